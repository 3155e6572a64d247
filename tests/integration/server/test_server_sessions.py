"""Whose memory it is: sessions begin and end by locks, leases and numbers that do not come back."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support.clock import Clock

pytest.importorskip("zmq")

from kvcore._util.zmq_socket import Context, make_socket, zmq
from kvcore.errors import TierUnavailable
from kvcore.model.shape import BlockShape
from kvcore.server import messages as m
from kvcore.server import runtime_dir as places
from kvcore.server import sessions as module
from kvcore.server.runtime_dir import RuntimeDir, SessionFile, SessionLock
from kvcore.server.server import Server
from kvcore.testing.waiting import until
from kvcore_devtools.server_fixture import settings

MODEL = m.Model.of(BlockShape(2, 2, 8, 16, "float32"), b"fingerprint")
LEASE_S = 5.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


class Asked(NamedTuple):
    """A server that does something only while it is asked, and what it answers."""

    server: Server
    ask: Callable[[Any], Any]


@contextmanager
def asked(folder: Path, clock: Clock) -> Iterator[Asked]:
    server = Server(settings(folder, server={"lease_s": LEASE_S}), clock=clock)
    server.open()
    context = Context()
    socket = make_socket(context, zmq.DEALER)
    socket.connect(f"ipc://{folder}/server.sock")

    def ask(request: Any) -> Any:
        socket.send_multipart(m.frames(request))

        def answered() -> bool:
            server.step()
            return bool(socket.poll(0))

        until(answered)
        return m.decode_reply(socket.recv_multipart())

    yield Asked(server, ask)
    context.destroy(linger=0)
    server.check_integrity()
    server.close()


@pytest.fixture
def serving(folder: Path, clock: Clock) -> Iterator[Asked]:
    with asked(folder, clock) as made:
        yield made


def welcome(ask: Callable[[Any], Any]) -> m.Welcome:
    found: m.Welcome = until(lambda: _welcome(ask))
    return found


def _welcome(ask: Callable[[Any], Any]) -> m.Welcome | None:
    reply = ask(m.Hello(1, MODEL, 1, "test"))
    return reply if isinstance(reply, m.Welcome) else None


def later(server: Server, clock: Clock, seconds: float) -> list[dict[str, Any]]:
    """The sessions that there are then."""
    clock.now += seconds
    server.step()
    found: list[dict[str, Any]] = server.status()["models"][0]["sessions"]
    return found


def test_who_was_welcomed_has_a_lease_to_come_in_and_no_longer(
    serving: Asked, clock: Clock, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server, ask = serving
    first = welcome(ask)
    assert len(later(server, clock, LEASE_S / 2)) == 1, "nobody holds it yet"
    assert not later(server, clock, LEASE_S), "nobody came"
    assert "silent" not in caplog.text, "an engine whose hello was answered late is well"
    with pytest.raises(TierUnavailable, match="is over"):
        SessionLock(folder, first.file)
    refused = ask(m.Heartbeat(2, first.session))
    assert (type(refused), refused.kind) == (m.Refused, "session")


def test_a_session_that_is_heard_is_not_called_silent(
    serving: Asked, clock: Clock, folder: Path
) -> None:
    """And one that is silent ends no sooner than its lock is let go."""
    server, ask = serving
    given = welcome(ask)
    held = SessionLock(folder, given.file)
    for _ in range(4):
        assert [s["silent"] for s in later(server, clock, LEASE_S * 0.6)] == [False]
        assert isinstance(ask(m.Heartbeat(2, given.session)), m.HeartbeatReply)
    assert [s["silent"] for s in later(server, clock, LEASE_S * 1.5)] == [True]
    assert isinstance(ask(m.Heartbeat(3, given.session)), m.HeartbeatReply)
    assert [s["silent"] for s in later(server, clock, 1.0)] == [False]
    held.close()
    assert not later(server, clock, 1.0), "it has joined: nothing is waited for"


def test_sessions_are_bounded(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, serving: Asked
) -> None:
    server, ask = serving
    monkeypatch.setattr(module, "MAX_SESSIONS", 2)
    for _ in range(2):
        welcome(ask)
    refused = ask(m.Hello(2, MODEL, 1, "test"))
    assert (type(refused), refused.kind) == (m.Refused, "misfit")
    assert not later(server, clock, 2 * LEASE_S)
    assert isinstance(ask(m.Hello(3, MODEL, 1, "test")), m.Welcome)


# -- the files ----------------------------------------------------------------------------------


def test_a_session_that_has_ended_can_be_taken_by_nobody(folder: Path) -> None:
    """Its slots are others' from then on."""
    own = RuntimeDir(folder)
    session = SessionFile(own, own.next_number(), {})
    held = SessionLock(folder, session.name)
    assert not session.ended(), "somebody holds it"
    held.close()
    assert session.ended()
    with pytest.raises(TierUnavailable, match="is over"):
        SessionLock(folder, session.name)
    own.close()


def test_a_session_that_ends_while_it_is_taken_is_not_taken(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at its name and the lock on what it named."""
    own = RuntimeDir(folder)
    session = SessionFile(own, own.next_number(), {})
    lock = places._try_lock

    def ends_first(file: int, kind: int) -> bool:
        monkeypatch.setattr(places, "_try_lock", lock)
        assert session.ended()
        return lock(file, kind)

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(places, "_try_lock", ends_first)
    with pytest.raises(TierUnavailable, match="is over"):
        SessionLock(folder, session.name)
    assert len(os.listdir("/proc/self/fd")) == before - 1, "the server's is closed, and its own"
    own.close()


def test_a_new_server_ends_what_a_killed_one_left_and_gives_no_number_twice(folder: Path) -> None:
    """A worker knows by its session's number, and by the file, whose memory it has mapped."""
    killed = RuntimeDir(folder)
    number = killed.next_number()
    left = SessionFile(killed, number, {})
    held = SessionLock(folder, left.name)
    assert not held.over
    killed.close()  # as the kernel does
    own = RuntimeDir(folder)
    assert held.over
    assert own.next_number() == number + 1
    with pytest.raises(TierUnavailable, match="is over"):
        SessionLock(folder, left.name)
    held.close()
    os.close(left._file)
    own.close()


def test_a_server_that_closes_ends_its_sessions(folder: Path, clock: Clock) -> None:
    with asked(folder, clock) as (_, ask):
        held = SessionLock(folder, welcome(ask).file)
        assert not held.over
    assert held.over, "before a next server comes"
    held.close()
