"""Puts the two halves together from a config: the only place that knows every part."""

from __future__ import annotations

from collections.abc import Callable

from kvcore_trtllm.describe import whole
from kvcore_trtllm.layout import Memory
from kvcore_trtllm.scheduler import Leader
from kvcore_trtllm.worker import Allgather, Tally, WorkerSide

from kvcore.adapting import build
from kvcore.adapting.outbox import Outbox
from kvcore.adapting.rank import refuse_tier
from kvcore.config import Config
from kvcore.metrics import Metrics
from kvcore.worker import RefusingWorker


def build_worker_side(
    config: Config, memory: Memory, rank: int, allgather: Allgather, *, layerwise: bool
) -> WorkerSide:
    """The worker of this rank. Raises UnsupportedError or LayoutError where KV cannot be moved
    right: nothing may be stored then."""
    model = whole(memory.facts, memory.groups, config.block.tokens)
    parts = build.build_worker(config, model, rank, memory.views)
    return WorkerSide(
        parts.worker,
        Tally(model.world_size, allgather),
        layers=model.shape.layers,
        layerwise=layerwise,
        metrics=parts.metrics,
        open_tier=parts.open_tier,
    )


def refusing_worker_side(world_size: int, allgather: Allgather) -> WorkerSide:
    """A worker that takes no work, so that the leader learns of it and stands aside."""
    return WorkerSide(
        RefusingWorker(),
        Tally(world_size, allgather),
        layers=0,
        layerwise=False,
        metrics=Metrics(),
        open_tier=refuse_tier,
    )


def build_leader(
    config: Config, memory: Memory, worker: WorkerSide
) -> tuple[Leader, list[Callable[[], None]]]:
    """The leader over the memory of rank 0, and what lets go of its tiers.

    That is called once all ranks have closed. A tier that cannot be used is named in the log and
    left out.
    """
    model = whole(memory.facts, memory.groups, config.block.tokens)
    alone = model.world_size == 1
    outbox = Outbox(pump=worker.pump if alone else None)
    parts = build.build_leader(config, model, outbox)
    if alone:  # the first lookup may read from a tier, before there is any plan
        worker.open(parts.open_tiers)
    leader = Leader(
        config,
        model,
        parts.manager,
        outbox,
        parts.metrics,
        open_tiers={} if alone else parts.open_tiers,
        lane=worker.start if alone else None,
    )
    worker.listener = leader.hear
    return leader, parts.releases
