"""Composes the parts of an SGLang rank from a config: the only module that knows every part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvcore.config import Config
from kvcore.connector.build import (
    ManagerParts,
    WorkerParts,
    build_fusion_scheduler,
    build_fusion_worker,
    build_leader,
    build_policy,
    build_worker,
    leader_parts,
)
from kvcore.connector.forward_timer import ForwardTimer
from kvcore.connector.fusion_scheduler import FusionTraits
from kvcore.connector.fusion_worker import FusionWorker
from kvcore.connector.guard import attempt
from kvcore.connector.step_transport import Outbox
from kvcore.errors import KVCoreError, UnsupportedError
from kvcore.explain.recorder import RequestRecorder
from kvcore.fusion.rope import Rope
from kvcore.telemetry.metrics import Data
from kvcore.telemetry.rates import ForwardPart
from kvcore_sglang.describe import Rank, Served
from kvcore_sglang.fusion import SglangLayers
from kvcore_sglang.fusion_scheduler import SglangFusionScheduler
from kvcore_sglang.leader import Leader
from kvcore_sglang.ranks import Follower, NoLinks, RankLinks, first_problem, join, open_links
from kvcore_sglang.worker import WorkerConnector


@dataclass
class Parts:
    """The parts of one rank: a leader with links to the other ranks, or a follower."""

    served: Served
    worker: WorkerConnector
    links: RankLinks
    leader: Leader | None
    follower: Follower | None

    def close(self) -> None:
        """Finish the saves in flight and release all resources. Blocks. Does not raise."""
        attempt("the close of the worker", self.worker.close, None)
        if self.follower is not None:
            attempt("the close of the link", self.follower.close, None)
        if self.leader is not None:
            attempt("the close of the leader", self.leader.close, None)


@dataclass
class Fusable:
    """The layers and rotations of a model that fusion supports."""

    layers: SglangLayers
    ropes: Sequence[Rope | None]


def build(
    config: Config,
    served: Served,
    forward_stream: object = None,
    publish: Callable[[Data], None] | None = None,
    fusable: Fusable | None = None,
    *,
    times_forwards: bool = False,
) -> Parts:
    """Build this rank's parts. Blocks until all ranks have joined.

    Args:
        config: the settings.
        served: the rank, its model and its pool of pages.
        forward_stream: see `kvcore_sglang.worker`.
        publish: see `Leader`.
        fusable: None without fusion, on all ranks alike.
        times_forwards: the forwards of the leader's rank can be timed.

    Raises UnsupportedError or LayoutError on all ranks if KV cannot be copied correctly, and on
    rank 0 only if a server refuses it. Nothing is left open then.
    """
    rank, model = served.rank, served.model

    def make() -> tuple[WorkerParts, WorkerConnector]:
        parts = build_worker(config, model, rank.number, [served.pool.view])
        blends = None
        if fusable is not None:
            layers, ropes = fusable.layers, fusable.ropes
            blends = build_fusion_worker(FusionWorker, config, model, parts, layers, ropes)
        timed = times_forwards and rank.number == 0  # all ranks take the same time
        clock = ForwardTimer[Sequence[ForwardPart]](parts.worker.device) if timed else None
        return parts, WorkerConnector(parts, forward_stream, blends, clock)

    parts, worker = _on_all(rank, make)
    worker.warm_up_blends(timed=config.fusion.adaptive)
    if rank.number:
        follower = join(rank)(worker, parts.metrics)
        return Parts(served, worker, NoLinks(), None, follower)
    links: RankLinks = NoLinks() if rank.group is None else open_links(rank)
    try:
        leader = _leader(config, served, worker, links, publish, fuses=fusable is not None)
    except KVCoreError:  # the caller informs the other ranks
        worker.close()
        links.close()
        raise
    return Parts(served, worker, links, leader, None)


def _on_all(
    rank: Rank, make: Callable[[], tuple[WorkerParts, WorkerConnector]]
) -> tuple[WorkerParts, WorkerConnector]:
    """Return what ``make`` makes, if it does on every rank; else raise on every rank.

    A collective. The ranks wait for each other when they warm up and when they are linked.
    """
    try:
        made = make()
    except Exception as error:
        first_problem(rank, str(error) or type(error).__name__)
        raise
    if problem := first_problem(rank, ""):
        made[1].close()
        raise UnsupportedError(f"another rank cannot move KV: {problem}")
    return made


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
    planning = recorder.weigh_alone(
        config,
        model,
        parts.manager,
        parts.read_paths,
        min_load_tokens=config.sglang.min_load_tokens,
        layerwise=config.sglang.layerwise,
        times_forwards=worker.times_forwards,
    )
    fusion = _fusion_leader(config, served, parts) if fuses else None
    made = leader_parts(parts, outbox, recorder, fusion, planning)
    return Leader(config, model, made, outbox, worker, links, parts.open_tiers, publish)


def _fusion_leader(config: Config, served: Served, parts: ManagerParts) -> SglangFusionScheduler:
    """Build the fusion scheduler.

    Its policy starts from the layers' timing at start, and learns from forwards, blends and loads.
    """
    model = served.model
    policy = build_policy(
        config,
        model,
        parts,
        hidden=int(served.checkpoint.text["hidden_size"]),
        device=served.pool.view.tensors[0].device.type,
    )
    traits = FusionTraits(served.page_tokens, ends_at_page=True)
    return build_fusion_scheduler(SglangFusionScheduler, config, model, parts, traits, policy)
