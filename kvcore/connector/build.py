"""Composes the leader and the worker of an engine from a config.

The choice between tiers of this process and a kvcore server is made here, and nowhere else.

    config + model ── build_leader ──▶ ManagerParts     index, lower tiers, manager; or a client
    config + model ── build_worker ──▶ WorkerParts     arena, copies, tiers to open     (each rank)
             pages ──┘
    parts + what the engine knows ──── build_policy, build_planner, build_fusion_worker

Both sides compute the size of the arena from the same numbers, so that a slot of the leader's index
is a slot of every rank.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from kvcore.config import Config
from kvcore.connector.fusion_policy import FusionPolicy, make_fusion_policy
from kvcore.connector.fusion_scheduler import FusionScheduler, FusionTraits
from kvcore.connector.fusion_worker import EngineLayers, FusionWorker
from kvcore.connector.leader import LeaderParts
from kvcore.explain.recorder import RequestRecorder
from kvcore.fusion.ops import FusionOps, select_fusion
from kvcore.fusion.rope import Rope
from kvcore.fusion.select import Selector
from kvcore.index import Event
from kvcore.index.policy import PointPolicy, SpacedPoints
from kvcore.manager import Transport
from kvcore.manager.load_advisor import LoadAdvisor
from kvcore.memory.layout import KVView
from kvcore.memory.points import RawPages, StatePages, WindowPages
from kvcore.model.spec import ModelDescription
from kvcore.runtime import build as runtime
from kvcore.runtime.build import ManagerParts, WorkerParts
from kvcore.runtime.page_store import Pages, open_pages
from kvcore.telemetry.metrics import Metrics
from kvcore.telemetry.rates import Rates
from kvcore.tiers.geometry import Geometry
from kvcore.tiers.held import Held
from kvcore.transfer.plan import layer_steps

__all__ = [
    "ManagerParts",
    "WorkerParts",
    "build_fusion_scheduler",
    "build_fusion_worker",
    "build_leader",
    "build_pages",
    "build_planner",
    "build_policy",
    "build_worker",
    "fusion_parts",
    "leader_parts",
]

_log = logging.getLogger("kvcore.connector")

_B = TypeVar("_B", bound=FusionWorker)
F = TypeVar("F", bound=FusionScheduler)


# -- leader ---------------------------------------------------------------------------------


def build_leader(
    config: Config,
    model: ModelDescription,
    transport: Transport,
    recorder: RequestRecorder | None = None,
    *,
    on_event: Callable[[Event], None] | None = None,
    data_parallel_rank: int | None = None,
    elsewhere: Sequence[Mapping[str, Held]] = (),
) -> ManagerParts:
    """Build the leader of a model, over tiers of this process or as a client of a server.

    The leader is a client if ``config`` names a server. Does I/O: a disk tier scans its records, or
    the client connects to the server.

    Args:
        config: the settings.
        model: the model whose KV is cached.
        transport: carries graphs to the workers.
        recorder: counts in the leader's metrics from then on, and receives its events.
        on_event: see `kvcore.runtime.build.build_manager`. A server sends events to its own
            subscribers only.
        data_parallel_rank: identifies the leader if one engine has several.
        elsewhere: what the disks of other machines hold; see `kvcore.runtime.build.hold_tiers`.

    Raises the errors of `build_manager`, and UnsupportedError if a server refuses this client.
    """
    model = model.behind(config.server.address)
    if recorder is not None:
        on_event = recorder.listener(on_event)
    if config.server.address is None:
        parts = runtime.build_manager(
            config,
            model,
            transport,
            on_event=on_event,
            data_parallel_rank=data_parallel_rank,
            elsewhere=elsewhere,
        )
        parts = runtime.with_admin(config, model, parts, data_parallel_rank)
    else:
        parts = _join(config, model, transport)
    if recorder is not None:
        recorder.count_in(parts.metrics)
    return runtime.enter_directory(config, model, parts, "leader", data_parallel_rank)


def leader_parts(
    parts: ManagerParts,
    transport: Transport,
    recorder: RequestRecorder,
    fusion: F | None = None,
    planning: LoadAdvisor | None = None,
    points: PointPolicy | None = None,
) -> LeaderParts[F]:
    """Collect the parts of an engine's `LeaderCore`, which releases ``parts`` when it closes.

    ``points`` chooses the resume points of a model with states; by default, `SpacedPoints` does.
    """
    return LeaderParts(
        manager=parts.manager,
        transport=transport,
        metrics=parts.metrics,
        recorder=recorder,
        fusion=fusion,
        planning=planning,
        points=points or SpacedPoints(),
        releases=parts.releases,
    )


def _join(config: Config, model: ModelDescription, transport: Transport) -> ManagerParts:
    """Build the leader as a client of a server."""
    from kvcore.server.client import join_server

    metrics = Metrics("leader", enabled=config.metrics.enabled)
    plugins = runtime.load_plugins(config)
    plugins.check(config)
    manager = join_server(config, model, transport, metrics)
    if config.events.endpoint or config.events.nats:
        _log.info("block events are published by the kvcore server, which has the tiers")
    return ManagerParts(manager, metrics, (), plugins, [manager.close])


def build_fusion_scheduler(
    kind: type[F],
    config: Config,
    model: ModelDescription,
    parts: ManagerParts,
    traits: FusionTraits,
    policy: FusionPolicy | None = None,
    *,
    layerwise: bool = True,
) -> F:
    """Build what plans blends for an engine; ``layerwise`` tells whether chunks arrive by layer."""
    return kind(
        config,
        model.shape.nbytes,
        parts.manager,
        runtime.segments_of(config, model, parts.manager),
        layer_steps(model.shape.layers) if layerwise else [],
        parts.metrics,
        traits,
        policy if config.fusion.adaptive else None,
    )


def build_policy(
    config: Config,
    model: ModelDescription,
    parts: ManagerParts,
    *,
    hidden: int,
    device: str,
    recorder: RequestRecorder | None = None,
) -> FusionPolicy | None:
    """Build the policy that learns an engine's rates and decides about blends.

    The fusion controller and the planner decide by rates. A ``recorder`` that keeps records or
    counts the time saved by loads estimates with them. Returns None if none of these is in use.
    ``hidden`` is the model's hidden size and ``device`` a torch device type.
    """
    fuses = config.fusion.enabled and config.fusion.adaptive
    estimates = recorder is not None and (recorder.records or config.metrics.enabled)
    if not (fuses or config.planner.enabled or estimates):
        return None
    looks = False
    if fuses:
        options = config.fusion.selector_options
        looks = parts.plugins.selector(config.fusion.selector, options).needs_question
    return make_fusion_policy(
        config.fusion,
        hidden=hidden,
        device=device,
        layers=model.shape.layers,
        ranks=model.world_size,
        paths=parts.read_paths,
        looks=looks,
    )


def build_planner(
    config: Config,
    model: ModelDescription,
    parts: ManagerParts,
    rates: Rates,
    recorder: RequestRecorder,
    *,
    min_load_tokens: int,
    layerwise: bool,
) -> LoadAdvisor | None:
    """Build the planner over ``rates`` and let ``recorder`` estimate with it.

    Returns the planner, or None if planning is off.
    """
    planning = LoadAdvisor(
        config,
        model,
        parts.manager,
        rates,
        min_load_tokens=min_load_tokens,
        layerwise=layerwise,
    )
    recorder.weigh_with(planning)
    return planning if config.planner.enabled else None


# -- worker ---------------------------------------------------------------------------------


def build_worker(
    config: Config,
    model: ModelDescription,
    rank: int,
    views: Sequence[KVView],
    states: StatePages | None = None,
    windows: WindowPages | None = None,
    pages: RawPages | None = None,
) -> WorkerParts:
    """Build the worker of ``rank``, over its own arena or over a server's.

    See `kvcore.runtime.build.build_worker` for ``views``, ``states``, ``windows``, ``pages`` and
    the errors raised.
    """
    if config.server.address is None:
        return runtime.build_worker(
            config, model, rank, views, states=states, windows=windows, pages=pages
        )
    from kvcore.server.worker import ServedWorker

    model = model.behind(config.server.address)
    served = partial(ServedWorker, served=config, model=model, rank=rank)
    return runtime.build_worker(
        config, model, rank, views, served=served, states=states, windows=windows, pages=pages
    )


def build_pages(config: Config, geometry: Geometry, identity: bytes, share: int = 1) -> Pages:
    """Open an engine's own pages in the one backing tier of ``config``, or in its server. Blocks.

    See `kvcore.runtime.page_store.open_pages` for the arguments and errors. A server's client
    raises UnsupportedError if the server refuses it. If no server answers, it is joined later.
    """
    if config.server.address is None:
        return open_pages(config, geometry, identity, share)
    from kvcore.server.pages import join_pages

    return join_pages(config, geometry.shape.nbytes, identity)


def fusion_parts(config: Config, parts: WorkerParts) -> tuple[Selector, FusionOps]:
    """Build a rank's row selector and select its kernels by ``[fusion]`` and ``[ops]``."""
    selector = parts.plugins.selector(config.fusion.selector, config.fusion.selector_options)
    device, plugins = parts.worker.groups[0].view.tensors[0].device, parts.plugins
    ops = select_fusion(device, plugins.ops(), plugins.fusion_ops(), config.ops.backend)
    return selector, ops


def build_fusion_worker(
    kind: type[_B],
    config: Config,
    model: ModelDescription,
    parts: WorkerParts,
    layers: EngineLayers,
    ropes: Sequence[Rope | None],
) -> _B:
    """Build a rank's fusion worker over the engine's own ``layers``.

    ``kind`` is the class to build. ``ropes`` rotate cached K, one a layer.
    """
    selector, ops = fusion_parts(config, parts)
    return kind(
        config,
        parts.worker,
        layers,
        ropes,
        selector,
        model.groups[0].page_tokens,
        ops,
    )
