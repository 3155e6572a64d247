"""Composes leader and worker from a config: the only module that knows every part."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch

from kvcore.config import Config
from kvcore.connector.build import (
    ManagerParts,
    WorkerParts,
    build_fusion_scheduler,
    build_fusion_worker,
    build_leader,
    build_planner,
    build_policy,
    build_worker,
    leader_parts,
)
from kvcore.connector.clients import Clients
from kvcore.connector.engine_layers import Agreement
from kvcore.connector.forward_timer import ForwardTimer
from kvcore.connector.fusion_policy import FusionPolicy
from kvcore.connector.fusion_scheduler import FusionTraits
from kvcore.connector.fusion_worker import FusionWorker, RefusingFusionWorker
from kvcore.connector.step_transport import Outbox
from kvcore.errors import UnsupportedError
from kvcore.explain.recorder import RequestRecorder
from kvcore.memory.device import device_of
from kvcore.memory.layout import KVView
from kvcore.model.ingredients import MediaIdentity
from kvcore.model.points import PointShape
from kvcore.model.shape import BlockShape
from kvcore.model.spec import LayerGroup, ModelDescription
from kvcore.plugins.attention import AttentionHook
from kvcore.runtime.build import load_plugins
from kvcore.tiers.held import Held
from kvcore.worker.lifecycle import refusing_parts
from kvcore_vllm.attention import install
from kvcore_vllm.describe import lookahead
from kvcore_vllm.fusion import VllmLayers, collectives, find_worker, ropes_of
from kvcore_vllm.fusion_scheduler import VllmFusionScheduler
from kvcore_vllm.handover import Handover
from kvcore_vllm.identity import draft_of, media_identity
from kvcore_vllm.layout import group_view
from kvcore_vllm.leader import Leader
from kvcore_vllm.packed import packed_view, raw_pages
from kvcore_vllm.round_trip import verify
from kvcore_vllm.worker import WorkerConnector

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_log = logging.getLogger("kvcore.vllm")


# -- leader ---------------------------------------------------------------------------------


def build_scheduler_side(
    config: Config,
    vllm_config: VllmConfig,
    model: ModelDescription,
    elsewhere: Sequence[Mapping[str, Held]] = (),
) -> Leader:
    """Build the leader. A tier that cannot be used is left out with a warning.

    ``elsewhere`` is what the disks of each other machine hold.
    """
    assert vllm_config.kv_transfer_config is not None
    outbox = Outbox(model.world_size)
    side: Leader
    settings, recorder = config.vllm, RequestRecorder.of(config)
    tell = (lambda event: side.note_event(event)) if _wants_events(vllm_config) else None
    parts = build_leader(
        config,
        model,
        outbox,
        recorder,
        on_event=tell,
        data_parallel_rank=_data_parallel_rank(vllm_config),
        elsewhere=elsewhere,
    )
    pace = build_policy(
        config,
        model,
        parts,
        hidden=vllm_config.model_config.get_hidden_size(),
        device=str(vllm_config.device_config.device_type),
        recorder=recorder,
    )
    in_step = _recovers_in_step(vllm_config)
    layerwise = loads_layerwise(config, vllm_config, model)
    planning = None
    if pace is not None:
        planning = build_planner(
            config,
            model,
            parts,
            pace.rates,
            recorder,
            min_load_tokens=settings.min_load_tokens,
            layerwise=layerwise and in_step,
        )
    fusion = _fusion_leader(config, vllm_config, model, parts, pace)
    points = parts.plugins.point_policy(config.points.policy, config.points.policy_options)
    side = Leader(
        config,
        model,
        leader_parts(parts, outbox, recorder, fusion, planning, points),
        outbox,
        parts.open_tiers,
        policy=pace,
        handover=Handover(
            vllm_config.kv_transfer_config.kv_role,
            settings.promise_s,
            parts.manager,
            Clients(config),
            parts.metrics,
        ),
        in_step=in_step,
        layerwise=layerwise,
        media=_media(vllm_config),
        lookahead=lookahead(vllm_config),
    )
    return side


def _media(vllm_config: VllmConfig) -> MediaIdentity | str:
    """Return what shapes the KV of media, or the reason why media cannot be told apart."""
    if getattr(vllm_config, "ec_transfer_config", None) is not None:
        return "ec_transfer_config lets vLLM take the embeddings of media from another engine"
    try:
        return media_identity(vllm_config)
    except UnsupportedError as error:
        return str(error)


def loads_layerwise(
    config: Config, vllm_config: VllmConfig, model: ModelDescription | None
) -> bool:
    """Return True if a forward waits for sync loads layer by layer.

    The replay of a full CUDA graph skips the waits inside the forward. It then waits for whole
    loads before, and to cut them would only make more copies. So it is with a draft model, whose
    forwards have graphs of their own, and with caches that no attention waits for, such as the
    index of sparse attention.
    """
    graphs = vllm_config.compilation_config.cudagraph_mode
    full = graphs is not None and graphs.has_full_cudagraphs()
    packed = model is not None and model.packed is not None
    return config.vllm.layerwise and not (full or packed) and draft_of(vllm_config) is None


def _recovers_in_step(vllm_config: VllmConfig) -> bool:
    """Return True if vLLM recovers from a failed load that is part of a step.

    It takes such a request back in the failed step alone. That is wrong if another step was already
    planned on top of it, and on Model Runner V2, whose device keeps the position it had.
    """
    return vllm_config.max_concurrent_batches == 1 and not vllm_config.use_v2_model_runner


def _fusion_leader(
    config: Config,
    vllm_config: VllmConfig,
    model: ModelDescription,
    parts: ManagerParts,
    pace: FusionPolicy | None,
) -> VllmFusionScheduler | None:
    """Build the fusion scheduler; None if fusion is off or does not support the model."""
    if not config.fusion.enabled:
        return None
    try:
        ropes_of(vllm_config, model)
    except UnsupportedError as error:
        _log.warning("exact prefixes only: %s", error)
        return None
    traits = FusionTraits(model.groups[0].page_tokens)
    layerwise = config.vllm.layerwise
    return build_fusion_scheduler(
        VllmFusionScheduler, config, model, parts, traits, pace, layerwise=layerwise
    )


def _data_parallel_rank(vllm_config: VllmConfig) -> int | None:
    parallel = vllm_config.parallel_config
    return parallel.data_parallel_rank if parallel.data_parallel_size > 1 else None


def _wants_events(vllm_config: VllmConfig) -> bool:
    events = vllm_config.kv_events_config
    return events is not None and events.enable_kv_cache_events


# -- worker ---------------------------------------------------------------------------------


def build_worker_connector(
    config: Config,
    vllm_config: VllmConfig,
    model: ModelDescription,
    kv_caches: dict[str, torch.Tensor],
    num_blocks: int,
) -> WorkerConnector:
    """Build the worker of this rank. ``num_blocks`` is the number of vLLM's pages.

    Raises UnsupportedError or LayoutError if KV cannot be copied correctly. Nothing may be stored
    then.
    """
    rank = vllm_config.parallel_config.rank % model.world_size
    shape = model.rank_shape(rank)
    groups = [group for group in model.rank_groups(rank) if group.layers]
    if model.packed is not None:
        views = [packed_view(kv_caches, group, model.packed, num_blocks) for group in groups]
    else:
        views = [group_view(vllm_config, kv_caches, group, shape) for group in groups]
        _verify(config, vllm_config, groups, views, shape)
    states, windows, pages = None, {}, {}
    if (point := model.rank_point(rank)) is not None:
        states = {s.group: [kv_caches[name] for name in s.names] for s in point.states}
        windows = _windows(config, vllm_config, model.groups, point, kv_caches)
        pages = {
            window.group: raw_pages(kv_caches, window.names, window.page_nbytes, num_blocks)
            for window in point.page_windows
        }
    parts = build_worker(config, model, rank, views, states, windows, pages)
    worker = WorkerConnector(
        parts,
        _blends(config, vllm_config, model, parts),
        layer_of={n: i for g in groups for n, i in zip(g.names, g.layers, strict=True)},
        page_tokens=tuple(group.page_tokens for group in model.groups),
        clock=ForwardTimer(parts.worker.device),
        follow_saves=bool(states or pages) and bool(vllm_config.use_v2_model_runner),
    )
    hooks = parts.plugins.attention(shape, rank)
    _hook_attention(vllm_config, model, hooks, worker, views[0].layout.page_tokens)
    return worker


def _windows(
    config: Config,
    vllm_config: VllmConfig,
    groups: Sequence[LayerGroup],
    point: PointShape,
    kv_caches: dict[str, torch.Tensor],
) -> dict[int, KVView]:
    """Return the verified pages of each group of layers with a window on this rank."""
    found = {}
    for window in point.windows:
        if not window.names:
            continue
        group = replace(groups[window.group], names=window.names)
        view = group_view(vllm_config, kv_caches, group, window.shape)
        _verify(config, vllm_config, [group], [view], window.shape)
        found[window.group] = view
    return found


def _blends(
    config: Config,
    vllm_config: VllmConfig,
    model: ModelDescription,
    parts: WorkerParts,
) -> FusionWorker | RefusingFusionWorker:
    """Build this rank's fusion worker, or one that refuses if vLLM's layers are not as expected."""
    group = model.groups[0]
    if not config.fusion.enabled:
        return RefusingFusionWorker(group.page_tokens)  # the leader has the same setting
    try:
        ropes = ropes_of(vllm_config, model)
        layers = VllmLayers(vllm_config, find_worker(vllm_config), group.names)
    except UnsupportedError as error:
        _log.warning("exact prefixes only: %s", error)
        return _refusing(vllm_config, group.page_tokens)
    return build_fusion_worker(FusionWorker, config, model, parts, layers, ropes)


def warm_up_blends(config: Config, vllm_config: VllmConfig, worker: WorkerConnector) -> None:
    """Prepare blends if every rank can make them.

    A collective if fusion is on: every rank calls it once, whatever worker it has.
    """
    if config.fusion.enabled and Agreement(collectives(vllm_config))(worker.can_blend):
        worker.warm_up_blends(timed=config.fusion.adaptive)


def _hook_attention(
    vllm_config: VllmConfig,
    model: ModelDescription,
    hooks: Sequence[AttentionHook],
    worker: WorkerConnector,
    page_tokens: int,
) -> None:
    """Install plugins' hooks around the layers of a model with one group of pages.

    ``page_tokens`` is the page of the attention kernels, which may be smaller than the scheduler's.
    The hooks are left out with a warning if the model or its runner does not support them. Model
    Runner V2 tells ``worker`` the requests of a step; V1 keeps them in its input batch.
    """
    if not hooks:
        return
    context = vllm_config.compilation_config.static_forward_context
    [group, *others] = model.groups
    try:
        graphs = vllm_config.compilation_config.cudagraph_mode
        if graphs is not None and graphs.has_full_cudagraphs():
            raise UnsupportedError("full CUDA graphs replay without them: use piecewise ones")
        if others or model.shape.kv_factor != 2:
            raise UnsupportedError("attention hooks are for K and V of one group of pages")
        if len(model.stages) > 1:
            raise UnsupportedError("attention hooks are not for pipeline stages")
        if draft_of(vllm_config) is not None:
            raise UnsupportedError("attention hooks are not for models with a draft model")
        runner = find_worker(vllm_config).model_runner
        v2 = vllm_config.use_v2_model_runner
        if not v2 and not hasattr(getattr(runner, "input_batch", None), "req_ids"):
            raise UnsupportedError(f"{type(runner).__name__} does not tell whose rows it runs")
        layers = [context[name] for name in group.names]
        requests = (lambda: worker.request_ids) if v2 else (lambda: runner.input_batch.req_ids)
        install(layers, hooks, requests, page_tokens)
    except UnsupportedError as error:
        names = ", ".join(hook.name for hook in hooks)
        _log.warning("attention hooks are left out: %s: %s", names, error)


def _refusing(vllm_config: VllmConfig, page_tokens: int) -> RefusingFusionWorker:
    """Build a fusion worker that refuses, and tells the other ranks so."""
    return RefusingFusionWorker(page_tokens, Agreement(collectives(vllm_config)))


def refusing_worker_connector(
    vllm_config: VllmConfig, page_tokens: Sequence[int]
) -> WorkerConnector:
    """Build a worker that refuses all work, so that the leader learns of it and stops.

    The pages of loads that were planned before that are reported as failed, and the engine computes
    them. ``page_tokens`` is the size of a scheduler block of each layer group.
    """
    return WorkerConnector(
        refusing_parts(),
        _refusing(vllm_config, page_tokens[0]),
        layer_of={},
        page_tokens=tuple(page_tokens),
        clock=ForwardTimer(device_of(None)),
    )


def _verify(
    config: Config,
    vllm_config: VllmConfig,
    groups: Sequence[LayerGroup],
    views: Sequence[KVView],
    shape: BlockShape,
) -> None:
    """Verify the layout of each group of pages. Raises LayoutError: see `round_trip.verify`."""
    context = vllm_config.compilation_config.static_forward_context
    ops = load_plugins(config).ops()
    dtype = cast("torch.dtype", vllm_config.model_config.dtype)  # vLLM has resolved its name
    for group, view in zip(groups, views, strict=True):
        layers = [context[name] for name in group.names]
        verify(layers, view, shape, dtype, ops)
