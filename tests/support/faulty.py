"""The plugin ``tests/engines/faulty``, for engines that are forks of one process.

What it is told lies beside it and not in variables of the environment: a process from which engines
are forked takes 10 s of a core to import SGLang, and has one environment.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import NamedTuple

_PLUGIN = Path(__file__).parents[1] / "engines" / "faulty"


class FaultyPlugin(NamedTuple):
    """A copy of the plugin. While there is the file ``fails``, every load of its operations fails.

    Its selector "telling" writes what it is shown to the folder ``told``.
    """

    env: dict[str, str]
    """The environment of an engine that finds this copy."""
    fails: Path
    told: Path


def faulty_plugin(folder: Path) -> FaultyPlugin:
    """Copy the plugin to ``folder``, which must not exist."""
    shutil.copytree(_PLUGIN, folder)
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return FaultyPlugin({"PYTHONPATH": path}, folder / "fails", folder / "told")
