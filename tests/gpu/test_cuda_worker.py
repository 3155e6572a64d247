"""The data plane on a real GPU: pages in device memory, pinned arena, copies on their own stream.

Needs a CUDA device and no engine: ``python -m pytest tests/gpu``. CI has none, and no GPU was at
hand when this was written: it has not been run yet.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from kvcore.index import BlockIndex, TierSpec
from kvcore.index.slots import SlotRun
from kvcore.manager import HOST, Backing, KVManager, TransferOptions
from kvcore.memory.arena import HostArena, slot_bytes
from kvcore.memory.checksums import naive_sum
from kvcore.memory.copy import builtin_ops, select_ops
from kvcore.memory.device import device_of
from kvcore.memory.device_region import DeviceRegion
from kvcore.memory.layout import DeviceGroup, KVView, from_strides
from kvcore.model.shape import BlockShape
from kvcore.tiers.disk import DiskAccess, DiskTier, Geometry, prepare_store
from kvcore.transfer.graph import OpReport, UnitTable
from kvcore.transfer.plan import layer_steps
from kvcore.worker import EnginePages, KVWorker, WorkerLimits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SHAPE = BlockShape(8, 8, 128, 16, "bfloat16")
PAGES, PAGE = 512, 16
NAMESPACE = b"n" * 16


class Local:
    """Worker and leader in one process."""

    def __init__(self, worker: KVWorker) -> None:
        self.worker = worker
        self.refused: list[OpReport] = []

    def submit(self, graph: object, lane: object = None) -> None:
        self.refused += self.worker.submit(graph)  # type: ignore[arg-type]

    def cancel(self, graph_id: int) -> None:
        self.worker.cancel(graph_id)

    def forget(self, tier: str, slots: Sequence[SlotRun]) -> None:
        self.worker.forget(tier, slots)

    def wait_report(self, timeout: float) -> bool:
        return self.worker.wait_report(timeout)

    def poll(self) -> list[OpReport]:
        refused, self.refused = self.refused, []
        return refused + self.worker.poll()


@pytest.fixture(params=[False, True], ids=["host", "straight"])
def to_device(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(params=["LBNHC", "LBHNC"])
def rig(request: pytest.FixtureRequest, tmp_path: Path, to_device: bool):  # type: ignore[no-untyped-def]
    content = 2 * SHAPE.head_dim
    size = {"LBNHC": (PAGES, PAGE, 8, content), "LBHNC": (PAGES, 8, PAGE, content)}[request.param]
    pages = [torch.zeros(size, dtype=torch.bfloat16, device="cuda") for _ in range(SHAPE.layers)]
    views = [p.transpose(1, 2) if request.param == "LBNHC" else p for p in pages]
    device = KVView(from_strides(views, SHAPE), views)
    device.check()
    arena = HostArena(SHAPE, 256 + 32, pin=device_of(torch.device("cuda", 0)))
    assert arena.pinned
    flat = KVView(arena.layout(), [arena.tensor()])
    worker = KVWorker(
        arena=arena,
        arena_view=flat,
        ops=select_ops(device, flat, builtin_ops()),
        pages=EnginePages(
            [DeviceGroup(tuple(range(SHAPE.layers)), device)], device=torch.device("cuda", 0)
        ),
        limits=WorkerLimits(device_slots=64),
    )
    geometry = Geometry(SHAPE, b"m" * 16, ((0, 8),))
    store = prepare_store(tmp_path, geometry, 2 << 30)
    worker.open_tier(
        "disk",
        DiskTier(
            store.mounted,
            geometry,
            shard=0,
            slot_nbytes=slot_bytes(SHAPE),
            access=DiskAccess(device_sums=True),
        ),
    )
    index = BlockIndex([TierSpec(HOST, 256), TierSpec("disk", store.num_slots, foreign=True)])
    local = Local(worker)
    manager = KVManager(
        index,
        local,
        backing=[Backing("disk", to_device=to_device)],
        options=TransferOptions(range(256, 288), device_slots=64 if to_device else 0),
    )
    yield pages, manager
    assert worker.close()
    store.close()


def keys(count: int, seed: int) -> list[bytes]:
    return [np.random.default_rng([seed, i]).bytes(16) for i in range(count)]


def table(pages: np.ndarray) -> list[UnitTable]:
    return [UnitTable.of(pages.astype(np.int64)[:, None], 16)]


def test_blocks_come_back_from_host_and_disk(rig) -> None:  # type: ignore[no-untyped-def]
    pages, manager = rig
    shuffled = np.random.default_rng(0).permutation(PAGES)
    home, away = shuffled[:200], shuffled[200:400]
    chain = keys(200, 1)
    for layer in pages:
        layer[home] = torch.randn(layer[home].shape, device="cuda").to(torch.bfloat16)
    expected = [layer[home].clone() for layer in pages]
    graph = manager.launch_save(chain, NAMESPACE, 200, lambda a, b: table(home[a:b]))
    assert manager.wait(graph.graph_id, 60)
    for tier in (HOST, "disk"):
        if tier == "disk":
            manager.index.removal.clear(tier=HOST)
        hit = manager.get_match(chain, NAMESPACE)
        assert hit.blocks_by_tier() == {tier: 200}
        for layer in pages:
            layer[away] = float("nan")
        # Work of the compute stream that a load must wait for, or it overwrites what was loaded.
        slow = torch.randn(8192, 8192, device="cuda")
        for _ in range(20):
            slow = slow @ slow.clamp(-1e-3, 1e-3)
        for layer in pages:
            layer[away] = float("nan")
        load = manager.launch_load(hit, 0, 200, table(away), layers=layer_steps(SHAPE.layers))
        assert manager.wait(load.graph_id, 60)
        for layer, want in zip(pages, expected, strict=True):
            assert torch.equal(layer[away], want)


def test_a_save_reads_what_the_forward_wrote(rig) -> None:  # type: ignore[no-untyped-def]
    """The copy is issued while the kernels that produce the KV still run."""
    pages, manager = rig
    place = np.arange(1, 65)
    slow = torch.randn(8192, 8192, device="cuda")
    for _ in range(20):
        slow = slow @ slow.clamp(-1e-3, 1e-3)
    for i, layer in enumerate(pages):
        layer[place] = float(i + 1)
    chain = keys(64, 2)
    graph = manager.launch_save(chain, NAMESPACE, 64, lambda a, b: table(place[a:b]))
    assert manager.wait(graph.graph_id, 60)
    for layer in pages:
        layer[place] = 0
    hit = manager.get_match(chain, NAMESPACE)
    load = manager.launch_load(hit, 0, 64, table(place))
    assert manager.wait(load.graph_id, 60)
    torch.cuda.synchronize()
    assert all(bool((layer[place] == i + 1).all()) for i, layer in enumerate(pages))


def test_rates(rig) -> None:  # type: ignore[no-untyped-def]
    """Prints GB/s of both directions beside a plain pinned copy; asserts nothing about time."""
    _, manager = rig
    place = np.random.default_rng(1).permutation(PAGES)[:200]
    chain = keys(200, 3)
    nbytes = 200 * SHAPE.nbytes
    started = time.perf_counter()
    graph = manager.launch_save(chain, NAMESPACE, 200, lambda a, b: table(place[a:b]))
    manager.transport.worker.wait_device(graph.graph_id)
    saved = time.perf_counter() - started
    assert manager.wait(graph.graph_id, 60)
    hit = manager.get_match(chain, NAMESPACE)
    started = time.perf_counter()
    load = manager.launch_load(hit, 0, 200, table(place))
    assert manager.wait(load.graph_id, 60)
    loaded = time.perf_counter() - started
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    gpu = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    started = time.perf_counter()
    gpu.copy_(host)
    torch.cuda.synchronize()
    plain = time.perf_counter() - started
    print(
        f"save {nbytes / saved / 1e9:.1f} load {nbytes / loaded / 1e9:.1f} "
        f"plain {nbytes / plain / 1e9:.1f} GB/s"
    )
    assert hit.depth == 200


@pytest.mark.parametrize("kind", ["torch", "triton"])
def test_sums_of_device_memory_are_those_of_host_memory(kind: str) -> None:
    ops = builtin_ops()[0]
    if kind == "triton":
        ops = pytest.importorskip("kvcore_kernels.ops").TritonOps()
    region = DeviceRegion(SHAPE, 3, ops, torch.device("cuda", 0))
    assert region.memory.kind == "VRAM"
    assert region.memory.address % 4096 == 0
    blocks = [np.random.default_rng(i).bytes(region.slot_nbytes) for i in range(3)]
    for place, block in enumerate(blocks):
        region.put(place, memoryview(bytearray(block)))
    torch.cuda.synchronize()
    want = [naive_sum([memoryview(block)], SHAPE.nbytes) for block in blocks]
    assert region.sums(range(3)) == want
    region.close()
