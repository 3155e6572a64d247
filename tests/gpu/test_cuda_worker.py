"""The data plane on a real GPU: pages in device memory, pinned arena, copies on their own stream.

Needs a CUDA device and no engine: ``python -m pytest tests/gpu``, or `make gpu GPU_PARTS=worker`.
CI has none, and no GPU was at hand when this was written. On a CPU (GPU_TESTS_ON=cpu) it has run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from kvcore.manager import HOST
from kvcore.memory.arena import HostArena
from kvcore.memory.checksums import naive_sum
from kvcore.memory.copy import builtin_ops
from kvcore.memory.device import device_of
from kvcore.memory.device_region import DeviceRegion
from kvcore.memory.layout import KVView
from kvcore.plugins.manager import PluginManager
from kvcore.transfer.plan import layer_steps
from support.gpu_rig import (
    DEVICE,
    IS_GPU,
    MISSING,
    NAMESPACE,
    ORDERS,
    PAGES,
    SHAPE,
    Rig,
    built,
    engine_pages,
    fitting,
    keep_busy,
    keys,
    table,
    wait_for_device,
)
from support.transfers import load_blocks, save_blocks

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)


@pytest.fixture(params=[False, True], ids=["host", "straight"])
def to_device(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(params=ORDERS)
def rig(request: pytest.FixtureRequest, tmp_path: Path, to_device: bool) -> Iterator[Rig]:
    """kvcore's own choice among all ways to copy that work here."""
    candidates = PluginManager().ops()
    with built(request.param, tmp_path, candidates, to_device=to_device) as made:
        yield made


def fill(pages: list[torch.Tensor], places: np.ndarray) -> list[torch.Tensor]:
    """Write random numbers to pages, and return copies of them, a layer each."""
    for layer in pages:
        layer[places] = torch.randn(layer[places].shape, device=DEVICE).to(torch.bfloat16)
    return [layer[places].clone() for layer in pages]


def poison(pages: list[torch.Tensor], places: np.ndarray) -> None:
    for layer in pages:
        layer[places] = float("nan")


def assert_hold(pages: list[torch.Tensor], places: np.ndarray, want: list[torch.Tensor]) -> None:
    for layer, expected in zip(pages, want, strict=True):
        assert torch.equal(layer[places], expected)


def come_back(rig: Rig, count: int, seed: int) -> None:
    """Save blocks, and load them into other pages from host memory and from disk."""
    pages, manager, _ = rig
    shuffled = np.random.default_rng(seed).permutation(PAGES)
    home, away = shuffled[:count], shuffled[count : 2 * count]
    chain, expected = keys(count, seed), fill(pages, home)
    graph = save_blocks(manager, chain, NAMESPACE, count, lambda a, b: table(home[a:b]))
    assert manager.wait(graph.graph_id, 60)
    for tier in (HOST, "disk"):
        if tier == "disk":
            manager.index.removal.clear(tier=HOST)
        hit = manager.get_match(chain, NAMESPACE)
        assert hit.blocks_by_tier() == {tier: count}
        poison(pages, away)
        # Work of the compute stream that a load must wait for, or it overwrites what was loaded.
        keep_busy()
        poison(pages, away)
        load = load_blocks(manager, hit, 0, count, table(away), layers=layer_steps(SHAPE.layers))
        assert manager.wait(load.graph_id, 60)
        assert_hold(pages, away, expected)
    assert_hold(pages, home, expected)


def test_blocks_come_back_from_host_and_disk(rig: Rig) -> None:
    come_back(rig, 200, seed=1)


def test_a_save_reads_what_the_forward_wrote(rig: Rig) -> None:
    """The copy is issued while the kernels that produce the KV still run."""
    pages, manager, _ = rig
    place = np.arange(1, 65)
    keep_busy()
    for i, layer in enumerate(pages):
        layer[place] = float(i + 1)
    chain = keys(64, 2)
    graph = save_blocks(manager, chain, NAMESPACE, 64, lambda a, b: table(place[a:b]))
    assert manager.wait(graph.graph_id, 60)
    for layer in pages:
        layer[place] = 0
    hit = manager.get_match(chain, NAMESPACE)
    load = load_blocks(manager, hit, 0, 64, table(place))
    assert manager.wait(load.graph_id, 60)
    wait_for_device()
    assert all(bool((layer[place] == i + 1).all()) for i, layer in enumerate(pages))


def test_pages_written_after_the_save_read_them_are_free(rig: Rig) -> None:
    """`wait_device` returns once the pages may be overwritten, and no sooner."""
    pages, manager, _ = rig
    place, other = np.arange(0, 128), np.arange(200, 328)
    expected, chain = fill(pages, place), keys(128, 4)
    keep_busy()
    graph = save_blocks(manager, chain, NAMESPACE, 128, lambda a, b: table(place[a:b]))
    manager.transport.worker.wait_device(graph.graph_id)
    poison(pages, place)
    assert manager.wait(graph.graph_id, 60)
    load = load_blocks(manager, manager.get_match(chain, NAMESPACE), 0, 128, table(other))
    assert manager.wait(load.graph_id, 60)
    assert_hold(pages, other, expected)


@pytest.mark.parametrize("order", ORDERS)
def test_every_way_to_copy_brings_blocks_back(order: str, tmp_path: Path) -> None:
    """Each implementation alone, through a whole worker."""
    _, view = engine_pages(order, 2)
    arena = HostArena(SHAPE, 2, pin=device_of(DEVICE))
    flat = KVView(arena.layout(), [arena.tensor()])
    ways = fitting(view, flat)
    assert {ops.name for ops in ways} >= ({"reference", "triton"} if IS_GPU else {"reference"})
    for number, ops in enumerate(ways):
        folder = tmp_path / str(number)
        folder.mkdir()
        with built(order, folder, [ops]) as rig:
            assert rig.ops is ops
            come_back(rig, 60, seed=10 + number)
    print(f"ways tried: {', '.join(ops.name for ops in ways)}")
    del flat
    arena.close()


def test_rates(rig: Rig) -> None:
    """Prints GB/s of both directions beside a plain pinned copy; asserts nothing about time."""
    _, manager, ops = rig
    place = np.random.default_rng(1).permutation(PAGES)[:200]
    chain = keys(200, 3)
    nbytes = 200 * SHAPE.nbytes
    started = time.perf_counter()
    graph = save_blocks(manager, chain, NAMESPACE, 200, lambda a, b: table(place[a:b]))
    manager.transport.worker.wait_device(graph.graph_id)
    saved = time.perf_counter() - started
    assert manager.wait(graph.graph_id, 60)
    hit = manager.get_match(chain, NAMESPACE)
    started = time.perf_counter()
    load = load_blocks(manager, hit, 0, 200, table(place))
    assert manager.wait(load.graph_id, 60)
    loaded = time.perf_counter() - started
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=IS_GPU)
    there = torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)
    wait_for_device()
    started = time.perf_counter()
    there.copy_(host)
    wait_for_device()
    plain = time.perf_counter() - started
    print(
        f"{ops.name}: save {nbytes / saved / 1e9:.1f} load {nbytes / loaded / 1e9:.1f} "
        f"plain {nbytes / plain / 1e9:.1f} GB/s"
    )
    assert hit.depth == 200


@pytest.mark.parametrize("kind", ["torch", "triton"])
def test_sums_of_device_memory_are_those_of_host_memory(kind: str) -> None:
    ops = builtin_ops()[0]
    if kind == "triton":
        if not IS_GPU:
            pytest.skip("Triton's kernels need a GPU")
        ops = pytest.importorskip("kvcore_kernels.ops").TritonOps()
    region = DeviceRegion(SHAPE, 3, ops, DEVICE)
    assert region.memory.kind == ("VRAM" if IS_GPU else "DRAM")
    assert region.memory.address % 4096 == 0
    blocks = [np.random.default_rng(i).bytes(region.slot_nbytes) for i in range(3)]
    for place, block in enumerate(blocks):
        region.put(place, memoryview(bytearray(block)))
    wait_for_device()
    want = [naive_sum([memoryview(block)], SHAPE.nbytes) for block in blocks]
    assert region.sums(range(3)) == want
    region.close()
