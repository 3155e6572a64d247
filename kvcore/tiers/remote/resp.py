"""The part of Redis's protocol that moves values between memory and server without copies.

redis-py opens the connection (TLS, password, database). Its own reader is not used: it joins and
slices bytes objects several times per reply.

    SET name value   *3 $3 SET $n name $m <parts> [EX ttl]   +OK | -ERR reason
    GET name         *2 $3 GET $n name                       $m <m bytes> | $-1 | -ERR reason
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

from kvcore.errors import TierUnavailable
from kvcore.tiers.remote.base import Item

_AHEAD_NBYTES = 1024
"""Bytes received at once where a line is expected. Bytes of a value among them are copied."""
_SMALL_NBYTES = 4096
"""Pieces up to this size are joined before sending, so that no header is sent on its own."""
_SPARE_NBYTES = 64 << 10
_LINE_NBYTES = 64 << 10
"""Upper limit for a line; no server sends a longer one."""
_VALUE_NBYTES = 512 << 20
"""Upper limit for a value, which is Redis's own default. What is longer comes from something else.
"""


class ReplyError(Exception):
    """An error reply of the server."""


class RespConnection:
    """A redis-py connection outside its pool. Used by one thread at a time.

    Methods raise what redis-py and sockets raise, RedisError and OSError, and must not be called
    again after such an exception. After a ReplyError the connection stays usable. Each wait for the
    server takes at most the connection's ``socket_timeout``.
    """

    def __init__(self, connection: Any) -> None:
        """Connect. Raises TierUnavailable if this version of redis-py hides its socket."""
        self._connection = connection
        connection.connect()
        self._socket: socket.socket | None = getattr(connection, "_sock", None)
        if self._socket is None:
            raise TierUnavailable("this version of redis-py hides its socket: install redis<9")
        self._ahead = memoryview(bytearray(_AHEAD_NBYTES))
        self._first = self._last = 0

    def is_idle(self) -> bool:
        """Return True if the connection can be reused because the server has sent nothing.

        Raises if the server has closed it.
        """
        return not self._connection.can_read(0)

    def close(self) -> None:
        self._connection.disconnect()

    def ask_set(self, items: Sequence[Item], ttl_s: int | None) -> None:
        """Send one SET per item. Blocks until all parts are sent.

        Call `read_ok` once per item afterwards.
        """
        self._send([piece for item in items for piece in _set(item, ttl_s)])

    def ask_get(self, names: Sequence[str]) -> None:
        """Send one GET per name. Call `read_size` once per name afterwards."""
        self._send([_command(b"GET", name.encode()) for name in names])

    def read_ok(self) -> None:
        """Read the reply to a SET. Raises ReplyError if the server refused it."""
        self._line(b"+")

    def read_size(self) -> int | None:
        """Read the size in bytes of the value that follows; None if there is no value.

        Call `read_value` or `skip_value` next. Raises ReplyError.
        """
        text = self._line(b"$")
        try:
            size = int(text)
        except ValueError:
            raise OSError(f"expected a size, received {text[:40]!r}") from None
        if size > _VALUE_NBYTES:
            raise OSError(f"announced a value of {size} bytes; supported are {_VALUE_NBYTES}")
        return None if size < 0 else size

    def read_value(self, parts: Sequence[memoryview]) -> None:
        """Read the next value into ``parts``, which must have its exact size."""
        for part in parts:
            self._fill(part.cast("B"))
        self._fill(memoryview(bytearray(2)))

    def skip_value(self, size: int) -> None:
        """Read and discard the next value."""
        spare, left = memoryview(bytearray(_SPARE_NBYTES)), size + 2
        while left:
            part = spare[: min(left, spare.nbytes)]
            self._fill(part)
            left -= part.nbytes

    # -- inside -----------------------------------------------------------------------------

    def _send(self, pieces: Sequence[bytes | memoryview]) -> None:
        together: list[bytes | memoryview] = []
        small: list[bytes | memoryview] = []
        for piece in pieces:
            if len(piece) <= _SMALL_NBYTES:
                small.append(piece)
                continue
            together += [b"".join(small), piece]
            small = []
        self._connection.send_packed_command([*together, b"".join(small)], check_health=False)

    def _line(self, kind: bytes) -> bytes:
        """Read a line of one kind, and return its text.

        Raises ReplyError for an error reply. Raises OSError for a line of another kind, which no
        Redis server sends here.
        """
        line = bytearray()
        while not line.endswith(b"\r\n"):
            if len(line) > _LINE_NBYTES:
                raise OSError(f"received a line of more than {_LINE_NBYTES} bytes")
            if self._first == self._last:
                self._first, self._last = 0, self._receive(self._ahead)
            seen = bytes(self._ahead[self._first : self._last])
            stop = seen.find(b"\n") + 1 or len(seen)
            line += seen[:stop]
            self._first += stop
        if line.startswith(b"-"):
            raise ReplyError(line[1:-2].decode(errors="replace"))
        if not line.startswith(kind):
            raise OSError(f"expected a line with {kind!r}, received {bytes(line[:40])!r}")
        return bytes(line[1:-2])

    def _fill(self, memory: memoryview) -> None:
        here = min(self._last - self._first, memory.nbytes)
        memory[:here] = self._ahead[self._first : self._first + here]
        self._first += here
        while here < memory.nbytes:
            here += self._receive(memory[here:])

    def _receive(self, memory: memoryview) -> int:
        assert self._socket is not None
        count = self._socket.recv_into(memory)
        if not count:
            raise OSError("the server has closed the connection")
        return count


def _set(item: Item, ttl_s: int | None) -> list[bytes | memoryview]:
    parts = [part.cast("B") for part in item.parts]
    ending = [b"EX", str(ttl_s).encode()] if ttl_s else []
    words = [b"SET", item.name.encode()]
    size = sum(part.nbytes for part in parts)
    head = b"*%d\r\n" % (3 + len(ending)) + b"".join(map(_word, words)) + b"$%d\r\n" % size
    return [head, *parts, b"\r\n" + b"".join(map(_word, ending))]


def _command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(map(_word, words))


def _word(word: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(word), word)
