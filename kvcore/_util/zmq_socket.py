"""ZeroMQ sockets for the server and its clients. Needs pyzmq (``pip install pyzmq``)."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from kvcore._util.curve import Authenticator
from kvcore._util.msgpack import MAX_MESSAGE
from kvcore._util.private import guarded_folder
from kvcore._util.zmtp_gate import Gate, Limits
from kvcore.errors import ConfigError, UnsupportedError

try:
    import zmq
except ImportError as error:  # pragma: no cover - everything else works without
    raise UnsupportedError("a kvcore server and its clients need pyzmq: install it") from error

__all__ = [
    "IPC",
    "QUEUED",
    "Context",
    "Entrance",
    "Limits",
    "LocalPeer",
    "bind_local",
    "is_of_another_user",
    "local_address",
    "local_peer",
    "make_socket",
    "said",
    "zmq",
]

IPC = "ipc://"

QUEUED = 4096
"""Messages that may wait for one peer. More are dropped, and the peer's session restarts."""
_HANDSHAKE_MS = 5000


class Context(zmq.Context[zmq.Socket[bytes]]):
    """A ZeroMQ context that can be garbage-collected without blocking.

    pyzmq's finalizer waits for open sockets. In a reference cycle, such as the traceback of a
    failed constructor, it no longer knows which sockets are open and closes none, so the engine
    would hang inside the garbage collector. Here each socket closes itself, and the context waits
    for none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.setsockopt(zmq.LINGER, 0)

    def __del__(self) -> None:
        pass


def make_socket(
    context: Any, kind: int, *, message: int = MAX_MESSAGE, queued: int = QUEUED
) -> Any:
    """Make a socket with bounded frames and queues that does not linger when closed.

    ``message`` is the largest frame in bytes, ``queued`` the messages that may wait for one peer.
    """
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, message)
    socket.setsockopt(zmq.SNDHWM, queued)
    socket.setsockopt(zmq.RCVHWM, queued)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    return socket


class Entrance:
    """Where the sockets of one context listen, and who may speak to them.

    At tcp:// a `Gate` stands before each socket, and with ``keys``, a folder of CURVE keys, only
    their owners are heard. A local socket (ipc://) is for this user.
    """

    def __init__(self, context: Any, keys: Path | None = None) -> None:
        """Read the keys. Raises ConfigError for keys that cannot be used."""
        self._context = context
        self._authenticator = None if keys is None else Authenticator(context, keys)
        self._gates: list[Gate] = []

    def listen(self, socket: Any, address: str, limits: Limits) -> str:
        """Bind a socket and return its address. Raises OSError if it cannot be bound."""
        try:
            if address.startswith("tcp://"):
                if self._authenticator is not None:
                    self._authenticator.lock(socket)
                self._gates.append(Gate(socket, address, limits))
                return self._gates[-1].endpoint
            socket.bind(address)
        except zmq.ZMQError as error:
            raise OSError(error.errno, str(error)) from error
        return str(socket.get(zmq.LAST_ENDPOINT).decode())

    def close(self) -> None:
        """Stop listening, and end the context. Idempotent.

        The sockets must be closed already, so that nobody is heard without the authenticator.
        Blocks for as long as they linger.
        """
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
        for gate in self._gates:
            gate.stop()


# -- local sockets: both ends belong to one user --------------------------------------------------


class LocalPeer(NamedTuple):
    """The process at the other end of a local socket, as the kernel tells it (SO_PEERCRED)."""

    uid: int
    pid: int


def said(frame: Any, key: str) -> str:
    """Return what ZeroMQ knows of a frame's sender; empty if nothing."""
    try:
        return str(frame.get(key))
    except zmq.ZMQError:
        return ""


def local_peer(frame: Any) -> LocalPeer | None:
    """Return who sent a frame over a local socket; None if that is not known."""
    return _parsed(said(frame, "Peer-Address"))


@lru_cache(maxsize=1024)  # a few peers send all messages
def _parsed(address: str) -> LocalPeer | None:
    parts = address.rsplit(":", 3)  # host, uid, gid, pid
    if len(parts) != 4 or not (parts[1].isdecimal() and parts[3].isdecimal()):
        return None
    return LocalPeer(int(parts[1]), int(parts[3]))


def is_of_another_user(frame: Any) -> bool:
    """Return True unless a process of this user, or of root, sent a frame.

    Only for a frame of a local socket: over TCP there are no users.
    """
    peer = local_peer(frame)
    return peer is None or peer.uid not in (0, os.geteuid())


def local_address(address: str) -> tuple[str, int]:
    """Return an address through the checked folder of a local socket, and the folder's descriptor.

    The address leads to that folder even after another one has taken its name. It is valid until
    the descriptor is closed. Raises OSError if there is no such folder, or if other users may make
    sockets in it.
    """
    path = Path(address.removeprefix(IPC))
    folder = guarded_folder(path.parent)
    return f"{IPC}/proc/self/fd/{folder}/{path.name}", folder


def bind_local(socket: Any, address: str, setting: str) -> None:
    """Bind a local socket that only this user may open, from the first moment.

    Raises ConfigError, which names the ``setting``, if it cannot be bound, or if other users may
    make sockets in its folder.
    """
    try:
        os.close(local_address(address)[1])
        before = os.umask(0o177)
        try:
            socket.bind(address)
        finally:
            os.umask(before)
    except OSError as error:  # zmq.ZMQError is none
        what = f"{error.filename}: {error.strerror}"
        raise ConfigError(f"{setting} {address!r} cannot be bound: {what}") from error
    except zmq.ZMQError as error:
        raise ConfigError(f"{setting} {address!r} cannot be bound: {error}") from error
