"""kvcore's metadata for a tree that is not installed: engines find its plugins by entry points."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["ROOT", "SOURCES", "project", "write_dist_info"]

ROOT = Path(__file__).parents[2]
SOURCES = ("", "kernels", "adapters/vllm", "adapters/sglang", "adapters/trtllm", "devtools")
"""Folders of the tree that hold packages."""


def project() -> dict[str, Any]:
    """Return the table ``project`` of pyproject.toml."""
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def write_dist_info(folder: Path) -> Path:
    """Write kvcore's name, version and entry points to ``folder``, as an installer would.

    Returns the ``.dist-info`` folder. If ``folder`` is on the module path, importlib finds it.
    """
    ours = project()
    info = folder / f"{ours['name']}-{ours['version']}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {ours['name']}\nVersion: {ours['version']}\n"
    )
    lines = []
    for group, points in ours["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items()), ""]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return info
