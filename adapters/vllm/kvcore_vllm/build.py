"""Composes leader and worker from a config: the only module that knows every part."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvcore.config import Config
from kvcore.connector.build import (
    LeaderParts,
    WorkerParts,
    build_fusion_scheduler,
    build_fusion_worker,
    build_leader,
    build_planner,
    build_policy,
    build_worker,
    scheduler_parts,
)
from kvcore.connector.forward_timer import ForwardTimer
from kvcore.connector.fusion_policy import FusionPolicy
from kvcore.connector.fusion_scheduler import FusionTraits
from kvcore.connector.fusion_worker import FusionWorker, RefusingFusionWorker
from kvcore.connector.step_transport import Outbox
from kvcore.errors import UnsupportedError
from kvcore.explain.recorder import RequestRecorder
from kvcore.memory.arena import HostArena
from kvcore.memory.copy import HeadRange
from kvcore.memory.layout import KVView
from kvcore.model.shape import BlockShape
from kvcore.model.spec import LayerGroup, ModelDescription
from kvcore.plugins.attention import AttentionHook
from kvcore.worker.lifecycle import refusing_parts
from kvcore_vllm.attention import install
from kvcore_vllm.fusion import VllmLayers, find_worker, ropes_of
from kvcore_vllm.fusion_scheduler import VllmFusionScheduler
from kvcore_vllm.handover import Handover
from kvcore_vllm.layout import group_view, verify_cpu_layout
from kvcore_vllm.scheduler import SchedulerSide
from kvcore_vllm.worker import WorkerConnector

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_log = logging.getLogger("kvcore.vllm")


# -- leader ---------------------------------------------------------------------------------


def build_scheduler_side(
    config: Config, vllm_config: VllmConfig, model: ModelDescription
) -> SchedulerSide:
    """Build the leader. A tier that cannot be used is left out with a warning."""
    assert vllm_config.kv_transfer_config is not None
    outbox = Outbox(model.world_size)
    side: SchedulerSide
    settings, recorder = config.vllm, RequestRecorder.of(config)
    tell = (lambda event: side.note_event(event)) if _wants_events(vllm_config) else None
    parts = build_leader(
        config,
        model,
        outbox,
        recorder,
        on_event=tell,
        data_parallel_rank=_data_parallel_rank(vllm_config),
    )
    pace = build_policy(
        config,
        model,
        parts,
        hidden=vllm_config.model_config.get_hidden_size(),
        device=str(vllm_config.device_config.device_type),
        recorder=recorder,
    )
    planning = None
    if pace is not None:
        planning = build_planner(
            config,
            model,
            parts,
            pace.rates,
            recorder,
            min_load_tokens=settings.min_load_tokens,
            layerwise=settings.layerwise,
        )
    fusion = _fusion_leader(config, vllm_config, model, parts, pace)
    side = SchedulerSide(
        config,
        model,
        scheduler_parts(parts, outbox, recorder, fusion, planning),
        outbox,
        parts.open_tiers,
        policy=pace,
        handover=Handover(
            vllm_config.kv_transfer_config.kv_role, settings.promise_s, parts.manager
        ),
    )
    return side


def _fusion_leader(
    config: Config,
    vllm_config: VllmConfig,
    model: ModelDescription,
    parts: LeaderParts,
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
) -> WorkerConnector:
    """Build the worker of this rank.

    Raises UnsupportedError or LayoutError if KV cannot be copied correctly. Nothing may be stored
    then.
    """
    rank = vllm_config.parallel_config.rank % model.world_size
    shape = model.rank_shape(rank)
    groups = [group for group in model.rank_groups(rank) if group.layers]
    views = [group_view(vllm_config, kv_caches, group, shape) for group in groups]
    if views[0].tensors[0].device.type == "cpu":
        _verify(vllm_config, groups, views, shape)
    parts = build_worker(config, model, rank, views)
    hooks = parts.plugins.attention(shape, rank)
    _hook_attention(vllm_config, model, hooks, views[0].layout.page_tokens)
    return WorkerConnector(
        parts,
        _blends(config, vllm_config, model, rank, parts),
        layer_of={n: i for g in groups for n, i in zip(g.names, g.layers, strict=True)},
        page_tokens=tuple(group.page_tokens for group in model.groups),
        clock=ForwardTimer(views[0].tensors[0].device),
    )


def _blends(
    config: Config,
    vllm_config: VllmConfig,
    model: ModelDescription,
    rank: int,
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
        return RefusingFusionWorker(group.page_tokens)
    return build_fusion_worker(FusionWorker, config, model, rank, parts, layers, ropes)


def _hook_attention(
    vllm_config: VllmConfig,
    model: ModelDescription,
    hooks: Sequence[AttentionHook],
    page_tokens: int,
) -> None:
    """Install plugins' hooks around the layers of a model with one group of pages.

    ``page_tokens`` is the page of the attention kernels, which may be smaller than the scheduler's.
    The hooks are left out with a warning if the model or its runner does not support them.
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
        runner = find_worker(vllm_config).model_runner
        if not hasattr(getattr(runner, "input_batch", None), "req_ids"):
            raise UnsupportedError(f"{type(runner).__name__} does not tell whose rows it runs")
        layers = [context[name] for name in group.names]
        install(layers, hooks, lambda: runner.input_batch.req_ids, page_tokens)
    except UnsupportedError as error:
        names = ", ".join(hook.name for hook in hooks)
        _log.warning("attention hooks are left out: %s: %s", names, error)


def refusing_worker_connector(model: ModelDescription) -> WorkerConnector:
    """Build a worker that refuses all work, so that the leader learns of it and stops.

    The pages of loads that were planned before that are reported as failed, and the engine computes
    them.
    """
    page_tokens = tuple(group.page_tokens for group in model.groups)
    return WorkerConnector(
        refusing_parts(),
        RefusingFusionWorker(page_tokens[0]),
        layer_of={},
        page_tokens=page_tokens,
        clock=ForwardTimer(torch.device("cpu")),
    )


def _verify(
    vllm_config: VllmConfig,
    groups: Sequence[LayerGroup],
    views: Sequence[KVView],
    shape: BlockShape,
) -> None:
    """Verify that kvcore's copies read what vLLM's own write kernel wrote, on one page."""
    from dataclasses import replace

    from kvcore.memory.copy.reference import ReferenceOps

    for group, view in zip(groups, views, strict=True):
        layer: Any = vllm_config.compilation_config.static_forward_context[group.names[0]]
        page_tokens = view.layout.page_tokens

        def read(cache: torch.Tensor, view: KVView = view) -> tuple[torch.Tensor, torch.Tensor]:
            planes = tuple(
                replace(plane, tensor=0) for plane in view.layout.select_layers([0]).planes[0]
            )
            one = KVView(replace(view.layout, num_pages=1, planes=(planes,)), [cache])
            block = replace(shape, layers=1, block_tokens=view.layout.page_tokens)
            arena = HostArena(block, 1, huge_pages=False)
            flat = KVView(arena.layout(), [arena.tensor()])
            everything = HeadRange(0, 0, shape.kv_heads)
            ReferenceOps().copy_blocks(one, np.array([0]), flat, np.array([0]), heads=everything)
            count = shape.kv_heads * 2 * view.layout.page_tokens * shape.head_dim
            both = flat.tensors[0][:count].view(
                shape.kv_heads, 2, view.layout.page_tokens, shape.head_dim
            )
            return both[:, 0].clone(), both[:, 1].clone()

        verify_cpu_layout(view, shape, layer, read)
        _log.debug("layout verified group=%d page_tokens=%d", group.index, page_tokens)
