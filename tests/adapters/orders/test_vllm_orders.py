"""vLLM's orders of calls, with the worker that kvcore ships, on the recording device."""

from __future__ import annotations

import pytest

from kvcore.memory.copy import link
from kvcore.memory.copy.link import Way
from kvcore.memory.layout import Arrangement
from kvcore.worker import WorkerLimits
from kvcore_devtools.gpu import SHAPE, GpuRank, Machine, RecordingOps, installed
from support.orders.books import Books
from support.orders.vllm import VllmRunner

pytestmark = pytest.mark.slow

STEPS = 25


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("full", [False, True], ids=["piecewise", "full"])
@pytest.mark.parametrize("runner", [1, 2])
def test_every_order_of_vllm_has_the_right_kv(
    runner: int, full: bool, depth: int, seed: int
) -> None:
    with installed(Machine(seed, index=1)) as machine:
        arrangement = [Arrangement.BLOCKWISE, Arrangement.LAYERWISE][seed % 2]
        rank = GpuRank(machine, arrangement=arrangement)
        books = Books(rank, seed, layerwise=not full)
        VllmRunner(rank, runner=runner, full=full, depth=depth).run(books, STEPS)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("way", Way)
def test_every_way_of_a_copy_over_the_link_has_the_right_kv(
    way: Way, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads copy each way through one staging that holds two blocks."""
    monkeypatch.setattr(link, "SLOT_BYTES", (2 * SHAPE.nbytes + 512,))
    with installed(Machine(seed, index=1)) as machine:
        within, over = RecordingOps(machine), RecordingOps(machine)
        ops = link.LinkOps(within, over, way=way)
        rank = GpuRank(machine, ops=ops, limits=WorkerLimits(copy_threads=2))
        VllmRunner(rank, runner=2, depth=2).run(Books(rank, seed), STEPS)
        assert machine.counts["launches"]


@pytest.mark.parametrize("full", [False, True], ids=["piecewise", "full"])
@pytest.mark.parametrize("runner", [1, 2])
def test_no_step_waits_for_the_device(runner: int, full: bool) -> None:
    """With asynchronous scheduling the runner's thread only queues work, loads and fences too."""
    with installed(Machine(0, index=1)) as machine:
        rank = GpuRank(machine)
        books = Books(rank, 0, layerwise=not full)
        VllmRunner(rank, runner=runner, full=full, depth=2).run(books, STEPS)
    steps = [counts for name, counts in machine.by_op.items() if name.startswith("step")]
    assert steps
    assert not any(counts["host_waits"] for counts in steps)
