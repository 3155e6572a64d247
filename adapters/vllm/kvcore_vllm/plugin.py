"""The plugin for vLLM. Imports neither vLLM nor torch.

kvcore.plugins        this module      offers vLLM to `kvcore plugins` and `kvcore serve`
vllm.general_plugins  register()       registers the connector in each of vLLM's processes, and
                                       switches it on (`kvcore_vllm.switch`)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvcore.engines.spec import EngineSpec
from kvcore.log import get_logger
from kvcore.plugins.hookspecs import hookimpl
from kvcore_vllm import switch
from kvcore_vllm.engine import CONNECTOR, CONNECTOR_MODULE, ENGINE, verdict

_log = get_logger("kvcore.vllm.plugin")


@hookimpl
def kvcore_engines() -> list[EngineSpec]:
    """Offer vLLM to `kvcore serve` and `kvcore plugins`."""
    return [replace(ENGINE, switch=switch.find_switch)]


def register() -> None:
    """Register the connector with vLLM by name, and switch it on if the settings do. Never raises.

    This is an entry point of vLLM, called once or more in the front end, the engine core and every
    worker. An error here would stop vLLM even for users who do not use kvcore. vLLM gets the class
    from this module once a configuration names it, and only then are the interfaces probed.
    """
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        KVConnectorFactory.register_connector(CONNECTOR, CONNECTOR_MODULE, CONNECTOR)
    except ValueError:  # registered by an earlier call in this process
        pass
    except Exception:  # noqa: BLE001 - an engine that moved on must still start
        _log.exception("connector_not_registered", connector=CONNECTOR)
        return
    else:
        _log.debug("connector_registered", connector=CONNECTOR)
    switch.install()


def __getattr__(name: str) -> Any:
    """Return the connector's class.

    Raises UnsupportedError if this vLLM lacks an interface that kvcore needs. The configuration
    names the connector, so vLLM must not start without it.
    """
    if name != CONNECTOR:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    verdict()
    from kvcore_vllm.connector import KVCoreConnector

    return KVCoreConnector
