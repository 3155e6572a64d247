"""Helpers of the adapters' plugins: settings, environment and command of an engine's own server.

Imports no engine and no torch.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcore.config.schema import Config

__all__ = [
    "command_beside",
    "given_settings",
    "has_entry_point",
    "serve_environment",
]


def given_settings(config: Config, *, secrets: bool = False) -> dict[str, Any]:
    """Return the settings that were set, nested, for the engine's own processes.

    Leaves out the choice of the engine, and secrets unless ``secrets``.
    """
    from kvcore.config import explicit_settings

    settings = explicit_settings(config, secrets=secrets)
    settings.pop("engine", None)
    return settings


def serve_environment(config: Config) -> dict[str, str]:
    """Return the environment for an engine whose command line carries the other settings.

    Secrets travel here, because other users can read command lines and engines show theirs. The
    settings are complete, so KVCORE_CONFIG is emptied: a file that it names must not be merged in
    again.
    """
    from kvcore.config import SECRETS_VARIABLE, secret_settings

    secrets = secret_settings(config)
    return {"KVCORE_CONFIG": "", SECRETS_VARIABLE: json.dumps(secrets) if secrets else ""}


def has_entry_point(group: str, value: str) -> bool:
    """Return True if installed packages have the entry point ``value`` in ``group``."""
    return any(point.value == value for point in importlib.metadata.entry_points(group=group))


def command_beside(name: str) -> str:
    """Return the path of the command ``name`` beside this interpreter, or ``name`` itself."""
    return shutil.which(name, path=str(Path(sys.executable).parent)) or name
