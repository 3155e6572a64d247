"""Block sums on host and device.

A GPU computes this sum as fast as it reads the bytes, whereas XXH3 is sequential.

    word i of the block, 64 bits, little-endian, zeros after the last byte; all modulo 2^64:

        x = word ^ (i + 1) * KEY
        x = x * FIRST;   x = x ^ x >> 32
        x = x * SECOND;  x = x ^ x >> 29
        sum of all x

Each step is invertible, so a changed word changes its x, and therefore the sum. Several changed
words are missed once in 2^64. Words that changed places are detected, because i enters x. 64 bits
suffice against bit rot and failed reads, which nobody crafts; the record also keeps XXH3-128.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from kvcore.errors import UnsupportedError
from kvcore.memory.buffers import Buffers, nbytes_of
from kvcore.memory.native_lib import load_library

if TYPE_CHECKING:
    import torch

__all__ = ["FIRST", "KEY", "SECOND", "bound_to", "host_sum", "naive_sum", "tensor_sums"]

KEY = 0x9E3779B97F4A7C15
FIRST = 0xBF58476D1CE4E5B9
SECOND = 0x94D049BB133111EB
WORD = 8
_PIECE_WORDS = 1 << 18
"""Words of a block processed at a time: 2 MiB per intermediate value."""


def bound_to(key: bytes, total: int) -> int:
    """Return what a record stores for the sum of block ``key``, so that no other block passes.

    The result is never 0, which means that there is no sum.
    """
    return (total ^ xxhash.xxh3_64_intdigest(key)) or 1


def host_sum(buffers: Buffers, nbytes: int) -> int:
    """Return the sum of the first ``nbytes`` bytes in host memory.

    Computed in C, or with numpy if the library is not built.
    """
    try:
        library: Any = load_library()
    except UnsupportedError:
        return naive_sum(buffers, nbytes)
    total = 0
    for first, part in _parts(buffers, nbytes):
        total += library.kvcore_sum(part.ctypes.data, part.nbytes, first)
    return total % 2**64


def naive_sum(buffers: Buffers, nbytes: int) -> int:
    """Compute `host_sum` with numpy."""
    total = 0
    for first, part in _parts(buffers, nbytes):
        padded = np.zeros(-(-part.nbytes // WORD) * WORD, dtype=np.uint8)
        padded[: part.nbytes] = part
        words = padded.view("<u8")
        with np.errstate(over="ignore"):
            places = np.arange(first + 1, first + 1 + len(words), dtype=np.uint64)
            x = words ^ places * np.uint64(KEY)
            x *= np.uint64(FIRST)
            x ^= x >> np.uint64(32)
            x *= np.uint64(SECOND)
            x ^= x >> np.uint64(29)
            total += int(x.sum(dtype=np.uint64))
    return total % 2**64


def tensor_sums(data: torch.Tensor, offsets: Sequence[int], nbytes: int) -> list[int]:
    """Return the sums of blocks of ``nbytes`` bytes in ``data``, flat bytes on any device.

    ``offsets`` are in bytes and multiples of 8. After each block, ``data`` has enough bytes to fill
    its last word. Blocks until the sums are known.
    """
    import torch

    if not offsets:
        return []
    words, rest = -(-nbytes // WORD), nbytes % WORD
    totals = []
    for offset in offsets:
        block = data[offset : offset + words * WORD].view(torch.int64)
        total = torch.zeros((), dtype=torch.int64, device=data.device)
        for first in range(0, words, _PIECE_WORDS):
            x = block[first : first + _PIECE_WORDS].clone()
            if rest and first + len(x) == words:
                x[-1] &= (1 << 8 * rest) - 1
            places = torch.arange(first + 1, first + 1 + len(x), device=data.device)
            x ^= places * _signed(KEY)
            x *= _signed(FIRST)
            x ^= (x >> 32) & ((1 << 32) - 1)
            x *= _signed(SECOND)
            x ^= (x >> 29) & ((1 << 35) - 1)
            total += x.sum()
        totals.append(total)
    return [value % 2**64 for value in torch.stack(totals).tolist()]


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _parts(buffers: Buffers, nbytes: int) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
    """Yield the number of the first word, and the bytes, of parts that begin at a word."""
    assert nbytes_of(buffers) >= nbytes
    if any(part.nbytes % WORD for part in buffers[:-1]):
        buffers = [memoryview(b"".join(part.cast("B") for part in buffers))]
    at = 0
    for part in buffers:
        size = min(part.nbytes, nbytes - at)
        if size <= 0:
            return
        yield at // WORD, np.frombuffer(part, dtype=np.uint8)[:size]
        at += size
