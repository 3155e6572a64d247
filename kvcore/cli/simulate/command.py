"""The options of `kvcore simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvcore import log
from kvcore.cli.options import AsJson

__all__ = ["simulate_trace"]


def simulate_trace(
    trace: Annotated[Path, typer.Argument(help="JSON lines, as Mooncake publishes its traces.")],
    host: Annotated[
        list[str] | None, typer.Option("--host", help="Host memory [64GiB]; may be given again.")
    ] = None,
    disk: Annotated[
        list[str] | None, typer.Option("--disk", help="Disk [0]; may be given again.")
    ] = None,
    policies: Annotated[
        list[str] | None, typer.Option("--policy", help="Eviction [lru]; may be given again.")
    ] = None,
    ways: Annotated[
        list[str] | None,
        typer.Option("--plan", help="planner, always or never [planner]; may be given again."),
    ] = None,
    write: Annotated[
        str, typer.Option("--write", help="When blocks go to disk.")
    ] = "write_through",
    block_tokens: Annotated[
        int, typer.Option("--block-tokens", min=1, help="Of a hash id of the trace.")
    ] = 512,
    token_bytes: Annotated[
        str, typer.Option("--token-bytes", help="KV of a token, all layers.")
    ] = "128KiB",
    layers: Annotated[int, typer.Option("--layers", help="Of the model.")] = 32,
    width: Annotated[int, typer.Option("--width", help="Heads times head size.")] = 4096,
    parameters: Annotated[float, typer.Option("--parameters", help="Of the model.")] = 8e9,
    flops: Annotated[float, typer.Option("--flops", help="Prefill's, in a second.")] = 4e14,
    host_bandwidth: Annotated[
        str, typer.Option("--host-bandwidth", help="Bytes a second, host to device.")
    ] = "20GB",
    disk_bandwidth: Annotated[
        str, typer.Option("--disk-bandwidth", help="Bytes a second, disk to host.")
    ] = "3GB",
    disk_latency_ms: Annotated[
        float, typer.Option("--disk-latency-ms", help="Of an operation.")
    ] = 0.2,
    speed: Annotated[
        float, typer.Option("--speed", help="Requests come this many times faster.")
    ] = 1.0,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Replay no more requests than this.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option("--png", help="Draw hit rates and times (matplotlib).")
    ] = None,
    in_json: AsJson = False,
) -> None:
    """Replay a trace: hits are those of the real index and policies, times are modelled.

    Options that may be given again make a sweep of all their combinations.
    """
    from kvcore.cli.simulate.sweep import Machine, Sweep, as_json, as_table, draw, run

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
    )
    sweep = Sweep(
        host or ["64GiB"], disk or ["0B"], policies or ["lru"], ways or ["planner"], write
    )
    outcomes = list(run(trace, machine, sweep, speed, limit))
    if in_json:
        typer.echo(as_json(trace, outcomes))
    else:
        Console().print(as_table(trace, outcomes))
    if picture is not None:
        draw(picture, trace, outcomes)
