"""``vllm.switch_on``: kvcore in every vLLM that names no connector, without an argument.

    vLLM loads its general plugins ─▶ install()     wraps EngineArgs.create_engine_config
    vLLM makes its configuration   ─▶ switch_on()   names kvcore if nothing else is named

A deployment sets one variable: ``KVCORE__VLLM__SWITCH_ON=true``, or a ``KVCORE_CONFIG`` whose file
says so. Without one, nothing of vLLM is wrapped. vLLM loads its plugins when its arguments are
made, so the wrapper is there before any configuration is, in each process that makes one. The other
processes get the configuration from it.

Nothing here stops vLLM: it did not ask for kvcore by name. What is wrong is logged, and vLLM starts
without kvcore.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kvcore.engines.serving import has_entry_point
from kvcore.engines.spec import Switch
from kvcore.errors import KVCoreError
from kvcore.log import get_logger

if TYPE_CHECKING:
    from kvcore.config.schema import Config

__all__ = ["find_switch", "install", "switch_on"]

_log = get_logger("kvcore.vllm.plugin")

_KEYS = ("vllm", "switch_on")
_WRAPPED = "_kvcore_wrapped"
_ALLOWED = "VLLM_PLUGINS"
"""vLLM's own variable: a list of the plugins to load, all if it is not set."""


def install(env: Mapping[str, str] = os.environ) -> None:
    """Let vLLM's arguments name kvcore where they name no connector, if the settings say so.

    Idempotent. Never raises.
    """
    try:
        from kvcore.config import load_config, names_settings

        if not names_settings(env):
            return
        config = load_config(env=env)
        if not config.vllm.switch_on:
            return
        _require()
        from vllm.engine.arg_utils import EngineArgs
    except KVCoreError as error:
        _log.error("not_switched_on", reason=str(error))
        return
    except Exception:  # noqa: BLE001 - an engine that moved on must still start
        _log.exception("switch_failed")
        return
    arguments: Any = EngineArgs
    made = arguments.create_engine_config
    if not hasattr(made, _WRAPPED):
        wrapped = _wrapped(made, str(config.source(_KEYS)))
        setattr(wrapped, _WRAPPED, True)
        arguments.create_engine_config = wrapped


def _require() -> None:
    """Raise UnsupportedError unless this vLLM is served and can be switched on."""
    from kvcore_vllm.engine import verdict
    from kvcore_vllm.probes import SWITCH_PROBE

    verdict().holds(SWITCH_PROBE)


def _wrapped(original: Callable[..., Any], source: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def create_engine_config(args: Any, *given: Any, **named: Any) -> Any:
        try:
            switch_on(args, source)
        except Exception:  # noqa: BLE001 - an engine that moved on must still start
            _log.exception("switch_failed")
        return original(args, *given, **named)

    return create_engine_config


def switch_on(args: Any, source: str) -> None:
    """Name kvcore as the connector in vLLM's arguments, unless they say anything of one."""
    if args.kv_transfer_config is not None:
        named = getattr(args.kv_transfer_config, "kv_connector", None)
        if not _is_ours(args.kv_transfer_config):
            _log.info("not_switched_on", reason=f"vLLM's arguments name {named or 'a connector'}")
        return
    if args.kv_offloading_size is not None:
        _log.info("not_switched_on", reason="vLLM's arguments ask for its own offloading")
        return
    from vllm.config import KVTransferConfig

    from kvcore_vllm.engine import CONNECTOR

    args.kv_transfer_config = KVTransferConfig(
        kv_connector=CONNECTOR, kv_role="kv_both", kv_load_failure_policy="recompute"
    )
    _log.info("switched_on", by=source)


def _is_ours(config: Any) -> bool:
    from kvcore_vllm.engine import CONNECTOR

    return getattr(config, "kv_connector", None) == CONNECTOR


def find_switch(config: Config, env: Mapping[str, str] = os.environ) -> Switch:
    """Return whether a vLLM that is started with ``env`` uses kvcore, and why.

    ``config`` are the settings that `kvcore doctor` was given: they need not be vLLM's.
    """
    from kvcore.config import load_config

    here = config.vllm.switch_on
    try:
        seen = load_config(env=env)
    except KVCoreError as error:
        return Switch(False, f"off: vLLM cannot read its settings: {error}", "repair them")
    if not seen.vllm.switch_on:
        if here:
            return Switch(
                False,
                f"off: vllm.switch_on ({config.source(_KEYS)}) is not in vLLM's environment",
                "set KVCORE_CONFIG to that file, or KVCORE__VLLM__SWITCH_ON=true, for vLLM",
            )
        return Switch(
            False, "off: vLLM uses kvcore only if its arguments name it (vllm.switch_on is false)"
        )
    source = seen.source(_KEYS)
    allowed = env.get(_ALLOWED)
    if allowed is not None and "kvcore" not in allowed.split(","):
        return Switch(
            False, f"off: {_ALLOWED} leaves kvcore's plugin out", f"add kvcore to {_ALLOWED}"
        )
    if not has_entry_point("vllm.general_plugins", "kvcore_vllm.plugin:register"):
        return Switch(False, "off: vLLM does not find kvcore's plugin", "reinstall kvcore")
    try:
        _require()
    except KVCoreError as error:
        return Switch(False, f"off: {error}", "install a release that kvcore was tried with")
    return Switch(True, f"on ({source}): every vLLM that names no connector uses kvcore")
