"""Stores that another engine wrote, with any number of ranks or stages.

Such a store holds a block as one object in each shard. A rank takes the part it needs, its own KV
heads of its own layers, out of the objects that hold it (`kvcore.tiers.sharding`). No block is
written to these stores; bad and unwanted ones are erased.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

from kvcore.errors import CorruptBlock, TierError
from kvcore.memory.arena import slot_bytes
from kvcore.memory.buffers import Buffers, nbytes_of
from kvcore.memory.hugepages import Pages
from kvcore.model.parts import Part
from kvcore.tiers.base import SlotError
from kvcore.tiers.checksum import checksum
from kvcore.tiers.disk.cipher import BlockCipher, Seal
from kvcore.tiers.disk.files import DataFile, IndexFile, Piece
from kvcore.tiers.disk.format import Record, shard_files
from kvcore.tiers.geometry import Geometry
from kvcore.tiers.sharding import Run, cover, places, runs

_log = logging.getLogger("kvcore.tiers.disk")


class _Shard(NamedTuple):
    """A shard that holds bytes of the rank's part, and the runs to take from each object."""

    number: int
    nbytes: int
    slot_nbytes: int
    runs: list[Run]
    blocks: DataFile
    records: IndexFile
    name: bytes


class ForeignStore:
    """Reads the blocks of the store in ``folder`` for a rank that holds ``part`` of each.

    Thread-safe between slots.
    """

    def __init__(
        self,
        folder: Path,
        part: Part,
        direct_io: str = "auto",
        cipher: BlockCipher | None = None,
    ) -> None:
        """Raise FormatError or TierUnavailable if the store cannot be used."""
        geometry = Geometry.load(folder)
        self._cipher = cipher
        self._name = folder.name
        self._nbytes = part.shape(geometry.shape).nbytes
        self._shards: list[_Shard] = []
        try:
            for number in cover(geometry.parts, part):
                taken = runs(geometry.parts[number], part, geometry.shape.head_nbytes)
                shape = geometry.shard_shape(number)
                size, (data, index) = slot_bytes(shape), shard_files(folder, number)
                blocks = DataFile(data, size, num_slots=None, direct_io=direct_io)
                records, name = IndexFile(index), geometry.shard_name(number)
                self._shards.append(
                    _Shard(number, shape.nbytes, size, taken, blocks, records, name)
                )
        except TierError:
            self.close()
            raise

    def read(self, slot: int, key: bytes, buffers: Buffers) -> TierError | None:
        """Read and verify every object that holds bytes of the rank's part.

        Returns an error if the block is not whole, or ``buffers`` are too small for it. Raises
        OSError if the medium fails.
        """
        if nbytes_of(buffers) < self._nbytes:
            return SlotError(f"buffers of {nbytes_of(buffers)} bytes for a block of {self._nbytes}")
        try:
            for shard in self._shards:
                found = self._object(shard, slot, key)
                for at, piece in places(shard.runs, buffers):
                    piece[:] = found[at : at + len(piece)]
        except TierError as error:
            return error
        return None

    def erase(self, slot: int, count: int = 1) -> None:
        """Make ``count`` slots from ``slot`` on unreadable for all ranks that use these shards."""
        for shard in self._shards:
            shard.records.erase(slot, count)

    def close(self) -> None:
        """Close the files. Idempotent."""
        for shard in self._shards:
            shard.blocks.close()
            shard.records.close()
        self._shards = []

    def _object(self, shard: _Shard, slot: int, key: bytes) -> memoryview:
        """Return the block's bytes in ``shard``. Raise CorruptBlock if they are not whole."""
        where = f"shard {shard.number} of slot {slot} of {self._name}"
        record = shard.records.get(slot)
        if record is None or record.key != key or record.nbytes != shard.nbytes:
            raise CorruptBlock(f"{where} does not hold block {key.hex()}")
        staging = Pages(shard.slot_nbytes).view
        ((_, got),) = shard.blocks.read([Piece(0, slot, [staging])])
        if isinstance(got, OSError):
            raise got
        if got < shard.nbytes or not is_whole(self._cipher, record, [staging], shard.name):
            self.erase(slot)
            raise CorruptBlock(
                f"{where}: the bytes of block {key.hex()} are not those written; it is erased"
            )
        return staging


def is_whole(cipher: BlockCipher | None, record: Record, buffers: Buffers, shard: bytes) -> bool:
    """Decrypt a block in place if there is a ``cipher``. Return True if it is what was written.

    The block must be encrypted if there is a cipher, and must not be if there is none. If the
    result is False, the content of the buffers is undefined. The checksum of an encrypted block is
    not checked, because its tag proves more. The checksum is for `scrub`, which has no key.
    """
    if cipher is None:
        plain = not record.nonce
        return plain and checksum(record.key, buffers, record.nbytes) == record.checksum
    if not record.nonce:
        return False
    seal = Seal(record.nonce, record.tag)
    return cipher.unseal(seal, buffers, record.nbytes, record.associated_data(shard))
