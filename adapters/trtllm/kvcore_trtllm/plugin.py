"""The plugin for TensorRT-LLM. Imports neither the engine nor torch.

kvcore.plugins       this module                              `kvcore plugins`, `kvcore serve`
kv_connector_config  kvcore_trtllm.connector, by its name     how TensorRT-LLM finds kvcore
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcore.engines.probes import Probe
from kvcore.engines.serving import command_beside, given_settings
from kvcore.engines.spec import EngineSpec, ServeCommand
from kvcore.errors import ConfigError, TierUnavailable
from kvcore.plugins.hookspecs import hookimpl

if TYPE_CHECKING:
    from kvcore.config.schema import Config

CONNECTOR = {
    "connector_module": "kvcore_trtllm.connector",
    "connector_scheduler_class": "KVCoreScheduler",
    "connector_worker_class": "KVCoreWorker",
}
OPTION_FLAGS = ("--extra_llm_api_options", "--extra-llm-api-options", "--config")
CACHE = {"enable_block_reuse": True, "enable_partial_reuse": False}
"""The settings of the engine's own prefix cache that a connector needs."""


@hookimpl
def kvcore_engines() -> list[EngineSpec]:
    """Offer TensorRT-LLM to `kvcore serve` and `kvcore plugins`."""
    return [ENGINE]


def serve(model: str, config: Config, engine_args: Sequence[str]) -> ServeCommand:
    """Return the command for ``trtllm-serve`` with kvcore as its connector.

    The engine's command line has no option for a connector, so it is written to an options file,
    together with the options of a file given with ``--extra_llm_api_options``. kvcore's own
    settings, secrets included, travel in a variable that TensorRT-LLM passes on to its MPI workers.

    Raises ConfigError if the engine's options contradict the connector's, and TierUnavailable if
    the file cannot be written.
    """
    from kvcore.config import FORWARDED_VARIABLE

    rest, given = _without_options(engine_args)
    options = _options(given)
    settings = given_settings(config, secrets=True)
    env = {FORWARDED_VARIABLE: json.dumps(settings), "KVCORE_CONFIG": ""}
    file = _write(options)
    return ServeCommand(
        [command_beside("trtllm-serve"), model, *rest, OPTION_FLAGS[0], str(file)], env
    )


def _without_options(engine_args: Sequence[str]) -> tuple[list[str], Path | None]:
    """Split off the engine's options file; return the other arguments, and the file or None."""
    rest: list[str] = []
    given: str | None = None
    words = iter(engine_args)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag not in OPTION_FLAGS:
            rest.append(word)
            continue
        given = value if equals else next(words, None)
        if not given:
            raise ConfigError(f"given {flag} without a file; supported is {flag} FILE")
    return rest, None if given is None else Path(given)


def _options(file: Path | None) -> dict[str, Any]:
    """Return the engine's options with kvcore added. Raises ConfigError if they contradict it."""
    import yaml

    options: Any = None
    if file is not None:
        try:
            options = yaml.safe_load(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise ConfigError(f"{file}: cannot be read: {error}") from error
    options = {} if options is None else options
    if not isinstance(options, dict):
        raise ConfigError(f"{file}: given a {type(options).__name__}; supported is a table")
    if "kv_connector_config" in options:
        raise ConfigError(
            f"{file}: has a kv_connector_config; `kvcore serve` writes one: remove it, or call "
            "trtllm-serve"
        )
    cache = options.get("kv_cache_config") or {}
    for name, needed in CACHE.items():
        if cache.get(name, needed) != needed:
            raise ConfigError(
                f"{file}: kv_cache_config.{name} is {cache[name]}; a connector needs {needed}"
            )
    return {
        **options,
        "kv_cache_config": {**cache, **CACHE},
        "kv_connector_config": dict(CONNECTOR),
    }


def _write(options: dict[str, Any]) -> Path:
    """Write the options to a file that is named by its content, so that restarts reuse it."""
    import yaml

    text = yaml.safe_dump(options, sort_keys=True)
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    file = Path.home() / ".cache" / "kvcore" / "trtllm" / f"{name}.yaml"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise TierUnavailable(f"{file} cannot be written: {error.strerror}") from error
    return file


def status() -> str:
    """Return a line that says whether TensorRT-LLM will find the connector."""
    if importlib.util.find_spec("kvcore_trtllm") is None:
        return "kvcore_trtllm cannot be imported here: reinstall kvcore"
    return f"named in kv_connector_config as {CONNECTOR['connector_module']}"


def probes() -> Sequence[Probe]:
    """Return the interfaces of TensorRT-LLM that kvcore uses."""
    from kvcore_trtllm.probes import PROBES

    return PROBES


TRIED: tuple[str, ...] = ()
"""No release has served with kvcore yet: its tests have stand-ins (docs/trtllm.md)."""

ENGINE = EngineSpec("trtllm", ("tensorrt-llm",), serve, status, "tensorrt_llm", TRIED, probes)
