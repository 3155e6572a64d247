"""`kvcore simulate`: the scenarios of a sweep, and their outcomes as a table, JSON and a plot."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from kvcore.cli.simulate.run import Outcome, Scenario, Way, simulate
from kvcore.cli.simulate.trace import read_trace
from kvcore.config import format_size, parse_size
from kvcore.errors import ConfigError
from kvcore.index.policy import BUILTIN_POLICIES
from kvcore.manager import WritePolicy
from kvcore.telemetry.rates import ComputeRates, TierRates

__all__ = ["Machine", "Sweep", "as_json", "as_table", "draw", "run"]


@dataclass(frozen=True)
class Machine:
    """The model and the media: KV bytes per token, weights, and bytes and FLOP per second."""

    block_tokens: int
    token_bytes: str
    layers: int
    width: int
    parameters: float
    flops: float
    host_bandwidth: str
    disk_bandwidth: str
    disk_latency_ms: float


@dataclass(frozen=True)
class Sweep:
    """The values to combine into scenarios: sizes as text, policies, and what decides to load."""

    host: Sequence[str]
    disk: Sequence[str]
    policies: Sequence[str]
    ways: Sequence[str]
    write: str


def run(
    trace: Path, machine: Machine, sweep: Sweep, speed: float, limit: int | None
) -> Iterator[Outcome]:
    """Yield the outcome of each scenario as it ends. Raises ConfigError or FormatError."""
    for scenario in list(_scenarios(machine, sweep)):
        yield simulate(scenario, read_trace(trace, machine.block_tokens, limit), speed)


def _scenarios(machine: Machine, sweep: Sweep) -> Iterator[Scenario]:
    block_bytes = machine.block_tokens * parse_size(machine.token_bytes)
    if block_bytes < 1 or min(machine.layers, machine.width, machine.parameters) < 1:
        raise ConfigError(
            f"given --token-bytes {machine.token_bytes} --layers {machine.layers} --width "
            f"{machine.width} --parameters {machine.parameters:g}; each must be above 0"
        )
    if not machine.flops > 0:
        raise ConfigError(f"given --flops {machine.flops:g}; it must be above 0")
    if machine.disk_latency_ms < 0:
        raise ConfigError(
            f"given --disk-latency-ms {machine.disk_latency_ms:g}; it must not be negative"
        )
    for host, disk, policy, way in itertools.product(
        sweep.host, sweep.disk, sweep.policies, sweep.ways
    ):
        yield Scenario(
            host_blocks=parse_size(host) // block_bytes,
            disk_blocks=parse_size(disk) // block_bytes,
            block_tokens=machine.block_tokens,
            block_bytes=block_bytes,
            layers=machine.layers,
            compute=ComputeRates.guess(
                int(machine.parameters), machine.width, machine.layers, machine.flops
            ),
            host=TierRates(2e-5, _second_a_byte(machine.host_bandwidth)),
            disk=TierRates(machine.disk_latency_ms / 1e3, _second_a_byte(machine.disk_bandwidth)),
            way=Way(_one_of("--plan", way, [known.value for known in Way])),
            policy=_one_of("--policy", policy, sorted(BUILTIN_POLICIES)),
            write=WritePolicy(_one_of("--write", sweep.write, [w.value for w in WritePolicy])),
        )


def _one_of(option: str, given: str, known: Sequence[str]) -> str:
    if given not in known:
        raise ConfigError(f"given {option} {given!r}; supported are {', '.join(known)}")
    return given


def _second_a_byte(bandwidth: str) -> float:
    found = parse_size(bandwidth)
    if found < 1:
        raise ConfigError(f"given a bandwidth of {bandwidth!r}; give bytes per second above 0")
    return 1 / found


# -- results ------------------------------------------------------------------------------------


def row(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome as plain values: sizes in bytes, times in seconds, rates as shares."""
    scenario = outcome.scenario
    return {
        "host_bytes": scenario.host_blocks * scenario.block_bytes,
        "disk_bytes": scenario.disk_blocks * scenario.block_bytes,
        "policy": scenario.policy,
        "plan": scenario.way.value,
        "write": scenario.write.value,
        "requests": outcome.requests,
        "tokens": outcome.tokens,
        "hit_rate": outcome.hit_rate,
        "misses": outcome.misses,
        "ttft_s": {name: outcome.quantile(share) for name, share in _QUANTILES},
        "prefill_s": outcome.prefill,
        "saved_s": outcome.saved,
    }


_QUANTILES = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))


def as_json(trace: Path, outcomes: Sequence[Outcome]) -> str:
    """Return the trace's name and all outcomes as JSON."""
    return json.dumps({"trace": trace.name, "rows": [row(one) for one in outcomes]}, indent=1)


def as_table(trace: Path, outcomes: Sequence[Outcome]) -> Table:
    """Return a table with a row for each scenario."""
    table = Table(
        title=trace.name, caption="times are modelled; hits come from the real index and policies"
    )
    for name in ("host", "disk", "policy", "plan"):
        table.add_column(name)
    for name in ("host hits", "disk hits", "TTFT p50", "p90", "p99", "prefill saved"):
        table.add_column(name, justify="right")
    for outcome in outcomes:
        shown = row(outcome)
        rate, first = shown["hit_rate"], shown["ttft_s"]
        share = outcome.saved / outcome.prefill_alone if outcome.prefill_alone else 0.0
        table.add_row(
            format_size(shown["host_bytes"], exact=False),
            format_size(shown["disk_bytes"], exact=False),
            shown["policy"],
            shown["plan"],
            *(f"{rate.get(tier, 0.0):.1%}" for tier in ("host", "disk")),
            *(f"{first[name]:.3g} s" for name, _ in _QUANTILES),
            f"{outcome.saved:,.0f} s ({share:.0%})",
        )
    return table


def draw(path: Path, trace: Path, outcomes: Sequence[Outcome]) -> None:
    """Plot hit rate and time to the first token over host memory, a line for each other setting.

    Raises ConfigError if matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"no {path.name}: matplotlib is not installed (pip install 'kvcore[bench]')"
        ) from error
    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    hits, first = figure.subplots(1, 2)
    lines: dict[str, list[dict[str, Any]]] = {}
    for shown in map(row, outcomes):
        name = f"{shown['policy']}, {shown['plan']}, disk {format_size(shown['disk_bytes'])}"
        lines.setdefault(name, []).append(shown)
    for name, rows in lines.items():
        rows.sort(key=lambda shown: shown["host_bytes"])
        sizes = [shown["host_bytes"] / 2**30 for shown in rows]
        hits.plot(sizes, [sum(shown["hit_rate"].values()) for shown in rows], "o-", label=name)
        first.plot(sizes, [shown["ttft_s"]["p50"] for shown in rows], "o-", label=name)
    hits.set(xlabel="host memory, GiB", ylabel="share of tokens loaded", ylim=(0, 1))
    first.set(xlabel="host memory, GiB", ylabel="seconds to the first token, median")
    first.set_ylim(bottom=0)
    hits.legend(fontsize="small")
    figure.suptitle(f"{trace.name}, modelled times", fontsize="medium")
    figure.savefig(path, dpi=130)
