"""A gate before a ZeroMQ socket that bounds what a stranger can make it hold.

    client ── TCP ──▶ Gate: counts connections, and the bytes of each message ── local ──▶ socket
                        │ too many, or too long: the connection is closed

libzmq bounds a frame (MAXMSGSIZE) and the number of messages (RCVHWM), but not the frames of one
message, and the receiver sees none of them before the last has come. Nor does it bound the number
of connections. The gate reads the plain headers of ZMTP 3 frames and passes every byte on. With
CURVE the headers do not tell where a message ends. There it bounds the frames of the handshake,
after which strangers are gone, and each frame of the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import re
import resource
import shutil
import socket
import tempfile
from functools import partial
from typing import Any, NamedTuple

from kvcore._util.log_limit import LogLimit
from kvcore._util.threads import GuardedThread, nobody_waits

__all__ = ["Gate", "Limits", "Meter", "TooMuch"]

_log = logging.getLogger("kvcore.gate")

_ADDRESS = re.compile(r"tcp://(?P<host>\*|[^\s/:\[\]]+|\[[0-9a-fA-F:]+\]):(?P<port>\*|[0-9]{1,5})")
_CHUNK = 16 << 10
_GREETING = 64
_HANDSHAKE_BYTES = 4096
"""Largest frame of a handshake."""
_FRAME_BYTES = 64
"""What libzmq holds for a frame beside its bytes."""
_SEALED_BYTES = 64
"""What CURVE adds to a frame."""
_STOP_S = 5.0
_MORE, _LONG, _COMMAND = 1, 2, 4
_BEATS = (b"\x04PING", b"\x04PONG")


class Limits(NamedTuple):
    """What clients may send: ``message`` bytes in one message, ``total`` in one connection.

    At most ``connections`` are open, and no more than take 3/8 of the process's open files.
    The parts of a message count 64 bytes each in addition. ``total`` leaves heartbeats out, and is
    for sockets that only subscribers connect to.
    """

    connections: int
    message: int
    total: int | None = None


class TooMuch(Exception):
    """A client sent more than its limits, or no ZMTP 3."""


class Meter:
    """Follows the frames that one client sends. Holds at most a header of them."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._head = bytearray()
        self._skip = 0
        self._handshake: int | None = None  # frames of the handshake to come; None: the greeting
        self._sealed = False
        self._message = self._total = 0

    def feed(self, data: bytes) -> None:
        """Take what the client sent next. Raises TooMuch."""
        at = 0
        while at < len(data):
            if self._skip:
                step = min(self._skip, len(data) - at)
                self._skip -= step
                at += step
                continue
            step = self._need() - len(self._head)
            self._head += data[at : at + step]
            at += step
            if len(self._head) == self._need():
                self._take()

    def _need(self) -> int:
        """Return the bytes of the header that has begun, as far as they are known by now."""
        if self._handshake is None:
            return _GREETING
        if not self._head:
            return 1
        size_at = 9 if self._head[0] & _LONG else 2
        if len(self._head) < size_at or not self._head[0] & _COMMAND:
            return size_at
        return size_at + min(5, self._size(size_at))

    def _size(self, size_at: int) -> int:
        return int.from_bytes(self._head[1:size_at], "big")

    def _take(self) -> None:
        head, self._head = bytes(self._head), bytearray()
        if self._handshake is None:
            self._greet(head)
            return
        size_at = 9 if head[0] & _LONG else 2
        size = int.from_bytes(head[1:size_at], "big")
        self._skip = size - (len(head) - size_at)
        if self._handshake:
            self._handshake -= 1
            self._bound(size, _HANDSHAKE_BYTES, "of a handshake")
        elif self._sealed:
            self._bound(size, self._limits.message + _SEALED_BYTES, "in one frame")
        else:
            self._count(head[0], size, head[size_at:])

    def _greet(self, head: bytes) -> None:
        if head[0] != 0xFF or head[10] < 3:
            raise TooMuch("what does not begin as ZMTP 3")
        self._sealed = head[12:32].rstrip(b"\0") != b"NULL"
        self._handshake = 2 if self._sealed else 1

    def _count(self, flags: int, size: int, start: bytes) -> None:
        self._message += size + _FRAME_BYTES
        self._bound(self._message, self._limits.message + _FRAME_BYTES, "in one message")
        if not flags & _MORE:
            self._message = 0
        if self._limits.total is not None and start not in _BEATS:
            self._total += size + _FRAME_BYTES
            self._bound(self._total, self._limits.total, "in all")

    def _bound(self, nbytes: int, limit: int, where: str) -> None:
        if nbytes > limit:
            raise TooMuch(f"{nbytes} bytes {where}; supported are {limit}")


class Gate:
    """Listens for a ZeroMQ socket, which it binds at a local one that nobody else can reach."""

    def __init__(self, inner: Any, address: str, limits: Limits) -> None:
        """Listen at tcp://HOST:PORT and start the thread.

        ``*`` is every address, or any free port. Raises OSError if the address cannot be bound, or
        if there is no thread.
        """
        self._limits = limits
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]  # a connection takes three
        self._most = min(limits.connections, files // 8 if files > 0 else limits.connections)
        self._logged = LogLimit()
        self._open = 0
        listening = _listen(address)
        try:
            self._path = _bind_inside(inner)
        except BaseException:
            listening.close()
            raise
        host, port, *_ = listening.getsockname()
        self.endpoint = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = GuardedThread("kvcore-gate", partial(self._run, listening), nobody_waits)
        if not self._thread.start():
            self._end(listening)
            raise OSError(errno.EAGAIN, str(self._thread.error))

    def stop(self) -> None:
        """Close every connection and stop listening. Idempotent."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_STOP_S)

    def _run(self, listening: socket.socket) -> None:
        try:
            self._loop.run_until_complete(self._serve(listening))
        finally:
            self._end(listening)

    def _end(self, listening: socket.socket) -> None:
        """Close everything, so that no client waits where nobody accepts."""
        self._loop.close()
        listening.close()
        os.close(self._path)

    async def _serve(self, listening: socket.socket) -> None:
        server = await asyncio.start_server(self._admit, sock=listening, limit=_CHUNK)
        await self._stop.wait()
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._open >= self._most:
            self._warn(writer, f"{self._open} connections are open, which is the limit")
            writer.transport.abort()
            return
        self._open += 1
        try:
            await self._pass(reader, writer)
        except TooMuch as error:
            self._warn(writer, f"it sent {error}")
        except OSError as error:  # either side has closed
            _log.debug("a connection ends: %s", error)
        except asyncio.CancelledError:  # `stop`; asyncio would report it as a failure
            pass
        finally:
            self._open -= 1
            writer.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = f"/proc/self/fd/{self._path}"
        answers, inner = await asyncio.open_unix_connection(path, limit=_CHUNK)
        ways = [
            asyncio.ensure_future(_pump(reader, inner, Meter(self._limits))),
            asyncio.ensure_future(_pump(answers, writer, None)),
        ]
        try:
            ended, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in ended:
                way.result()
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            inner.transport.abort()

    def _warn(self, writer: asyncio.StreamWriter, why: str) -> None:
        address = str((writer.get_extra_info("peername") or ("?",))[0])
        if self._logged.admit("closed") is not None:
            _log.warning("a connection of %s to %s is closed: %s", address, self.endpoint, why)


async def _pump(
    source: asyncio.StreamReader, target: asyncio.StreamWriter, meter: Meter | None
) -> None:
    target.transport.set_write_buffer_limits(high=_CHUNK)
    while data := await source.read(_CHUNK):
        if meter is not None:
            meter.feed(data)
        target.write(data)
        await target.drain()


def _listen(address: str) -> socket.socket:
    found = _ADDRESS.fullmatch(address)
    port = 0 if found is None or found["port"] == "*" else int(found["port"])
    if found is None or port > 65535:
        raise OSError(f"supported is tcp://HOST:PORT, given {address!r}")
    host = "" if found["host"] == "*" else found["host"].strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family)


def _bind_inside(inner: Any) -> int:
    """Bind a ZeroMQ socket to a local one without a name; return a descriptor that leads to it."""
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = tempfile.mkdtemp(prefix="kvcore-gate-", dir=shared)
    try:
        inner.bind(f"ipc://{folder}/s")
        return os.open(f"{folder}/s", os.O_PATH | os.O_CLOEXEC)
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)
