"""kvcore's own tiers, policies and operations, offered through the hooks that others use.

Nothing is imported until a factory is called.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from kvcore.errors import ConfigError
from kvcore.plugins.hookspecs import OpsPlugin, PolicyPlugin, TierContext, TierPlugin, hookimpl

_POLICIES = ("lru", "lfu", "arc", "s3fifo", "priority")


@hookimpl
def kvcore_policies() -> list[PolicyPlugin]:
    return [PolicyPlugin(name, _policy(name)) for name in _POLICIES]


@hookimpl
def kvcore_tiers() -> list[TierPlugin]:
    return [
        TierPlugin("disk", "disk", _disk),
        TierPlugin("memory", "memory", _memory),
    ]


@hookimpl
def kvcore_ops() -> list[OpsPlugin]:
    return [
        OpsPlugin("native", _made_by("kvcore.ops.native:NativeOps")),
        OpsPlugin("reference", _made_by("kvcore.ops.reference:ReferenceOps")),
    ]


def _policy(name: str) -> Callable[[], Any]:
    return lambda: import_module("kvcore.policy").BUILTIN_POLICIES[name]


def _disk(context: TierContext) -> Any:
    """``options`` are the keywords of `DiskTier`; ``path`` is needed."""
    if "path" not in context.options:
        raise ConfigError(f"tier {context.name!r}: options have no path; give the folder to use")
    return import_module("kvcore.tiers.disk").DiskTier(
        slot_nbytes=context.slot_nbytes,
        geometry=dict(context.geometry),
        capacity_bytes=context.capacity,
        shard=(context.rank, context.ranks),
        **context.options,
    )


def _memory(context: TierContext) -> Any:
    return import_module("kvcore.tiers.memory").MemoryTier(
        num_slots=context.capacity // context.slot_nbytes, slot_nbytes=context.slot_nbytes
    )


def _made_by(path: str) -> Callable[[], Any]:
    """Calls ``module:attribute`` without arguments, importing the module only then."""
    module, _, attribute = path.partition(":")
    return lambda: getattr(import_module(module), attribute)()
