"""The hooks a plugin may implement, and the values they return.

A plugin is a module named by an entry point of the group ``kvcore.plugins``. It imports nothing
heavy: what it returns are names and callables, and the callables import when called.

    from kvcore.plugins import TierPlugin, hookimpl

    @hookimpl
    def kvcore_tiers():
        return [TierPlugin("shelf", "remote", make_shelf)]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import pluggy

if TYPE_CHECKING:
    from kvcore.ops.base import DeviceOps
    from kvcore.policy.base import EvictionPolicy
    from kvcore.schema import Config
    from kvcore.tiers.base import Tier

PROJECT = "kvcore"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class ServeCommand(NamedTuple):
    """A command that starts an engine, and the variables to set for it beside its parent's."""

    argv: list[str]
    env: dict[str, str]


@dataclass(frozen=True)
class EngineSpec:
    """A serving engine and its adapter.

    ``distributions`` are the packages that may bring the engine, the first installed one counts;
    ``versions`` is a specifier of those the adapter serves, such as ">=0.32,<0.33".
    ``serve(model, config, engine_args)`` builds the command line; ``status()`` says in a few words
    how the adapter is hooked up. Neither imports the engine.
    """

    name: str
    distributions: tuple[str, ...]
    versions: str
    serve: Callable[[str, Config, Sequence[str]], ServeCommand]
    status: Callable[[], str]


@dataclass(frozen=True)
class TierContext:
    """What a backing tier is built from, in each rank.

    ``capacity`` is this rank's share in bytes. ``geometry`` describes a block and is JSON-able;
    stored bytes are readable only where it is equal.
    """

    name: str
    slot_nbytes: int
    capacity: int
    geometry: Mapping[str, Any]
    rank: int = 0
    ranks: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TierPlugin:
    """A kind of backing tier: ``medium`` is "disk", "remote" or "memory".

    ``factory`` raises TierUnavailable when the medium cannot be used, ConfigError when the options
    do not fit.
    """

    name: str
    medium: str
    factory: Callable[[TierContext], Tier]


@dataclass(frozen=True)
class PolicyPlugin:
    """An eviction policy: ``factory()`` gives the class.

    The class is called with the capacity in blocks, the index's clock of uses, and the user's
    ``policy_options`` as keywords.
    """

    name: str
    factory: Callable[[], type[EvictionPolicy]]


@dataclass(frozen=True)
class OpsPlugin:
    """Device operations: ``factory()`` gives an instance or raises UnsupportedError."""

    name: str
    factory: Callable[[], DeviceOps]


@hookspec
def kvcore_engines() -> Sequence[EngineSpec]:
    """Engines this plugin adapts."""
    raise NotImplementedError


@hookspec
def kvcore_tiers() -> Sequence[TierPlugin]:
    """Backing tiers."""
    raise NotImplementedError


@hookspec
def kvcore_policies() -> Sequence[PolicyPlugin]:
    """Eviction policies."""
    raise NotImplementedError


@hookspec
def kvcore_ops() -> Sequence[OpsPlugin]:
    """Implementations of the device operations."""
    raise NotImplementedError
