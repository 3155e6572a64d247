"""The worker of a server: a model's host memory on this machine, and the tiers below it.

It has no pages of an engine. The engines' own workers copy to and from the memory, which they map.
"""

from __future__ import annotations

import os
from typing import Any, ClassVar

from kvcore.config import Config
from kvcore.errors import LayoutError
from kvcore.memory.arena import HostArena, arena_bytes
from kvcore.memory.copy.base import Copy, DeviceOps
from kvcore.memory.hugepages import SharedPages
from kvcore.memory.layout import KVView
from kvcore.model.spec import ModelDescription
from kvcore.runtime.build import arena_arrangement
from kvcore.runtime.machines import without_plugin_disks
from kvcore.server.page_model import for_pages, is_of_pages
from kvcore.server.runtime_dir import RuntimeDir
from kvcore.server.wire import Model
from kvcore.telemetry.metrics import Metrics
from kvcore.worker import EnginePages, KVWorker, WorkerLimits

__all__ = ["map_metadata", "model_config", "tier_worker"]


class _NoCopies(DeviceOps):
    """Device operations of the server, which has no pages of an engine."""

    name: ClassVar[str] = "none"
    priority: ClassVar[int] = 0

    def supports(self, src: KVView, dst: KVView) -> bool:
        return False

    def copy(self, copy: Copy) -> None:
        raise LayoutError("the server copies no pages of an engine: its clients do")


def model_config(config: Config, described: ModelDescription) -> Config:
    """Return the settings for one of a server's models: its share of host memory, and its tiers."""
    capacity = config.host.capacity // config.server.models
    host = config.host.model_copy(update={"capacity": capacity})
    config = config.model_copy(update={"host": host})
    if is_of_pages(described):
        return for_pages(config)
    return without_plugin_disks(config)[0] if described.machines > 1 else config


def tier_worker(
    config: Config,
    model: Model,
    machine: int,
    slots: int,
    folder: RuntimeDir,
    arena: str,
    metrics: Metrics,
) -> KVWorker:
    """Return a worker over ``slots`` slots of new memory, in the file ``arena`` of ``folder``.

    A slot holds the parts of the ranks on ``machine``. Blocks while the memory is allocated. Raises
    TierUnavailable if there is not enough.
    """
    shape = model.described.rank_shape(machine)
    arrangement = arena_arrangement(config, model.point_rows, packed=model.packed)
    nbytes = arena_bytes(shape, slots, arrangement)
    file = folder.make_arena(arena, nbytes, huge_pages=config.host.huge_pages)
    try:
        pages = SharedPages(file, nbytes, huge=config.host.huge_pages)
    finally:
        os.close(file)
    prefault = config.host.prefault
    memory = HostArena(shape, slots, arrangement=arrangement, prefault=prefault, pages=pages)
    return KVWorker(
        arena=memory,
        arena_view=KVView(memory.layout(), ()),
        ops=_NoCopies(),
        pages=EnginePages(),
        limits=WorkerLimits(queue_depth=config.transfer.queue_depth),
        metrics=metrics,
    )


def map_metadata(worker: KVWorker, model: Model, name: str) -> dict[str, Any]:
    """Return what an engine's worker needs to map the memory of ``worker``, the file ``name``."""
    arena = worker.arena
    return {
        "arena": name,
        "fingerprint": model.fingerprint.hex(),
        "slots": arena.num_slots,
        "arrangement": arena.arrangement.value,
        "shape": arena.shape.to_dict(),
    }
