"""`kvcore explain`: one request in words, or the latest requests as a table."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvcore.cli.options import AsJson, Assignments, ConfigFile, load
from kvcore.cli.tables import print_table
from kvcore.errors import ConfigError

__all__ = ["as_table", "as_text", "find"]


def find(folder: Path, request: str | None, last: int) -> list[dict[str, Any]]:
    """Return the record of ``request``, or the ``last`` records if it is None.

    If no id equals ``request``, the newest id that contains it is taken. Raises ConfigError if
    there is none.
    """
    from kvcore.explain.file import read_records

    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder: give the engine's explain.path")
    try:
        records = list(read_records(folder))
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be read ({error}): run it as the engine's user"
        ) from error
    if not records:
        raise ConfigError(
            f"no records in {folder}: give the engine's explain.path. A record is written when its "
            "request has ended"
        )
    if request is None:
        return list(islice(records, last))
    exact = [record for record in records if record["request"] == request]
    alike = [record for record in records if request in record["request"]]
    found = (exact or alike)[:1]
    if not found:
        raise ConfigError(
            f"no record of {request!r} among the {len(records)} in {folder}: it has not ended, is "
            "too long ago (raise explain.capacity), or was another engine's"
        )
    return found


def as_table(records: list[dict[str, Any]]) -> Table:
    table = Table("request", "ended", "tokens", "held by", "missed", "plan", "ms", box=None)
    for record in records:
        ago = f"{max(time.time() - record['at'], 0):.0f} s ago"
        matched = ", ".join(_matched(record)) or "nothing"
        causes = ", ".join(miss.get("cause", "") for miss in record.get("misses", []))
        plan = record.get("plan", {}).get("action", "")
        ms = f"{sum(record.get('ms', {}).values()):.0f}"
        cells = (record["request"], ago, str(record.get("tokens", "")), matched, causes, plan, ms)
        table.add_row(*(Text(cell, overflow="fold") for cell in cells))
    return table


def as_text(record: dict[str, Any]) -> str:
    """Return a whole record as text, one fact a line."""
    return "\n".join(_lines(record))


def _lines(record: dict[str, Any]) -> Iterator[str]:
    outcome = record.get("outcome", "")
    yield f"request {record['request']}: {record.get('tokens')} tokens, {outcome}"
    yield f"  the engine held        {record.get('engine_held', 0)} tokens itself"
    for name, value in record.get("asked", {}).items():
        yield f"  the request asked      {name}: {json.dumps(value)}"
    for line in _matched(record):
        yield f"  found                  {line}"
    for miss in record.get("misses", []):
        yield f"  the rest was not used  {_cause(miss)}"
    if plan := record.get("plan"):
        yield from _plan(plan)
    if otherwise := record.get("otherwise"):
        yield from _otherwise(otherwise)
    for tier, tokens in record.get("loaded", {}).items():
        yield f"  loaded                 {tokens} tokens from {tier}"
    if failures := record.get("failures"):
        yield f"  loads that failed      {failures}"
    for name, ms in record.get("ms", {}).items():
        yield f"  {name:22} {ms:.1f} ms"


def _matched(record: dict[str, Any]) -> list[str]:
    return [
        f"{found['tier']}: tokens {found['tokens'][0]} to {found['tokens'][1]}"
        for found in record.get("matched", [])
    ]


def _cause(miss: dict[str, Any]) -> str:
    words = str(miss.get("cause", ""))
    if "tier" in miss:
        words += f" from {miss['tier']}"
    if "seconds_ago" in miss:
        words += f", {miss['seconds_ago']:.1f} s before"
    if "differed" in miss:
        words += f" ({', '.join(miss['differed'])} differed)"
    if "held" in miss:
        words += f" there; blocks are held to token {miss['held']}"
    return words


def _otherwise(times: dict[str, Any]) -> Iterator[str]:
    names = {
        "load_all_ms": "estimate, loading",
        "recompute_ms": "estimate, computing",
        "loading_ms": "of it, loads alone",
    }
    for key, name in names.items():
        if times.get(key) is not None:
            yield f"  {name:22} {times[key]:.1f} ms"
    for why in times.get("unknown", []):
        yield f"  {'no estimate':22} {why}"


def _plan(plan: dict[str, Any]) -> Iterator[str]:
    yield f"  planned                {plan['action']} up to token {plan['stop']} ({plan['why']})"
    yield f"  expected               {plan['expected_ms']:.1f} ms"
    yield f"  loading all            {plan['load_all_ms']:.1f} ms"
    yield f"  computing all          {plan['recompute_ms']:.1f} ms"
    if plan.get("deadline_ms") is not None:
        yield f"  given up after         {plan['deadline_ms']:.0f} ms"
    for tier, rate in plan.get("rates", {}).items():
        speed = 1e-9 / rate["byte_s"] if rate["byte_s"] else float("inf")
        latency = 1e3 * rate["operation_s"]
        yield f"  rate of {tier:14} {latency:.2f} ms an operation, {speed:.2f} GB/s"


# -- the command --------------------------------------------------------------------------------


def explain_request(
    request: Annotated[
        str | None, typer.Argument(help="Request id or part of it. Default: list the latest.")
    ] = None,
    path: Annotated[
        Path | None, typer.Option("--path", help="Folder of records. Default: explain.path.")
    ] = None,
    last: Annotated[int, typer.Option("--last", min=1, help="Number of requests to list.")] = 20,
    file: ConfigFile = None,
    assignments: Assignments = None,
    in_json: AsJson = False,
) -> None:
    """Explain how a request was served: what matched, what was planned, what happened."""
    folder = path or load(file, assignments).explain.path
    if folder is None:
        raise ConfigError("given no --path and no explain.path: name the folder of records")
    found = find(folder, request, last)
    if in_json:
        typer.echo(json.dumps(found, indent=1))
    elif request is None:
        print_table(as_table(found))
    else:
        Console().print(as_text(found[0]), markup=False, highlight=False)
