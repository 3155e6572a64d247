"""Resume points in a simulation: where the engine has them, and which are kept.

The engine offers a point at every boundary that it computes. What keeps some of them is the policy
of an engine's leader.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvcore.errors import ConfigError
from kvcore.index import BlockIndex
from kvcore.index.policy import EveryPoint, PointPolicy, PointRequest, SpacedPoints
from kvcore.manager import Hit
from kvcore.model.keys import KEY_BYTES
from kvcore.model.points import PointShape, StateGroup, without_rows
from kvcore.plugins import PluginManager

__all__ = ["Bytes", "PointRule", "held", "point_shape"]

_WORDS = "ends, junctions, every=TOKENS, last, all"


class PointRule(NamedTuple):
    """The points that are kept. With ``moves``, a new one replaces the last of its conversation."""

    name: str
    policy: PointPolicy
    moves: bool = False

    @classmethod
    def read(cls, text: str, plugins: PluginManager) -> PointRule:
        """Read a value of ``--points``: words, or the name of a policy as in ``points.policy``.

        Raises ConfigError for anything else.
        """
        words = [word.strip() for word in text.split(",")]
        if words == ["last"]:
            return cls(text, SpacedPoints(junctions=False, every=0), moves=True)
        if words == ["all"]:
            return cls(text, EveryPoint())
        policies = [found.name for found in plugins.found("point policy")]
        if text in policies:
            return cls(text, plugins.point_policy(text, {}))
        every = 0
        for word in words:
            if word.startswith("every="):
                every = _tokens(word)
            elif word not in ("ends", "junctions"):
                raise ConfigError(
                    f"given --points {text!r}; supported are {_WORDS}, of which the first three "
                    f"may be joined by commas, and the policies {', '.join(policies)}"
                )
        spaced = SpacedPoints(ends="ends" in words, junctions="junctions" in words, every=every)
        return cls(text, spaced)

    def take(
        self, points: PointShape, hit: Hit, computed: int, stop: int, block: int
    ) -> Sequence[int]:
        """Return the blocks before which a point is saved, of a prompt of ``stop`` whole blocks.

        ``hit`` is what was found of it, and the engine computed the blocks from ``computed`` on.
        """
        end = points.boundary(stop)
        first = points.boundary(computed) + points.every
        junction = points.boundary(hit.reached) if hit.reached > hit.blocks else 0
        request = PointRequest(
            offered=range(first * block, end * block + 1, points.every * block),
            ends=(end * block,),
            junctions=(junction * block,),
            kept=hit.blocks * block,
            point_tokens=points.most_rows * block,
        )
        return [tokens // block for tokens in self.policy.take(request)]


def _tokens(word: str) -> int:
    number = word.removeprefix("every=")
    if not number.isdecimal() or not int(number):
        raise ConfigError(f"given --points {word!r}; give every= a number of tokens above 0")
    return int(number)


def point_shape(point_bytes: int, block_bytes: int, every: int) -> PointShape:
    """Return the shape of points of ``point_bytes`` bytes, at every ``every``-th block."""
    return PointShape((StateGroup(0, ("states",), point_bytes),), block_bytes, every)


class Bytes(NamedTuple):
    """Bytes of blocks, and of the rows of resume points."""

    blocks: int = 0
    points: int = 0


def held(index: BlockIndex, tier: str, block_bytes: int) -> Bytes:
    """Return the bytes that a tier holds, each row as large as a block."""
    keys, parents = index.admin.published(tier)
    blocks = len(without_rows(keys, parents)[0]) // KEY_BYTES
    rows = len(keys) // KEY_BYTES - blocks
    return Bytes(blocks * block_bytes, rows * block_bytes)
