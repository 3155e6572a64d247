"""The naive tier, a dictionary of bytes: the contract suite's oracle, and a tier for tests."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from kvcore.errors import CorruptBlock, Mismatch, TierError
from kvcore.memory.buffers import nbytes_of
from kvcore.tiers.base import BlockRead, BlockRecord, BlockWrite, SlotError, Tier, is_asked_for


class MemoryTier(Tier):
    """A tier of ``num_slots`` slots of ``slot_nbytes`` bytes in the process's own memory.

    Shorter blocks are padded with zeros.
    """

    def __init__(self, num_slots: int, slot_nbytes: int) -> None:
        self.num_slots = num_slots
        self.slot_nbytes = slot_nbytes
        self._blocks: dict[int, tuple[BlockRecord, bytes]] = {}
        self._lock = threading.Lock()
        self._stamp = 0

    def write(self, requests: Sequence[BlockWrite]) -> list[TierError | None]:
        return [self._write(request) for request in requests]

    def read(self, requests: Sequence[BlockRead]) -> list[TierError | None]:
        return [self._read(request) for request in requests]

    def invalidate(self, slots: Iterable[int]) -> None:
        with self._lock:
            for slot in slots:
                self._blocks.pop(slot, None)

    def scan(self) -> list[BlockRecord]:
        with self._lock:
            return [record for record, _ in self._blocks.values()]

    def check_integrity(self) -> None:
        with self._lock:
            held = list(self._blocks.items())
        for slot, (record, data) in held:
            if record.slot != slot or self._refuse(slot, len(data)) is not None:
                raise CorruptBlock(f"slot {slot} holds {len(data)} bytes as {record}")

    def _write(self, request: BlockWrite) -> TierError | None:
        refused = self._refuse(request.slot, nbytes_of(request.buffers))
        if refused is not None:
            return refused
        with self._lock:
            self._stamp += 1
            record = BlockRecord(*request[:4], self._stamp)
            data = b"".join(request.buffers).ljust(self.slot_nbytes, b"\0")
            self._blocks[request.slot] = record, data
        return None

    def _read(self, request: BlockRead) -> TierError | None:
        refused = self._refuse(request.slot, nbytes_of(request.buffers))
        if refused is not None:
            return refused
        with self._lock:
            record, data = self._blocks.get(request.slot, (None, b""))
        if record is None or not is_asked_for(record, request):
            return CorruptBlock(
                f"slot {request.slot} does not hold block {request.key.hex()}", Mismatch.OTHER
            )
        start = 0
        for part in request.buffers:
            part.cast("B")[:] = data[start : start + part.nbytes]
            start += part.nbytes
        return None

    def _refuse(self, slot: int, nbytes: int) -> SlotError | None:
        if 0 <= slot < self.num_slots and nbytes <= self.slot_nbytes:
            return None
        return SlotError(
            f"slot {slot} with {nbytes} bytes; this tier has {self.num_slots} slots "
            f"of {self.slot_nbytes}"
        )
