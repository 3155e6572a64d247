"""`kvcore doctor`: examine the installation and say what to change."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from kvcore import log
from kvcore.cli.options import AsJson, Assignments, ConfigFile, load
from kvcore.cli.probe import Finding, Level
from kvcore.cli.tables import print_table

__all__ = ["as_json", "as_table", "examine_machine", "exit_code"]


def examine_machine(
    file: ConfigFile = None,
    assignments: Assignments = None,
    probe: Annotated[
        bool, typer.Option("--probe/--no-probe", help="Write and read 32 MiB in disk.path.")
    ] = True,
    contact: Annotated[
        bool,
        typer.Option("--contact/--no-contact", help="Connect to stores, server, etcd and NATS."),
    ] = True,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.1, help="Time limit for each server to answer.")
    ] = 3.0,
    in_json: AsJson = False,
) -> None:
    """Check engines, machine, disk, settings and servers, and say what to change.

    Exit code 1 if there is a problem.
    """
    from kvcore.cli import checks, plugins

    effective = load(file, assignments)
    log.configure("error")
    manager, limit = plugins.manager(effective), seconds if contact else None
    findings = list(checks.examine(effective, manager, probe=probe, contact_s=limit))
    if in_json:
        typer.echo(as_json(findings))
    else:
        print_table(as_table(findings))
    if code := exit_code(findings):
        raise typer.Exit(code)


def exit_code(findings: list[Finding]) -> int:
    """Return 1 if any finding is a problem, else 0."""
    return int(any(finding.level is Level.PROBLEM for finding in findings))


def as_json(findings: list[Finding]) -> str:
    return json.dumps([finding._asdict() for finding in findings], indent=1)


def as_table(findings: list[Finding]) -> Table:
    styles = {Level.GOOD: "green", Level.WARNING: "yellow", Level.PROBLEM: "red"}
    table = Table("", "", "found", "change", box=None, pad_edge=False)
    for about, level, found, change in findings:
        cells = (Text(found, overflow="fold"), Text(change, overflow="fold"))
        table.add_row(about, Text(level.value, style=styles[level]), *cells)
    return table
