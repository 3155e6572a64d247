"""Stores written at another tensor-parallel size, or by an engine that is gone: read only.

A block lies there as one object a shard. What a rank needs of it, its own range of KV heads, is cut
out of the objects that hold it: in canonical order a head range is one run of bytes a layer.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from kvcore.errors import CorruptBlock, FormatError, TierUnavailable
from kvcore.layout import BlockShape
from kvcore.tiers.base import Buffers, nbytes_of
from kvcore.tiers.disk.format import RECORD_NBYTES, Geometry, Record, checksum, shard_files
from kvcore.tiers.host import slot_bytes


class ForeignStore:
    """Reads blocks of ``folder`` for the rank with KV ``heads`` [start, stop) of ``shape``."""

    def __init__(self, folder: Path, shape: BlockShape, heads: tuple[int, int]) -> None:
        try:
            self._geometry = Geometry.load(folder)
            self._files = [
                (os.open(data, os.O_RDONLY), os.open(index, os.O_RDONLY))
                for data, index in (
                    shard_files(folder, shard) for shard in range(len(self._geometry.heads))
                )
            ]
        except (OSError, FormatError) as error:
            raise TierUnavailable(f"cannot read the store {folder}: {error}") from error
        self._shape = shape
        self._heads = heads
        self._shards = self._cover()

    def read(self, slot: int, key: bytes, buffers: Buffers) -> CorruptBlock | None:
        """Read and verify every object that holds a wanted head. Raises OSError on I/O errors."""
        mine = self._shape.with_heads(self._heads[1] - self._heads[0])
        if nbytes_of(buffers) < mine.nbytes:
            return CorruptBlock(f"a buffer of {nbytes_of(buffers)} bytes for {mine.nbytes}")
        block = np.empty((mine.layers, mine.kv_heads, mine.head_nbytes), dtype=np.uint8)
        for shard in self._shards:
            start, stop = self._geometry.heads[shard]
            theirs = self._geometry.shard_shape(shard)
            data = self._object(shard, slot, key, theirs)
            if data is None:
                return CorruptBlock(f"shard {shard} of slot {slot} does not hold {key.hex()} whole")
            a, b = max(start, self._heads[0]), min(stop, self._heads[1])
            source = data[: theirs.nbytes].reshape(theirs.layers, theirs.kv_heads, -1)
            block[:, a - self._heads[0] : b - self._heads[0]] = source[:, a - start : b - start]
        _pour(block, buffers)
        return None

    def close(self) -> None:
        for pair in self._files:
            for file in pair:
                os.close(file)
        self._files = []

    def _cover(self) -> list[int]:
        """Shards that together hold every wanted head, each head once."""
        chosen, head = [], self._heads[0]
        while head < self._heads[1]:
            spans = enumerate(self._geometry.heads)
            shard = next((i for i, (a, b) in spans if a <= head < b), None)
            if shard is None:
                raise TierUnavailable(f"no shard holds KV head {head}: {self._geometry.heads}")
            chosen.append(shard)
            head = self._geometry.heads[shard][1]
        return chosen

    def _object(
        self, shard: int, slot: int, key: bytes, shape: BlockShape
    ) -> np.ndarray[tuple[int], np.dtype[np.uint8]] | None:
        data_file, index_file = self._files[shard]
        record = Record.unpack(os.pread(index_file, RECORD_NBYTES, slot * RECORD_NBYTES))
        if record is None or record.key != key or record.nbytes < shape.nbytes:
            return None
        data = os.pread(data_file, record.nbytes, slot * slot_bytes(shape))
        if len(data) != record.nbytes or checksum(key, [memoryview(data)]) != record.checksum:
            return None
        return np.frombuffer(data, dtype=np.uint8)


def _pour(block: np.ndarray[tuple[int, int, int], np.dtype[np.uint8]], buffers: Buffers) -> None:
    flat, start = memoryview(block.reshape(-1).data).cast("B"), 0
    for part in buffers:
        count = min(part.nbytes, len(flat) - start)
        part.cast("B")[:count] = flat[start : start + count]
        start += count
