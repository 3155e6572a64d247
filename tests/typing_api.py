"""Never run: mypy --strict reads it, so that a change of a public type is seen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from typing_extensions import assert_type

from kvcore.config import Config, Setting, Source, explicit_settings, load_config, settings
from kvcore.index.policy import LRU, EvictionPolicy
from kvcore.log import Logger, get_logger
from kvcore.memory.copy import DeviceOps
from kvcore.plugins import (
    EngineSpec,
    PluginManager,
    PolicyPlugin,
    ServeCommand,
    TierContext,
    TierPlugin,
    hookimpl,
    store_plugin,
)
from kvcore.telemetry.metrics import Data, Metrics, MissReason, PrometheusSink, SaveSkip, merge
from kvcore.tiers.remote import BlockStore, StoreKind, StoreOptions

config = load_config(Path("kvcore.toml"), {"host": {"capacity": "8GiB"}}, {"A": "b"})
assert_type(config, Config)
assert_type(config.host.capacity, int)
assert_type(config.disk.path, "Path | None")
assert_type(config.tiers["shelf"].options, dict[str, Any])
assert_type(config.source("host.capacity"), Source)
assert_type(settings(config), list[Setting])
assert_type(explicit_settings(config), dict[str, Any])
config.host.capactiy  # type: ignore[attr-defined]  # noqa: B018

plugins = PluginManager(disable=config.plugins.disable)
assert_type(plugins.policy("lru"), type[EvictionPolicy])
assert_type(plugins.engine("vllm"), EngineSpec)
assert_type(plugins.tier("disk"), TierPlugin)
assert_type(plugins.ops(), list[DeviceOps])


def _serve(model: str, config: Config, engine_args: Sequence[str]) -> ServeCommand:
    return ServeCommand(["engine", model, *engine_args], {})


@hookimpl
def kvcore_engines() -> list[EngineSpec]:
    return [EngineSpec("engine", ("engine",), _serve, lambda: "ready", "engine", ("1.0",))]


assert_type(store_plugin("mine", lambda: StoreKind(StoreOptions, _shelf)), TierPlugin)


def _shelf(options: StoreOptions, rank: int | None) -> BlockStore:
    raise NotImplementedError


@hookimpl
def kvcore_policies() -> list[PolicyPlugin]:
    return [PolicyPlugin("mine", lambda: LRU)]


def _capacity(context: TierContext) -> int:
    return context.capacity


metrics = Metrics("rank0", enabled=config.metrics.enabled)
metrics.looked_up({"host": 3}, 4, MissReason.BUSY)
metrics.save_skipped(SaveSkip.NO_ROOM, 3)
assert_type(metrics.delta(), Data)
assert_type(merge({}, metrics.snapshot()), Data)
PrometheusSink(["model"]).apply(metrics.delta(), ["m"])
assert_type(get_logger(__name__), Logger)
