"""A worker and a leader over an engine's pages in device memory, in one process.

GPU_TESTS_ON=cpu puts the pages in host memory. The tests of tests/gpu then run on any machine,
which shows that they are right, and nothing about a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from kvcore.index import BlockIndex, TierSpec
from kvcore.index.slots import SlotRun
from kvcore.manager import HOST, Backing, KVManager, TransferOptions
from kvcore.memory.arena import HostArena, slot_bytes
from kvcore.memory.copy import select_ops
from kvcore.memory.copy.base import DeviceOps
from kvcore.memory.device import device_of
from kvcore.memory.device_group import DeviceGroup
from kvcore.memory.layout import KVView, from_strides
from kvcore.model.shape import BlockShape
from kvcore.plugins.manager import PluginManager
from kvcore.tiers.disk import DiskAccess, DiskTier, Geometry, prepare_store
from kvcore.transfer.graph import OpReport, UnitTable
from kvcore.worker import EnginePages, KVWorker, WorkerLimits

KIND = os.environ.get("GPU_TESTS_ON", "cuda")
DEVICE = torch.device(KIND, 0) if KIND == "cuda" else torch.device(KIND)
IS_GPU = KIND == "cuda"
MISSING = "needs a CUDA device" if IS_GPU and not torch.cuda.is_available() else ""

SHAPE = BlockShape(8, 8, 128, 16, "bfloat16") if IS_GPU else BlockShape(2, 2, 64, 16, "bfloat16")
PAGES, PAGE = 512, 16
ORDERS = ["LBNHC", "LBHNC"]
NAMESPACE = b"n" * 16


class Rig(NamedTuple):
    """An engine's pages, a tensor a layer with the page first, and what moves their KV."""

    pages: list[torch.Tensor]
    manager: KVManager
    ops: DeviceOps


class Local:
    """The transport to a worker in this process."""

    def __init__(self, worker: KVWorker) -> None:
        self.worker = worker
        self.refused: list[OpReport] = []

    def submit(self, graph: object, lane: object = None) -> None:
        self.refused += self.worker.submit(graph)  # type: ignore[arg-type]

    def cancel(self, graph_id: int) -> None:
        self.worker.cancel(graph_id)

    def invalidate(self, tier: str, slots: Sequence[SlotRun]) -> None:
        self.worker.invalidate(tier, slots)

    def wait_report(self, timeout: float) -> bool:
        return self.worker.wait_report(timeout)

    def poll(self) -> list[OpReport]:
        refused, self.refused = self.refused, []
        return refused + self.worker.poll()


def engine_pages(order: str, pages: int = PAGES) -> tuple[list[torch.Tensor], KVView]:
    """Return zeroed pages in the physical order that vLLM calls ``order``, and their view."""
    content, heads = 2 * SHAPE.head_dim, SHAPE.kv_heads
    size = {"LBNHC": (pages, PAGE, heads, content), "LBHNC": (pages, heads, PAGE, content)}[order]
    tensors = [torch.zeros(size, dtype=torch.bfloat16, device=DEVICE) for _ in range(SHAPE.layers)]
    views = [t.transpose(1, 2) if order == "LBNHC" else t for t in tensors]
    view = KVView(from_strides(views, SHAPE), views)
    view.check()
    return tensors, view


@contextmanager
def built(
    order: str, folder: Path, candidates: Sequence[DeviceOps], *, to_device: bool = False
) -> Iterator[Rig]:
    """Build a rig with 256 slots of host memory and a disk tier, and the fastest of the candidates.

    With ``to_device``, reads of the disk bypass host memory where the machine can do that.
    """
    pages, device = engine_pages(order)
    arena = HostArena(SHAPE, 256 + 32, pin=device_of(DEVICE))
    assert arena.pinned is IS_GPU
    flat = KVView(arena.layout(), [arena.tensor()])
    ops = select_ops(device, flat, candidates)
    worker = KVWorker(
        arena=arena,
        arena_view=flat,
        ops=ops,
        pages=EnginePages([DeviceGroup(tuple(range(SHAPE.layers)), device)], device=DEVICE),
        limits=WorkerLimits(device_slots=64),
    )
    geometry = Geometry(SHAPE, b"m" * 16, ((0, SHAPE.kv_heads),))
    store = prepare_store(folder, geometry, 2 << 30 if IS_GPU else 64 << 20)
    access = DiskAccess(device_sums=True)
    size = slot_bytes(SHAPE)
    worker.open_tier(
        "disk", DiskTier(store.mounted, geometry, shard=0, slot_nbytes=size, access=access)
    )
    index = BlockIndex([TierSpec(HOST, 256), TierSpec("disk", store.num_slots, foreign=True)])
    manager = KVManager(
        index,
        Local(worker),
        backing=[Backing("disk", to_device=to_device)],
        options=TransferOptions(range(256, 288), device_slots=64 if to_device else 0),
    )
    try:
        yield Rig(pages, manager, ops)
    finally:
        assert worker.close()
        store.close()


def fitting(src: KVView, dst: KVView) -> list[DeviceOps]:
    """Return all ways to copy, of kvcore and of plugins, that serve these two memories."""
    return [ops for ops in PluginManager().ops() if ops.supports(src, dst)]


def keys(count: int, seed: int) -> list[bytes]:
    return [np.random.default_rng([seed, i]).bytes(16) for i in range(count)]


def table(pages: np.ndarray) -> list[UnitTable]:
    return [UnitTable.of(pages.astype(np.int64)[:, None], 16)]


def keep_busy() -> None:
    """Give the current stream work for tens of milliseconds. The host does not wait on a GPU."""
    side = 8192 if IS_GPU else 256
    slow = torch.randn(side, side, device=DEVICE)
    for _ in range(20):
        slow = slow @ slow.clamp(-1e-3, 1e-3)


def wait_for_device() -> None:
    device_of(DEVICE).synchronize()
