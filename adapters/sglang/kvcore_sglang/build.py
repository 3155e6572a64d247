"""Puts the parts of a rank together from a config: the only place that knows every part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvcore.config import Config
from kvcore.connector.build import (
    LeaderParts,
    build_fusion_worker,
    build_leader,
    build_policy,
    build_worker,
    scheduler_parts,
)
from kvcore.connector.forward_timer import ForwardTimer
from kvcore.connector.fusion_scheduler import FusionTraits
from kvcore.connector.fusion_worker import FusionWorker
from kvcore.connector.step_transport import Outbox
from kvcore.errors import KVCoreError
from kvcore.explain.recorder import RequestRecorder
from kvcore.fusion.rope import Rope
from kvcore.runtime.build import segments_of
from kvcore.telemetry.metrics import Data
from kvcore.telemetry.rates import ForwardPart
from kvcore.transfer.plan import layer_steps
from kvcore_sglang.describe import Served
from kvcore_sglang.fusion import SglangLayers
from kvcore_sglang.fusion_scheduler import SglangFusionScheduler
from kvcore_sglang.leader import Leader
from kvcore_sglang.ranks import Follower, NoLinks, RankLinks, join, open_links
from kvcore_sglang.worker import Fence, WorkerConnector


@dataclass
class Parts:
    """One rank: a leader and links to the others, or a follower."""

    served: Served
    worker: WorkerConnector
    links: RankLinks
    leader: Leader | None
    follower: Follower | None

    def close(self) -> None:
        """Finish what is under way, then let go. Blocks."""
        self.worker.close()
        if self.follower is not None:
            self.follower.close()
        if self.leader is not None:
            self.leader.close()


@dataclass
class Fusable:
    """What blends need of a model that they are right for."""

    layers: SglangLayers
    ropes: Sequence[Rope | None]


def build(
    config: Config,
    served: Served,
    fence: Fence,
    publish: Callable[[Data], None] | None = None,
    fusable: Fusable | None = None,
    *,
    times_forwards: bool = False,
) -> Parts:
    """This rank's parts. Blocks until all ranks are there. ``publish`` as `Leader` has it;
    ``fusable`` is None on all ranks where there is no fusion; ``times_forwards`` says that those of
    the leader's rank can be timed.

    Raises UnsupportedError or LayoutError where KV cannot be moved right, on all ranks alike, and
    on rank 0 where a server refuses it: nothing is left open then.
    """
    rank, model = served.rank, served.model
    parts = build_worker(config, model, rank.number, [served.pool.view])
    blends = None
    if fusable is not None:
        layers, ropes = fusable.layers, fusable.ropes
        blends = build_fusion_worker(FusionWorker, config, model, rank.number, parts, layers, ropes)
    timed = times_forwards and rank.number == 0  # all compute alike, and the leader learns of it
    clock = (
        ForwardTimer[Sequence[ForwardPart]](served.pool.view.tensors[0].device) if timed else None
    )
    worker = WorkerConnector(parts, fence, blends, clock)
    if rank.number:
        follower = join(rank)(worker, parts.metrics)
        return Parts(served, worker, NoLinks(), None, follower)
    links: RankLinks = NoLinks() if rank.group is None else open_links(rank)
    try:
        leader = _leader(config, served, worker, links, publish, fuses=fusable is not None)
    except KVCoreError:  # the other ranks are told by the caller
        worker.close()
        links.close()
        raise
    return Parts(served, worker, links, leader, None)


def _leader(
    config: Config,
    served: Served,
    worker: WorkerConnector,
    links: RankLinks,
    publish: Callable[[Data], None] | None,
    *,
    fuses: bool,
) -> Leader:
    """Build the leader beside the worker of rank 0."""
    model = served.model
    outbox, recorder = Outbox(model.world_size), RequestRecorder.of(config)
    parts = build_leader(config, model, outbox, recorder)
    recorder.weigh_alone(
        config,
        model,
        parts.manager,
        parts.read_paths,
        min_load_tokens=config.sglang.min_load_tokens,
        layerwise=config.sglang.layerwise,
        times_forwards=worker.times_forwards,
    )
    fusion = _fusion_leader(config, served, parts) if fuses else None
    made = scheduler_parts(parts, outbox, recorder, fusion)
    return Leader(config, model, made, outbox, worker, links, parts.open_tiers, publish)


def _fusion_leader(config: Config, served: Served, parts: LeaderParts) -> SglangFusionScheduler:
    """Build what plans blends. Its policy knows layers from their timing at start, and learns
    forwards, blends and loads as they come."""
    model = served.model
    policy = build_policy(
        config,
        model,
        parts,
        hidden=int(served.checkpoint.text["hidden_size"]),
        device=served.pool.view.tensors[0].device.type,
    )
    return SglangFusionScheduler(
        config,
        model.shape.nbytes,
        parts.manager,
        segments_of(config, model, parts.manager),
        layer_steps(model.shape.layers),
        parts.metrics,
        FusionTraits(served.page_tokens, ends_at_page=True),
        policy if config.fusion.adaptive else None,
    )
