"""Puts the two halves together from a config: the only place that knows every part."""

from __future__ import annotations

import logging
from typing import Any

from kvcore_trtllm.describe import ModelDescription, whole
from kvcore_trtllm.layout import Memory
from kvcore_trtllm.scheduler import Leader, Outbox
from kvcore_trtllm.worker import Allgather, Tally, WorkerSide

from kvcore.backing import BackingOpener, PreparedBacking, prepare_backings
from kvcore.config import Config
from kvcore.errors import UnsupportedError
from kvcore.index import BlockIndex, TierSpec
from kvcore.layout import KVView
from kvcore.manager import HOST, KVManager
from kvcore.metrics import Metrics
from kvcore.ops import select_ops
from kvcore.plugins import PluginManager
from kvcore.tiers.base import Tier
from kvcore.tiers.disk import Geometry
from kvcore.tiers.host import HostArena, slot_bytes
from kvcore.worker import DeviceGroup, KVWorker, RefusingWorker

_log = logging.getLogger("kvcore.trtllm")


def host_slots(config: Config, model: ModelDescription) -> tuple[int, int]:
    """(slots of the index, staging slots behind them) in every rank's arena.

    Both halves compute this from the same numbers; all ranks together stay below host.capacity.
    """
    per_slot = slot_bytes(model.rank_shape(0)) * model.world_size
    total = config.host.capacity // per_slot
    if total < 1:
        raise UnsupportedError(
            f"host.capacity of {config.host.capacity} bytes does not hold one block of {per_slot}"
        )
    staging = min(2 * config.transfer.batch_blocks, total // 4)
    return total - staging, staging


def geometry(model: ModelDescription) -> Geometry:
    heads = tuple(model.facts.head_range(rank) for rank in range(model.world_size))
    return Geometry(model.shape, model.fingerprint, heads)


def _plugins(config: Config) -> PluginManager:
    return PluginManager(disable=config.plugins.disable, strict=config.plugins.strict)


# -- worker ---------------------------------------------------------------------------------


def build_worker_side(
    config: Config, memory: Memory, rank: int, allgather: Allgather, *, layerwise: bool
) -> WorkerSide:
    """The worker of this rank. Raises UnsupportedError or LayoutError where KV cannot be moved
    right: nothing may be stored then."""
    model = whole(memory.facts, memory.groups, config.block.tokens)
    shape = model.rank_shape(rank)
    device = memory.views[0].tensors[0].device
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
    ops = select_ops(memory.views[0], arena_view, plugins.ops(), config.ops.backend)
    metrics = Metrics(f"rank{rank}", enabled=config.metrics.enabled)
    worker = KVWorker(
        arena=arena,
        arena_view=arena_view,
        groups=[
            DeviceGroup(group.layers, view)
            for group, view in zip(memory.groups, memory.views, strict=True)
        ],
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
        Tally(model.world_size, allgather),
        layers=model.shape.layers,
        layerwise=layerwise,
        metrics=metrics,
        open_tier=BackingOpener(config, geometry(model), rank, plugins),
    )


def refusing_worker_side(world_size: int, allgather: Allgather) -> WorkerSide:
    """A worker that takes no work, so that the leader learns of it and stands aside."""

    def open_tier(name: str, options: dict[str, Any]) -> Tier:
        raise UnsupportedError(f"tier {name!r} is not opened: this worker stores nothing")

    return WorkerSide(
        RefusingWorker(),
        Tally(world_size, allgather),
        layers=0,
        layerwise=False,
        metrics=Metrics(),
        open_tier=open_tier,
    )


# -- leader ---------------------------------------------------------------------------------


def build_leader(
    config: Config, memory: Memory, worker: WorkerSide
) -> tuple[Leader, list[PreparedBacking]]:
    """The leader over the memory of rank 0, and the tiers to release once all ranks have closed.

    A tier that cannot be used is named in the log and left out.
    """
    model = whole(memory.facts, memory.groups, config.block.tokens)
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
    alone = model.world_size == 1
    outbox = Outbox(worker.pump if alone else None)
    manager = KVManager(
        index,
        outbox,
        backing=[found.backing for found in backings],
        staging_slots=range(slots, slots + staging),
        batch_blocks=config.transfer.batch_blocks,
        metrics=metrics,
    )
    told = {found.spec.name: dict(found.prepared.told) for found in backings}
    if alone:  # the first lookup may read from a tier, before there is any plan
        worker.open(told)
    leader = Leader(
        config,
        model,
        manager,
        outbox,
        metrics,
        open_tiers={} if alone else told,
        lane=worker.start if alone else None,
    )
    worker.listener = leader.hear
    _log.info(
        "kvcore leads: block_tokens=%d block_bytes=%d page_tokens=%d host_blocks=%d tiers=%s",
        config.block.tokens,
        model.shape.nbytes,
        memory.facts.page_tokens,
        slots,
        ",".join(index.tiers),
    )
    return leader, backings
