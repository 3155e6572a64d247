"""`kvcore server`: run a server, print the status of one, or make keys for one."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from kvcore import log
from kvcore.cli.options import Assignments, ConfigFile, load
from kvcore.config import Config, format_size
from kvcore.config.paths import memory_of
from kvcore.errors import ConfigError, TierUnavailable

__all__ = ["run", "run_server", "status", "with_address"]

STATUS_WAIT_S = 2.0


def with_address(config: Config) -> Config:
    """Return the settings with the address "local" if none is given."""
    if config.server.address is not None:
        return config
    server = config.server.model_copy(update={"address": "local"})
    return config.model_copy(update={"server": server})


def run(config: Config, ready: Callable[[str], object], machine: int = 0) -> None:
    """Serve until SIGINT or SIGTERM, and call ``ready`` with the address once it listens.

    ``machine`` is the number of this machine, of those on which an engine has its ranks. Raises
    ConfigError if the settings cannot be served, or if another server has the folder.
    """
    from kvcore.server.machine_server import MachineServer
    from kvcore.server.server import Server

    log.configure(config.log.level, config.log.format)
    check(config)
    # Every model needs torch. Its import takes seconds, in which no message would be answered, so
    # it comes before anybody is told that the server listens.
    import torch  # noqa: F401

    server = MachineServer(config, machine) if machine else Server(config)
    address = server.open()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: server.stop())
    ready(address)
    server.run()


def check(config: Config) -> None:
    """Raise ConfigError for settings with which the first engine would be refused."""
    from kvcore.admin.tenants import check_quotas
    from kvcore.cli.plugins import manager

    manager(config).check(config)
    check_quotas(config)
    path = memory_of(config.server)
    while not os.path.exists(path):
        path = path.parent
    whole, machines = shutil.disk_usage(path).total, 1 + len(config.server.machines)
    if config.host.capacity // machines > whole:
        share = f", of which each of {machines} machines has its share," if machines > 1 else ""
        raise ConfigError(
            f"host.capacity is {format_size(config.host.capacity)}{share} and {path} has "
            f"{format_size(whole, exact=False)} in all: lower it, or give server.folder on a "
            "larger tmpfs"
        )


def status(config: Config) -> str:
    """Return the running server's status as JSON. Raises TierUnavailable if none answers."""
    from kvcore.server.messages import StatusReply, StatusRequest
    from kvcore.server.rpc import Link

    link = Link(config.server)
    try:
        reply = link.ask(StatusRequest(link.ref()), STATUS_WAIT_S)
    finally:
        link.close()
    if link.distrusted:
        raise TierUnavailable(link.distrusted)
    if not isinstance(reply, StatusReply):
        raise TierUnavailable(f"no kvcore server answers for {config.server.address!r}")
    return json.dumps(reply.status, indent=2)


# -- the command --------------------------------------------------------------------------------


def run_server(
    file: ConfigFile = None,
    assignments: Assignments = None,
    keygen: Annotated[
        Path | None,
        typer.Option(
            "--keygen", metavar="FOLDER", help="Write CURVE keys for TCP to FOLDER and exit."
        ),
    ] = None,
    client: Annotated[
        str, typer.Option("--client", help="Name of the client's keys (with --keygen).")
    ] = "client",
    machine: Annotated[
        int,
        typer.Option(
            "--machine",
            min=0,
            max=4095,
            help="Number of this machine, as vLLM's --node-rank: hold the parts of its ranks for "
            "the server of machine 0, at server.address.",
        ),
    ] = 0,
    show_status: Annotated[
        bool, typer.Option("--status", help="Print the running server's status as JSON and exit.")
    ] = False,
) -> None:
    """Hold KV for all engines of this machine, until interrupted."""
    if keygen is not None:
        from kvcore._util.curve import make_keys

        for path in make_keys(keygen, client):
            typer.echo(path)
        return
    effective = with_address(load(file, assignments))
    if show_status:
        typer.echo(status(effective))
    elif machine:
        told = f"kvcore server of machine {machine}, for that at"
        run(effective, lambda address: typer.echo(f"{told} {address}"), machine)
    else:
        run(effective, lambda address: typer.echo(f"kvcore server listens on {address}"))
