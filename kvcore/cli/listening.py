"""Whether anybody listens at an address. ZeroMQ waits for whoever may come, and does not say."""

from __future__ import annotations

import socket
import time

__all__ = ["Listening"]

AGAIN_S = 5.0
"""Seconds after which it is looked again."""
CONNECT_S = 1.0


class Listening:
    """Looks at ``address`` ("ipc://SOCKET" or "tcp://HOST:PORT") now and then.

    ``why`` says what the system said of an address at which nobody listens, and is empty while
    somebody may.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._next = 0.0
        self.why = ""

    def holds(self) -> bool:
        """False once nobody listens there. Blocks for `CONNECT_S` at most, and a name's look-up.

        Who is too slow to take a connection listens: the question has a deadline of its own.
        """
        if not self.why and time.monotonic() >= self._next:
            self._next = time.monotonic() + AGAIN_S
            try:
                self._connect()
            except TimeoutError:
                pass
            except OSError as error:
                self.why = error.strerror or str(error)
        return not self.why

    def _connect(self) -> None:
        kind, _, place = self._address.partition("://")
        if kind == "ipc":
            with socket.socket(socket.AF_UNIX) as local:
                local.settimeout(CONNECT_S)
                local.connect(place)
        elif kind == "tcp":
            host, _, port = place.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
