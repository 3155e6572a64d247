"""SGLang's overlap schedule, with the worker that kvcore ships, on the recording device."""

from __future__ import annotations

import pytest

from kvcore.worker import WorkerLimits
from kvcore_devtools.gpu import GpuRank, Machine, installed
from support.orders.books import Books
from support.orders.failing import fail_first_attempts
from support.orders.sglang import SglangScheduler

pytestmark = pytest.mark.slow

STEPS = 25


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("leads", [True, False], ids=["leader", "follower"])
@pytest.mark.parametrize("layerwise", [False, True], ids=["whole", "layerwise"])
def test_the_overlap_schedule_has_the_right_kv(layerwise: bool, leads: bool, seed: int) -> None:
    with installed(Machine(seed, index=1)) as machine:
        rank = GpuRank(machine)
        books = Books(rank, seed, layerwise=layerwise, parks=False, locks=True, host_only=True)
        SglangScheduler(rank, layerwise=layerwise, leads=leads).run(books, STEPS)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("late", [False, True], ids=["first", "last"])
def test_a_load_that_is_repeated_waits_for_the_same_work(
    late: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads copy, so the second attempt may be on a stream that has waited for nothing.

    If the failure comes last, one thread has taken the reports of the copies, and another submits
    the load again.
    """
    fail_first_attempts(monkeypatch, seed, after_s=0.02 if late else 0.0)
    with installed(Machine(seed, index=1)) as machine:
        rank = GpuRank(machine, limits=WorkerLimits(copy_threads=2))
        books = Books(rank, seed, layerwise=True, parks=False, locks=True, host_only=True)
        SglangScheduler(rank, layerwise=True, leads=False).run(books, STEPS)
