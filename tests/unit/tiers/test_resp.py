"""`RespConnection` against a server that sends what it likes, in pieces of any size."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.tiers.remote.base import Item
from kvcore.tiers.remote.resp import ReplyError, RespConnection


class Connection:
    """What `RespConnection` takes of a connection of redis-py."""

    def __init__(self, made: socket.socket) -> None:
        self._sock = made

    def connect(self) -> None:
        pass

    def send_packed_command(self, pieces: Sequence[Any], check_health: bool) -> None:
        for piece in pieces:
            self._sock.sendall(piece)


@contextmanager
def said(pieces: Sequence[bytes]) -> Iterator[RespConnection]:
    """A wire on which the server says these pieces, one after the other, and leaves."""
    ours, theirs = socket.socketpair()
    ours.settimeout(60)

    def say() -> None:
        with theirs, suppress(OSError):  # nobody listens any more
            for piece in pieces:
                theirs.sendall(piece)

    saying = threading.Thread(target=say)
    saying.start()
    try:
        yield RespConnection(Connection(ours))
    finally:
        ours.close()
        saying.join()


def cut(data: bytes, at: Sequence[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in at), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


VALUES = st.lists(st.none() | st.binary(max_size=5000), min_size=1, max_size=6)


@given(VALUES, st.lists(st.integers(0, 1 << 20), max_size=12), st.integers(1, 4000))
def test_values_come_whole_however_they_are_cut(
    values: list[bytes | None], at: list[int], first: int
) -> None:
    """Each into two parts; every second one is thrown away."""
    data = b"".join(b"$-1\r\n" if v is None else b"$%d\r\n%b\r\n" % (len(v), v) for v in values)
    with said(cut(data + b"+OK\r\n", at)) as wire:
        for number, value in enumerate(values):
            size = wire.read_size()
            assert size == (None if value is None else len(value))
            if value is None or size is None:
                continue
            if number % 2:
                wire.skip_value(size)
                continue
            into = bytearray(size)
            parts = [memoryview(into)[:first], memoryview(into)[first:]]
            wire.read_value(parts)
            assert bytes(into) == value
        wire.read_ok()


@given(st.binary(max_size=60), st.binary(max_size=9000), st.integers(0, 10_000))
def test_what_is_set_is_framed_as_one_value(name: bytes, value: bytes, ttl_s: int) -> None:
    text = name.hex()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        half = len(value) // 2
        parts = [memoryview(value)[:half], memoryview(value)[half:]]
        RespConnection(Connection(ours)).ask_set([Item(text, parts)], ttl_s or None)
        ours.shutdown(socket.SHUT_WR)
        heard = b"".join(iter(lambda: theirs.recv(1 << 16), b""))
    words = [b"SET", text.encode(), value, *([b"EX", b"%d" % ttl_s] if ttl_s else [])]
    expected = b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)
    assert heard == b"*%d\r\n" % len(words) + expected


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "closed"),
        (b"$5", "closed"),
        (b":3\r\n", "line with"),
        (b"$five\r\n", "expected a size"),
        (b"$" + b"5" * 200_000, "more than"),
        (b"*1\r\n$1\r\na\r\n", "line with"),
    ],
)
def test_what_is_no_answer_ends_the_connection(data: bytes, why: str) -> None:
    with said([data]) as wire, pytest.raises(OSError, match=why):
        wire.read_size()


def test_a_value_that_breaks_off_is_an_error() -> None:
    with said([b"$10\r\nabc"]) as wire:
        assert wire.read_size() == 10
        with pytest.raises(OSError, match="closed"):
            wire.read_value([memoryview(bytearray(10))])


def test_a_refusal_is_told_and_the_next_answer_read() -> None:
    with said([b"-OOM no memory\r\n+OK\r\n"]) as wire:
        with pytest.raises(ReplyError, match="OOM no memory"):
            wire.read_ok()
        wire.read_ok()
