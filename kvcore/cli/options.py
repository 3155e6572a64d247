"""Options that several commands share, and the configuration that they give."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvcore.config import (
    Config,
    load_config,
    merge_tables,
    parse_assignment,
    secrets_in,
)
from kvcore.errors import ConfigError

__all__ = ["AsJson", "Assignments", "ConfigFile", "load"]

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "-c", "--config", help="TOML or YAML file. Default: the file that KVCORE_CONFIG names."
    ),
]
Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="NAME=VALUE", help="Set one setting, for example host.capacity=8GiB."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def load(
    file: Path | None, assignments: list[str] | None, extra: dict[str, Any] | None = None
) -> Config:
    """Return the settings of ``file`` and the environment, overridden by ``--set``.

    ``extra`` is a nested table that overrides all of them. Raises ConfigError.
    """
    overrides: dict[str, Any] = {}
    for text in assignments or []:
        merge_tables(overrides, parse_assignment(text))
    for name in secrets_in(overrides):
        raise ConfigError(
            f"--set {name}: other users can read command lines; give secrets in the file, or as "
            f"the variable KVCORE__{name.upper().replace('.', '__')}"
        )
    merge_tables(overrides, extra or {})
    return load_config(file, overrides, overrides_from="--set")
