"""The options of `kvcore simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvcore import log
from kvcore.cli.options import AsJson
from kvcore.errors import ConfigError

__all__ = ["simulate_trace"]


def simulate_trace(
    trace: Annotated[
        Path, typer.Argument(help="Trace as JSON lines, in the format that Mooncake publishes.")
    ],
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
    from kvcore.cli.simulate.sweep import Machine, Sweep, as_json, as_table, draw, run
    from kvcore.cli.simulate.trace import read_trace

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
    if next(read_trace(trace, block_tokens, 1), None) is None:
        raise ConfigError(f"{trace} has no requests: give a file of JSON lines")
    outcomes = list(run(trace, machine, sweep, speed, limit))
    if in_json:
        typer.echo(as_json(trace, outcomes))
    else:
        Console().print(as_table(trace, outcomes))
    if picture is not None:
        draw(picture, trace, outcomes)
