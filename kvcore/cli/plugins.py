"""`kvcore plugins`: the plugins that were found, as tables or JSON. Imports no engine."""

from __future__ import annotations

import json
from typing import Any

import typer
from rich.table import Table
from rich.text import Text

from kvcore import log
from kvcore.cli.options import AsJson, Assignments, ConfigFile, load
from kvcore.cli.tables import print_table
from kvcore.config import Config
from kvcore.engines.verdict import Verdict, judge
from kvcore.plugins import PluginManager
from kvcore.plugins.manager import Offer, Origin, reason


def manager(config: Config) -> PluginManager:
    return PluginManager(disable=config.plugins.disable, strict=config.plugins.strict)


def as_tables(plugins: PluginManager) -> list[Table | Text]:
    found = Table("kind", "name", "plugin", "from", "", box=None, pad_edge=False)
    for row in _rows(plugins):
        style = "red" if row["supported"] is False else ""
        cells = (row["kind"], row["name"], row["plugin"], row["distribution"], row["about"])
        found.add_row(*(Text(str(cell), overflow="fold") for cell in cells), style=style)
    lines: list[Table | Text] = [found]
    for failure in plugins.failures:
        origin = failure.origin
        text = f"left out: {origin.plugin} ({_distribution(origin)}): {reason(failure.error)}"
        lines.append(Text(text, style="red"))
    lines += [Text(f"disabled: {name}", style="dim") for name in plugins.disabled]
    return lines


def as_json(plugins: PluginManager) -> str:
    failures = [
        {
            "plugin": failure.origin.plugin,
            "distribution": _distribution(failure.origin),
            "error": reason(failure.error),
        }
        for failure in plugins.failures
    ]
    found = {"found": _rows(plugins), "left_out": failures, "disabled": list(plugins.disabled)}
    return json.dumps(found, indent=2)


def _rows(plugins: PluginManager) -> list[dict[str, Any]]:
    return [_row(found) for found in plugins.found()]


def _row(found: Offer) -> dict[str, Any]:
    row: dict[str, Any] = {
        "kind": found.kind,
        "name": found.name,
        "plugin": found.origin.plugin,
        "distribution": _distribution(found.origin),
        "about": "",
        "supported": None,
    }
    if found.kind == "engine":
        verdict = judge(found.item)
        row["supported"], row["standing"] = verdict.served, verdict.standing.value
        row["about"] = _engine_line(found, verdict)
    elif found.kind == "tier":
        row["about"] = found.item.medium
    return row


def _engine_line(found: Offer, verdict: Verdict) -> str:
    if verdict.version is None:
        return verdict.about
    return f"{verdict.about}; {_status(found) if verdict.served else verdict.advice}"


def _status(found: Offer) -> str:
    try:
        return str(found.item.status())
    except Exception as error:  # noqa: BLE001 - third-party code: the listing shows the error
        return f"status failed: {reason(error)}"


def _distribution(origin: Origin) -> str:
    return f"{origin.distribution} {origin.version}".strip() or "unknown distribution"


# -- the command --------------------------------------------------------------------------------


def show_plugins(
    file: ConfigFile = None, assignments: Assignments = None, in_json: AsJson = False
) -> None:
    """List engines, tiers, policies and operations, and the plugins that were left out."""
    effective = load(file, assignments)
    log.configure("error")  # the listing names plugins that were left out
    found = manager(effective)
    if in_json:
        typer.echo(as_json(found))
    else:
        print_table(*as_tables(found))
