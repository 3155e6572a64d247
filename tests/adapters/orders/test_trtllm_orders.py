"""TensorRT-LLM's executor, with the worker that kvcore ships, on the recording device."""

from __future__ import annotations

import pytest

from kvcore_devtools.gpu import GpuRank, Machine, installed
from support.orders.books import Books
from support.orders.trtllm import TrtllmExecutor

pytestmark = pytest.mark.slow

STEPS = 25


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("layerwise", [False, True], ids=["whole", "layerwise"])
def test_the_executor_has_the_right_kv(layerwise: bool, overlap: bool, seed: int) -> None:
    with installed(Machine(seed, index=1)) as machine:
        rank = GpuRank(machine)
        books = Books(rank, seed, layerwise=layerwise)
        TrtllmExecutor(rank, layerwise=layerwise, overlap=overlap).run(books, STEPS)
