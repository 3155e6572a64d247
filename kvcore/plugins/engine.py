"""What adapters do to make an engine find kvcore, and to start the engine with it. Imports no
engine and no torch.

    engine's entry point ──▶ unsupported   hooks go in unless the version does not fit
    `kvcore serve`       ──▶ settings, environment, command of the engine's own server
"""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcore.plugins.hookspecs import EngineSpec
from kvcore.plugins.manager import installed

if TYPE_CHECKING:
    from kvcore.config.schema import Config

__all__ = [
    "SECRET_VARIABLE",
    "command_beside",
    "given_settings",
    "has_entry_point",
    "serve_environment",
    "unsupported",
]

SECRET_VARIABLE = "KVCORE__NAMESPACE__SECRET"


def unsupported(engine: EngineSpec) -> dict[str, object] | None:
    """Return what to log if the installed engine is not of a supported version, else None."""
    found = installed(engine)
    if found.supported:
        return None
    return {
        "distribution": found.distribution,
        "version": found.version,
        "supported": engine.versions,
        "advice": f"install a kvcore for this version of {engine.name}, or a supported version",
    }


def given_settings(config: Config, *, secrets: bool = False) -> dict[str, Any]:
    """Return the settings that were set, nested, for the engine's own processes; the choice of the
    engine is left out. Secrets are left out unless ``secrets``."""
    from kvcore.config import explicit_settings

    settings = explicit_settings(config, secrets=secrets)
    settings.pop("engine", None)
    return settings


def serve_environment(config: Config) -> dict[str, str]:
    """Return the environment of an engine whose command line carries the other settings.

    Secrets travel here, because other users can read command lines. The settings are complete, so a
    file named by KVCORE_CONFIG must not be merged in again.
    """
    env = {"KVCORE_CONFIG": ""}
    if config.namespace.secret is not None:
        env[SECRET_VARIABLE] = config.namespace.secret
    return env


def has_entry_point(group: str, value: str) -> bool:
    """Return True if package metadata names ``value`` in ``group``, as the engine will see it."""
    return any(point.value == value for point in importlib.metadata.entry_points(group=group))


def command_beside(name: str) -> str:
    """Return the command ``name`` of this interpreter's environment, or its bare name."""
    return shutil.which(name, path=str(Path(sys.executable).parent)) or name
