"""Commands and their options. What they print is made in the modules beside this one."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from typer.core import TyperGroup

from kvcore import __version__, log
from kvcore.cli import ctl
from kvcore.config import Config, format_size, load_config, merge_tables, parse_assignment
from kvcore.errors import ConfigError, KVCoreError

if TYPE_CHECKING:
    from kvcore.testing.conformance import Result

__all__ = ["app"]


class _Group(TyperGroup):
    """Turns kvcore's own errors into a line on standard error and exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KVCoreError as error:
            if ctx.params.get("debug"):
                raise
            for line in str(error).splitlines():
                typer.echo(f"kvcore: error: {line}", err=True)
            raise typer.Exit(2) from error


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Tiered KV-cache offload for LLM serving engines.",
)
app.add_typer(ctl.app, name="ctl")

ConfigFile = Annotated[
    Path | None,
    typer.Option("-c", "--config", help="TOML or YAML file; else the one KVCORE_CONFIG names."),
]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="A setting, as in host.capacity=8GiB."),
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvcore {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print and exit."),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    pass


@app.command("config")
def show_config(
    file: ConfigFile = None,
    assignments: Assignments = None,
    show: Annotated[
        bool, typer.Option("--show", help="Print the effective settings (what happens anyway).")
    ] = True,
    as_json: AsJson = False,
    docs: Annotated[
        bool, typer.Option("--docs", help="Print the reference of all settings as Markdown.")
    ] = False,
) -> None:
    """Show the effective settings and where each came from."""
    from kvcore.cli import config

    if docs:
        typer.echo(config.reference(), nl=False)
        return
    effective = _load(file, assignments)
    if as_json:
        typer.echo(config.as_json(effective))
    else:
        Console().print(config.as_table(effective))


@app.command("plugins")
def show_plugins(
    file: ConfigFile = None, assignments: Assignments = None, as_json: AsJson = False
) -> None:
    """List what was found: engines, tiers, policies, operations, and plugins left out."""
    from kvcore.cli import plugins

    effective = _load(file, assignments)
    log.configure("error")  # a plugin left out is in the listing
    manager = plugins.manager(effective)
    if as_json:
        typer.echo(plugins.as_json(manager))
    else:
        Console().print(*plugins.as_tables(manager), sep="\n")


@app.command("serve")
def serve_model(
    model: Annotated[str, typer.Argument(help="Model, as the engine takes it.")],
    engine_args: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- ENGINE_ARGS", help="Passed on to the engine as they are."),
    ] = None,
    engine: Annotated[
        str | None, typer.Option("--engine", help="Engine; else the one of the config.")
    ] = None,
    file: ConfigFile = None,
    assignments: Assignments = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the command, do not run it.")
    ] = False,
) -> None:
    """Start an engine with kvcore: this process becomes the engine."""
    from kvcore.cli import serve

    effective = _load(file, assignments)
    command = serve.command(model, effective, engine, engine_args or [])
    if dry_run:
        typer.echo(serve.as_shell(command))
    else:
        serve.run(command)


@app.command("server")
def run_server(
    file: ConfigFile = None,
    assignments: Assignments = None,
    keygen: Annotated[
        Path | None,
        typer.Option("--keygen", metavar="FOLDER", help="Write CURVE keys for TCP there, and end."),
    ] = None,
    client: Annotated[
        str, typer.Option("--client", help="Name of the client's keys, for --keygen.")
    ] = "client",
    status: Annotated[
        bool, typer.Option("--status", help="Print how the running server is, as JSON, and end.")
    ] = False,
) -> None:
    """Keep KV for every engine of this machine, until interrupted."""
    from kvcore.cli import server

    if keygen is not None:
        for path in server.make_keys(keygen, client):
            typer.echo(path)
        return
    effective = server.with_address(_load(file, assignments))
    if status:
        typer.echo(server.status(effective))
    else:
        server.run(effective, lambda address: typer.echo(f"kvcore server listens on {address}"))


@app.command("warm")
def warm_chunks(
    files: Annotated[list[Path], typer.Argument(help="Texts (UTF-8), a chunk each.")],
    url: Annotated[str | None, typer.Option("--url", help="Address of a running engine.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Model; of a running engine, its first one.")
    ] = None,
    engine: Annotated[
        str | None, typer.Option("--engine", help="Engine to start, where --url names none.")
    ] = None,
    longest: Annotated[
        int, typer.Option("--chunk-tokens", min=16, help="Longer texts are cut into such pieces.")
    ] = 4096,
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar="OPENAI_API_KEY", help="For the engine.")
    ] = None,
    file: ConfigFile = None,
    assignments: Assignments = None,
) -> None:
    """Compute texts once, so that fusion can reuse them in any prompt.

    With --url in the engine that serves there; else an engine is started for it, and what should
    outlive it needs a tier that does (disk).
    """
    from kvcore.cli import warming

    effective = _load(file, assignments)
    target = warming.Target(url, model, engine, api_key)
    warming.run(files, target, effective, longest, Console())


@app.command("conformance")
def check_conformance(
    engines: Annotated[
        list[str] | None, typer.Option("--engine", help="Engine to try; may be given again.")
    ] = None,
    partners: Annotated[
        list[str] | None,
        typer.Option("--with", help="Engine to exchange KV with, beside the others given."),
    ] = None,
    pythons: Annotated[
        list[str] | None,
        typer.Option(
            "--python",
            metavar="ENGINE=PATH",
            help="Interpreter of the environment that has an engine, where this one has not.",
        ),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Remote store to exchange KV through: redis://, s3://, file://."
        ),
    ] = None,
    model: Annotated[
        Path | None, typer.Option("--model", help="Folder of a Llama; else a tiny one is made.")
    ] = None,
    cases: Annotated[
        list[str] | None,
        typer.Option("--case", metavar="GLOB", help="Only cases or sections of such a name."),
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="List the cases, run nothing.")] = False,
    page: Annotated[
        Path | None,
        typer.Option("--page", help="Markdown to write, with all results so far (.json beside)."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Try an adapter: the same cases as for every engine. Exit code 1 where one fails."""
    from kvcore.cli import conformance

    if show:
        Console().print(conformance.listing())
        return
    log.configure("error")
    progress = Console(stderr=True)

    def told(engine: str, result: Result, so_far: conformance.Record) -> None:
        line = f"{engine} {result.section} {result.case}: {result.outcome} {result.why}"
        progress.print(line, markup=False, highlight=False)
        if page is not None:
            conformance.keep(page, so_far)  # a run may take an hour, and be interrupted

    record = conformance.run_engines(
        engines or ["reference"],
        partners or [],
        model,
        cases or [],
        told,
        pythons=conformance.interpreters(pythons or []),
        store=store,
    )
    if as_json:
        typer.echo(conformance.as_json(record), nl=False)
    else:
        Console().print(conformance.as_table(record))
    if conformance.failures(record):
        raise typer.Exit(1)


@app.command("simulate")
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
    as_json: AsJson = False,
) -> None:
    """Replay a trace: hits are those of the real index and policies, times are modelled.

    Options that may be given again make a sweep of all their combinations.
    """
    from kvcore.cli.simulate import command as simulate

    log.configure("error")
    machine = simulate.Machine(
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
    sweep = simulate.Sweep(
        host or ["64GiB"], disk or ["0B"], policies or ["lru"], ways or ["planner"], write
    )
    outcomes = list(simulate.run(trace, machine, sweep, speed, limit))
    if as_json:
        typer.echo(simulate.as_json(trace, outcomes))
    else:
        Console().print(simulate.as_table(trace, outcomes))
    if picture is not None:
        simulate.draw(picture, trace, outcomes)


@app.command("top")
def show_top(
    url: Annotated[
        str, typer.Option("--url", help="The engine's Prometheus endpoint.")
    ] = "http://127.0.0.1:8000/metrics",
    every: Annotated[float, typer.Option("--every", min=0.1, help="Seconds.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one picture and end.")] = False,
) -> None:
    """Watch tiers, hits and misses, bandwidth and queues of a running engine."""
    from kvcore.cli import top

    before = top.fetch(url)
    if once:
        Console().print(top.frame(before))
        return
    with Live(top.frame(before), console=Console(), auto_refresh=False) as live:
        while True:
            time.sleep(every)
            now = top.fetch(url)
            live.update(top.frame(now, before), refresh=True)
            before = now


@app.command("doctor")
def examine_machine(
    file: ConfigFile = None,
    assignments: Assignments = None,
    probe: Annotated[
        bool, typer.Option("--probe/--no-probe", help="Read and write 32 MiB in disk.path.")
    ] = True,
    contact: Annotated[
        bool,
        typer.Option("--contact/--no-contact", help="Ask stores, server, etcd and NATS."),
    ] = True,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.1, help="How long each has to answer.")
    ] = 3.0,
    as_json: AsJson = False,
) -> None:
    """Look at engines, machine, disk, settings and servers, and say what to change.

    Exit code 1 where there is a problem.
    """
    from kvcore.cli import doctor, plugins

    effective = _load(file, assignments)
    log.configure("error")
    manager, limit = plugins.manager(effective), seconds if contact else None
    findings = list(doctor.examine(effective, manager, probe=probe, contact_s=limit))
    if as_json:
        typer.echo(doctor.as_json(findings))
    else:
        Console().print(doctor.as_table(findings))
    if code := doctor.exit_code(findings):
        raise typer.Exit(code)


@app.command("bench")
def bench_model(
    model: Annotated[str, typer.Argument(help="Model, as the engine takes it.")],
    engine: Annotated[
        str | None, typer.Option("--engine", help="Engine; else the one of the config, or vllm.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", help="A prompt a line, or .jsonl with `prompt`; else made up."),
    ] = None,
    count: Annotated[int, typer.Option("--count", min=1, help="Most prompts.")] = 16,
    words: Annotated[
        int, typer.Option("--words", min=1, help="Words of a prompt that is made up.")
    ] = 1000,
    answer: Annotated[int, typer.Option("--answer", min=1, help="Tokens of an answer.")] = 32,
    engine_args: Annotated[
        list[str] | None,
        typer.Option(
            "--engine-arg",
            metavar="NAME=VALUE",
            help="The engine's own, by the names of its Python API; values are JSON or text.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder for bench.json and .png.")] = Path(
        "results"
    ),
    file: ConfigFile = None,
    assignments: Assignments = None,
) -> None:
    """Time to first token and throughput of one's own model, with kvcore and without it."""
    from kvcore.cli import bench

    effective = _load(file, assignments)
    name = engine or effective.engine or "vllm"
    asked = bench.synthetic(count, words) if prompts is None else bench.read_prompts(prompts, count)
    out.mkdir(parents=True, exist_ok=True)
    start = bench.starter(model, name, out / "bench.log", bench.arguments(engine_args or []))
    outlives = effective.disk.path is not None or bool(effective.tiers)
    settings, progress = bench.settings(effective, name), Console(stderr=True)
    done: list[bench.Pass] = []
    for each in bench.passes(start, settings, asked, answer, restart=outlives):
        done.append(each)
        progress.print(f"{each.contender}: {len(each.answers)} prompts", highlight=False)
    notes = {"model": model, "prompts": len(asked), "answer_tokens": answer}
    bench.report(name, done, notes).finish(out, bench.draw)


@app.command("explain")
def explain_request(
    request: Annotated[
        str | None, typer.Argument(help="Its id, or a part of one; else the last ones are listed.")
    ] = None,
    path: Annotated[
        Path | None, typer.Option("--path", help="Folder of records; else explain.path.")
    ] = None,
    last: Annotated[int, typer.Option("--last", min=1, help="How many are listed.")] = 20,
    file: ConfigFile = None,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Say why a request was served as it was: what matched, what was planned, what happened."""
    from kvcore.cli import explain

    folder = path or _load(file, assignments).explain.path
    if folder is None:
        raise ConfigError("given no --path and no explain.path: name the folder of records")
    found = explain.find(folder, request, last)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    elif request is None:
        Console().print(explain.as_table(found))
    else:
        Console().print(explain.as_text(found[0]), markup=False, highlight=False)


@app.command("scrub")
def scrub_stores(
    path: Annotated[
        Path | None, typer.Argument(help="Folder of the disk tier; else disk.path.")
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Change nothing; else damaged blocks are erased.")
    ] = False,
    file: ConfigFile = None,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Read and verify every block on disk, while no engine runs there.

    Exit code 0: all is whole; 1: something was damaged; 3: a store is in use, or not readable.
    """
    from kvcore.cli import scrub

    folder = path or _load(file, assignments).disk.path
    if folder is None:
        raise ConfigError("given no folder and no disk.path: name the folder of the disk tier")
    log.configure("error")
    with Console(stderr=True).status("reading") as status:
        total = [0]

        def done(nbytes: int) -> None:
            total[0] += nbytes
            status.update(f"read {format_size(total[0], exact=False)}")

        found = scrub.run(folder, not keep, done)
    if as_json:
        typer.echo(scrub.as_json(found))
    else:
        Console().print(scrub.as_table(found))
    if code := scrub.exit_code(found):
        raise typer.Exit(code)


def _load(file: Path | None, assignments: list[str] | None) -> Config:
    overrides: dict[str, Any] = {}
    for text in assignments or []:
        merge_tables(overrides, parse_assignment(text))
    return load_config(file, overrides, overrides_from="--set")
