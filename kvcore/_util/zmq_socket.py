"""ZeroMQ sockets for the server and its clients. Needs pyzmq (``pip install pyzmq``)."""

from __future__ import annotations

from typing import Any

from kvcore._util.msgpack import MAX_MESSAGE
from kvcore.errors import UnsupportedError

try:
    import zmq
except ImportError as error:  # pragma: no cover - everything else works without
    raise UnsupportedError("a kvcore server and its clients need pyzmq: install it") from error

__all__ = ["QUEUED", "Context", "make_socket", "zmq"]

QUEUED = 4096
"""Messages that may wait for one peer. More are dropped, and the peer's session restarts."""


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


def make_socket(context: Any, kind: int) -> Any:
    """Make a socket with bounded messages and queues that does not linger when closed."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
    socket.setsockopt(zmq.SNDHWM, QUEUED)
    socket.setsockopt(zmq.RCVHWM, QUEUED)
    return socket
