"""Attention of scattered rows: the row at position p sees keys 0..p and never p + 1.

    keys      0 1 2 3 4 5 6 7 8 9
    row 3     x x x x                 the mask follows from the rows' positions, not from their
    row 7     x x x x x x x x         order: rows that are left out leave no hole in it
    row 9     x x x x x x x x x x

`attend_rows` never builds a mask of all rows by all keys. It processes rows in tiles and reads only
the keys that a tile can see. `naive_attend_rows` defines the same in a few lines.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kvcore.errors import LayoutError

__all__ = ["Attention", "Look", "attend_rows", "look_of", "look_rows", "naive_attend_rows"]

TILE_SCORES = 1 << 20
"""Maximum number of scores (rows x keys) per head of one tile."""
TILE_ROWS = 128
"""Maximum number of rows of one tile. A tile reads the keys that its last row sees, so in a smaller
tile fewer keys are masked for the other rows."""


@dataclass(frozen=True)
class Attention:
    """The parameters of a layer's attention, besides q, k and v.

    ``window`` is how many keys a row sees, including its own; None means all up to its own.
    ``soft_cap`` bounds scores to (-cap, cap) by a tanh; 0 means no bound.
    """

    scale: float
    window: int | None = None
    soft_cap: float = 0.0


def attend_rows(
    queries: Tensor, positions: Tensor, keys: Tensor, values: Tensor, attention: Attention
) -> Tensor:
    """Compute attention of rows at ``positions`` over keys whose index is their position.

    ``queries`` is [rows, heads, dim], ``positions`` [rows] int64 ascending, ``keys`` and
    ``values`` [tokens, kv_heads, dim]. Returns [rows, heads, v_dim]. Keys that no row sees are not
    read. Reads the positions, and so waits for the device. Raises LayoutError if a position has
    no key, or if kv_heads does not divide heads.
    """
    _check(queries, positions, keys, values)
    out = queries.new_empty(len(queries), queries.shape[1], values.shape[2])
    known = positions.tolist()
    for start, stop in _split(known):
        _check_last(known[stop - 1], keys)
        seen = known[stop - 1] + 1
        first = 0
        if attention.window is not None:
            first = max(0, known[start] - attention.window + 1)
        rows = slice(start, stop)
        mask = _visible(positions[rows], first, seen, attention.window)
        out[rows] = _tile(
            queries[rows], keys[first:seen], values[first:seen], mask, attention
        ).transpose(0, 1)
    return out


class Look(NamedTuple):
    """Rows whose positions the host knows, and those of them that ask, for `look_rows`.

    Args:
        positions: [rows] int64 ascending, on the device.
        tiles: (first row, row after the last, position of the first, of the last) of each tile.
        asking: index of the first row that asks; all after it ask too.
        unseen: [keys] int64 ascending, on the device: positions whose keys no row attends to.
        before: of each tile, how many of these are not behind its last row.
    """

    positions: Tensor
    tiles: tuple[tuple[int, int, int, int], ...]
    asking: int
    unseen: Tensor
    before: tuple[int, ...]


def look_of(
    positions: Tensor, known: Sequence[int], asking: int, unseen: Tensor, holes: Sequence[int]
) -> Look:
    """Return rows for `look_rows`, whose positions are ``known`` on the host. Reads no memory.

    ``holes`` are the positions in ``unseen``, on the host.
    """
    tiles = tuple((start, stop, known[start], known[stop - 1]) for start, stop in _split(known))
    before = tuple(bisect_right(holes, last) for *_, last in tiles)
    return Look(positions, tiles, asking, unseen, before)


def look_rows(
    queries: Tensor,
    look: Look,
    keys: Tensor,
    values: Tensor,
    attention: Attention,
    interest: Tensor,
) -> Tensor:
    """Compute `attend_rows`, and record the maximum attention that each key gets.

    The maximum is over the rows that ask. It is accumulated in place in ``interest``, [heads,
    tokens] float32, which starts as zeros. The rows may be spread over several calls. Keys that
    are ``unseen`` may have any content; their values must be finite. The host does not wait for
    the device.
    """
    _check(queries, look.positions, keys, values)
    k, v = keys.transpose(0, 1).contiguous(), values.transpose(0, 1).contiguous()
    heads, group = len(k), queries.shape[1] // len(k)
    out = queries.new_empty(len(queries), queries.shape[1], values.shape[2])
    highest = interest.view(heads, group, len(keys))
    for (start, stop, lowest, last), before in zip(look.tiles, look.before, strict=True):
        _check_last(last, keys)
        seen, rows = last + 1, slice(start, stop)
        scores = _scores(queries[rows].transpose(0, 1), k[:, :seen], attention)
        # Every row sees the keys up to the first row, so nothing is masked there.
        first = 0 if attention.window is not None else lowest + 1
        mask = _visible(look.positions[rows], first, seen, attention.window)
        scores[..., first:].masked_fill_(~mask, float("-inf"))
        if before:
            scores.index_fill_(-1, look.unseen[:before], float("-inf"))
        weights = scores.softmax(dim=-1)
        flat = weights.to(v.dtype).view(heads, -1, seen) @ v[:, :seen]
        out[rows] = flat.view(heads * group, stop - start, -1).transpose(0, 1)
        if look.asking < stop:
            interested = weights[:, :, max(look.asking - start, 0) :]
            best = highest[:, :, :seen]
            torch.maximum(best, interested.amax(dim=2), out=best)
    return out


def naive_attend_rows(
    queries: Tensor, positions: Tensor, keys: Tensor, values: Tensor, attention: Attention
) -> Tensor:
    """Compute `attend_rows` one row at a time."""
    group = queries.shape[1] // keys.shape[1]
    out = []
    for query, position in zip(queries, positions.tolist(), strict=True):
        first = 0 if attention.window is None else max(0, position + 1 - attention.window)
        k = keys[first : position + 1].repeat_interleave(group, dim=1).float()
        v = values[first : position + 1].repeat_interleave(group, dim=1).float()
        scores = torch.einsum("hd,thd->ht", query.float(), k) * attention.scale
        if attention.soft_cap:
            scores = attention.soft_cap * torch.tanh(scores / attention.soft_cap)
        out.append(torch.einsum("ht,thd->hd", scores.softmax(dim=1), v))
    if not out:
        return queries.new_empty(0, queries.shape[1], values.shape[2])
    return torch.stack(out).to(queries.dtype)


def _check(queries: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> None:
    if len(queries) != len(positions) or len(keys) != len(values):
        raise LayoutError(
            f"{len(queries)} queries for {len(positions)} positions, "
            f"{len(keys)} keys for {len(values)} values: give as many of each"
        )
    if queries.shape[1] % keys.shape[1]:
        raise LayoutError(
            f"{queries.shape[1]} query heads over {keys.shape[1]} KV heads: give a multiple"
        )


def _check_last(last: int, keys: Tensor) -> None:
    if last >= len(keys):
        raise LayoutError(f"a row at position {last} needs {last + 1} keys; got {len(keys)}")


def _split(positions: Sequence[int]) -> list[tuple[int, int]]:
    """Split rows into runs of at most `TILE_ROWS` rows and, from two rows on, `TILE_SCORES`."""
    tiles, start = [], 0
    while start < len(positions):
        stop, last = start + 1, min(start + TILE_ROWS, len(positions))
        # Positions ascend, so the last row of a tile has the most keys.
        while stop < last and (stop + 1 - start) * (positions[stop] + 1) <= TILE_SCORES:
            stop += 1
        tiles.append((start, stop))
        start = stop
    return tiles


def _visible(positions: Tensor, first: int, seen: int, window: int | None) -> Tensor:
    """Return which keys in [first, seen) each row sees: [rows, seen - first] bool."""
    keys, rows = torch.arange(first, seen, device=positions.device), positions[:, None]
    return keys <= rows if window is None else (keys <= rows) & (keys > rows - window)


def _tile(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, attention: Attention
) -> Tensor:
    """Compute attention of one tile: [heads, rows, v_dim]."""
    q, k, v = queries.transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1)
    if not attention.soft_cap:
        out: Tensor = functional.scaled_dot_product_attention(
            q[None], k[None], v[None], mask[None, None], scale=attention.scale, enable_gqa=True
        )
        return out[0]
    scores = _scores(q, k, attention).masked_fill_(~mask, float("-inf"))
    weights = scores.softmax(dim=-1).to(v.dtype)
    return (weights.view(k.shape[0], -1, mask.shape[1]) @ v).view(len(q), mask.shape[0], -1)


def _scores(queries: Tensor, keys: Tensor, attention: Attention) -> Tensor:
    """Return unmasked scores of [heads, n, dim] tensors, float32.

    The shape is [kv_heads, heads per KV head, rows, tokens].
    """
    heads = keys.shape[0]
    grouped = queries.reshape(heads, -1, queries.shape[2])
    scores = (grouped @ keys.transpose(1, 2)).float().mul_(attention.scale)
    if attention.soft_cap:
        scores = attention.soft_cap * torch.tanh(scores / attention.soft_cap)
    return scores.view(heads, len(queries) // heads, queries.shape[1], keys.shape[1])
