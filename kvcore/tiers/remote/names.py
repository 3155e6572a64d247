"""Under which name a block lies in a store: the same on every host, for the same bytes.

    kvcore/<model and block shape>/h<first>-<last head>.l<first>-<last layer>/<key>

The key is a hash of all tokens so far, of the tenant's salt and of the deployment's secret, so that
nothing in a name can be guessed from a prompt where a secret is set.
"""

from __future__ import annotations

from dataclasses import dataclass

import xxhash

from kvcore.tiers.disk.format import Geometry


@dataclass(frozen=True)
class Shard:
    """One rank's part of a model's blocks."""

    prefix: str
    base: str
    heads: tuple[int, int]
    layers: tuple[int, int]
    block_nbytes: int

    @classmethod
    def of(cls, geometry: Geometry, rank: int, prefix: str) -> Shard:
        shape = geometry.shard_shape(rank)
        layers = (0, geometry.shape.layers)
        return cls(prefix, geometry.base, geometry.heads[rank], layers, shape.nbytes)

    @classmethod
    def all_of(cls, geometry: Geometry, prefix: str) -> list[Shard]:
        """Every shard of a block, once: ranks that hold the same heads share one."""
        ranks = range(len(geometry.heads))
        return list(dict.fromkeys(cls.of(geometry, rank, prefix) for rank in ranks))

    @property
    def folder(self) -> str:
        heads, layers = self.heads, self.layers
        place = f"h{heads[0]}-{heads[1]}.l{layers[0]}-{layers[1]}"
        return f"{self.prefix}/{self.base}/{place}"

    @property
    def digest(self) -> bytes:
        """16 bytes that stand in every value of this shard. The prefix is not part of it."""
        place = f"{self.base} {self.heads} {self.layers} {self.block_nbytes}"
        return xxhash.xxh3_128_digest(place.encode())

    def name(self, key: bytes) -> str:
        return f"{self.folder}/{key.hex()}"
