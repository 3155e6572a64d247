"""The chunks of a blend over a device that queues its work."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from kvcore.config import load_config
from kvcore.connector.fusion_messages import BlendOrder, ChunkLoad
from kvcore.connector.fusion_worker import FusionWorker
from kvcore.fusion.ops import TorchFusion
from support.manual_worker import SHAPE, ManualRig


def test_chunks_arrive_while_a_step_runs() -> None:
    """They go to memory of their own: the step that runs cannot matter to them."""
    rig = ManualRig()
    config = load_config(overrides={"fusion": {"adaptive": False}}, env={})
    layers: Any = SimpleNamespace(layers=SHAPE.layers, agree=lambda well: well)
    selector: Any = None
    blends = FusionWorker(
        config, rig.worker, layers, [], SHAPE, selector, SHAPE.block_tokens, TorchFusion()
    )
    rig.compute(lambda: rig.write(1, 7.0))  # of the step
    graph = rig.load(1, page=0, slot=0)
    order = BlendOrder("r", b"", 0, 0, 16, [], 0.5, [ChunkLoad(graph, 0, 16, 0, 0)], 1)
    assert blends.begin([order]) == []
    rig.until_issued(graph)
    rig.device.run(*rig.others())
    [(_, staging)] = blends._orders
    assert staging is not None
    assert bool((staging.tensor == 1).all())
    assert rig.read(1) == {0.0}, "the step has not run"
    rig.end()
    rig.worker.release(1)
    rig.close()
