"""A rank whose disk is read straight into staging on the device, and a leader that does so.

The tier and its reader are kvcore's. NIXL's agent is played: it reads the file into "device" memory
on the calling thread, as GPUDirect Storage does beside every stream.
"""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path as Folder
from typing import Any
from unittest import mock

from kvcore.errors import TierError
from kvcore.memory.nixl import DONE, FileSpan, Memory
from kvcore.tiers.base import BlockRead, DeviceRead
from kvcore.tiers.disk import DiskAccess, DiskTier, Geometry, prepare_store
from kvcore.transfer.graph import Path, Span, TransferGraph
from kvcore.transfer.plan import TierRows, build_load
from kvcore.worker import WorkerLimits
from kvcore_devtools.gpu import SHAPE, GpuRank, Machine
from support.orders.books import Books

__all__ = ["DirectBooks", "disk_rank"]

PLACES = 4


class _Disk(DiskTier):
    """A tier that does not mind which block was before the one that is asked for."""

    def read(self, requests: Sequence[BlockRead]) -> list[TierError | None]:
        return super().read([one._replace(parent=b"") for one in requests])

    def read_device(self, requests: Sequence[DeviceRead]) -> list[TierError | None]:
        return super().read_device([one._replace(parent=b"") for one in requests])


class _Agent:
    """NIXL's agent. ``share`` of its moves fails, after it has written something."""

    chance, share = random.Random(0), 0.0

    def __init__(self, backend: str, memory: Memory) -> None:
        assert memory.kind == "VRAM"
        self._memory = memory

    def keep(self, fd: int, nbytes: int) -> None:
        pass

    def move(self, operation: str, spans: Sequence[FileSpan]) -> str:
        for one in spans:
            part = (ctypes.c_char * one.nbytes).from_address(self._memory.address + one.start)
            os.preadv(one.fd, [memoryview(part)], one.offset)
        return "a failed move" if self.chance.random() < self.share else DONE

    def close(self) -> None:
        pass


@contextmanager
def disk_rank(
    machine: Machine, folder: Folder, seed: int, *, failing: float = 0.3, slots: int = 8,
    threads: int = 1,
) -> Iterator[GpuRank]:  # fmt: skip
    """Yield a rank with ``PLACES`` places for blocks that come straight from its disk.

    A ``failing`` share of these reads fails: the blocks then go through host memory.
    """
    geometry = Geometry(SHAPE, b"m" * 16, ((0, SHAPE.kv_heads),))
    store = prepare_store(folder, geometry, 1 << 20, wait_s=0)

    def open_disk(slot_nbytes: int) -> DiskTier:
        access = DiskAccess(device_sums=True)
        return _Disk(store.mounted, geometry, shard=0, slot_nbytes=slot_nbytes, access=access)

    agent: Any = type("Agent", (_Agent,), {"chance": random.Random(seed), "share": failing})
    with mock.patch("kvcore.tiers.disk.gds.FileAgent", agent):
        rank = GpuRank(
            machine,
            slots=slots,
            limits=WorkerLimits(device_slots=PLACES, copy_threads=threads),
            shelf=open_disk,
        )
        try:
            yield rank
        finally:
            machine.finish()
            rank.worker.close(timeout=5)
            store.close()


class DirectBooks(Books):
    """A leader that loads from disk past host memory, if the staging has room.

    A place of the staging is free for others when the load that uses it was reported.
    """

    def __init__(self, rank: GpuRank, seed: int, **options: Any) -> None:
        super().__init__(rank, seed, **options)
        self.direct = 0
        self._places = list(range(PLACES))
        self._staged: dict[int, list[int]] = {}

    def _load(self, blocks: list[int], pages: list[int]) -> TransferGraph | None:
        held = [block for block in blocks if block in self.published]
        rest = [block for block in blocks if block not in self.published]
        if not rest or not self._places or self._random.random() < 0.2:
            return super()._load(blocks, pages)
        blocks[:] = held + rest
        self._random.shuffle(self._places)
        mine = [self._places.pop() for _ in range(min(len(rest), len(self._places)))]
        staged = [-1] * len(held) + [mine[i % len(mine)] for i in range(len(rest))]
        slots = [self.published[block] for block in held]
        rows = Span(len(held), len(blocks))
        graph = build_load(
            self._number(),
            self._chain(blocks),
            [*slots, *[-1] * len(rest)],
            [TierRows(self.rank.tier, Path.DISK2D, rows, [self.stored[block] for block in rest])],
            batch_rows=len(mine),
            layers=self._layers,
            staged=staged,
        ).bind(self.rank.units(pages))
        self._fly(graph, pages, slots)
        self._staged[graph.graph_id] = mine
        self.direct += len(rest)
        return graph

    def take(self, reports: Any) -> None:
        super().take(reports)
        for number in [one for one in self._staged if one not in self.flights]:
            self._places += self._staged.pop(number)
