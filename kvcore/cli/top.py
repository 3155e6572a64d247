"""`kvcore top`: live metrics of an engine, from its Prometheus endpoint.

fetch ─▶ Sample ─┐
fetch ─▶ Sample ─┴▶ frame     bandwidth needs two samples; all else is from the last one

    limit         bytes per second of a path while one of its operations runs, over all of them
    TTFT saved    seconds to the first token, expected if computed minus expected as loaded, at
                  measured rates, summed over the requests that loaded
"""

from __future__ import annotations

import time
import urllib.request
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from kvcore.config import format_size
from kvcore.errors import UnsupportedError

__all__ = ["Sample", "fetch", "frame", "parse"]

FETCH_S = 5.0
MAX_BYTES = 64 << 20


@dataclass
class Sample:
    """Sums over all engines of a page, by metric and one label. ``at`` is the time in seconds."""

    at: float = 0.0
    used: dict[str, float] = field(default_factory=dict)
    capacity: dict[str, float] = field(default_factory=dict)
    hits: float = 0.0
    misses: dict[str, float] = field(default_factory=dict)
    moved: dict[str, float] = field(default_factory=dict)
    queue: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    expected: dict[str, float] = field(default_factory=dict)


_KEPT = {
    "kvcore_tier_used_bytes": ("used", "tier"),
    "kvcore_tier_capacity_bytes": ("capacity", "tier"),
    "kvcore_misses_total": ("misses", "reason"),
    "kvcore_transfer_bytes_total": ("moved", "path"),
    "kvcore_queue_depth": ("queue", "path"),
    "kvcore_transfer_seconds_sum": ("seconds", "path"),
    "kvcore_expected_ttft_seconds_total": ("expected", "way"),
}


def fetch(url: str) -> Sample:
    """Read the endpoint. Blocks. Raises UnsupportedError if it has no metrics of kvcore."""
    try:
        with urllib.request.urlopen(url, timeout=FETCH_S) as answer:
            text = answer.read(MAX_BYTES).decode()
    except (OSError, ValueError) as error:
        raise UnsupportedError(
            f"{url}: {error}; give the address of the engine's metrics with --url"
        ) from error
    return parse(text, time.monotonic())


def parse(text: str, at: float) -> Sample:
    """Parse a page in Prometheus' text format. Raises UnsupportedError for anything else."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    hits, any_of_ours = 0.0, False
    try:
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    except (ValueError, KeyError, IndexError) as error:
        raise UnsupportedError(f"not a page of metrics: {error}") from error
    for name, labels, value, *_ in samples:
        any_of_ours |= name.startswith("kvcore_")
        if name == "kvcore_hits_total":
            hits += value
        elif name in _KEPT:
            kind, label = _KEPT[name]
            found[kind][labels.get(label, "")] += value
    if not any_of_ours:
        raise UnsupportedError(
            "no metrics of kvcore there; set metrics.enabled = true, and send a request"
        )
    return Sample(at, hits=hits, **{kind: dict(series) for kind, series in found.items()})


def frame(now: Sample, before: Sample | None = None) -> Group:
    """Return one screen: tiers, lookups and transfers."""
    return Group(_tiers(now), "", _lookups(now), "", _transfers(now, before))


def _tiers(now: Sample) -> Table:
    table = Table("tier", "used", "of", "", box=None, title="tiers", title_justify="left")
    for tier in sorted(now.used.keys() | now.capacity.keys()):
        used, capacity = now.used.get(tier, 0), now.capacity.get(tier, 0)
        share = f"{used / capacity:.0%}" if capacity else ""
        table.add_row(tier, _size(used), _size(capacity), share)
    return table


def _lookups(now: Sample) -> Table:
    table = Table("lookups", "", "", box=None, title="hits and misses", title_justify="left")
    total = now.hits + sum(now.misses.values())
    for name, count in [("hit", now.hits), *sorted(now.misses.items())]:
        table.add_row(name, f"{count:.0f}", f"{count / total:.1%}" if total else "")
    if computed := now.expected.get("recompute"):
        saved = computed - now.expected.get("load", 0.0)
        table.add_row("TTFT saved", f"{saved:.1f} s", f"{saved / computed:.1%}")
    return table


def _transfers(now: Sample, before: Sample | None) -> Table:
    columns = ("path", "moved", "a second", "limit", "queue")
    table = Table(*columns, box=None, title="transfers")
    table.title_justify = "left"
    for path in sorted(now.moved.keys() | now.queue.keys()):
        speed = _speed(path, now, before)
        moved, queue = now.moved.get(path, 0), now.queue.get(path, 0)
        table.add_row(path, _size(moved), speed, _limit(path, now), f"{queue:.0f}")
    return table


def _limit(path: str, now: Sample) -> str:
    """Return the bandwidth of a path while an operation runs."""
    seconds = now.seconds.get(path, 0.0)
    return _size(now.moved.get(path, 0.0) / seconds) if seconds > 0 else ""


def _speed(path: str, now: Sample, before: Sample | None) -> str:
    if before is None or now.at <= before.at:
        return ""
    moved = _of(now.moved, path) - _of(before.moved, path)
    return _size(max(moved, 0) / (now.at - before.at))  # below zero: the engine restarted


def _of(series: Mapping[str, float], name: str) -> float:
    return series.get(name, 0.0)


def _size(nbytes: float) -> str:
    return format_size(int(nbytes), exact=False)


# -- the command --------------------------------------------------------------------------------


def show_top(
    url: Annotated[
        str, typer.Option("--url", help="Prometheus endpoint of the engine.")
    ] = "http://127.0.0.1:8000/metrics",
    every: Annotated[
        float, typer.Option("--every", min=0.1, help="Seconds between updates.")
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print once and exit.")] = False,
) -> None:
    """Watch the tiers, hits, misses, bandwidth and queues of a running engine."""
    before = fetch(url)
    if once:
        Console().print(frame(before))
        return
    with Live(frame(before), console=Console(), auto_refresh=False) as live:
        while True:
            time.sleep(every)
            now = fetch(url)
            live.update(frame(now, before), refresh=True)
            before = now
