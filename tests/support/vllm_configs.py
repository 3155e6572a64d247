"""Configs of vLLM for a tiny model, of which a test changes one setting."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import EngineArgs

from kvcore.harness.models import tiny_model


@cache
def folder() -> Path:
    return tiny_model("llama", layers=2, heads=4, kv_heads=2, head_dim=64)


@cache
def _config() -> Any:
    args = EngineArgs(str(folder()), dtype="float32", enforce_eager=True, block_size=16)
    return args.create_engine_config()


def config() -> Any:
    """Return a config of its own, which a test may change."""
    return copy.deepcopy(_config())


def having(change: Callable[[Any], None]) -> Any:
    made = config()
    change(made)
    return made


def changed(config: Any, changes: Mapping[str, Any]) -> Any:
    """Return a copy with other settings. In a name, ``__`` stands between a part and its own."""
    made = copy.deepcopy(config)
    for path, value in changes.items():
        set_to(path.replace("__", "."), value)(made)
    return made


def set_to(path: str, value: Any) -> Callable[[Any], None]:
    def change(made: Any) -> None:
        *way, last = path.split(".")
        for name in way:
            made = getattr(made, name)
        object.__setattr__(made, last, value)

    return change
