"""A client's socket: requests and their replies, from any thread.

The thread that waits for a reply receives for all threads. A reply that comes after its request was
given up is passed to `Link`'s ``late``, because the server may have begun something that no thread
waits for. So are the server's orders (`kvcore.server.machine_messages`), in the order in which they
come.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from kvcore._util.curve import ClientKeys
from kvcore._util.zmq_socket import (
    IPC,
    Context,
    is_of_another_user,
    local_address,
    make_socket,
    zmq,
)
from kvcore.admin.messages import Refused, frames
from kvcore.config.schema_server import ServerConfig
from kvcore.errors import FormatError
from kvcore.server.messages import ServerReply, ServerRequest, decode_reply
from kvcore.server.runtime_dir import address_of

__all__ = ["Link"]

_log = logging.getLogger("kvcore.server.client")

SLICE_S = 0.002
"""Seconds that a waiting thread holds the socket while others wait to send."""
YIELD_S = 0.0005
"""Seconds that it then leaves the lock alone; a lock taken again at once starves the other threads.
"""
LATE_KEPT = 4096
"""Given-up requests whose replies are still expected."""


class Link:
    """One connection to the server of ``config``. Thread-safe.

    `renew` replaces the connection. ``late`` is called, without a lock held, with replies to
    requests that were given up, and with the server's orders.
    """

    def __init__(
        self, config: ServerConfig, late: Callable[[ServerReply], None] = lambda reply: None
    ) -> None:
        """Connect without waiting for the server.

        A local server is connected to only where no other user can have made its socket. Raises
        ConfigError for an address or keys that cannot be used.
        """
        self._config = config
        self._address = address_of(config)
        self._late = late
        self._lock = threading.Lock()
        self._refs = itertools.count(1)
        self._wanted: dict[int, ServerReply | None] = {}
        self._given_up: dict[int, None] = {}
        self._too_late: deque[ServerReply] = deque()
        self.heard = time.monotonic()
        """When the server last sent anything."""
        self.refused: Refused | None = None
        """The last refusal that answers no particular request."""
        self.distrusted = ""
        """Why nothing is sent to what is at the server's address; empty if nothing is wrong."""
        self._folder: int | None = None
        """The folder of a local server's socket, checked; the connection leads through it."""
        self._closed = False
        self._context = Context()
        self._socket = self._connect()

    def _connect(self) -> Any:
        socket = make_socket(self._context, zmq.DEALER)
        if self._address.startswith(IPC):
            self._connect_local(socket)
            return socket
        if self._config.keys is not None:
            ClientKeys.read(self._config.keys).lock(socket)
        socket.connect(self._address)
        return socket

    def _connect_local(self, socket: Any) -> None:
        """Connect through the socket's folder, if other users cannot have made the socket.

        If not, or if there is no folder yet, the socket stays unconnected until `renew`.
        """
        self._leave_folder()
        self.distrusted = ""
        try:
            address, self._folder = local_address(self._address)
        except FileNotFoundError:
            return
        except OSError as error:
            self.distrusted = f"{self._address} is not used: {error.filename}: {error.strerror}"
            return
        socket.connect(address)

    def _leave_folder(self) -> None:
        if self._folder is not None:
            os.close(self._folder)
            self._folder = None

    def ref(self) -> int:
        """Return a new number for a request."""
        return next(self._refs)

    def tell(self, request: ServerRequest) -> bool:
        """Send a request that needs no reply.

        Returns False if the server has read nothing for a long time, or if the link is closed.
        """
        with self._lock:
            return self._send(request)

    def ask(
        self, request: ServerRequest, timeout: float, *, alive: Callable[[], bool] | None = None
    ) -> ServerReply | None:
        """Send a request and return its reply, or None if none comes within ``timeout`` seconds.

        Also returns None if the link is closed meanwhile. Blocks. With ``alive`` it waits in
        slices, between which other threads may use the link; it gives up once ``alive`` returns
        False.
        """
        limit = time.monotonic() + timeout
        with self._lock:
            self._wanted[request.ref] = None
            if not self._send(request):
                del self._wanted[request.ref]
                return None
        while True:
            left = max(limit - time.monotonic(), 0.0)
            reply = self._wait(request.ref, left if alive is None else min(left, SLICE_S))
            if reply is not None:
                return reply
            if left <= 0 or self._closed or (alive is not None and not alive()):
                self._give_up(request.ref)
                return None
            time.sleep(YIELD_S)

    def drain(self, seconds: float = 0.0) -> None:
        """Receive the messages that are there, after up to ``seconds`` for the first one.

        Blocks longer only while another thread waits for a reply.
        """
        with self._lock:
            self._receive(seconds)
        self._tell_late()

    def renew(self) -> None:
        """Replace the connection. Requests in flight on the old one are lost."""
        with self._lock:
            if self._closed:
                return
            self._socket.close()
            self._wanted.clear()
            self._given_up.clear()
            self._too_late.clear()
            self.refused = None
            self._socket = self._connect()

    def close(self) -> None:
        """Close the socket; waiting requests return None. Idempotent.

        Blocks until a thread that waits without ``alive`` is done.
        """
        with self._lock:
            self._closed = True
            self._context.destroy(linger=200)
            self._leave_folder()

    # -- inside -------------------------------------------------------------------------------

    def _send(self, request: ServerRequest) -> bool:
        if self._closed:
            return False
        try:
            self._socket.send_multipart(frames(request), zmq.NOBLOCK)
        except zmq.Again:
            return False
        except FormatError as error:
            _log.warning("not sent: %s", error)
            return False
        return True

    def _wait(self, ref: int, seconds: float) -> ServerReply | None:
        limit = time.monotonic() + seconds
        with self._lock:
            while self._wanted.get(ref) is None:
                left = limit - time.monotonic()
                if not self._receive(max(left, 0.0)) and (left <= 0 or self._closed):
                    break
            reply = self._wanted.get(ref)
            if reply is not None:
                del self._wanted[ref]
        self._tell_late()
        return reply

    def _give_up(self, ref: int) -> None:
        with self._lock:
            reply = self._wanted.pop(ref, None)
            if reply is None:
                self._given_up[ref] = None
                if len(self._given_up) > LATE_KEPT:
                    del self._given_up[next(iter(self._given_up))]
            else:
                self._too_late.append(reply)
        self._tell_late()

    def _receive(self, seconds: float) -> bool:
        """Receive one message and all others that are there; return True if there was any."""
        if self._closed or not self._socket.poll(int(seconds * 1000 + 0.999)):
            return False
        while True:
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return True
            if self._folder is not None and is_of_another_user(parts[0]):
                self.distrusted = f"another user's process answers at {self._address}"
            else:
                self._take([part.bytes for part in parts])

    def _take(self, parts: list[bytes]) -> None:
        try:
            reply = decode_reply(parts)
        except FormatError as error:  # whatever answers is not a kvcore server of this version
            self.refused = Refused(0, "misfit", str(error))
            return
        self.heard = time.monotonic()
        if reply.ref in self._wanted:
            self._wanted[reply.ref] = reply
        elif reply.ref in self._given_up:
            del self._given_up[reply.ref]
            self._too_late.append(reply)
        elif isinstance(reply, Refused):
            self.refused = reply
        elif not reply.ref:
            self._too_late.append(reply)

    def _tell_late(self) -> None:
        while self._too_late:
            try:
                reply = self._too_late.popleft()
            except IndexError:
                return
            self._late(reply)
