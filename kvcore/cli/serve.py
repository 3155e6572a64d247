"""`kvcore serve`: start an engine with kvcore switched on."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from kvcore.cli.options import Assignments, ConfigFile, load
from kvcore.cli.plugins import manager
from kvcore.config import Config, engine_environment, missing_secrets
from kvcore.engines.verdict import require
from kvcore.errors import ConfigError, UnsupportedError
from kvcore.plugins import ServeCommand


def command(
    model: str, config: Config, engine: str | None, engine_args: Sequence[str]
) -> ServeCommand:
    """Return the command line of ``engine``, or of the engine that the settings name.

    Raises ConfigError if neither names one, or if the command lacks a secret setting.
    Raises UnsupportedError if the engine is not installed or lacks what the adapter needs.
    """
    plugins = manager(config)
    name = engine or config.engine
    if name is None:
        names = ", ".join(found.name for found in plugins.found("engine")) or "none"
        raise ConfigError(f"no engine given; found are: {names}. Use --engine, or set `engine`")
    spec = plugins.engine(name)
    plugins.check(config)
    require(spec)
    made = spec.serve(model, config, engine_args)
    if missing := missing_secrets(config, engine_environment(made.env)):
        raise ConfigError(
            f"the plugin of {name} does not pass {', '.join(missing)} on to the engine, so quotas "
            "and clears would act on other namespaces: its serve() must use "
            "kvcore.engines.serving.serve_environment"
        )
    return made


def as_shell(command: ServeCommand) -> str:
    """Return one shell line. It shows the names of variables, not values, which may be secret."""
    variables = [
        f"{name}={shlex.quote('...') if value else ''}" for name, value in command.env.items()
    ]
    return " ".join([*variables, shlex.join(command.argv)])


def run(command: ServeCommand) -> NoReturn:
    """Replace this process. Raises UnsupportedError if the command cannot be run."""
    try:
        os.execvpe(command.argv[0], command.argv, engine_environment(command.env))
    except OSError as error:
        raise UnsupportedError(
            f"{command.argv[0]!r} cannot be run: {error.strerror}; is the engine installed here?"
        ) from error


# -- the command --------------------------------------------------------------------------------


def serve_model(
    model: Annotated[str, typer.Argument(help="Model name or path, as the engine takes it.")],
    engine_args: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- ENGINE_ARGS", help="Passed to the engine unchanged."),
    ] = None,
    engine: Annotated[
        str | None, typer.Option("--engine", help="Engine. Default: the setting `engine`.")
    ] = None,
    file: ConfigFile = None,
    assignments: Assignments = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the command instead of running it.")
    ] = False,
) -> None:
    """Start an engine with kvcore. The engine replaces this process."""
    effective = load(file, assignments)
    made = command(model, effective, engine, engine_args or [])
    if dry_run:
        typer.echo(as_shell(made))
    else:
        run(made)
