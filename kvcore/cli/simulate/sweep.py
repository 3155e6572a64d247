"""`kvcore simulate`: the scenarios of a sweep, and their outcomes as a table, JSON and a plot."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from kvcore.cli.simulate.agents import Agents
from kvcore.cli.simulate.points import PointRule
from kvcore.cli.simulate.run import Outcome, Scenario, Way, simulate
from kvcore.cli.simulate.trace import TraceRequest, read_trace
from kvcore.config import format_size, parse_size
from kvcore.errors import ConfigError
from kvcore.index.policy import BUILTIN_POLICIES
from kvcore.manager import WritePolicy
from kvcore.plugins import PluginManager
from kvcore.telemetry.rates import ComputeRates, TierRates

__all__ = ["Machine", "Sweep", "Trace", "as_json", "as_table", "draw", "run"]


@dataclass(frozen=True)
class Machine:
    """The model and the media: KV bytes per token, weights, and bytes and FLOP per second.

    ``point_bytes`` are those of a resume point ("0" for a model without), or a number of blocks
    such as "7 rows". The engine has one every ``point_step`` tokens.
    """

    block_tokens: int
    token_bytes: str
    layers: int
    width: int
    parameters: float
    flops: float
    host_bandwidth: str
    disk_bandwidth: str
    disk_latency_ms: float
    point_bytes: str = "0"
    point_step: int | None = None


@dataclass(frozen=True)
class Sweep:
    """The values to combine into scenarios.

    They are sizes as text, policies, what decides to load, and which resume points are kept.
    """

    host: Sequence[str]
    disk: Sequence[str]
    policies: Sequence[str]
    ways: Sequence[str]
    write: str
    points: Sequence[str] = ("ends,junctions",)


@dataclass(frozen=True)
class Trace:
    """The requests of every scenario: of a file, or made up."""

    source: Path | Agents
    limit: int | None = None

    @property
    def name(self) -> str:
        """The name to show."""
        return self.source.name if isinstance(self.source, Path) else "agents"

    def requests(self, block_tokens: int) -> Iterator[TraceRequest]:
        """Return the requests from the first on. Raises ConfigError or FormatError."""
        if isinstance(self.source, Path):
            return read_trace(self.source, block_tokens, self.limit)
        return self.source.requests(block_tokens, self.limit)


def run(trace: Trace, machine: Machine, sweep: Sweep, speed: float) -> Iterator[Outcome]:
    """Yield the outcome of each scenario as it ends. Raises ConfigError or FormatError."""
    for scenario in list(_scenarios(machine, sweep)):
        yield simulate(scenario, trace.requests(machine.block_tokens), speed)


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
    step = machine.block_tokens if machine.point_step is None else machine.point_step
    if step < 1 or step % machine.block_tokens:
        raise ConfigError(
            f"given --point-step {step}; it must be a multiple of --block-tokens "
            f"{machine.block_tokens}"
        )
    plugins = PluginManager()
    rules = [PointRule.read(text, plugins) for text in sweep.points]
    for host, disk, policy, way, rule in itertools.product(
        sweep.host, sweep.disk, sweep.policies, sweep.ways, rules
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
            point_bytes=_point_bytes(machine.point_bytes, block_bytes),
            point_step=step // machine.block_tokens,
            points=rule,
        )


def _point_bytes(given: str, block_bytes: int) -> int:
    """Return the bytes of a point from a size, or from a number of rows as large as a block."""
    rows = given.removesuffix("rows").strip()
    if rows != given and rows.isdecimal():
        return int(rows) * block_bytes
    return parse_size(given)


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
    scenario, written = outcome.scenario, outcome.written
    points = scenario.points.name if scenario.point_bytes else None
    return {
        "host_bytes": scenario.host_blocks * scenario.block_bytes,
        "disk_bytes": scenario.disk_blocks * scenario.block_bytes,
        "policy": scenario.policy,
        "plan": scenario.way.value,
        "write": scenario.write.value,
        "points": points,
        "requests": outcome.requests,
        "tokens": outcome.tokens,
        "hit_rate": outcome.hit_rate,
        "misses": outcome.misses,
        "held_bytes": {tier: kinds._asdict() for tier, kinds in outcome.held.items()},
        "written_bytes": written._asdict(),
        "ttft_s": {name: outcome.quantile(share) for name, share in _QUANTILES},
        "prefill_s": outcome.prefill,
        "saved_s": outcome.saved,
    }


_QUANTILES = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))


def as_json(trace: Trace, outcomes: Sequence[Outcome]) -> str:
    """Return the trace's name and all outcomes as JSON."""
    return json.dumps({"trace": trace.name, "rows": [row(one) for one in outcomes]}, indent=1)


def as_table(trace: Trace, outcomes: Sequence[Outcome]) -> Table:
    """Return a table with a row for each scenario. What is the same in all stands below it.

    If the model has resume points, it says which are kept, and how many bytes are held and written.
    """
    settings = [_settings(row(outcome)) for outcome in outcomes]
    found = [_found(outcome) for outcome in outcomes]
    told = [
        name for name in settings[0] if name == "host" or len({one[name] for one in settings}) > 1
    ]
    common = [f"{name} {value}" for name, value in settings[0].items() if name not in told]
    common += ["times are modelled", "hits come from the real index and policies"]
    table = Table(title=trace.name, caption="; ".join(common))
    for name in told:
        table.add_column(name, overflow="fold")
    for name in found[0]:
        table.add_column(name, justify="right", overflow="fold")
    for one, shown in zip(settings, found, strict=True):
        table.add_row(*(one[name] for name in told), *shown.values())
    return table


def _settings(shown: dict[str, Any]) -> dict[str, str]:
    """Return what a scenario was given, as text."""
    points = {"points": shown["points"]} if shown["points"] else {}
    return {
        "host": format_size(shown["host_bytes"], exact=False),
        "disk": format_size(shown["disk_bytes"], exact=False),
        "policy": shown["policy"],
        "plan": shown["plan"],
        **points,
    }


def _found(outcome: Outcome) -> dict[str, str]:
    """Return what came of a scenario, as text."""
    shown = row(outcome)
    share = outcome.saved / outcome.prefill_alone if outcome.prefill_alone else 0.0
    kept = {}
    if outcome.scenario.point_bytes:
        blocks = sum(kinds.blocks for kinds in outcome.held.values())
        points = sum(kinds.points for kinds in outcome.held.values())
        kept = {"blocks held": blocks, "points held": points, "written": sum(outcome.written)}
    return {
        **{f"{tier} hits": f"{shown['hit_rate'].get(tier, 0.0):.1%}" for tier in ("host", "disk")},
        **{f"TTFT {name}": f"{shown['ttft_s'][name]:.3g} s" for name, _ in _QUANTILES},
        "prefill saved": f"{outcome.saved:,.0f} s ({share:.0%})",
        **{name: f"{size / 1e9:,.1f} GB" for name, size in kept.items()},
    }


def draw(path: Path, trace: Trace, outcomes: Sequence[Outcome]) -> None:
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
        name += f", points {shown['points']}" if shown["points"] else ""
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
