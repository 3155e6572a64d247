"""The checksum that a stored block carries."""

from __future__ import annotations

import xxhash

from kvcore.memory.buffers import Buffers

__all__ = ["checksum"]


def checksum(key: bytes, buffers: Buffers, nbytes: int) -> bytes:
    """Return the XXH3-128 of the first ``nbytes`` bytes, seeded with the block's key.

    Because of the seed, another block's bytes do not match.
    """
    state = xxhash.xxh3_128(seed=int.from_bytes(key[:8], "little"))
    for part in buffers:
        state.update(part if part.nbytes <= nbytes else part.cast("B")[:nbytes])
        nbytes -= min(nbytes, part.nbytes)
    return state.digest()
