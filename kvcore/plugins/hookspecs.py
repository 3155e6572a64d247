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
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pluggy

if TYPE_CHECKING:
    from kvcore.config.schema import Config
    from kvcore.config.schema_cluster import ClusterConfig
    from kvcore.fusion.select import Selector
    from kvcore.index.policy.base import EvictionPolicy
    from kvcore.memory.copy.base import DeviceOps
    from kvcore.memory.layout import BlockShape
    from kvcore.plugins.attention import AttentionHook
    from kvcore.tiers.base import BlockRecord, Tier
    from kvcore.tiers.disk.format import Geometry
    from kvcore.tiers.remote import Finder, StoreKind

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
    """What a backing tier is made from.

    ``capacity`` is in bytes, the total over all ranks. ``geometry`` tells the model, the shape of a
    block and each rank's KV heads and layers: stored bytes are readable only where it fits.
    ``told`` is what the leader's ``prepare`` said, empty without one. ``share`` is among how many
    leaders the capacity is divided. ``cluster`` is `[cluster]`, for what finds others through it.
    ``notes`` are folders for what a leader must leave to the next one, the best first.
    """

    name: str
    geometry: Geometry
    capacity: int
    options: Mapping[str, Any] = field(default_factory=dict)
    rank: int = 0
    told: Mapping[str, Any] = field(default_factory=dict)
    share: int = 1
    cluster: ClusterConfig | None = None
    notes: Sequence[Path] = ()

    @property
    def slot_nbytes(self) -> int:
        """Bytes of a slot of this rank, a multiple of 4096: its part of one block."""
        return self._slot_nbytes(self.rank)

    @property
    def num_slots(self) -> int:
        """Blocks that fit into this leader's part of ``capacity``, over all ranks."""
        return (
            self.capacity
            // self.share
            // sum(map(self._slot_nbytes, range(len(self.geometry.heads))))
        )

    def _slot_nbytes(self, rank: int) -> int:
        from kvcore.memory.arena import slot_bytes

        return slot_bytes(self.geometry.shard_shape(rank))


def _nothing() -> None:
    return None


@dataclass(frozen=True)
class PreparedTier:
    """What the leader knows of a tier before any rank has opened it.

    ``records`` are the blocks that every rank holds whole. ``told`` goes to each rank and is plain
    data (JSON). ``release`` is called once, after the ranks have closed theirs. ``foreign`` tells
    that records may lie in slots beyond ``num_slots``, which are read and never written. A store
    that other hosts write to has a ``finder``, which asks it what it holds, and where each engine
    keeps its own a ``node``, by which others are told of it. ``void`` writes down, for one that
    outlives the engine, that what lies there of a namespace (None: all) is cleared; it returns at
    once. The ranks are told to erase it too, which an engine that is killed does not live to do.
    """

    num_slots: int
    records: Sequence[BlockRecord] = ()
    told: Mapping[str, Any] = field(default_factory=dict)
    release: Callable[[], None] = _nothing
    foreign: bool = False
    finder: Finder | None = None
    node: str = ""
    void: Callable[[bytes | None], None] | None = None


@dataclass(frozen=True)
class TierPlugin:
    """A kind of backing tier: ``medium`` is "disk", "remote" or "memory".

    ``factory`` opens it, once in each rank. ``prepare``, for a tier that outlives the engine or is
    shared, runs once before that, in the leader; without it the tier starts empty. Both raise
    TierUnavailable when the medium cannot be used, ConfigError when the options do not fit.
    """

    name: str
    medium: str
    factory: Callable[[TierContext], Tier]
    prepare: Callable[[TierContext], PreparedTier] | None = None


def store_plugin(name: str, kind: Callable[[], StoreKind]) -> TierPlugin:
    """A remote store as a tier: `kvcore.tiers.remote` does all but talk to it.

    ``kind`` imports the store's client; it is called in the leader and in each rank.
    """

    def factory(context: TierContext) -> Tier:
        from kvcore.tiers.remote import open_tier

        return open_tier(context, kind())

    def prepare(context: TierContext) -> PreparedTier:
        from kvcore.tiers.remote import prepare

        return prepare(context, kind())

    return TierPlugin(name, "remote", factory, prepare)


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


@dataclass(frozen=True)
class SelectorPlugin:
    """A way to choose the rows that fusion recomputes.

    ``factory(**fusion.selector_options)`` gives an instance, which serves all requests; it raises
    ConfigError, or TypeError for an argument it does not have, when the options do not fit.
    """

    name: str
    factory: Callable[..., Selector]


@dataclass(frozen=True)
class AttentionPlugin:
    """A hook around every layer's attention, called from when the engine's model is loaded.

    ``factory(shape, rank)`` gives it for a rank, whose heads and layers ``shape`` tells, or raises
    UnsupportedError where it is not for this model. Registering is asking for it: an attention
    plugin that is not wanted is named in ``plugins.disable``.
    """

    name: str
    factory: Callable[[BlockShape, int], AttentionHook]


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


@hookspec
def kvcore_selectors() -> Sequence[SelectorPlugin]:
    """Selectors of rows for fusion."""
    raise NotImplementedError


@hookspec
def kvcore_attention() -> Sequence[AttentionPlugin]:
    """Hooks around the attention of the engine's layers."""
    raise NotImplementedError
