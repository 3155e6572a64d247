"""The chunks of a blend over a device that queues its work."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from kvcore.config import load_config
from kvcore.connector import fusion_worker
from kvcore.connector.fusion_messages import BlendOrder, ChunkLoad
from kvcore.connector.fusion_worker import FusionWorker
from kvcore.fusion.ops import TorchFusion
from kvcore.fusion.staging import ChunkStaging
from support.manual_worker import SHAPE, ManualRig, manual_rig


@pytest.fixture
def rig() -> Iterator[ManualRig]:
    with manual_rig() as made:
        yield made


def test_chunks_arrive_while_a_step_runs(rig: ManualRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """They go to memory of their own: the step that runs cannot matter to them."""

    def staged(*given: Any) -> ChunkStaging:
        staging = ChunkStaging(*given)
        rig.machine.know_device(staging.tensor.data_ptr(), staging.tensor.nbytes, "a staging")
        return staging

    monkeypatch.setattr(fusion_worker, "ChunkStaging", staged)
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
    rig.run(*rig.others())
    [(_, staging)] = blends._orders
    assert staging is not None
    assert bool((staging.tensor == 1).all())
    assert rig.read(1) == {0.0}, "the step has not run"
    rig.end()
    rig.worker.release(1)
