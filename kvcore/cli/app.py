"""Commands and their options. What they print is made in the modules beside this one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from kvcore import __version__, log
from kvcore.config import Config, load_config, merge_tables, parse_assignment
from kvcore.errors import KVCoreError

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
    record = conformance.run_engines(
        engines or ["reference"],
        partners or [],
        model,
        cases or [],
        lambda engine, result: progress.print(
            f"{engine} {result.section} {result.case}: {result.outcome} {result.why}",
            markup=False,
            highlight=False,
        ),
    )
    if page is not None:
        beside = page.with_suffix(".json")
        everything = conformance.merged(beside, record)
        beside.write_text(conformance.as_json(everything))
        page.write_text(conformance.page(everything))
    if as_json:
        typer.echo(conformance.as_json(record), nl=False)
    else:
        Console().print(conformance.as_table(record))
    if conformance.failures(record):
        raise typer.Exit(1)


def _load(file: Path | None, assignments: list[str] | None) -> Config:
    overrides: dict[str, Any] = {}
    for text in assignments or []:
        merge_tables(overrides, parse_assignment(text))
    return load_config(file, overrides, overrides_from="--set")
