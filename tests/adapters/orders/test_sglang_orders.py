"""SGLang's overlap schedule, with the worker that kvcore ships, on the recording device."""

from __future__ import annotations

import pytest

from kvcore.testing.gpu import GpuRank, Machine, installed
from support.orders.books import Books
from support.orders.sglang import SglangScheduler

STEPS = 25


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("leads", [True, False], ids=["leader", "follower"])
@pytest.mark.parametrize("layerwise", [False, True], ids=["whole", "layerwise"])
def test_the_overlap_schedule_has_the_right_kv(layerwise: bool, leads: bool, seed: int) -> None:
    with installed(Machine(seed, index=1)) as machine:
        rank = GpuRank(machine)
        books = Books(rank, seed, layerwise=layerwise, parks=False, locks=True)
        SglangScheduler(rank, layerwise=layerwise, leads=leads).run(books, STEPS)
