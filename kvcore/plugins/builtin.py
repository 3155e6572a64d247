"""kvcore's own tiers, policies and operations, offered through the hooks that plugins use.

Nothing is imported until a factory is called.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from kvcore.errors import ConfigError
from kvcore.plugins.hookspecs import (
    OpsPlugin,
    PointPolicyPlugin,
    PolicyPlugin,
    SelectorPlugin,
    hookimpl,
    store_plugin,
)
from kvcore.tiers.spec import PreparedTier, TierContext, TierPlugin

_POLICIES = ("lru", "lfu", "arc", "s3fifo", "priority")
_POINTS = ("spaced", "all")
_STORES = {
    "files": "files.store",
    "memory-store": "memory",
    "mooncake": "mooncake",
    "objects": "objects",
    "peer": "peer.store",
    "redis": "redis",
}
"""Remote stores, and the modules of `kvcore.tiers.remote` that talk to them."""
_SELECTORS = ("runs", "question", "key", "value", "key+value")


@hookimpl
def kvcore_policies() -> list[PolicyPlugin]:
    return [PolicyPlugin(name, _policy(name)) for name in _POLICIES]


@hookimpl
def kvcore_point_policies() -> list[PointPolicyPlugin]:
    return [PointPolicyPlugin(name, _points(name)) for name in _POINTS]


@hookimpl
def kvcore_tiers() -> list[TierPlugin]:
    return [
        TierPlugin("disk", "disk", _disk, _prepare_disk),
        TierPlugin("memory", "memory", _memory),
        *(store_plugin(name, _store(module)) for name, module in _STORES.items()),
    ]


@hookimpl
def kvcore_ops() -> list[OpsPlugin]:
    return [
        OpsPlugin("link", _made_by("kvcore.memory.copy.link:LinkOps")),
        OpsPlugin("native", _made_by("kvcore.memory.copy.native:NativeOps")),
        OpsPlugin("reference", _made_by("kvcore.memory.copy.reference:ReferenceOps")),
    ]


@hookimpl
def kvcore_selectors() -> list[SelectorPlugin]:
    return [SelectorPlugin(name, _selector(name)) for name in _SELECTORS]


def _selector(name: str) -> Callable[..., Any]:
    def make(**options: Any) -> Any:
        return import_module("kvcore.fusion.select").BUILTIN_SELECTORS[name](**options)

    return make


def _policy(name: str) -> Callable[[], Any]:
    return lambda: import_module("kvcore.index.policy").BUILTIN_POLICIES[name]


def _points(name: str) -> Callable[..., Any]:
    def make(**options: Any) -> Any:
        return import_module("kvcore.index.policy").BUILTIN_POINTS[name](**options)

    return make


def _prepare_disk(context: TierContext) -> PreparedTier:
    """Choose, lock and scan a store in the folder ``options["path"]``."""
    disk = import_module("kvcore.tiers.disk")
    path, guard, _ = _disk_options(context)
    geometry = context.geometry.guarded(guard)
    capacity = geometry.share_of(context.capacity)
    store = disk.prepare_store(path, geometry, capacity, share=context.share, guard=guard)
    return PreparedTier(
        store.num_slots,
        store.records,
        store.mounted.to_options(),
        release=store.close,
        foreign=geometry.is_whole,
        torn=store.torn,
        clears=store.tombstones,
    )


def _disk(context: TierContext) -> Any:
    """Open the rank's shard of the store that the leader chose."""
    disk = import_module("kvcore.tiers.disk")
    _, guard, access = _disk_options(context)
    return disk.DiskTier(
        disk.MountedStore.from_options(context.rank_options),
        context.geometry.guarded(guard),
        shard=context.rank,
        slot_nbytes=context.slot_nbytes,
        access=disk.DiskAccess(**access),
        guard=guard,
    )


def _disk_options(context: TierContext) -> tuple[Path, Any, dict[str, Any]]:
    """Return the folder, what protects the blocks, and the arguments of `DiskAccess`."""
    options = dict(context.options)
    path = options.pop("path", None)
    keys = [options.pop(name, None) for name in ("key_env", "key_file")]
    unknown = options.keys() - {"direct_io", "io_threads", "sync_interval_s", "device_sums"}
    if path is None or unknown:
        raise ConfigError(
            f"tier {context.name!r}: given options {sorted(context.options)}; `path`, the folder "
            "to use, is needed, and direct_io, io_threads and sync_interval_s, and key_env or "
            "key_file, may be given"
        )
    guard = import_module("kvcore.tiers.guard").guard_of(context, *keys)
    return Path(path).expanduser(), guard, options


def _store(module: str) -> Callable[[], Any]:
    return lambda: import_module(f"kvcore.tiers.remote.{module}").KIND


def _memory(context: TierContext) -> Any:
    return import_module("kvcore.tiers.memory").MemoryTier(context.num_slots, context.slot_nbytes)


def _made_by(path: str) -> Callable[[], Any]:
    """Return a factory that imports ``module:attribute`` when called, and calls it."""
    module, _, attribute = path.partition(":")
    return lambda: getattr(import_module(module), attribute)()
