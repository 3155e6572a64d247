"""CURVE keys: over TCP, server and clients talk only to peers whose keys they hold.

folder/server.key                public, for clients
folder/server.key_secret         the server's
folder/clients/NAME.key          public, for the server; one for each client
folder/clients/NAME.key_secret   the client's
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from kvcore.errors import ConfigError

CLIENTS = "clients"


def make_keys(folder: Path, client: str = "client") -> list[Path]:
    """Write a key pair for ``client``, and one for the server if it has none; return the files.

    Raises ConfigError if the folder cannot be written, if the client already has keys, or if its
    name is not the name of a file.
    """
    from zmq.auth import create_certificates

    if Path(client).name != client or client in ("", ".."):
        raise ConfigError(f"given the client {client!r}; supported are names of files in {folder}")
    try:
        (folder / CLIENTS).mkdir(mode=0o700, parents=True, exist_ok=True)
        if (folder / CLIENTS / f"{client}.key").exists():
            raise ConfigError(f"{folder / CLIENTS / client}.key is there already: name another")
        made: list[str] = []
        if not (folder / "server.key").exists():
            made += create_certificates(folder, "server")
        made += create_certificates(folder / CLIENTS, client)
        for path in made:
            os.chmod(path, 0o600)
    except OSError as error:
        raise ConfigError(f"keys cannot be written to {folder}: {error.strerror}") from error
    return [Path(path) for path in made]


def lock_server(socket: Any, folder: Path) -> Any:
    """Accept only clients with a key in ``folder``; return an object whose ``stop()`` ends that."""
    from zmq.auth.thread import ThreadAuthenticator

    public, secret = _load(folder / "server.key_secret")
    guard = ThreadAuthenticator(socket.context)
    guard.start()
    guard.configure_curve(domain="*", location=str(folder / CLIENTS))
    socket.curve_publickey, socket.curve_secretkey = public, secret
    socket.curve_server = True
    return guard


def lock_client(socket: Any, folder: Path) -> None:
    """Talk only to the server whose key is in ``folder``, with the first client's keys found there.

    Raises ConfigError if a key is missing.
    """
    secrets = sorted((folder / CLIENTS).glob("*.key_secret"))
    if not secrets:
        raise ConfigError(
            f"{folder / CLIENTS} holds no client's keys (*.key_secret): make them with "
            "`kvcore server --keygen FOLDER`"
        )
    socket.curve_serverkey = _load(folder / "server.key")[0]
    socket.curve_publickey, socket.curve_secretkey = _load(secrets[0])


def _load(path: Path) -> tuple[bytes, bytes]:
    from zmq.auth import load_certificate

    try:
        public, secret = load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a CURVE key: {error}; see --keygen") from error
    if path.suffix == ".key_secret" and secret is None:
        raise ConfigError(f"{path} holds no secret key; see --keygen")
    return public, secret or b""
