"""ZeroMQ sockets as the server and its clients use them. Needs pyzmq (``pip install pyzmq``)."""

from __future__ import annotations

from typing import Any

from kvcore.errors import UnsupportedError
from kvcore.server.messages import MAX_MESSAGE

try:
    import zmq
except ImportError as error:  # pragma: no cover - everything else works without
    raise UnsupportedError("a kvcore server, and its clients, need pyzmq: install it") from error

__all__ = ["QUEUED", "make_socket", "zmq"]

QUEUED = 4096
"""Messages waiting for one peer; more are dropped, and the peer's session begins anew."""


def make_socket(context: Any, kind: int) -> Any:
    """A socket with bounded messages and queues, which waits for nobody when it closes."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
    socket.setsockopt(zmq.SNDHWM, QUEUED)
    socket.setsockopt(zmq.RCVHWM, QUEUED)
    return socket
