"""The settings table ``[server]``."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from kvcore.config.fields import FolderPath, Name, SchemaModel, Seconds, is_socket
from kvcore.errors import ConfigError

__all__ = ["ServerConfig"]


def _address(value: str) -> str:
    if value == "local" or is_socket(value) or re.fullmatch(r"tcp://[^/]+:[0-9]+", value):
        return value
    raise ConfigError(
        f'given {value!r}; supported are "local", "ipc://SOCKET" and "tcp://HOST:PORT"'
    )


def _listener(value: str) -> str:
    port = re.fullmatch(r".+:([0-9]{1,5})", value)
    if port is None or int(port[1]) > 65535:
        raise ConfigError(f'given {value!r}; supported is "HOST:PORT"')
    return value


class ServerConfig(SchemaModel):
    """`kvcore server`: one process that caches KV for every engine of the machine.

    The server and its clients read the same table.
    """

    address: Annotated[str, AfterValidator(_address)] | None = Field(
        default=None,
        description='Where the server listens and engines connect: "local" (a socket in '
        '`folder`), "ipc://SOCKET", or "tcp://HOST:PORT" (with `keys`). If set, the engine has no '
        "tiers of its own. Unset: the engine uses no server.",
    )
    folder: FolderPath | None = Field(
        default=None,
        description="Folder, accessible only to its owner, that holds the server's socket and, on "
        "a tmpfs, the host tier. Every client needs it. Unset: `/run/kvcore` for root, "
        "`/run/user/UID/kvcore` for a user who is logged in, with the host tier in `/dev/shm`, or "
        "else `/dev/shm/kvcore-UID`.",
    )
    keys: FolderPath | None = Field(
        default=None,
        description="Folder of CURVE keys, made by `kvcore server --keygen FOLDER`. TCP requires "
        "it.",
    )
    admins: list[Name] = Field(
        default_factory=list,
        description="Clients whose keys may send commands of `kvcore ctl` over TCP, by the names "
        "given with `--client`. Engines need no such right. At a local socket every process of the "
        "same user may.",
    )
    machines: list[Name] = Field(
        default_factory=list,
        description="Servers of an engine's other machines (`kvcore server --machine NUMBER`), by "
        "the names of their keys: the first is that of machine 1.",
    )
    models: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Models served side by side. Each gets an equal share of `host.capacity`. "
        "Engines with the same model share its KV.",
    )
    deadline_s: Seconds = Field(
        default=0.1,
        description="Longest time, in seconds, that an engine waits for an answer. After that the "
        "engine recomputes, and does not use the server until the server has answered a heartbeat.",
    )
    lease_s: Seconds = Field(
        default=5.0,
        description="Seconds of silence after which server and client consider each other gone. A "
        "client whose process is alive keeps the memory that its copies use.",
    )
    metrics: Annotated[str, AfterValidator(_listener)] | None = Field(
        default=None,
        description='Address at which the server exposes its metrics to Prometheus: "HOST:PORT". '
        "There is no authentication, so bind an address that only scrapers can reach. Unset: not "
        "exposed.",
    )
