"""A publisher in a process of its own: it tells what a thread tells, and either side can go."""

from __future__ import annotations

import dataclasses
import logging
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.testing.waiting import until

zmq = pytest.importorskip("zmq")

from kvcore.config import load_config  # noqa: E402
from kvcore.events import Feed, Pacing, PublisherPlan, PublisherProcess, Subscriber  # noqa: E402
from kvcore.events.feed import BlockTokens, Item, Lost, Queued  # noqa: E402
from kvcore.events.frames import Buffer, pack, unpack  # noqa: E402
from kvcore.events.open import open_events  # noqa: E402
from kvcore.events.record import head_of  # noqa: E402
from kvcore.events.view import Hash  # noqa: E402
from kvcore.events.wire import SNAPSHOT, BlockStored, decode  # noqa: E402
from kvcore.events.zmq_bus import ZmqSource  # noqa: E402
from kvcore.index import BlockIndex, Event, TierSpec  # noqa: E402
from kvcore.model.keys import ROOT_PARENT, pack_tokens  # noqa: E402
from kvcore.telemetry.metrics import Metrics  # noqa: E402

LIMIT_S = 120
NAMESPACE = b"n" * 16
TIERS = {"host": 24, "disk": 60}
View = dict[str, dict[Hash, Hash | None]]


def key(n: int) -> bytes:
    return n.to_bytes(16, "big")


def state(pid: int) -> str:
    """As /proc has it: T is stopped; a dead one that nobody reaped is Z, and "" is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    until(lambda: state(pid) == "T", "not stopped")


def held_by(index: BlockIndex) -> View:
    """As a consumer of its events has it."""
    found: View = {}
    for tier in index.tiers:
        keys, parents = index.admin.published(tier)
        pairs = [(keys[i : i + 16], parents[i : i + 16]) for i in range(0, len(keys), 16)]
        if pairs:
            found[tier] = {k: None if up == ROOT_PARENT else up for k, up in pairs}
    return found


class ProcessRig:
    """An index, its events by a process, and consumers of them."""

    def __init__(self, folder: Path, **plan: Any) -> None:
        self.ends = f"ipc://{folder}/pub", f"ipc://{folder}/ask"
        pacing = Pacing(
            interval_s=0.005,
            batch_blocks=4,
            queue_blocks=plan.pop("queue_blocks", 4096),
            heartbeat_s=0.2,
        )
        plan = {"endpoint": self.ends[0], "replay_endpoint": self.ends[1], **plan}
        self.index = BlockIndex([TierSpec(name, size) for name, size in TIERS.items()])
        self.metrics = Metrics()
        self.feed = Feed(
            pacing.queue_blocks,
            lambda: {tier: self.index.admin.published(tier) for tier in self.index.tiers},
            token_ids=plan.get("token_ids", False),
            count=self.metrics.told,
        )
        self.process = PublisherProcess(
            PublisherPlan(block_tokens=16, pacing=pacing, **plan), self.feed, self.metrics.told
        )
        self.index.watch(self.feed.note)
        self.consumers: list[Subscriber] = []

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def consumer(self) -> Subscriber:
        source = ZmqSource(*self.ends, "kvcore")
        self.consumers.append(Subscriber(source, answer_s=LIMIT_S, retry_s=0.1))
        return self.consumers[-1]

    def store(self, *numbers: int, tier: str = "host") -> None:
        """A chain of these blocks; others make room."""
        keys = [key(n) for n in numbers]
        start = self.index.held(tier, keys)
        self.index.lifecycle.commit(
            self.index.lifecycle.reserve(tier, keys, start, len(keys), NAMESPACE)
        )

    def agree(self, consumer: Subscriber, what: str) -> None:
        def true() -> bool:
            consumer.poll(0.05)
            return consumer.synced and consumer.tiers() == held_by(self.index)

        until(true, what)

    def told(self) -> dict[str, int]:
        found = self.metrics.snapshot().get("kvcore_event_blocks_total", {})
        return {outcome: int(blocks) for outcome, blocks in found.items()}

    def close(self) -> None:
        for consumer in self.consumers:
            consumer.close()
        self.process.close()


@pytest.fixture
def rigged(tmp_path: Path) -> Iterator[Callable[..., ProcessRig]]:
    made: list[ProcessRig] = []

    def make(**plan: Any) -> ProcessRig:
        made.append(ProcessRig(tmp_path, **plan))
        assert made[-1].process.start()
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def rig(rigged: Callable[..., ProcessRig]) -> ProcessRig:
    return rigged()


# -- what is told -----------------------------------------------------------------------------


def play(index: BlockIndex, seed: int, steps: int) -> Iterator[None]:
    """Chains that branch are stored, evicted, dropped and cleared."""
    picks = random.Random(seed)
    for _ in range(steps):
        tier, act = picks.choice([*TIERS]), picks.random()
        length = picks.randint(1, 6)
        path = [picks.randint(1, 3) for _ in range(length)]
        keys = [bytes(path[: i + 1]).ljust(16, b"\0") for i in range(length)]
        if act < 0.7:
            start = index.held(tier, keys)
            index.lifecycle.commit(index.lifecycle.reserve(tier, keys, start, length, NAMESPACE))
        elif act < 0.85:
            index.evictions.evict(tier, picks.randint(1, 4))
        elif act < 0.98:
            index.removal.invalidate(tier, keys[-1])
        else:
            index.removal.clear(tier=tier)
        yield


class Told:
    """Events of the settings, and a consumer of them."""

    def __init__(self, folder: Path, who: str, index: BlockIndex) -> None:
        ends = {"endpoint": f"ipc://{folder}/{who}", "replay_endpoint": f"ipc://{folder}/a{who}"}
        events = {**ends, "publisher": who, "interval_s": 0.005, "heartbeat_s": 0.2}
        made = open_events(load_config(overrides={"events": events}, env={}), index, Metrics())
        assert made is not None
        self.telling = made
        source = ZmqSource(*ends.values(), "kvcore")
        self.consumer = Subscriber(source, answer_s=LIMIT_S, retry_s=0.1)

    def knows(self, held: View) -> bool:
        self.consumer.poll(0.05)
        return self.consumer.synced and self.consumer.tiers() == held

    def close(self) -> None:
        self.consumer.close()
        self.telling.close()


@pytest.mark.parametrize("seed", range(3))
def test_a_consumer_of_a_process_knows_what_one_of_a_thread_knows(
    tmp_path: Path, seed: int
) -> None:
    index = BlockIndex([TierSpec(name, size) for name, size in TIERS.items()])
    for _ in play(index, seed + 100, 30):
        pass  # something is held before anybody tells of it
    both = [Told(tmp_path, who, index) for who in ("process", "thread")]

    def note(event: Event) -> None:
        for each in both:
            each.telling.feed.note(event)

    index.watch(note)
    for _ in play(index, seed, 300):
        for each in both:
            each.consumer.poll(0)
    held = held_by(index)
    assert held
    until(lambda: all(each.knows(held) for each in both), "they know different things")
    for each in both:
        each.close()


def test_tokens_and_counts_pass_through(rigged: Callable[..., ProcessRig]) -> None:
    rig = rigged(token_ids=True)
    consumer = rig.consumer()
    rig.feed.publish_tokens([key(1), key(2)], pack_tokens(range(32)))
    rig.store(1, 2, 3)
    rig.agree(consumer, "not told")
    answer = consumer._source.ask(SNAPSHOT, LIMIT_S)
    assert answer is not None
    runs = [e for m in answer for e in decode(m.payload) if isinstance(e, BlockStored)]
    assert [run.token_ids for run in runs] == [list(range(32)), []]
    until(lambda: rig.told() == {"published": 3}, "not counted")


events_of = st.builds(
    Event,
    st.booleans(),
    st.sampled_from(["host", "disk"]),
    st.lists(st.binary(min_size=16, max_size=16), max_size=5).map(tuple),
    st.binary(min_size=16, max_size=16),
)
spelled_of = st.integers(0, 3).flatmap(
    lambda n: st.builds(
        BlockTokens,
        st.lists(st.binary(min_size=16, max_size=16), min_size=n, max_size=n).map(tuple),
        st.binary(min_size=8 * n, max_size=8 * n),
    )
)
lost_of = st.builds(
    Lost,
    st.integers(0, 1 << 40),
    st.dictionaries(
        st.sampled_from(["host", "disk"]),
        st.integers(0, 3).flatmap(
            lambda n: st.tuples(*[st.binary(min_size=16 * n, max_size=16 * n)] * 2)
        ),
    ),
)


@settings(deadline=None)
@given(
    batches=st.lists(st.lists(events_of | spelled_of | lost_of, max_size=6), max_size=4),
    step=st.integers(1, 200),
)
def test_what_is_packed_is_what_was_queued(batches: list[list[Item]], step: int) -> None:
    def waiting(item: Item) -> Queued:
        if not isinstance(item, Event):
            return item
        return head_of(item.stored, item.tier) + item.parent + b"".join(item.keys)

    sent = b"".join(part for batch in batches for part in pack(map(waiting, batch)))
    buffer = Buffer()
    found = []
    for at in range(0, len(sent), step):
        buffer.add(sent[at : at + step])
        found += [unpack(frame) for frame in buffer.frames()]
    assert found == batches


# -- the process goes -------------------------------------------------------------------------


def test_a_stopped_process_holds_nobody_up_and_resumes_from_all_that_is_held(
    rigged: Callable[..., ProcessRig],
) -> None:
    rig = rigged(queue_blocks=256)
    consumer = rig.consumer()
    rig.store(1, 2, 3)
    rig.agree(consumer, "not told")
    until(lambda: rig.told() == {"published": 3}, "not counted")
    pid, before = rig.pid, consumer.resyncs
    stop(pid)
    n = 10
    while rig.told().get("dropped", 0) < 50_000:  # more than the socket holds
        rig.store(*range(n, n + 200))
        n += 200
        assert n < 10_000_000, "what waits is not bounded"
    assert rig.told()["published"] == 3, "it was not stopped"
    os.kill(pid, signal.SIGCONT)
    rig.agree(consumer, "not in step after it went on")
    assert rig.pid == pid, "it was only slow"
    assert consumer.resyncs > before
    rig.store(1, 2, 3)
    rig.agree(consumer, "live news come no more")


def test_a_process_that_hangs_is_killed_and_started_anew(
    rigged: Callable[..., ProcessRig], caplog: pytest.LogCaptureFixture
) -> None:
    rig = rigged(queue_blocks=256)
    rig.process.BACKOFF_S = 0.1
    consumer = rig.consumer()
    rig.store(1, 2, 3)
    rig.agree(consumer, "not told")
    pid, patience = rig.pid, rig.process.STALL_S
    rig.process.STALL_S = 0.5
    stop(pid)
    n = 10

    def replaced() -> bool:
        nonlocal n
        rig.store(*range(n, n + 10))
        n += 10
        return rig.process.pid not in (None, pid)

    until(replaced, "it is waited for")
    rig.process.STALL_S = patience
    assert state(pid) == ""
    rig.agree(consumer, "the second tells nothing")
    assert lines(caplog, f"process {pid} has read nothing") == 1


def lines(caplog: pytest.LogCaptureFixture, text: str) -> int:
    return sum(text in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("idle", [False, True], ids=["storing", "idle"])
def test_a_killed_process_is_started_anew_with_all_that_is_held(
    rig: ProcessRig, caplog: pytest.LogCaptureFixture, idle: bool
) -> None:
    rig.process.BACKOFF_S = 0
    consumer = rig.consumer()
    rig.store(1, 2, 3)
    rig.agree(consumer, "not told")
    first, before = rig.pid, consumer.resyncs
    os.kill(first, signal.SIGKILL)
    until(lambda: not rig.feed.renewed, "nobody asks for what is held")
    assert state(first) == "", "it is not reaped"
    if idle:
        rig.feed.tick()
    else:
        rig.store(1, 2, 3, 4)
    until(lambda: rig.process.pid not in (None, first), "no other was started")

    def asked_again() -> bool:
        consumer.poll(0.05)
        return consumer.resyncs > before

    until(asked_again, "the second is taken for the first")
    rig.agree(consumer, "the second tells nothing")
    rig.store(7, 8)
    rig.agree(consumer, "live news come no more")
    assert lines(caplog, "is started anew: process") == 1
    assert "by signal 9" in caplog.text


def test_one_that_fails_again_and_again_is_given_up_and_nobody_fails_with_it(
    rig: ProcessRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.process.RESTARTS, rig.process.BACKOFF_S = 2, 0
    gone: list[int] = []

    def given_up() -> bool:
        pid = rig.process.pid
        if pid is not None and pid not in gone:
            os.kill(pid, signal.SIGKILL)
            gone.append(pid)
        rig.feed.tick()
        return lines(caplog, "told no more") > 0

    until(given_up, "it is started for ever")
    rig.process._thread.join(LIMIT_S)
    assert len(gone) == 3
    assert lines(caplog, "is started anew") == 2
    assert [state(pid) for pid in gone] == [""] * 3
    before = rig.told().get("dropped", 0)
    rig.store(500, 501)
    rig.feed.tick()
    assert rig.told()["dropped"] >= before + 2, "what is not told is not counted"


def test_signals_that_end_engines_do_not_end_it(rig: ProcessRig) -> None:
    consumer, pid = rig.consumer(), rig.pid
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(pid, number)
    rig.store(1, 2)
    rig.agree(consumer, "not told")
    assert rig.pid == pid


# -- the leader goes --------------------------------------------------------------------------


def test_what_is_queued_is_sent_when_it_is_closed_and_nothing_stays(rig: ProcessRig) -> None:
    consumer = rig.consumer()
    rig.store(1)
    rig.agree(consumer, "not told")
    pid, plan = rig.pid, rig.process._plan
    long = dataclasses.replace(plan.pacing, interval_s=LIMIT_S)
    rig.store(2)
    rig.process._plan = msgspec.structs.replace(plan, pacing=long)  # after this nothing goes
    rig.agree(consumer, "not told")
    for n in range(10, 400):
        rig.store(n, n + 1000)
    rig.process.close()
    assert state(pid) == ""
    assert not rig.process._thread.is_alive()
    rig.agree(consumer, "what was queued was not sent")
    told = rig.told()
    assert told.keys() == {"published"}, "the last report is not counted"
    assert told["published"] >= 2 * 390
    rig.process.close()


def test_a_stopped_process_does_not_hold_a_close_up(rig: ProcessRig) -> None:
    rig.process.CLOSE_S = 0.2
    pid = rig.pid
    stop(pid)
    rig.store(1)
    closer = threading.Thread(target=rig.process.close)
    closer.start()
    closer.join(LIMIT_S)
    assert not closer.is_alive()
    assert state(pid) == ""


LEADER = """
import os, sys, time
from pathlib import Path
from tests_rig import ProcessRig, key

def main():
    rig = ProcessRig(Path(sys.argv[1]))
    rounds, ship = [0], rig.process._ship_queued

    def shipping(child):
        ship(child)
        rounds[0] += 1

    rig.process._ship_queued = shipping
    assert rig.process.start()
    print(rig.pid, flush=True)
    forked = os.fork() if sys.argv[2] == "fork" else 0
    if sys.argv[2] == "fork" and not forked:
        time.sleep(1000)
    print(forked, flush=True)
    for line in sys.stdin:
        rig.store(*map(int, line.split()))
        before = rounds[0]
        while rounds[0] < before + 2:
            time.sleep(0.001)
        print("stored", flush=True)

main()
"""


@pytest.mark.parametrize("fork", ["fork", "alone"])
def test_a_leader_that_is_killed_takes_its_process_along_after_it_has_sent_what_it_has(
    tmp_path: Path, fork: str
) -> None:
    """Also where a fork of the leader has the leader's end of the socket."""
    (tmp_path / "tests_rig.py").write_text(Path(__file__).read_text())
    path = os.pathsep.join([str(tmp_path), *sys.path])
    leader = subprocess.Popen(
        [sys.executable, "-c", LEADER, str(tmp_path), fork],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert leader.stdin is not None
    assert leader.stdout is not None
    pid, forked = int(leader.stdout.readline()), int(leader.stdout.readline())
    twin = ProcessRig(tmp_path)  # to consume, and to say what is held
    twin.feed.close()
    consumer = twin.consumer()
    try:
        for stored in ([1, 2], [5, 6, 7]):
            if stored[0] == 5:
                stop(pid)
            leader.stdin.write(" ".join(map(str, stored)) + "\n")
            leader.stdin.flush()
            assert leader.stdout.readline() == "stored\n"
            twin.store(*stored)
            if stored[0] == 1:
                twin.agree(consumer, "not told")
        leader.kill()
        leader.wait()
        os.kill(pid, signal.SIGCONT)
        held = held_by(twin.index)
        heard: list[View] = []

        def hears() -> bool:
            consumer.poll(0.05)
            heard.append({tier: dict(known) for tier, known in consumer.tiers().items()})
            return heard[-1] == held

        until(hears, "what it had was not sent")
        until(lambda: state(pid) in ("", "Z"), "it did not end with the leader")
    finally:
        leader.kill()
        leader.wait()
        for left in filter(None, (forked, pid)):
            if state(left) not in ("", "Z"):
                os.kill(left, signal.SIGKILL)
        consumer.close()


# -- what it is -------------------------------------------------------------------------------


def test_it_has_nothing_of_the_engines(tmp_path: Path, rigged: Callable[..., ProcessRig]) -> None:
    secret = "nats://user:hunter2@127.0.0.1:1"
    with (tmp_path / "engines").open("wb") as opened:
        os.set_inheritable(opened.fileno(), True)
        rig = rigged(nats=secret)
        links = {os.readlink(link) for link in Path(f"/proc/{rig.pid}/fd").iterdir()}
    assert str(tmp_path / "engines") not in links
    for file in ("cmdline", "environ"):
        assert b"hunter2" not in Path(f"/proc/{rig.pid}/{file}").read_bytes()
    mapped = Path(f"/proc/{rig.pid}/maps").read_text()
    assert "libtorch" not in mapped
    assert "libcuda" not in mapped


def test_a_machine_that_starts_no_process_has_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    events = {"endpoint": f"ipc://{tmp_path}/pub"}
    index = BlockIndex([TierSpec("host", 8)])
    made = open_events(load_config(overrides={"events": events}, env={}), index, Metrics())
    assert made is not None
    assert "a thread tells block events" in caplog.text
    made.close()


def test_its_log_lines_are_the_leaders(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rig = ProcessRig(tmp_path, endpoint="tcp://*:nowhere")
    assert not rig.process.start()
    [record] = [record for record in caplog.records if "no block events" in record.getMessage()]
    assert (record.name, record.levelno) == ("kvcore.events", logging.WARNING)
    assert record.getMessage().startswith("no block events")
    assert state(rig.pid) == ""


def test_nobody_starts_it_by_hand(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvcore.events.publisher_process"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 2
    assert "started by kvcore" in done.stderr
