"""Stores that another engine wrote, with any number of ranks or stages.

Such a store holds a block as one object in each shard. A rank takes the part it needs, its own KV
heads of its own layers, out of the objects that hold it (`kvcore.tiers.sharding`). No block is
written to these stores; bad and unwanted ones are erased.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

from kvcore.errors import CorruptBlock, Mismatch, TierError
from kvcore.memory.arena import slot_bytes
from kvcore.memory.buffers import nbytes_of
from kvcore.memory.hugepages import Pages
from kvcore.model.parts import Part
from kvcore.tiers.base import BlockRead, SlotError, is_asked_for
from kvcore.tiers.disk.files import DataFile, IndexFile, Piece
from kvcore.tiers.disk.format import Record, shard_files
from kvcore.tiers.geometry import Geometry
from kvcore.tiers.guard import BlockGuard
from kvcore.tiers.sharding import Run, cover, places, runs

_log = logging.getLogger("kvcore.tiers.disk")


_WRONG = {
    Mismatch.CORRUPT: "has bytes that are not those written",
    Mismatch.FORGED: (
        "was not written with this namespace.secret or key, or was changed by someone without it"
    ),
    Mismatch.TRUNCATED: "has bytes that are not those written, because the file ends before them",
}


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
        guard: BlockGuard | None = None,
    ) -> None:
        """Raise FormatError or TierUnavailable if the store cannot be used."""
        geometry = Geometry.load(folder)
        self._guard = guard
        self._name = folder.name
        self._nbytes = part.shape(geometry.shape).nbytes
        self._shards: list[_Shard] = []
        try:
            for number in cover(geometry.parts, part):
                taken = runs(geometry.parts[number], part, geometry.shape.head_nbytes)
                shape = geometry.shard_shape(number)
                size, (data, index) = slot_bytes(shape), shard_files(folder, number)
                blocks = DataFile(data, size, num_slots=None, direct_io=direct_io)
                records, name = IndexFile(index, guard), geometry.shard_name(number)
                self._shards.append(
                    _Shard(number, shape.nbytes, size, taken, blocks, records, name)
                )
        except TierError:
            self.close()
            raise

    def read(self, slot: int, request: BlockRead) -> TierError | None:
        """Read and verify every object that holds bytes of the rank's part of a block.

        ``slot`` is the slot of ``request`` without the number of the store.

        Returns an error if the block is not whole, or ``buffers`` are too small for it. Raises
        OSError if the medium fails.
        """
        given = nbytes_of(request.buffers)
        if given < self._nbytes:
            return SlotError(f"buffers of {given} bytes for a block of {self._nbytes}")
        try:
            for shard in self._shards:
                found = self._object(shard, slot, request)
                for at, piece in places(shard.runs, request.buffers):
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

    def _object(self, shard: _Shard, slot: int, request: BlockRead) -> memoryview:
        """Return the block's bytes in ``shard``. Raise CorruptBlock if they are not whole."""
        where = f"shard {shard.number} of slot {slot} of {self._name}"
        record = shard.records.get(slot)
        if record is None or record.nbytes != shard.nbytes or not is_asked_for(record, request):
            raise not_held(where, request.key, record)
        staging = Pages(shard.slot_nbytes).view
        ((_, got),) = shard.blocks.read([Piece(0, slot, [staging])])
        if isinstance(got, OSError):
            raise got
        wrong: Mismatch | None = Mismatch.TRUNCATED
        if got >= shard.nbytes:
            wrong = record.mismatch(self._guard, [staging], shard.name)
        if wrong is not None:
            self.erase(slot)
            raise damaged(where, request.key, wrong)
        return staging


def not_held(where: str, key: bytes, record: Record | None) -> CorruptBlock:
    """Return the error for a slot with no valid record, or with one of another block."""
    wrong = Mismatch.CORRUPT if record is None else Mismatch.OTHER
    return CorruptBlock(f"{where} does not hold block {key.hex()}", wrong)


def damaged(where: str, key: bytes, wrong: Mismatch) -> CorruptBlock:
    """Return the error for a slot whose bytes are not the block's, and which is erased now."""
    return CorruptBlock(f"{where}: block {key.hex()} {_WRONG[wrong]}; it is erased", wrong)
