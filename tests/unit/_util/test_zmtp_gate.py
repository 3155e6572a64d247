"""The gate before a socket: no more is held than the limits, whatever is sent in what pieces."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("zmq")

from kvcore._util.curve import Authenticator, ClientKeys, client_names, curve_key, make_keys
from kvcore._util.zmq_socket import Context, Entrance, Limits, make_socket, zmq
from kvcore._util.zmtp_gate import Meter, TooMuch
from kvcore.admin.audit import identity
from kvcore.errors import ConfigError
from kvcore.testing.waiting import until
from support.zmtp import COMMAND, MORE, Stranger, frame

LIMITS = Limits(connections=3, message=1000, total=4000)
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
SEALED = GREETING.replace(b"NULL\0", b"CURVE")
READY = frame(b"\x05READY", COMMAND)
ASK = frame(b"", MORE) + frame(b"snapshot")
PING = frame(b"\x04PING\0\0", COMMAND)


def feed(meter: Meter, data: bytes, cuts: list[int]) -> None:
    ends = sorted({min(cut, len(data)) for cut in cuts} | {len(data)})
    start = 0
    for end in ends:
        meter.feed(data[start:end])
        start = end


@given(st.lists(st.integers(0, 2000), max_size=20))
def test_what_is_within_the_limits_passes_in_any_pieces(cuts: list[int]) -> None:
    feed(Meter(LIMITS), GREETING + READY + ASK * 10 + PING * 100, cuts)
    sealed = frame(bytes(200), COMMAND) + frame(bytes(900), COMMAND) + frame(bytes(1040)) * 100
    feed(Meter(LIMITS), SEALED + sealed, cuts)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n" + bytes(60),
        GREETING[:10] + b"\x02" + GREETING[11:],
        GREETING + frame(bytes(5000), COMMAND)[:14],
        SEALED + frame(bytes(200), COMMAND) + frame(bytes(5000), COMMAND)[:14],
        SEALED + frame(bytes(200), COMMAND) * 2 + frame(bytes(1100))[:9],
        GREETING + READY + frame(bytes(1100))[:9],
        GREETING + READY + frame(bytes(100), MORE) * 7,
        GREETING + READY + frame(b"", MORE) * 20,
        GREETING + READY + ASK * 40,
        GREETING + READY + frame(bytes(30), COMMAND) * 50,
    ],
    ids=[
        "no ZMTP",
        "ZMTP 2",
        "a long handshake",
        "a long CURVE handshake",
        "a long sealed frame",
        "a long frame",
        "many frames",
        "many empty frames",
        "many messages",
        "many commands",
    ],
)
@given(cuts=st.lists(st.integers(0, 2000), max_size=20))
def test_what_is_beyond_is_told_before_its_last_byte(data: bytes, cuts: list[int]) -> None:
    with pytest.raises(TooMuch):
        feed(Meter(LIMITS), data, cuts)


class Echo:
    """A ROUTER behind an entrance that sends everything back."""

    def __init__(self, keys: Path | None = None, limits: Limits = LIMITS) -> None:
        self.context = Context()
        context = Context()
        self.entrance = Entrance(context, keys)
        self.router = make_socket(context, zmq.ROUTER, message=1000, queued=8)
        self.address = self.entrance.listen(self.router, "tcp://127.0.0.1:*", limits)
        self.frame: Any = None
        self.heard: list[tuple[str, bytes]] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.is_set():
            if self.router.poll(20):
                parts = self.router.recv_multipart(copy=False)
                self.frame = parts[-1]
                self.heard.append((curve_key(parts[-1]), parts[-1].bytes))
                self.router.send_multipart(parts)

    def client(self, keys: Path | None = None) -> zmq.Socket[bytes]:
        dealer = make_socket(self.context, zmq.DEALER)
        if keys is not None:
            ClientKeys.read(keys).lock(dealer)
        dealer.connect(self.address)
        return dealer

    def close(self) -> None:
        self._end.set()
        self._thread.join()
        self.router.close()
        self.entrance.close()
        self.entrance.close()
        self.context.destroy(linger=0)


@pytest.fixture
def echo() -> Iterator[Echo]:
    made = Echo()
    yield made
    made.close()


def test_a_client_is_served_beside_one_that_sends_too_much(echo: Echo) -> None:
    stranger = Stranger(echo.address).ready()
    stranger.flood(frame(bytes(100), MORE), 1 << 20)
    assert stranger.closed()
    dealer = echo.client()
    dealer.send_multipart([b"a", b"b"])
    assert dealer.poll(30_000)
    assert dealer.recv_multipart() == [b"a", b"b"]
    assert [body for _, body in echo.heard] == [b"b"], "nothing of the stranger's was heard"


def test_connections_beyond_the_limit_are_closed_and_those_within_are_served(echo: Echo) -> None:
    dealer = echo.client()
    dealer.send(b"first")
    assert dealer.poll(30_000)
    held = [Stranger(echo.address).ready() for _ in range(2)]
    assert len(held) == 2
    assert all(Stranger(echo.address).closed() for _ in range(5)), "one more than the limit"
    dealer.send(b"second")
    assert dealer.recv() == b"first"
    assert dealer.poll(30_000)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:x", "tcp://127.0.0.1:99999", "tcp://a b:1"])
def test_an_address_that_cannot_be_bound(address: str) -> None:
    context = Context()
    with pytest.raises(OSError, match="supported is tcp://HOST:PORT"):
        Entrance(context).listen(context.socket(zmq.ROUTER), address, LIMITS)
    context.destroy(linger=0)


# -- keys -------------------------------------------------------------------------------------


def test_only_those_with_keys_are_heard_and_by_their_key(tmp_path: Path) -> None:
    mine, others = tmp_path / "mine", tmp_path / "others"
    make_keys(mine, "a")
    make_keys(others, "a")
    echo = Echo(mine)
    dealer, other, naked = echo.client(mine), echo.client(others), echo.client()
    for one in (other, naked):
        one.send(b"stranger")
    dealer.send(b"known")
    assert dealer.poll(30_000)
    assert not other.poll(300)
    assert not naked.poll(0)
    [(key, body)] = echo.heard
    assert (client_names(mine)[key], body) == ("a", b"known")
    echo.close()


def test_once_the_guard_has_ended_nobody_new_is_heard(tmp_path: Path) -> None:
    make_keys(tmp_path)
    echo = Echo(tmp_path)
    known = echo.client(tmp_path)
    known.send(b"before")
    assert known.poll(30_000)
    guard = echo.entrance._authenticator
    assert guard is not None
    guard.stop()
    strangers = [echo.client(tmp_path), echo.client()]
    for one in strangers:
        one.send(b"after")
    assert not strangers[0].poll(500)
    assert [body for _, body in echo.heard] == [b"before"]
    echo.close()


def test_keys_that_come_and_go_count_from_the_next_connection(tmp_path: Path) -> None:
    make_keys(tmp_path, "a")
    echo = Echo(tmp_path)
    make_keys(tmp_path, "b")
    (tmp_path / "clients" / "a.key").unlink()
    former = echo.client(tmp_path)
    (tmp_path / "clients" / "a.key_secret").unlink()
    new = echo.client(tmp_path)
    former.send(b"a")
    new.send(b"b")
    assert new.poll(30_000)
    assert not former.poll(300)
    (tmp_path / "clients" / "c.key").write_text("half a key")
    again = echo.client(tmp_path)
    again.send(b"b")
    assert again.poll(30_000), "those known stay"
    echo.close()


def test_a_guard_needs_the_secret_of_who_listens(tmp_path: Path) -> None:
    make_keys(tmp_path)
    (tmp_path / "server.key_secret").unlink()
    context = Context()
    with pytest.raises(ConfigError, match="--keygen"):
        Authenticator(context, tmp_path)
    context.destroy(linger=0)


def test_a_client_without_keys_names_no_key_that_counts(echo: Echo) -> None:
    """libzmq passes on what a client without keys says of itself, as it does what a guard says."""
    stranger = Stranger(echo.address).ready(**{"User-Id": b"forged"})
    stranger.socket.sendall(frame(b"hello"))
    until(lambda: echo.heard, "nothing came")
    assert echo.heard == [("forged", b"hello")]
    assert "forged" not in identity(echo.frame)
