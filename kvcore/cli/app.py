"""The ``kvcore`` command line, assembled from one module a command.

A command's module has its Typer function next to its implementation. It imports numpy, engines and
kvcore's data plane inside functions, so that ``kvcore --help`` and light commands start fast.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvcore import __version__
from kvcore.cli import (
    bench,
    config,
    conformance,
    ctl,
    doctor,
    explain,
    plugins,
    scrub,
    serve,
    server,
    top,
    warm,
)
from kvcore.cli.simulate import command as simulate
from kvcore.errors import KVCoreError

__all__ = ["app"]


class _Group(TyperGroup):
    """A command group that reports kvcore's own errors on standard error, with exit code 2."""

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


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvcore {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    pass


app.command("config")(config.show_config)
app.command("plugins")(plugins.show_plugins)
app.command("serve")(serve.serve_model)
app.command("server")(server.run_server)
app.command("warm")(warm.warm_chunks)
app.command("conformance")(conformance.check_conformance)
app.command("simulate")(simulate.simulate_trace)
app.command("top")(top.show_top)
app.command("doctor")(doctor.examine_machine)
app.command("bench")(bench.bench_model)
app.command("explain")(explain.explain_request)
app.command("scrub")(scrub.scrub_stores)
app.add_typer(ctl.app, name="ctl")
