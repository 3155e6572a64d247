"""The hooks that a plugin may implement, and the values they return.

A plugin is a module named by an entry point of the group ``kvcore.plugins``. It imports nothing
heavy: it returns names and callables, and the callables import when called.

    from kvcore.plugins import TierPlugin, hookimpl

    @hookimpl
    def kvcore_tiers():
        return [TierPlugin("shelf", "remote", make_shelf)]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pluggy

from kvcore.engines.spec import EngineSpec
from kvcore.tiers.spec import TierPlugin

if TYPE_CHECKING:
    from kvcore.fusion.ops import FusionOps
    from kvcore.fusion.select import Selector
    from kvcore.index.policy.base import EvictionPolicy
    from kvcore.index.policy.points import PointPolicy
    from kvcore.memory.copy.base import DeviceOps
    from kvcore.model.shape import BlockShape
    from kvcore.plugins.attention import AttentionHook
    from kvcore.tiers.base import Tier
    from kvcore.tiers.remote import StoreKind
    from kvcore.tiers.spec import PreparedTier, TierContext

PROJECT = "kvcore"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True)
class PolicyPlugin:
    """An eviction policy: ``factory()`` returns the class.

    The class is called with the capacity in blocks, the index's clock of uses, and the user's
    ``policy_options`` as keywords.
    """

    name: str
    factory: Callable[[], type[EvictionPolicy]]


@dataclass(frozen=True)
class PointPolicyPlugin:
    """A way to choose the resume points that are saved of a model with states.

    ``factory(**points.policy_options)`` returns an instance that serves all requests. If the
    options do not fit it raises ConfigError, or TypeError for an unknown argument.
    """

    name: str
    factory: Callable[..., PointPolicy]


@dataclass(frozen=True)
class OpsPlugin:
    """Device operations: ``factory()`` returns an instance or raises UnsupportedError.

    ``fusion()`` returns the operations for blends, or raises UnsupportedError. Without it the
    plugin only copies, and torch blends.
    """

    name: str
    factory: Callable[[], DeviceOps]
    fusion: Callable[[], FusionOps] | None = None


@dataclass(frozen=True)
class SelectorPlugin:
    """A way to choose the rows that fusion recomputes.

    ``factory(**fusion.selector_options)`` returns an instance that serves all requests. If the
    options do not fit it raises ConfigError, or TypeError for an unknown argument.
    """

    name: str
    factory: Callable[..., Selector]


@dataclass(frozen=True)
class AttentionPlugin:
    """A hook around every layer's attention, called once the engine's model is loaded.

    ``factory(shape, rank)`` returns the hook of a rank, with that rank's heads and layers in
    ``shape``, or raises UnsupportedError if it is not for this model. A registered hook is active;
    name an unwanted plugin in ``plugins.disable``.
    """

    name: str
    factory: Callable[[BlockShape, int], AttentionHook]


@hookspec
def kvcore_engines() -> Sequence[EngineSpec]:
    """Return the engines that this plugin adapts."""
    raise NotImplementedError


@hookspec
def kvcore_tiers() -> Sequence[TierPlugin]:
    """Return backing tiers."""
    raise NotImplementedError


@hookspec
def kvcore_policies() -> Sequence[PolicyPlugin]:
    """Return eviction policies."""
    raise NotImplementedError


@hookspec
def kvcore_point_policies() -> Sequence[PointPolicyPlugin]:
    """Return policies that choose which resume points are saved."""
    raise NotImplementedError


@hookspec
def kvcore_ops() -> Sequence[OpsPlugin]:
    """Return implementations of the device operations."""
    raise NotImplementedError


@hookspec
def kvcore_selectors() -> Sequence[SelectorPlugin]:
    """Return selectors of rows for fusion."""
    raise NotImplementedError


@hookspec
def kvcore_attention() -> Sequence[AttentionPlugin]:
    """Return hooks around the attention of the engine's layers."""
    raise NotImplementedError


def store_plugin(name: str, kind: Callable[[], StoreKind]) -> TierPlugin:
    """Return a remote store as a tier; `kvcore.tiers.remote` does all but talk to the store.

    ``kind`` imports the store's client. It is called in the leader and in each rank.
    """

    def factory(context: TierContext) -> Tier:
        from kvcore.tiers.remote import open_tier

        return open_tier(context, kind())

    def prepare(context: TierContext) -> PreparedTier:
        from kvcore.tiers.remote import prepare

        return prepare(context, kind())

    return TierPlugin(name, "remote", factory, prepare)
