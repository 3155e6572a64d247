"""The chunks of a blend over a device that queues its work."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from kvcore.config import load_config
from kvcore.connector.fusion_messages import BlendOrder, ChunkLoad
from kvcore.connector.fusion_worker import FusionWorker
from kvcore.fusion.ops import TorchFusion
from kvcore.transfer.graph import SKIP
from support.manual_worker import SHAPE, ManualRig, manual_rig


@pytest.fixture
def rig() -> Iterator[ManualRig]:
    with manual_rig() as made:
        yield made


def test_chunks_wait_for_the_step_that_runs(rig: ManualRig) -> None:
    """Their pages were another request's, for which the step may still compute."""
    config = load_config(overrides={"fusion": {"adaptive": False}}, env={})
    layers: Any = SimpleNamespace(layers=SHAPE.layers, agree=lambda well: well, collective=False)
    selector: Any = None
    size = SHAPE.block_tokens
    blends = FusionWorker(config, rig.worker, layers, [], selector, size, TorchFusion())
    rig.compute(lambda: rig.write(1, 7.0))  # of the step
    graph = rig.load(1, page=SKIP, slot=0)
    chunk = ChunkLoad(graph, 0, size, size, 0)
    order = BlendOrder("r", b"", 0, 0, 2 * size, [0, 1], 0.5, [chunk])
    assert blends.begin([order], rig.worker.mark) == []
    rig.until_issued(graph)
    rig.run(*rig.others())
    assert rig.read(1) == {0.0}, "the step has not run"
    rig.end()
    assert rig.read(1) == {1.0}
    assert rig.read(0) == {0.0}


@pytest.mark.parametrize(("first", "length"), [(0, 5), (3, 6), (5, 11)])
def test_a_chunk_goes_to_its_own_tokens_alone(rig: ManualRig, first: int, length: int) -> None:
    """Its blocks begin and end at others' tokens, which belong elsewhere or are computed."""
    size = SHAPE.block_tokens
    graph = rig.load(1, page=SKIP, slot=0)
    slots = np.array([3, 1, 2])[:, None] * size + np.arange(size)
    bound = ChunkLoad(graph, first, length, size - 2, 0).into(slots.ravel())
    rig.submit(bound)
    rig.worker.follow(1)
    rig.end()
    for cache in rig.caches:  # [pages, heads, tokens, dim]
        filled = cache.ne(0).any(dim=3).any(dim=1).flatten().nonzero().ravel()
        assert filled.tolist() == sorted(slots.ravel()[size - 2 :][:length].tolist())
