"""ZeroMQ sockets as the server and its clients use them. Needs pyzmq (``pip install pyzmq``)."""

from __future__ import annotations

from typing import Any

from kvcore._util.msgpack import MAX_MESSAGE
from kvcore.errors import UnsupportedError

try:
    import zmq
except ImportError as error:  # pragma: no cover - everything else works without
    raise UnsupportedError("a kvcore server, and its clients, need pyzmq: install it") from error

__all__ = ["QUEUED", "Context", "make_socket", "zmq"]

QUEUED = 4096
"""Messages waiting for one peer; more are dropped, and the peer's session begins anew."""


class Context(zmq.Context[zmq.Socket[bytes]]):
    """One that may be forgotten: its sockets wait for nobody, and neither does it.

    pyzmq's waits in its finalizer for sockets that are still open. In a cycle (the traceback of a
    constructor that failed is one) it no longer knows which, closes none, and the engine stands
    still within a garbage collection for good. Here each socket closes itself, as it does anyway.
    """

    def __init__(self) -> None:
        super().__init__()
        self.setsockopt(zmq.LINGER, 0)

    def __del__(self) -> None:
        pass


def make_socket(context: Any, kind: int) -> Any:
    """A socket with bounded messages and queues, which waits for nobody when it closes."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
    socket.setsockopt(zmq.SNDHWM, QUEUED)
    socket.setsockopt(zmq.RCVHWM, QUEUED)
    return socket
