"""Puts the two sides together from a config: the only place that knows every part."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from kvcore_vllm.blending import Blends, RefusingBlends
from kvcore_vllm.describe import ModelDescription
from kvcore_vllm.fusing import FusionLeader
from kvcore_vllm.fusion import VllmLayers, find_worker, ropes_of
from kvcore_vllm.layout import group_view, verify_cpu_layout
from kvcore_vllm.scheduler import Outbox, SchedulerSide
from kvcore_vllm.worker import WorkerSide

from kvcore.backing import BackingOpener, prepare_backings
from kvcore.config import Config
from kvcore.errors import UnsupportedError
from kvcore.fusion.segments import Segments
from kvcore.index import BlockIndex, TierSpec
from kvcore.layout import BlockShape, KVView
from kvcore.manager import HOST, KVManager
from kvcore.metrics import Metrics
from kvcore.ops import HeadRange, select_ops
from kvcore.ops.fusion import select_fusion
from kvcore.plugins import PluginManager
from kvcore.tiers.base import Tier
from kvcore.tiers.disk import Geometry
from kvcore.tiers.host import HostArena, slot_bytes
from kvcore.transfer.graph import Span
from kvcore.transfer.plan import layer_steps
from kvcore.worker import DeviceGroup, KVWorker, RefusingWorker

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_log = logging.getLogger("kvcore.vllm")


def host_slots(config: Config, model: ModelDescription) -> tuple[int, int]:
    """(slots of the index, staging slots behind them) in every rank's arena.

    Both sides compute this from the same numbers; all ranks together stay below host.capacity.
    """
    per_slot = slot_bytes(rank_shape(model, 0)) * model.world_size
    total = config.host.capacity // per_slot
    if total < 1:
        raise UnsupportedError(
            f"host.capacity of {config.host.capacity} bytes does not hold one block of {per_slot}"
        )
    staging = min(2 * config.transfer.batch_blocks, total // 4)
    return total - staging, staging


def rank_shape(model: ModelDescription, rank: int) -> BlockShape:
    """The canonical block of one rank's heads."""
    start, stop = model.head_range(rank)
    return model.shape.with_heads(stop - start)


def geometry(model: ModelDescription) -> Geometry:
    heads = tuple(model.head_range(rank) for rank in range(model.world_size))
    return Geometry(model.shape, model.fingerprint, heads)


# -- leader ---------------------------------------------------------------------------------


def build_scheduler_side(
    config: Config, vllm_config: VllmConfig, model: ModelDescription
) -> SchedulerSide:
    """The leader. A tier that cannot be used is named in the log and left out."""
    plugins = _plugins(config)
    plugins.check(config)
    slots, staging = host_slots(config, model)
    backings = prepare_backings(config, geometry(model), plugins)
    host = TierSpec(HOST, slots, plugins.policy(config.host.policy), config.host.policy_options)
    index = BlockIndex([host, *(found.spec for found in backings)])
    for found in backings:
        lost = index.restore(found.spec.name, found.prepared.records)
        _log.info(
            "tier restored name=%s blocks=%d dropped=%d slots=%d",
            found.spec.name,
            index.num_used(found.spec.name),
            len(lost),
            found.spec.num_slots,
        )
    metrics = Metrics("leader", enabled=config.metrics.enabled)
    outbox = Outbox(model.world_size)
    side: SchedulerSide
    steps = layer_steps(model.shape.layers) if config.vllm.layerwise else []
    manager = KVManager(
        index,
        outbox,
        backing=[found.backing for found in backings],
        staging_slots=range(slots, slots + staging),
        batch_blocks=config.transfer.batch_blocks,
        metrics=metrics,
        on_event=(lambda event: side.note_event(event)) if _wants_events(vllm_config) else None,
    )
    side = SchedulerSide(
        config,
        model,
        manager,
        outbox,
        metrics,
        open_tiers={found.spec.name: dict(found.prepared.told) for found in backings},
        on_close=[found.prepared.release for found in backings],
        fusion=_fusion_leader(config, vllm_config, model, manager, steps),
    )
    _log.info(
        "kvcore leads: block_tokens=%d block_bytes=%d host_blocks=%d tiers=%s",
        config.block.tokens,
        model.shape.nbytes,
        slots,
        ",".join(index.tiers),
    )
    return side


def _fusion_leader(
    config: Config,
    vllm_config: VllmConfig,
    model: ModelDescription,
    manager: KVManager,
    steps: Sequence[Span],
) -> FusionLeader | None:
    """None where fusion is off, or the model is not one it is right for."""
    if not config.fusion.enabled:
        return None
    try:
        ropes_of(vllm_config, model)
    except UnsupportedError as error:
        _log.warning("exact prefixes only: %s", error)
        return None
    limit = vllm_config.scheduler_config.max_num_batched_tokens
    return FusionLeader(
        config,
        model.shape,
        manager,
        _segments(config, model),
        steps,
        model.groups[0].page_tokens,
        limit if vllm_config.lora_config is not None else None,
    )


def _segments(config: Config, model: ModelDescription) -> Segments:
    """Tokens of stored blocks; beside the disk tier's, they outlive the engine as its blocks do."""
    path = None
    if config.disk.path is not None and config.disk.path.is_dir():
        name = f"segments-{model.fingerprint.hex()[:16]}-{config.block.tokens}"
        path = config.disk.path / name
    return Segments(config.block.tokens, min_tokens=config.fusion.min_tokens, path=path)


def _plugins(config: Config) -> PluginManager:
    return PluginManager(disable=config.plugins.disable, strict=config.plugins.strict)


def _wants_events(vllm_config: VllmConfig) -> bool:
    events = vllm_config.kv_events_config
    return events is not None and events.enable_kv_cache_events


# -- worker ---------------------------------------------------------------------------------


def build_worker_side(
    config: Config,
    vllm_config: VllmConfig,
    model: ModelDescription,
    kv_caches: dict[str, torch.Tensor],
) -> WorkerSide:
    """The worker of this rank. Raises UnsupportedError or LayoutError where KV cannot be moved
    right: nothing may be stored then."""
    rank = vllm_config.parallel_config.rank % model.world_size
    shape = rank_shape(model, rank)
    views = [group_view(vllm_config, kv_caches, group, shape) for group in model.groups]
    device = views[0].tensors[0].device
    slots, staging = host_slots(config, model)
    arena = HostArena(
        shape,
        slots + staging,
        arrangement=config.host.arrangement,
        huge_pages=config.host.huge_pages,
        pin=config.host.pin and device.type == "cuda",
    )
    arena_view = KVView(arena.layout(), [arena.tensor()])
    plugins = _plugins(config)
    ops = select_ops(views[0], arena_view, plugins.ops(), config.ops.backend)
    if device.type == "cpu":
        _verify(vllm_config, model, views, shape)
    metrics = Metrics(f"rank{rank}", enabled=config.metrics.enabled)
    worker = KVWorker(
        arena=arena,
        arena_view=arena_view,
        groups=[DeviceGroup(g.layers, v) for g, v in zip(model.groups, views, strict=True)],
        ops=ops,
        device=device,
        copy_threads=config.transfer.copy_threads,
        queue_depth=config.transfer.queue_depth,
        metrics=metrics,
    )
    _log.info(
        "kvcore works: rank=%d host_bytes=%d huge_pages=%s pinned=%s copies=%s",
        rank,
        arena.nbytes,
        arena.huge_pages,
        arena.pinned,
        ops.name,
    )
    return WorkerSide(
        worker,
        blends=_blends(config, vllm_config, model, worker, shape, plugins),
        layer_of={n: i for g in model.groups for n, i in zip(g.names, g.layers, strict=True)},
        page_tokens=tuple(group.page_tokens for group in model.groups),
        metrics=metrics,
        open_tier=BackingOpener(config, geometry(model), rank, plugins),
    )


def _blends(
    config: Config,
    vllm_config: VllmConfig,
    model: ModelDescription,
    worker: KVWorker,
    shape: BlockShape,
    plugins: PluginManager,
) -> Blends | RefusingBlends | None:
    """What blends on this rank; one that refuses where vLLM's layers are not what they were."""
    if not config.fusion.enabled:
        return None
    page_tokens = model.groups[0].page_tokens
    try:
        ropes = ropes_of(vllm_config, model)
        names = model.groups[0].names
        layers = VllmLayers(vllm_config, find_worker(vllm_config), names)
    except UnsupportedError as error:
        _log.warning("exact prefixes only: %s", error)
        return RefusingBlends(page_tokens)
    selector = plugins.selector(config.fusion.selector, config.fusion.selector_options)
    device = worker.groups[0].view.tensors[0].device
    ops = select_fusion(device, plugins.ops(), config.ops.backend)
    return Blends(config, worker, layers, ropes, shape, selector, page_tokens, ops)


def refusing_worker_side() -> WorkerSide:
    """A worker that takes no work, so that the leader learns of it and stands aside."""

    def open_tier(name: str, options: dict[str, Any]) -> Tier:
        raise UnsupportedError(f"tier {name!r} is not opened: this worker stores nothing")

    return WorkerSide(
        RefusingWorker(), layer_of={}, page_tokens=(), metrics=Metrics(), open_tier=open_tier
    )


def _verify(
    vllm_config: VllmConfig, model: ModelDescription, views: list[KVView], shape: BlockShape
) -> None:
    """One page through vLLM's own write kernel, read back through our copies."""
    from dataclasses import replace

    from kvcore.ops.reference import ReferenceOps

    for group, view in zip(model.groups, views, strict=True):
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

        verify_cpu_layout(view, shape, str(layer.isa), read)
        _log.debug("layout verified group=%d page_tokens=%d", group.index, page_tokens)
