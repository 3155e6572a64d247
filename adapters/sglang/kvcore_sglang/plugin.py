"""The plugin for SGLang. Imports neither SGLang nor torch.

kvcore.plugins       this module      offers SGLang to `kvcore plugins` and `kvcore serve`
sglang.srt.plugins   register()       registers kvcore's hooks in each of SGLang's processes
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from kvcore._util.module_command import module_command
from kvcore.engines.probes import Probe
from kvcore.engines.serving import (
    given_settings,
    has_entry_point,
    serve_environment,
)
from kvcore.engines.spec import EngineSpec, ServeCommand
from kvcore.engines.verdict import Standing, Verdict, judge, require
from kvcore.errors import ConfigError
from kvcore.log import get_logger
from kvcore.plugins.hookspecs import hookimpl

if TYPE_CHECKING:
    from kvcore.config.schema import Config

LINKER = "KVCoreLinker"
LINKER_MODULE = "kvcore_sglang.linker"
FLAG = "--unified-cache-external-linker"

_log = get_logger("kvcore.sglang.plugin")


@hookimpl
def kvcore_engines() -> list[EngineSpec]:
    """Offer SGLang to `kvcore serve` and `kvcore plugins`."""
    return [ENGINE]


def register() -> None:
    """Register kvcore's hooks with SGLang. Never raises.

    This is an entry point of SGLang, called once in every process of the engine. The hooks do
    nothing until there is a linker of kvcore's, which checks that they are in place.
    """
    try:
        from kvcore_sglang.hooks import register_all

        register_all()
    except Exception:  # noqa: BLE001 - an engine that moved on must still start
        _log.exception("hooks_not_registered")


@cache
def verdict() -> Verdict:
    """Return what is known of the installed SGLang, found out once in a process.

    Raises UnsupportedError if kvcore does not serve it.
    """
    return require(ENGINE)


def linker_base() -> Any:
    """Return the base class of the linker.

    Raises UnsupportedError if this SGLang cannot have kvcore as its linker. The configuration names
    the linker, so SGLang must not start without it.
    """
    from kvcore_sglang.probes import LINKER_PROBE

    _enter(LINKER_PROBE)
    from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

    return UnifiedCacheLinker


def storage_base() -> Any:
    """Return the base class of the storage. Raises UnsupportedError as `linker_base` does."""
    from kvcore_sglang.probes import STORAGE_PROBE

    _enter(STORAGE_PROBE)
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

    return HiCacheStorage


def _enter(entrance: str) -> None:
    found = verdict()
    found.holds(entrance)
    if found.standing is Standing.PROBED:
        _log.warning("engine_untried", engine=found.about)


def probes() -> Sequence[Probe]:
    """Return the interfaces of SGLang that kvcore uses."""
    from kvcore_sglang.probes import PROBES

    return PROBES


def linker_config(config: Config) -> dict[str, object]:
    """Return SGLang's ``unified_cache_external_linker_config`` for these settings, without secrets.

    It holds only what was set. The engine's processes read it.
    """
    return {
        "linker": LINKER,
        "linker_module_path": LINKER_MODULE,
        "linker_extra_config": given_settings(config),
    }


def engine_settings(config: Config) -> dict[str, object]:
    """Return the same as arguments of SGLang's Python API, ``sglang.Engine(**...)``."""
    return {
        "enable_unified_cache_external_linker": True,
        "unified_cache_external_linker_backend": "dynamic",
        "unified_cache_external_linker_config": linker_config(config),
    }


def serve(model: str, config: Config, engine_args: Sequence[str]) -> ServeCommand:
    """Return the command for ``sglang.launch_server`` with kvcore as its cache linker.

    Raises ConfigError if the engine's arguments name a linker, and UnsupportedError if the
    installed SGLang has no linkers.
    """
    from kvcore_sglang.probes import LINKER_PROBE

    judge(ENGINE).holds(LINKER_PROBE)
    if clash := [arg for arg in engine_args if FLAG.lstrip("-") in arg.replace("_", "-")]:
        raise ConfigError(
            f"given {clash[0]!r}; `kvcore serve` writes {FLAG}-* itself: put kvcore's settings in "
            "its file, or start SGLang's server by hand"
        )
    settings = json.dumps(linker_config(config))
    flags = [f"--enable{FLAG[1:]}", f"{FLAG}-backend", "dynamic", f"{FLAG}-config", settings]
    command = [*module_command("sglang.launch_server"), "--model-path", model]
    return ServeCommand([*command, *flags, *engine_args], serve_environment(config))


def status() -> str:
    """Return a line that says whether SGLang will find the hooks, from package metadata."""
    if has_entry_point("sglang.srt.plugins", "kvcore_sglang.plugin:register"):
        return f"{LINKER} is named by {FLAG}-config; its hooks are registered at SGLang's start"
    return "no sglang.srt.plugins entry point: reinstall kvcore"


TRIED = ("0.5.20", "0.5.21", "0.5.22", "0.5.23")
"""Releases that have served with kvcore; docs/sglang.md says in which configurations."""

ENGINE = EngineSpec("sglang", ("sglang",), serve, status, "sglang", TRIED, probes)
