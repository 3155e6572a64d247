"""CURVE keys: over TCP, processes talk only to those whose keys they hold.

One folder, of one shape, for the server, the nodes of a `peer` tier and block events:

folder/server.key                public key of whoever listens, for those that connect
folder/server.key_secret         its secret half, only for those that listen
folder/clients/NAME.key          public, for those that listen; one for each that may connect
folder/clients/NAME.key_secret   its secret half, only for NAME itself
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any, NamedTuple

from kvcore._util.log_limit import LogLimit
from kvcore._util.threads import GuardedThread, nobody_waits
from kvcore.errors import CapacityError, ConfigError

__all__ = ["Authenticator", "ClientKeys", "client_names", "curve_key", "make_keys"]

_log = logging.getLogger("kvcore.curve")

CLIENTS = "clients"
_ZAP = "inproc://zeromq.zap.01"
_DOMAIN = b"kvcore"
_TICK_MS = 100
_STOP_S = 5.0


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


class Authenticator:
    """Admits to the sockets of one context only clients whose keys are in ``folder``.

    A thread answers libzmq's questions (ZAP). A locked socket accepts nobody without an answer, so
    once this has ended, or if its thread fails, nobody new is heard. Close the locked sockets
    before `stop`: connections that were admitted stay open. A key that is added to the folder, or
    removed from it, counts from the next connection on.
    """

    def __init__(self, context: Any, folder: Path) -> None:
        """Read the keys and start the thread.

        Raises ConfigError if a key cannot be read, and CapacityError if there is no thread.
        """
        import zmq

        self._folder = folder
        self._logged = LogLimit()
        self._public, self._secret = _load(folder / "server.key_secret")
        self._seen = 0
        self._admitted: frozenset[str] = frozenset()
        self._read()
        self._ended = threading.Event()
        self._socket = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(_ZAP)
        self._thread = GuardedThread("kvcore-keys", self._run, nobody_waits)
        if not self._thread.start():
            self._socket.close()
            raise CapacityError("nobody can be heard: no thread to check their keys can be started")

    def lock(self, socket: Any) -> None:
        """Have a socket, which is not bound yet, accept only these clients."""
        import zmq

        socket.curve_publickey, socket.curve_secretkey = self._public, self._secret
        socket.curve_server = True
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # no answer, no clients

    def stop(self) -> None:
        """End the thread. Idempotent."""
        self._ended.set()
        self._thread.join(_STOP_S)

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                if self._socket.poll(_TICK_MS):
                    self._socket.send_multipart(self._answer(self._socket.recv_multipart()))
        finally:
            self._socket.close()

    def _read(self) -> None:
        """Read the clients' keys again if their folder has changed. Raises ConfigError."""
        try:
            changed = (self._folder / CLIENTS).stat().st_mtime_ns
        except OSError as error:
            raise ConfigError(f"{self._folder / CLIENTS}: {error.strerror}") from error
        if changed != self._seen:
            self._admitted = frozenset(client_names(self._folder))
            self._seen = changed

    def _answer(self, asked: list[bytes]) -> list[bytes]:
        """Return the answer to a request of libzmq.

        Its frames are version, number, domain, address, identity, mechanism and the client's key.
        """
        from zmq.utils import z85

        number, mechanism, key = asked[1], asked[5], asked[-1]
        try:
            self._read()
        except Exception as error:  # noqa: BLE001 - thread boundary: the next client is answered too
            if self._logged.admit("keys") is not None:
                _log.warning("CURVE keys cannot be read, those known stay: %s", error)
        if mechanism == b"CURVE" and z85.encode(key).decode() in self._admitted:
            return [b"1.0", number, b"200", b"OK", z85.encode(key), b""]
        _log.debug("a client with keys that are not listed is refused")
        return [b"1.0", number, b"400", b"unknown key", b"", b""]


class ClientKeys(NamedTuple):
    """A client's key pair, and the public key of the server that it talks to."""

    public: bytes
    secret: bytes
    server: bytes

    @classmethod
    def read(cls, folder: Path) -> ClientKeys:
        """Read the first client's pair that is found in ``folder``.

        Raises ConfigError if a key is missing.
        """
        secrets = sorted((folder / CLIENTS).glob("*.key_secret"))
        if not secrets:
            raise ConfigError(
                f"{folder / CLIENTS} holds no client's keys (*.key_secret): make them with "
                "`kvcore server --keygen FOLDER`"
            )
        return cls(*_load(secrets[0]), _load(folder / "server.key")[0])

    def lock(self, socket: Any) -> None:
        """Have a socket, which is not connected yet, talk only to the server."""
        socket.curve_serverkey = self.server
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret


def client_names(folder: Path) -> dict[str, str]:
    """Return the name of each client in ``folder`` by its public key in text form."""
    return {_load(file)[0].decode(): file.stem for file in (folder / CLIENTS).glob("*.key")}


def curve_key(frame: Any) -> str:
    """Return the public key, in text form, of the client that sent a ZeroMQ frame; "" if none."""
    import zmq

    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""


def _load(path: Path) -> tuple[bytes, bytes]:
    from zmq.auth import load_certificate

    try:
        public, secret = load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a CURVE key: {error}; see --keygen") from error
    if path.suffix == ".key_secret" and secret is None:
        raise ConfigError(f"{path} holds no secret key; see --keygen")
    return public, secret or b""
