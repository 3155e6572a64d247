"""Redis's protocol, as far as values in memory need it: SET from it, GET into it, without a copy.

redis-py makes the connection (TLS, passwords, database); its own replies are bytes objects, put
together and cut several times.

    SET name value   *3 $3 SET $n name $m <parts> [EX ttl]   +OK | -ERR why
    GET name         *2 $3 GET $n name                       $m <m bytes> | $-1 | -ERR why
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

from kvcore.errors import TierUnavailable
from kvcore.tiers.remote.base import Item

_AHEAD_NBYTES = 1024
"""Read at once where a line is expected: what of it is of a value is copied."""
_SMALL_NBYTES = 4096
"""Pieces up to this size are sent together: a header does not go out alone."""
_SPARE_NBYTES = 64 << 10
_LINE_NBYTES = 64 << 10
"""More than any server says in a line."""


class ReplyError(Exception):
    """What a server says instead of an answer."""


class RespConnection:
    """A connection of redis-py, not of its pool. One thread at a time; after an exception of a
    method, other than ReplyError, it is of no more use.

    Raises what redis-py and sockets raise: RedisError, OSError. Each wait for the server lasts the
    connection's ``socket_timeout`` at most.
    """

    def __init__(self, connection: Any) -> None:
        """Connects. Raises TierUnavailable for a redis-py that hides its socket."""
        self._connection = connection
        connection.connect()
        self._socket: socket.socket | None = getattr(connection, "_sock", None)
        if self._socket is None:
            raise TierUnavailable("this redis-py keeps its socket elsewhere: install redis<9")
        self._ahead = memoryview(bytearray(_AHEAD_NBYTES))
        self._first = self._last = 0

    def is_idle(self) -> bool:
        """Whether it can be used again: the server has said nothing. Raises where it has left."""
        return not self._connection.can_read(0)

    def close(self) -> None:
        self._connection.disconnect()

    def ask_set(self, items: Sequence[Item], ttl_s: int | None) -> None:
        """Send a SET of each. Blocks until the parts are sent; `read_ok` answers each."""
        self._send([piece for item in items for piece in _set(item, ttl_s)])

    def ask_get(self, names: Sequence[str]) -> None:
        """Send a GET of each; `read_size` answers each."""
        self._send([_command(b"GET", name.encode()) for name in names])

    def read_ok(self) -> None:
        """Raises ReplyError where a command was refused."""
        self._line(b"+")

    def read_size(self) -> int | None:
        """Bytes of the value that comes, for `read_value` or `skip_value`; None when there is none.
        Raises ReplyError."""
        told = self._line(b"$")
        try:
            size = int(told)
        except ValueError:
            raise OSError(f"a size was expected, and {told[:40]!r} came") from None
        return None if size < 0 else size

    def read_value(self, parts: Sequence[memoryview]) -> None:
        """Fill ``parts`` with the value that comes, which is as long as they are."""
        for part in parts:
            self._fill(part.cast("B"))
        self._fill(memoryview(bytearray(2)))

    def skip_value(self, size: int) -> None:
        """Throw the value away that comes."""
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
        """What a line of one kind says. Raises ReplyError for an error, OSError for another kind:
        who speaks so is no such server."""
        line = bytearray()
        while not line.endswith(b"\r\n"):
            if len(line) > _LINE_NBYTES:
                raise OSError(f"a line of more than {_LINE_NBYTES} bytes came")
            if self._first == self._last:
                self._first, self._last = 0, self._receive(self._ahead)
            seen = bytes(self._ahead[self._first : self._last])
            stop = seen.find(b"\n") + 1 or len(seen)
            line += seen[:stop]
            self._first += stop
        if line.startswith(b"-"):
            raise ReplyError(line[1:-2].decode(errors="replace"))
        if not line.startswith(kind):
            raise OSError(f"a line with {kind!r} was expected, and {bytes(line[:40])!r} came")
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
