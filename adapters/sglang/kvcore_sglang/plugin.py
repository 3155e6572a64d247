"""How kvcore and SGLang find each other. Imports neither SGLang nor torch.

kvcore.plugins       this module      kvcore learns of the engine: `kvcore plugins`, `serve`
sglang.srt.plugins   register()       SGLang learns of kvcore's hooks, in each of its processes
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcore.errors import ConfigError
from kvcore.log import get_logger
from kvcore.plugins.hookspecs import EngineSpec, ServeCommand, hookimpl

if TYPE_CHECKING:
    from kvcore.config.schema import Config

LINKER = "KVCoreLinker"
LINKER_MODULE = "kvcore_sglang.linker"
VERSIONS = ">=0.5.23,<0.5.24"
FLAG = "--unified-cache-external-linker"
SECRET_VARIABLE = "KVCORE__NAMESPACE__SECRET"

_log = get_logger("kvcore.sglang.plugin")


@hookimpl
def kvcore_engines() -> list[EngineSpec]:
    return [ENGINE]


def register() -> None:
    """Entry point of SGLang: registers kvcore's hooks, where the version fits.

    Called once in every process of the engine. The hooks do nothing until there is a linker of
    kvcore's, which checks that they took. Never raises: SGLang would only log it.
    """
    try:
        _register()
    except Exception:  # noqa: BLE001 - an engine that moved on must still start
        _log.exception("hooks_not_registered", supported=VERSIONS)


def _register() -> None:
    from kvcore.plugins.manager import installed

    engine = installed(ENGINE)
    if not engine.supported:
        _log.warning(
            "hooks_not_registered",
            distribution=engine.distribution,
            version=engine.version,
            supported=VERSIONS,
            advice="install a kvcore made for this SGLang, or such an SGLang",
        )
        return
    from kvcore_sglang.hooks import register_all

    register_all()


def linker_config(config: Config) -> dict[str, object]:
    """SGLang's ``unified_cache_external_linker_config`` for these settings, without secrets.

    Only what was set goes in; the engine's processes take it from there.
    """
    from kvcore.config import explicit_settings

    settings = explicit_settings(config)
    settings.pop("engine", None)
    return {"linker": LINKER, "linker_module_path": LINKER_MODULE, "linker_extra_config": settings}


def engine_settings(config: Config) -> dict[str, object]:
    """The same as arguments of SGLang's Python API, ``sglang.Engine(**...)``."""
    return {
        "enable_unified_cache_external_linker": True,
        "unified_cache_external_linker_backend": "dynamic",
        "unified_cache_external_linker_config": linker_config(config),
    }


def serve(model: str, config: Config, engine_args: Sequence[str]) -> ServeCommand:
    """``sglang.launch_server`` with kvcore as its cache linker.

    A secret travels in the environment, because command lines can be read by other users. The
    settings are complete, so a file named by KVCORE_CONFIG must not be merged in again.
    """
    if clash := [arg for arg in engine_args if FLAG.lstrip("-") in arg.replace("_", "-")]:
        raise ConfigError(
            f"given {clash[0]!r}; `kvcore serve` writes {FLAG}-* itself: put kvcore's settings in "
            "its file, or start SGLang's server by hand"
        )
    settings = json.dumps(linker_config(config))
    env = {"KVCORE_CONFIG": ""}
    if config.namespace.secret is not None:
        env[SECRET_VARIABLE] = config.namespace.secret
    flags = [f"--enable{FLAG[1:]}", f"{FLAG}-backend", "dynamic", f"{FLAG}-config", settings]
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", model]
    return ServeCommand([*command, *flags, *engine_args], env)


def status() -> str:
    """Whether SGLang will find the hooks, from package metadata."""
    points = importlib.metadata.entry_points(group="sglang.srt.plugins")
    if any(point.value == "kvcore_sglang.plugin:register" for point in points):
        return f"{LINKER} is named by {FLAG}-config; its hooks are registered at SGLang's start"
    return "no sglang.srt.plugins entry point: reinstall kvcore"


ENGINE = EngineSpec("sglang", ("sglang",), VERSIONS, serve, status)
