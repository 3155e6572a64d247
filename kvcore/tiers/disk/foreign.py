"""Stores written at another tensor-parallel size, or by an engine that is gone.

A block lies there as one object a shard. What a rank needs of it, its own range of KV heads, is cut
out of the objects that hold it: in canonical order a head range is one run of bytes a layer. No
block is written here; bad and unwanted ones are erased.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvcore.errors import CorruptBlock, TierError
from kvcore.layout import BlockShape
from kvcore.tiers.base import Buffers, SlotError, nbytes_of
from kvcore.tiers.disk.cipher import BlockCipher, Seal
from kvcore.tiers.disk.files import DataFile, IndexFile, Piece
from kvcore.tiers.disk.format import Geometry, Record, checksum, shard_files
from kvcore.tiers.host import slot_bytes
from kvcore.tiers.pages import Pages

_log = logging.getLogger("kvcore.tiers.disk")

_Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


class _Shard(NamedTuple):
    """A shard that holds wanted heads: where they are in it, and where they go."""

    number: int
    shape: BlockShape
    theirs: slice
    mine: slice
    blocks: DataFile
    records: IndexFile
    place: bytes


class ForeignStore:
    """Reads blocks of the store in ``folder`` for the rank with KV ``heads`` [start, stop).

    Thread-safe between slots. Raises FormatError or TierUnavailable when it cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        heads: tuple[int, int],
        direct_io: str = "auto",
        cipher: BlockCipher | None = None,
    ) -> None:
        geometry = Geometry.load(folder)
        self._cipher = cipher
        self._name = folder.name
        self._shape = geometry.shape.with_heads(heads[1] - heads[0])
        self._shards: list[_Shard] = []
        try:
            for number, theirs, mine in _cover(geometry.heads, heads):
                shape = geometry.shard_shape(number)
                data, index = shard_files(folder, number)
                blocks = DataFile(data, slot_bytes(shape), num_slots=None, direct_io=direct_io)
                records = IndexFile(index)
                place = geometry.place(number)
                self._shards.append(_Shard(number, shape, theirs, mine, blocks, records, place))
        except TierError:
            self.close()
            raise

    def read(self, slot: int, key: bytes, buffers: Buffers) -> TierError | None:
        """Read and verify every object that holds a wanted head. Raises OSError on I/O errors."""
        shape = self._shape
        if nbytes_of(buffers) < shape.nbytes:
            return SlotError(f"buffers of {nbytes_of(buffers)} bytes for a block of {shape.nbytes}")
        block: _Bytes = np.empty((shape.layers, shape.kv_heads, shape.head_nbytes), np.uint8)
        try:
            for shard in self._shards:
                block[:, shard.mine] = self._object(shard, slot, key)[:, shard.theirs]
        except CorruptBlock as error:
            return error
        _pour(block, buffers)
        return None

    def erase(self, slot: int, count: int = 1) -> None:
        """Make ``count`` slots from ``slot`` on unreadable for every rank that shares a shard with
        this one."""
        for shard in self._shards:
            shard.records.erase(slot, count)

    def close(self) -> None:
        for shard in self._shards:
            shard.blocks.close()
            shard.records.close()
        self._shards = []

    def _object(self, shard: _Shard, slot: int, key: bytes) -> _Bytes:
        """The block's bytes in ``shard``, [layers, heads, bytes]. Raises CorruptBlock."""
        where = f"shard {shard.number} of slot {slot} of {self._name}"
        shape, record = shard.shape, shard.records.get(slot)
        if record is None or record.key != key or record.nbytes != shape.nbytes:
            raise CorruptBlock(f"{where} does not hold block {key.hex()}")
        staging = Pages(slot_bytes(shape)).view
        ((_, got),) = shard.blocks.read([Piece(0, slot, [staging])])
        if isinstance(got, OSError):
            raise got
        if got < shape.nbytes or not is_whole(self._cipher, record, [staging], shard.place):
            self.erase(slot)
            raise CorruptBlock(
                f"{where}: the bytes of block {key.hex()} are not those written; it is erased"
            )
        flat = np.frombuffer(staging, np.uint8, shape.nbytes)
        return flat.reshape(shape.layers, shape.kv_heads, shape.head_nbytes)


def is_whole(cipher: BlockCipher | None, record: Record, buffers: Buffers, place: bytes) -> bool:
    """Whether the bytes are those that were written, of a store that is encrypted, or is not, as
    ``cipher`` says. They are decrypted where they are; if False they hold anything."""
    if checksum(record.key, buffers, record.nbytes) != record.checksum:
        return False
    if cipher is None or not record.nonce:
        return cipher is None and not record.nonce
    seal = Seal(record.nonce, record.tag)
    return cipher.unseal(seal, buffers, record.nbytes, record.bound(place))


def _cover(
    spans: tuple[tuple[int, int], ...], wanted: tuple[int, int]
) -> list[tuple[int, slice, slice]]:
    """(shard, heads within it, heads within ``wanted``): together each wanted head once."""
    chosen, head = [], wanted[0]
    while head < wanted[1]:
        shard = next((i for i, (a, b) in enumerate(spans) if a <= head < b), None)
        if shard is None:
            raise SlotError(f"no shard holds KV head {head}: the store has {spans}")
        start, stop = spans[shard][0], min(spans[shard][1], wanted[1])
        chosen.append(
            (shard, slice(head - start, stop - start), slice(head - wanted[0], stop - wanted[0]))
        )
        head = stop
    return chosen


def _pour(block: _Bytes, buffers: Buffers) -> None:
    """Copy ``block`` into ``buffers``, which may be longer."""
    flat, start = memoryview(block.reshape(-1).data), 0
    for part in buffers:
        count = min(part.nbytes, len(flat) - start)
        part.cast("B")[:count] = flat[start : start + count]
        start += count
