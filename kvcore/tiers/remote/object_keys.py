"""Under which name a part of a block lies in a store: the same on every host, for the same bytes.

    kvcore/<model and block shape>/h<first>-<last head>.l<first>-<last layer>/<key>

The key is a hash of all tokens so far, of the tenant's salt and of the deployment's secret, so that
nothing in a name can be guessed from a prompt where a secret is set.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import xxhash

from kvcore.model.parts import Part
from kvcore.model.shape import BlockShape
from kvcore.tiers.geometry import Geometry
from kvcore.tiers.sharding import Run, cover, runs

_PLACE = re.compile(r"h([0-9]{1,6})-([0-9]{1,6})\.l([0-9]{1,6})-([0-9]{1,6})")


@dataclass(frozen=True)
class Shard:
    """One rank's part of a model's blocks. ``shape`` is the whole block.

    What follows from these is kept: it is asked for with each block that is moved.
    """

    prefix: str
    base: str
    part: Part
    shape: BlockShape

    @classmethod
    def of(cls, geometry: Geometry, rank: int, prefix: str) -> Shard:
        return cls(prefix, geometry.base, geometry.parts[rank], geometry.shape)

    @classmethod
    def all_of(cls, geometry: Geometry, prefix: str) -> list[Shard]:
        """Every shard of a block, once: ranks that hold the same part share one."""
        ranks = range(len(geometry.parts))
        return list(dict.fromkeys(cls.of(geometry, rank, prefix) for rank in ranks))

    def sibling(self, part: Part) -> Shard:
        """The shard of the same blocks that is ``part``."""
        return Shard(self.prefix, self.base, part, self.shape)

    def sibling_in(self, folder: str) -> Shard | None:
        """The shard of the same blocks whose values lie in ``folder``; None where none's do."""
        found = _PLACE.fullmatch(folder.rpartition("/")[2])
        if found is None:
            return None
        first, last, top, bottom = map(int, found.groups())
        shard = self.sibling(Part((first, last), (top, bottom)))
        return shard if shard.part.within(self.shape) and shard.folder == folder else None

    @cached_property
    def block_nbytes(self) -> int:
        """Bytes of the part."""
        return self.part.shape(self.shape).nbytes

    @cached_property
    def folder(self) -> str:
        heads, layers = self.part
        place = f"h{heads[0]}-{heads[1]}.l{layers[0]}-{layers[1]}"
        return f"{self.prefix}/{self.base}/{place}"

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that stand in every value of this shard. The prefix is not part of it."""
        place = f"{self.base} {self.part.heads} {self.part.layers} {self.block_nbytes}"
        return xxhash.xxh3_128_digest(place.encode())

    def name(self, key: bytes) -> str:
        return f"{self.folder}/{key.hex()}"


class ShardSlice:
    """What a rank takes out of the values of ``held``: ``runs`` of their bytes."""

    def __init__(self, held: Shard, wanted: Shard) -> None:
        self.shard = held
        self.nbytes = held.block_nbytes
        self.digest = held.digest
        self.runs: list[Run] = runs(held.part, wanted.part, held.shape.head_nbytes)
        self.spare_nbytes = self.nbytes - sum(run.nbytes for run in self.runs)

    @classmethod
    def all_of(cls, parts: Sequence[Part], wanted: Shard) -> list[ShardSlice]:
        """The cuts that together are ``wanted``, of blocks that were written in ``parts``."""
        held = [wanted.sibling(parts[number]) for number in cover(parts, wanted.part)]
        return [cls(shard, wanted) for shard in held]
