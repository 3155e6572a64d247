"""Resume points: what only the next token needs of a model's cache.

A *block* has what every later token needs of its own tokens. Some layers keep something else: a
state (Mamba, gated delta net, short convolution) that each token overwrites. A *resume point* is
the state of all such layers at one boundary between two blocks, and the model can go on only there:

    tokens   0        16        32        48
    blocks   │   b0   │   b1   │   b2   │   b3 ...      kept once, used by every longer prompt
    states   ·        ·        S32      ·               kept where the engine has one: a point

A point is stored as rows behind the chain of blocks that leads to it, ``b0 b1 p0 p1 .. pn``. Rows
have the size of a block, so that index, tiers, quotas and restart treat both alike. The states of
all layers are one run of bytes, layer after layer, which is cut into rows:

    states   │  layer 0  │  layer 1  │  layer 2  │
    rows     │     p0      │     p1      │  p2 ░░│      the end of the last row is not used

A point is found by its last row: a row can be in a tier only if all rows before it are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvcore.errors import LayoutError
from kvcore.model.keys import KEY_BYTES

__all__ = [
    "Piece",
    "PointShape",
    "StateGroup",
    "is_point_row",
    "last_point_key",
    "point_keys",
    "without_rows",
]

_MASK = int.from_bytes(b"kvcore-point-row", "big")
_KEYS = 1 << (8 * KEY_BYTES)
_HALVES = ">u8"


def point_keys(block: bytes, rows: int) -> tuple[bytes, ...]:
    """Return the keys of the rows of the point behind a block. The first is its child."""
    first = int.from_bytes(block, "big") ^ _MASK
    return tuple(_key(first + row) for row in range(rows))


def last_point_key(block: bytes, rows: int) -> bytes:
    """Return the last of `point_keys`."""
    return _key((int.from_bytes(block, "big") ^ _MASK) + rows - 1)


def is_point_row(key: bytes, parent: bytes) -> bool:
    """Return True if ``key`` names a row of a point and ``parent`` the row or block before it."""
    number, before = int.from_bytes(key, "big"), int.from_bytes(parent, "big")
    return number == before ^ _MASK or number == (before + 1) % _KEYS


def without_rows(keys: bytes, parents: bytes) -> tuple[bytes, bytes]:
    """Return packed keys and their packed parent keys, without those that are rows of points.

    The same as `is_point_row` of each pair, for many: a few million pairs a second.
    """
    import numpy as np  # few models have points

    number = np.frombuffer(keys, dtype=_HALVES).reshape(-1, 2)
    before = np.frombuffer(parents, dtype=_HALVES).reshape(-1, 2)
    mask = np.frombuffer(_key(_MASK), dtype=_HALVES)
    low = before[:, 1] + np.uint64(1)
    high = before[:, 0] + (low == 0)
    first = (number == before ^ mask).all(axis=1)
    kept = ~(first | ((number[:, 0] == high) & (number[:, 1] == low)))
    return number[kept].tobytes(), before[kept].tobytes()


def _key(number: int) -> bytes:
    return (number % _KEYS).to_bytes(KEY_BYTES, "big")


@dataclass(frozen=True)
class StateGroup:
    """Layers whose states share one page table in the engine: a page is one state of each.

    ``group`` is the position of the table among the model's groups, ``names`` are the engine's
    names of the layers, and ``nbytes`` are the bytes of one layer's state on each rank.
    """

    group: int
    names: tuple[str, ...]
    nbytes: int


class Piece(NamedTuple):
    """``nbytes`` bytes of one layer's state, from ``offset`` on, that lie in a row of a point.

    ``layer`` is a position in the group's names, and ``at`` the place of the bytes in the row.
    """

    row: int
    group: int
    layer: int
    offset: int
    at: int
    nbytes: int


@dataclass(frozen=True)
class PointShape:
    """The resume points of a model, the same on every rank.

    ``states`` are the groups in the order of their bytes, ``row_nbytes`` the bytes of a row on one
    rank, and ``every`` the blocks between two boundaries at which the engine can have a point.
    """

    states: tuple[StateGroup, ...]
    row_nbytes: int
    every: int

    def __post_init__(self) -> None:
        sizes = [self.row_nbytes, self.every, *(state.nbytes for state in self.states)]
        if not self.states or min(sizes) < 1 or not all(state.names for state in self.states):
            raise LayoutError(f"not the shape of a resume point: {self}")

    @property
    def nbytes(self) -> int:
        """Bytes of all states of a point on one rank."""
        return sum(len(state.names) * state.nbytes for state in self.states)

    @property
    def rows(self) -> int:
        """The number of rows of a point."""
        return -(-self.nbytes // self.row_nbytes)

    def chain(self, keys: Sequence[bytes], blocks: int) -> tuple[bytes, ...]:
        """Return the first ``blocks`` of ``keys``, and the rows of the point behind them."""
        return (*keys[:blocks], *point_keys(keys[blocks - 1], self.rows))

    def boundary(self, blocks: int) -> int:
        """Return the last boundary at which a point can be, at or before ``blocks``."""
        return blocks // self.every * self.every

    def pieces(self) -> Iterator[Piece]:
        """Yield where each byte of a point's states is, in order."""
        place = 0
        for state in self.states:
            for layer in range(len(state.names)):
                offset = 0
                while offset < state.nbytes:
                    row, at = divmod(place, self.row_nbytes)
                    size = min(state.nbytes - offset, self.row_nbytes - at)
                    yield Piece(row, state.group, layer, offset, at, size)
                    place, offset = place + size, offset + size
