"""Finds plugins, isolates the broken ones, and returns what they offer by name.

    entry point ──load──▶ module ──register, check_pending──▶ hooks ──collect──▶ tables by name
         │                   │                                  │
         └───────────────────┴────────── an error ──────────────┴──▶ failures (named, reported)

A plugin is registered whole or not at all: after one wrong hook, wrong value or name that is taken,
nothing of it is registered. kvcore's own engines, tiers, policies and operations are plugins too.
"""

from __future__ import annotations

import difflib
import functools
import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import pluggy

from kvcore import __version__
from kvcore.engines.spec import EngineSpec
from kvcore.errors import ConfigError, PluginError, UnsupportedError
from kvcore.log import get_logger
from kvcore.masking import mask_passwords
from kvcore.plugins import builtin, hookspecs
from kvcore.plugins.hookspecs import (
    PROJECT,
    AttentionPlugin,
    OpsPlugin,
    PointPolicyPlugin,
    PolicyPlugin,
    SelectorPlugin,
)
from kvcore.tiers.spec import TierPlugin

if TYPE_CHECKING:
    from kvcore.config.schema import Config
    from kvcore.fusion.ops import FusionOps
    from kvcore.fusion.select import Selector
    from kvcore.index.policy.base import EvictionPolicy
    from kvcore.index.policy.points import PointPolicy
    from kvcore.memory.copy.base import DeviceOps
    from kvcore.model.shape import BlockShape
    from kvcore.plugins.attention import AttentionHook

GROUP = "kvcore.plugins"
BUILTIN = "builtin"

_log = get_logger(__name__)
_T = TypeVar("_T")

_HOOKS: dict[str, tuple[str, type[Any]]] = {
    "kvcore_engines": ("engine", EngineSpec),
    "kvcore_tiers": ("tier", TierPlugin),
    "kvcore_policies": ("policy", PolicyPlugin),
    "kvcore_point_policies": ("point policy", PointPolicyPlugin),
    "kvcore_ops": ("ops", OpsPlugin),
    "kvcore_selectors": ("selector", SelectorPlugin),
    "kvcore_attention": ("attention", AttentionPlugin),
}


class Origin(NamedTuple):
    """The entry point of a plugin, and the distribution that provides it."""

    plugin: str
    distribution: str = ""
    version: str = ""


class Offer(NamedTuple):
    """One thing that a plugin offers."""

    kind: str
    name: str
    origin: Origin
    item: Any

    @property
    def identity(self) -> str:
        """Return its name with its distribution and version."""
        return f"{self.origin.distribution}=={self.origin.version}:{self.name}"


class Failure(NamedTuple):
    """A plugin that was left out, and the error because of which it was."""

    origin: Origin
    error: Exception


class PluginManager:
    """All plugins of this environment, loaded when it is built.

    Building one reads the metadata of installed packages and imports the plugins' light modules.
    Afterwards it only reads, so threads may share it.
    """

    def __init__(
        self,
        *,
        disable: Iterable[str] = (),
        strict: bool = False,
        entry_points: Iterable[importlib.metadata.EntryPoint] | None = None,
    ) -> None:
        """``entry_points`` replaces those of the environment.

        With ``strict``, raises PluginError for the first broken plugin.
        """
        self.failures: list[Failure] = []
        self.disabled = tuple(disable)
        self._strict = strict
        self._found: dict[tuple[str, str], Offer] = {}
        self._pluggy = pluggy.PluginManager(PROJECT)
        self._pluggy.add_hookspecs(hookspecs)
        self._take(builtin, Origin(BUILTIN, PROJECT, __version__))
        found = _with_origins(entry_points) if entry_points is not None else discovered()
        for entry_point, origin in found.items():
            if entry_point.name not in self.disabled:
                self._load(entry_point, origin)

    # -- asking ---------------------------------------------------------------------------------

    def found(self, kind: str | None = None) -> list[Offer]:
        """Return everything on offer, or of one kind, in order of registration."""
        return [found for found in self._found.values() if kind in (None, found.kind)]

    def engine(self, name: str) -> EngineSpec:
        """Return an engine. Raises ConfigError for an unknown name, and suggests the nearest."""
        return self._named("engine", name, EngineSpec)

    def tier(self, name: str) -> TierPlugin:
        """Return a tier. Raises ConfigError for an unknown name, and suggests the nearest."""
        return self._named("tier", name, TierPlugin)

    def policy(self, name: str) -> type[EvictionPolicy]:
        """Return the class of a policy, for `TierSpec`.

        Raises ConfigError for an unknown name, and suggests the nearest.
        """
        return self._named("policy", name, PolicyPlugin).factory()

    def selector(self, name: str, options: Mapping[str, Any]) -> Selector:
        """Return a selector. Raises ConfigError for an unknown name or options that do not fit."""
        factory = self._named("selector", name, SelectorPlugin).factory
        return _with_options("selector", name, factory, options)

    def point_policy(self, name: str, options: Mapping[str, Any]) -> PointPolicy:
        """Return a policy of resume points.

        Raises ConfigError for an unknown name or options that do not fit.
        """
        factory = self._named("point policy", name, PointPolicyPlugin).factory
        return _with_options("point policy", name, factory, options)

    def ops(self) -> list[DeviceOps]:
        """Return every implementation of the device operations that works here, for `select_ops`.

        Creates them, which imports torch. One that cannot be created is logged and left out.
        """
        made = (_make_ops(found, found.item.factory) for found in self.found("ops"))
        return [ops for ops in made if ops is not None]

    def fusion_ops(self) -> dict[str, FusionOps]:
        """Return the operations for blends of each implementation, by name, for `select_fusion`.

        Creates them, which imports torch. One that cannot be created is logged and left out.
        """
        found = [offer for offer in self.found("ops") if offer.item.fusion is not None]
        made = {offer.name: _make_ops(offer, offer.item.fusion) for offer in found}
        return {name: ops for name, ops in made.items() if ops is not None}

    def attention(self, shape: BlockShape, rank: int) -> list[AttentionHook]:
        """Return every attention hook for this model.

        One that cannot be created is logged and left out.
        """
        made = (_make_attention(found, shape, rank) for found in self.found("attention"))
        return [hook for hook in made if hook is not None]

    def check(self, config: Config) -> None:
        """Raise ConfigError for a setting that names something no plugin offers."""
        names = [
            ("engine", "engine", config.engine),
            ("host.policy", "policy", config.host.policy),
            ("disk.policy", "policy", config.disk.policy),
            ("points.policy", "point policy", config.points.policy),
            ("ops.backend", "ops", config.ops.backend),
            ("fusion.selector", "selector", config.fusion.selector),
            *((f"tiers.{name}.plugin", "tier", t.plugin) for name, t in config.tiers.items()),
        ]
        for setting, kind, name in names:
            if name is not None and (kind, name) != ("ops", "auto"):
                try:
                    self._named(kind, name, object)
                except ConfigError as error:
                    raise ConfigError(f"{setting} ({config.source(setting)}): {error}") from error

    def _named(self, kind: str, name: str, cls: type[_T]) -> _T:
        if found := self._found.get((kind, name)):
            assert isinstance(found.item, cls)
            return found.item
        names = [found.name for found in self.found(kind)]
        close = difflib.get_close_matches(name, names, n=1)
        advice = f"did you mean {close[0]!r}?" if close else f"found are: {', '.join(names)}"
        if broken := [f"{f.origin.plugin} ({f.error})" for f in self.failures]:
            advice += f" Plugins that could not be loaded: {'; '.join(broken)}"
        raise ConfigError(
            f"there is no {kind} called {name!r}; {advice if names else 'none found'}"
        )

    # -- loading --------------------------------------------------------------------------------

    def _load(self, entry_point: importlib.metadata.EntryPoint, origin: Origin) -> None:
        try:
            self._take(entry_point.load(), origin)
        except Exception as error:  # third-party code: reported and left out
            if self._strict:
                raise PluginError(
                    f"plugin {origin.plugin!r} ({entry_point.value}) cannot be loaded: "
                    f"{reason(error)}; repair it, or name it in plugins.disable"
                ) from error
            self.failures.append(Failure(origin, error))
            _log.warning(
                "plugin_left_out",
                plugin=origin.plugin,
                module=entry_point.value,
                distribution=origin.distribution,
                error=reason(error),
            )

    def _take(self, plugin: object, origin: Origin) -> None:
        """Register ``plugin`` and all that it offers, or raise and register nothing."""
        try:
            self._pluggy.register(plugin, name=origin.plugin)
            self._pluggy.check_pending()
            offers = list(self._offers(plugin, origin))
            _check_names(offers, self._found)
        except BaseException:
            if self._pluggy.get_plugin(origin.plugin) is plugin:
                self._pluggy.unregister(name=origin.plugin)
            raise
        self._found.update({(offer.kind, offer.name): offer for offer in offers})

    def _offers(self, plugin: object, origin: Origin) -> Iterable[Offer]:
        """Yield what the hooks of one plugin return."""
        others = [other for other in self._pluggy.get_plugins() if other is not plugin]
        for hook, (kind, cls) in _HOOKS.items():
            for items in self._pluggy.subset_hook_caller(hook, others)():
                for item in items:
                    if not isinstance(item, cls):
                        raise PluginError(
                            f"{hook} returned {item!r}; supported is a list of {cls.__name__}"
                        )
                    yield Offer(kind, item.name, origin, item)


def _check_names(offers: Iterable[Offer], found: Mapping[tuple[str, str], Offer]) -> None:
    taken = {at: one.origin.plugin for at, one in found.items()}
    for offer in offers:
        at = (offer.kind, offer.name)
        if at in taken:
            raise PluginError(
                f"{offer.kind} {offer.name!r} is offered by plugin {taken[at]!r} already; "
                "choose another name"
            )
        taken[at] = offer.origin.plugin


def _with_options(
    kind: str, name: str, factory: Callable[..., _T], options: Mapping[str, Any]
) -> _T:
    """Return what ``factory`` makes. Raises ConfigError for options that do not fit."""
    try:
        return factory(**options)
    except TypeError as error:
        raise ConfigError(f"{kind} {name!r} with options {dict(options)}: {error}") from error


def _make_ops(found: Offer, factory: Callable[[], _T]) -> _T | None:
    try:
        ops = factory()
    except UnsupportedError as error:
        # A missing GPU, for example, is no fault: other operations serve. The native copies,
        # however, should always be there.
        tell = _log.warning if found.origin.plugin == BUILTIN else _log.info
        tell("ops_left_out", ops=found.name, error=reason(error))
        return None
    except Exception as error:  # noqa: BLE001 - another's code: named
        _log.warning("ops_left_out", ops=found.name, error=reason(error))
        return None
    return ops


def _make_attention(found: Offer, shape: BlockShape, rank: int) -> AttentionHook | None:
    try:
        hook: AttentionHook = found.item.factory(shape, rank)
    except UnsupportedError as error:
        _log.info("attention_hook_left_out", hook=found.name, error=reason(error))
        return None
    except Exception as error:  # noqa: BLE001 - another's code: named, and the engine runs
        _log.warning("attention_hook_left_out", hook=found.name, error=reason(error))
        return None
    return hook


def discovered() -> Mapping[importlib.metadata.EntryPoint, Origin]:
    """Return the entry points of this environment.

    Reads the metadata of every package again only where a folder of ``sys.path`` has changed: a
    process builds several managers.
    """
    return _discovered(tuple([(path, _changed(path)) for path in sys.path]))


@functools.lru_cache(maxsize=1)
def _discovered(
    folders: tuple[tuple[str, int], ...],
) -> Mapping[importlib.metadata.EntryPoint, Origin]:
    return _with_origins(importlib.metadata.entry_points(group=GROUP))


def _changed(path: str) -> int:
    """Return when something was added to a folder or taken out, in ns; 0 if there is none."""
    try:
        return os.stat(path or ".").st_mtime_ns
    except (OSError, ValueError):
        return 0


def _with_origins(
    entry_points: Iterable[importlib.metadata.EntryPoint],
) -> dict[importlib.metadata.EntryPoint, Origin]:
    """Return the entry points without repeats, each with its distribution.

    An editable install beside its build metadata lists its own twice.
    """
    distinct = {(ep.name, ep.value): ep for ep in entry_points}
    found = {}
    for ep in distinct.values():
        dist = ep.dist
        found[ep] = Origin(ep.name, dist.name if dist else "", dist.version if dist else "")
    return found


def reason(error: Exception) -> str:
    """Return an error in one line, with its class and without passwords in URLs."""
    return mask_passwords(" ".join(f"{type(error).__name__}: {error}".split()))
