"""Names of blocks in a store. The same bytes have the same name on every host.

    kvcore/<model and block shape>/h<first>-<last head>.l<first>-<last layer>/<key>

The key is a hash of all tokens up to the end of the block, the tenant's salt and the deployment's
secret. If a secret is set, nobody can derive a name from a prompt.
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
    """One rank's part of a model's blocks. ``shape`` is the shape of the whole block.

    Derived values are cached, because every block that is transferred needs them.
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
        """Return every distinct shard of a block. Ranks that hold the same part share a shard."""
        ranks = range(len(geometry.parts))
        return list(dict.fromkeys(cls.of(geometry, rank, prefix) for rank in ranks))

    def sibling(self, part: Part) -> Shard:
        """Return the shard of the same blocks for another part."""
        return Shard(self.prefix, self.base, part, self.shape)

    def sibling_in(self, folder: str) -> Shard | None:
        """Return the shard of the same blocks that is stored in ``folder``; None if none is."""
        found = _PLACE.fullmatch(folder.rpartition("/")[2])
        if found is None:
            return None
        first, last, top, bottom = map(int, found.groups())
        shard = self.sibling(Part((first, last), (top, bottom)))
        return shard if shard.part.within(self.shape) and shard.folder == folder else None

    @cached_property
    def block_nbytes(self) -> int:
        """Size of the part in bytes."""
        return self.part.shape(self.shape).nbytes

    @cached_property
    def folder(self) -> str:
        heads, layers = self.part
        place = f"h{heads[0]}-{heads[1]}.l{layers[0]}-{layers[1]}"
        return f"{self.prefix}/{self.base}/{place}"

    @cached_property
    def digest(self) -> bytes:
        """The 16 bytes that identify this shard in each of its values, without the prefix."""
        place = f"{self.base} {self.part.heads} {self.part.layers} {self.block_nbytes}"
        return xxhash.xxh3_128_digest(place.encode())

    def name(self, key: bytes) -> str:
        return f"{self.folder}/{key.hex()}"


class ShardSlice:
    """The bytes that the shard ``wanted`` takes from the values of the shard ``held``.

    ``runs`` are these bytes; ``spare_nbytes`` counts the other bytes of such a value.
    """

    def __init__(self, held: Shard, wanted: Shard) -> None:
        self.shard = held
        self.nbytes = held.block_nbytes
        self.digest = held.digest
        self.runs: list[Run] = runs(held.part, wanted.part, held.shape.head_nbytes)
        self.spare_nbytes = self.nbytes - sum(run.nbytes for run in self.runs)

    @classmethod
    def all_of(cls, parts: Sequence[Part], wanted: Shard) -> list[ShardSlice]:
        """Return the slices that make up ``wanted``, for blocks that were written in ``parts``."""
        held = [wanted.sibling(parts[number]) for number in cover(parts, wanted.part)]
        return [cls(shard, wanted) for shard in held]
