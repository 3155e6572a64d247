"""The options of `kvcore simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcore import log
from kvcore.cli.options import AsJson
from kvcore.cli.tables import print_table
from kvcore.errors import ConfigError

if TYPE_CHECKING:
    from kvcore.cli.simulate.agents import Agents

__all__ = ["simulate_trace"]


def simulate_trace(
    trace: Annotated[
        Path | None,
        typer.Argument(help="Trace as JSON lines, in the format that Mooncake publishes."),
    ] = None,
    generate: Annotated[
        str | None, typer.Option("--generate", help="In place of a trace: agents, made up.")
    ] = None,
    sessions: Annotated[
        int, typer.Option("--sessions", help="Sessions of --generate agents.")
    ] = 220,
    seed: Annotated[int, typer.Option("--seed", help="Seed of --generate agents.")] = 7,
    host: Annotated[
        list[str] | None, typer.Option("--host", help="Host memory [64GiB]. May be repeated.")
    ] = None,
    disk: Annotated[
        list[str] | None, typer.Option("--disk", help="Disk [0]. May be repeated.")
    ] = None,
    policies: Annotated[
        list[str] | None, typer.Option("--policy", help="Eviction policy [lru]. May be repeated.")
    ] = None,
    ways: Annotated[
        list[str] | None,
        typer.Option("--plan", help="planner, always or never [planner]. May be repeated."),
    ] = None,
    write: Annotated[
        str, typer.Option("--write", help="Write policy of the disk tier.")
    ] = "write_through",
    block_tokens: Annotated[
        int, typer.Option("--block-tokens", min=1, help="Tokens for each hash id of the trace.")
    ] = 512,
    token_bytes: Annotated[
        str, typer.Option("--token-bytes", help="KV bytes of a token, over all layers.")
    ] = "128KiB",
    point_bytes: Annotated[
        str,
        typer.Option(
            "--point-bytes",
            help='Bytes of a resume point, for a model with states; or blocks of as many: "7rows".',
        ),
    ] = "0",
    point_step: Annotated[
        int | None,
        typer.Option("--point-step", help="Tokens between two places of points [a block]."),
    ] = None,
    points: Annotated[
        list[str] | None,
        typer.Option(
            "--points",
            help="Points that are kept: ends, junctions and every=TOKENS, joined by commas; last; "
            "all; or a policy by its name, as in points.policy [ends,junctions]. May be repeated.",
        ),
    ] = None,
    layers: Annotated[int, typer.Option("--layers", help="Layers of the model.")] = 32,
    width: Annotated[
        int, typer.Option("--width", help="Hidden size: heads times head size.")
    ] = 4096,
    parameters: Annotated[
        float, typer.Option("--parameters", help="Parameters of the model.")
    ] = 8e9,
    flops: Annotated[float, typer.Option("--flops", help="FLOP/s of prefill.")] = 4e14,
    host_bandwidth: Annotated[
        str, typer.Option("--host-bandwidth", help="Bytes per second, host to device.")
    ] = "20GB",
    disk_bandwidth: Annotated[
        str, typer.Option("--disk-bandwidth", help="Bytes per second, disk to host.")
    ] = "3GB",
    disk_latency_ms: Annotated[
        float, typer.Option("--disk-latency-ms", help="Latency of one disk operation.")
    ] = 0.2,
    speed: Annotated[
        float, typer.Option("--speed", help="Replay the trace this many times faster.")
    ] = 1.0,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Replay at most this many requests.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option("--png", help="Plot hit rates and times (needs matplotlib).")
    ] = None,
    in_json: AsJson = False,
) -> None:
    """Replay a trace through the real index and policies, with modelled times.

    Repeated options make a sweep over all combinations.
    """
    from kvcore.cli.simulate.sweep import Machine, Sweep, Trace, as_json, as_table, draw, run

    log.configure("error")
    machine = Machine(
        block_tokens,
        token_bytes,
        layers,
        width,
        parameters,
        flops,
        host_bandwidth,
        disk_bandwidth,
        disk_latency_ms,
        point_bytes,
        point_step,
    )
    sweep = Sweep(
        host or ["64GiB"],
        disk or ["0B"],
        policies or ["lfu"],
        ways or ["planner"],
        write,
        points or ["ends,junctions"],
    )
    chosen = Trace(_source(trace, generate, sessions, seed), limit)
    if next(chosen.requests(block_tokens), None) is None:
        raise ConfigError(f"{chosen.name} has no requests: give a file of JSON lines")
    outcomes = list(run(chosen, machine, sweep, speed))
    if in_json:
        typer.echo(as_json(chosen, outcomes))
    else:
        print_table(as_table(chosen, outcomes))
    if picture is not None:
        draw(picture, chosen, outcomes)


def _source(trace: Path | None, generate: str | None, sessions: int, seed: int) -> Path | Agents:
    from kvcore.cli.simulate.agents import Agents

    if (trace is None) == (generate is None):
        raise ConfigError("give the file of a trace, or --generate agents: one of them")
    if trace is not None:
        return trace
    if generate != "agents":
        raise ConfigError(f"given --generate {generate!r}; supported is agents")
    return Agents(sessions=sessions, seed=seed)
