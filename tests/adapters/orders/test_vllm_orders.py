"""vLLM's orders of calls, with the worker that kvcore ships, on the recording device."""

from __future__ import annotations

import pytest

from kvcore.memory.layout import Arrangement
from kvcore.testing.gpu import GpuRank, Machine, installed
from support.orders.books import Books
from support.orders.vllm import VllmRunner

STEPS = 25


@pytest.mark.parametrize("seed", range(6))
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
