"""A host on the network asks for block events, without reading what it asks for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("zmq")

from kvcore._util.curve import make_keys
from kvcore._util.zmq_socket import Context, zmq
from kvcore.events import Feed, Pacing, Publisher, Subscriber
from kvcore.events import publisher as module
from kvcore.events.wire import SNAPSHOT, number_bytes
from kvcore.events.zmq_bus import ANSWERS, ZmqOutlet, ZmqSource
from kvcore.index import Event
from kvcore.model.keys import ROOT_PARENT
from kvcore.testing.waiting import until
from support.zmtp import MIB, MORE, Stranger, frame, grown

LIMIT_S = 90
BLOCKS = 200_000
ASK = frame(b"", MORE)


def key(n: int) -> bytes:
    return n.to_bytes(16, "big")


class Rig:
    """A publisher that holds a snapshot of some MiB."""

    def __init__(self, blocks: int = BLOCKS, keys: Path | None = None) -> None:
        keys_ = b"".join(key(n + 1) for n in range(blocks))
        parents = ROOT_PARENT + keys_[: -len(ROOT_PARENT)] if blocks else b""
        self.outlet = ZmqOutlet("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", "kvcore", keys=keys)
        pacing = Pacing(interval_s=0.005, heartbeat_s=0.2)
        self.feed = Feed(pacing.queue_blocks, lambda: {"host": (keys_, parents)})
        self.publisher = Publisher(
            self.feed.content(), self.feed.items, [self.outlet], 16, pacing=pacing
        )
        self.publisher.start()
        assert self.outlet.replay_endpoint is not None
        self.ask_at = self.outlet.replay_endpoint

    def source(self, keys: Path | None = None) -> ZmqSource:
        return ZmqSource(self.outlet.endpoint, self.ask_at, "kvcore", keys=keys)


@contextmanager
def rig(blocks: int = BLOCKS, keys: Path | None = None) -> Iterator[Rig]:
    made = Rig(blocks, keys)
    yield made
    made.publisher.close()


def held(consumer: Subscriber, count: int) -> Callable[[], bool]:
    def true() -> bool:
        consumer.poll(0.05)
        return consumer.synced and len(consumer.tiers().get("host", {})) == count

    return true


@pytest.mark.slow
def test_snapshots_that_nobody_reads_cost_one_and_a_little_for_each() -> None:
    with rig() as made:
        strangers = [Stranger(made.ask_at).ready() for _ in range(100)]

        def attack() -> None:
            for _ in range(3):
                for one in strangers:
                    one.socket.sendall((ASK + frame(SNAPSHOT)) * 5)
                time.sleep(0.3)

        assert grown(attack) < 160 * MIB, "1,500 snapshots of 4 MiB"
        assert len(made.outlet._answers) <= ANSWERS
        for one in strangers:
            one.socket.close()
        until(lambda: not made.outlet._answers, "the answers are not given up")
        consumer = Subscriber(made.source(), answer_s=LIMIT_S)
        until(held(consumer, BLOCKS), "a consumer is not served any more")
        consumer.close()


def test_a_client_that_does_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcore.events.zmq_bus.ANSWER_S", 0.5)
    with rig() as made:
        stranger = Stranger(made.ask_at).ready()
        stranger.socket.sendall(ASK + frame(SNAPSHOT))
        until(lambda: made.outlet._answers, "it was not asked")
        until(lambda: not made.outlet._answers, "it is waited for without end")


def test_those_who_ask_at_once_share_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    made_ones: list[object] = []
    before = module._Snapshot.__init__

    def counting(self: module._Snapshot, *args: object) -> None:
        made_ones.append(None)
        before(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(module._Snapshot, "__init__", counting)
    monkeypatch.setattr(module, "SNAPSHOT_S", 3600.0)
    with rig(1000) as made:
        sources = [made.source() for _ in range(10)]
        answers = [source.ask(SNAPSHOT, LIMIT_S) for source in sources]
        made.feed.note(Event(True, "host", (key(5000),), ROOT_PARENT))
        consumer = Subscriber(sources[0], answer_s=LIMIT_S)
        until(held(consumer, 1001), "a shared snapshot is not brought up to date")
        assert all(answers)
        assert len(made_ones) == 1
        for source in sources:
            source.close()


def test_a_slow_replay_ends_where_the_history_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The publisher keeps nothing for a slow client, which sees that its answer is cut."""
    outlet = _Outlet()
    pacing = Pacing(history_bytes=100_000)
    feed = Feed(pacing.queue_blocks, lambda: {"host": (b"", b"")})
    publisher = Publisher(feed.content(), feed.items, [outlet], 16, pacing=pacing)
    for n in range(300):
        feed.note(Event(True, "host", (key(n),), ROOT_PARENT))
        publisher.step()
    outlet.asked.append(outlet)
    publisher.step()
    assert outlet.answer_ is not None
    next(outlet.answer_)
    for n in range(300):
        feed.note(Event(True, "host", (key(n),), ROOT_PARENT))
        publisher.step()
    with pytest.raises(module.LostHistory):
        list(outlet.answer_)


class _Outlet:
    body = number_bytes(0)

    def __init__(self) -> None:
        self.asked: list[_Outlet] = []
        self.answer_: Iterator[object] | None = None

    def send(self, message: object) -> bool:
        return True

    def requests(self) -> list[_Outlet]:
        asked, self.asked = self.asked, []
        return asked

    def answer(self, messages: Iterator[object]) -> None:
        self.answer_ = messages

    def close(self) -> None: ...


# -- keys -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_events_with_keys_are_for_those_with_keys(tmp_path: Path) -> None:
    mine, others = tmp_path / "mine", tmp_path / "others"
    make_keys(mine, "router-1")
    make_keys(others, "router-1")
    with rig(1000, keys=mine) as made:
        strangers = [made.source(), made.source(others)]
        for stranger in strangers:
            assert stranger.ask(SNAPSHOT, 0.5) is None
            assert stranger.receive(0.5) is None, "heartbeats come five times a second"
        consumer = Subscriber(made.source(mine), answer_s=LIMIT_S)
        until(held(consumer, 1000), "a consumer with keys is not served")
        made.feed.note(Event(True, "host", (key(5000),), ROOT_PARENT))
        until(held(consumer, 1001), "events do not come")
        guard = made.outlet._entrance._authenticator
        assert guard is not None
        guard.stop()
        late = made.source(mine)
        assert late.ask(SNAPSHOT, 0.5) is None, "without its guard nobody new is heard"
        for source in (*strangers, late):
            source.close()
        consumer.close()


def test_a_publisher_that_connects_shows_its_keys(tmp_path: Path) -> None:
    """Where one consumer binds for all publishers, it is the server of CURVE."""
    from kvcore._util.curve import Authenticator

    make_keys(tmp_path, "engine-a")
    context = Context()
    guard = Authenticator(context, tmp_path)
    sub = context.socket(zmq.SUB)
    guard.lock(sub)
    sub.subscribe(b"")
    port = sub.bind_to_random_port("tcp://127.0.0.1")
    outlets = [
        ZmqOutlet(f"tcp://127.0.0.1:{port}", None, name, keys=keys)
        for name, keys in (("known", tmp_path), ("stranger", None))
    ]
    publishers = [
        Publisher({"host": (b"", b"")}, list, [one], 16, pacing=Pacing(heartbeat_s=0.01))
        for one in outlets
    ]
    for publisher in publishers:
        publisher.start()
    assert sub.poll(LIMIT_S * 1000)
    time.sleep(0.3)
    topics = {sub.recv_multipart()[0] for _ in range(5)}
    assert topics == {b"known"}
    for publisher in publishers:
        publisher.close()
    sub.close()
    guard.stop()
    context.term()
