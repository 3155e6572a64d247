"""Registration and leadership in a real etcd: killed holders, an etcd that hangs, and goes."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvcore.cluster import Leadership, Member, open_directory
from kvcore.errors import ClusterError
from kvcore.testing.engine import EngineArgs, ReferenceEngine, random_llama
from kvcore.testing.waiting import until
from kvcore_devtools.server_fixture import RunningServer, settings
from kvcore_devtools.servers import Server, Start, etcd, need_client

need_client("etcd3gw")

from etcd3gw.lease import Lease  # noqa: E402

from kvcore.cluster.etcd import EtcdDirectory, _HeldLease  # noqa: E402

TTL_S = 5
LIMIT_S = 120
ALICE = Member("leader", "alice", "tcp://a:1", "m", "g", {"events": "tcp://a:2"})


@pytest.fixture(scope="module")
def server(start_server: Start) -> Server:
    return start_server(etcd())


@pytest.fixture
def connect(server: Server, request: pytest.FixtureRequest) -> Iterator[Callable[[], Any]]:
    """Directories of the test's own part of etcd."""
    made: list[EtcdDirectory] = []
    prefix = f"/{request.node.name}"

    def one() -> EtcdDirectory:
        made.append(EtcdDirectory([f"http://127.0.0.1:{server.port}"], ttl_s=TTL_S, prefix=prefix))
        return made[-1]

    yield one
    for directory in made:
        directory.close()


def test_members_are_found_until_they_leave(connect: Callable[[], EtcdDirectory]) -> None:
    mine, other = connect(), connect()
    entry = mine.join(ALICE)
    until(lambda: entry.held, "not entered")
    worker = mine.join(Member("worker", "alice", model="m"))
    assert other.members("leader") == [ALICE]
    assert len(other.members(model="m")) == 2
    assert other.members(group="none") == []

    def left() -> int:
        """Whole seconds that etcd still gives the lease."""
        held = mine._held
        return -1 if held is None else Lease(held.lease, mine._clients[0]).ttl()

    until(lambda: left() < TTL_S - 1, "etcd does not count the lease's time")
    until(lambda: left() >= TTL_S - 1, "a lease is not renewed")
    assert entry.held
    assert other.members("leader") == [ALICE]
    entry.leave()
    assert not entry.held
    assert other.members() == [worker.member]
    mine.close()
    assert other.members() == [], "what a directory entered goes with it"


HOLDER = """
import sys, time
from kvcore.cluster import Member
from kvcore.cluster.etcd import EtcdDirectory
directory = EtcdDirectory([sys.argv[1]], ttl_s=int(sys.argv[2]), prefix=sys.argv[3])
entry, candidacy = directory.join(Member("leader", "bob")), directory.campaign("m", "g", "bob")
while not (entry.held and candidacy.term):
    time.sleep(0.02)
print("in", flush=True)
time.sleep(600)
"""


def test_a_killed_process_is_gone_after_its_lease(
    server: Server, connect: Callable[[], EtcdDirectory], request: pytest.FixtureRequest
) -> None:
    where = f"http://127.0.0.1:{server.port}"
    directory = connect()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, where, str(TTL_S), f"/{request.node.name}"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "in\n"
        assert [member.name for member in directory.members()] == ["bob"]
        first = directory.leader("m", "g")
        assert first is not None
        mine = directory.campaign("m", "g", "me")
        assert mine.term is None
    finally:
        holder.kill()
        holder.wait()
    until(lambda: not directory.members(), "a dead process is still entered")
    until(lambda: mine.term, "nobody took over")
    assert mine.term is not None
    assert mine.term > first.term, "terms must grow"
    assert directory.leader("m", "g") == Leadership("me", mine.term)


def test_a_holder_that_is_cut_off_knows_before_etcd_does_and_comes_back(
    server: Server, connect: Callable[[], EtcdDirectory]
) -> None:
    mine = connect()
    entry, candidacy = mine.join(ALICE), mine.campaign("m", "g", "alice")
    until(lambda: entry.held and candidacy.term, "not entered")
    before = candidacy.term
    server.hang()
    try:
        began = time.monotonic()
        until(lambda: not entry.held, "the holder does not know")
        assert candidacy.term is None
        assert not candidacy.record("k", "v"), "a write without a lease"
        # A machine that stands still makes it later, never much earlier than the last renewal.
        assert time.monotonic() - began < LIMIT_S
        with pytest.raises(ClusterError, match="127"):
            mine.members()
    finally:
        server.go_on()
    until(lambda: entry.held and candidacy.term, "not entered again")
    assert mine.members() == [ALICE]
    assert before is not None
    assert candidacy.term is not None
    assert candidacy.term > before, "a term of a lost lease must not go on"


def test_two_candidates_never_both_lead(
    server: Server, connect: Callable[[], EtcdDirectory]
) -> None:
    """Their own words, in the order one, other, one: no time lies between the first and the last
    in which both are right."""
    rivals = [connect().campaign("m", "g", name) for name in ("a", "b")]
    ended, both, terms = threading.Event(), [], set()

    def watch() -> None:
        while not ended.is_set():
            for one, other in (rivals, rivals[::-1]):
                first, between, last = one.term, other.term, one.term
                terms.update({first, between, last} - {None})
                if first is not None and first == last and between is not None:
                    both.append((first, between))
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for _ in range(2):
            until(lambda: rivals[0].term or rivals[1].term, "nobody leads")
            server.hang()
            until(lambda: not (rivals[0].term or rivals[1].term), "a leader that nobody knows of")
            server.go_on()
        until(lambda: rivals[0].term or rivals[1].term, "nobody leads")
        leading = next(rival for rival in rivals if rival.term)
        leading.resign()
        until(lambda: any(r.term for r in rivals if r is not leading), "nobody took over")
    finally:
        ended.set()
        watcher.join()
        server.go_on()
    assert not both, f"both led: {both[:3]}"
    assert len(terms) >= 3


def test_a_leader_of_the_past_writes_nothing(connect: Callable[[], EtcdDirectory]) -> None:
    old, new = connect(), connect()
    first = old.campaign("m", "g", "old")
    until(lambda: first.term, "nobody leads")
    assert first.record("view", "1")
    assert new.record("m", "g", "view") == "1"
    for rival in (new.campaign("m", "g", "old"), old.campaign("m", "g", "other")):
        assert rival.term is None, "nor leads its name elsewhere, nor another of its process"
        rival.resign()
    assert first.record("view", "1")
    stale = first.won
    first.resign()
    second = new.campaign("m", "g", "new")
    until(lambda: second.term, "nobody took over")
    first.won = stale  # as if its thread had been stopped between the look and the write
    assert first.term is not None, "it believes that it leads"
    assert not first.record("view", "2"), "a write of a past term came through"
    assert second.record("view", "3")
    assert old.record("m", "g", "view") == "3"
    first.resign()
    assert second.record("view", "4"), "who led in the past ended another's term"


def test_etcd_that_is_not_there_yet_and_one_endpoint_that_is_dead(start_server: Start) -> None:
    server = start_server(etcd())
    dead, there = "http://127.0.0.1:1", f"http://127.0.0.1:{server.port}"
    first = EtcdDirectory([there], ttl_s=TTL_S, prefix="/first")
    made = first.join(ALICE)
    until(lambda: made.held, "etcd that is killed before it has made its files stays dead")
    first.close()
    server.kill()
    directory = EtcdDirectory([dead, there], ttl_s=TTL_S)
    entry = directory.join(ALICE)
    assert not entry.held
    with pytest.raises(ClusterError):
        directory.leader("m", "g")
    server.start()
    until(lambda: entry.held, "not entered when etcd came")
    assert directory.members() == [ALICE]
    directory.close()
    server.kill()


MALFORMED = (
    b"",
    b"\xff\xfe",
    b"[]",
    b"null",
    b'{"kind": "worker", "name": 7}',
    b'{"kind": "worker", "name": "x", "details": null}',
    b'{"kind": "worker", "name": "x", "details": ["peer"]}',
    b'{"kind": "worker", "name": "x", "details": {"peer": 7}}',
    b'{"kind": ["worker"], "name": "x"}',
    b"[" * 100_000,
)


def test_what_others_write_hides_nobody(
    server: Server, connect: Callable[[], EtcdDirectory], request: pytest.FixtureRequest
) -> None:
    """An empty value too, of which etcd's gateway says nothing. And an election is somebody's,
    whatever is written there."""
    mine = connect()
    entry = mine.join(ALICE)
    candidacy = mine.campaign("m", "g", "alice")
    until(lambda: entry.held and candidacy.term, "not entered")
    prefix = f"/{request.node.name}"
    client = mine._clients[0]
    for number, value in enumerate(MALFORMED):
        client.put(f"{prefix}/members/worker/bad-{number}", value)
    assert mine.members() == [ALICE]
    for number, value in enumerate(MALFORMED):
        client.put(f"{prefix}/elections/m/bad-{number}", value)
        client.put(f"{prefix}/records/m/g/bad-{number}", value)
        rival = mine.campaign("m", f"bad-{number}", "alice")
        assert rival.term is None, "it is another's"
        leader = mine.leader("m", f"bad-{number}")
        assert leader is not None
        assert mine.record("m", "g", f"bad-{number}") == leader.name
    late = mine.join(Member("worker", "late", model="m"))
    ended = mine._held
    assert ended is not None
    mine._revoke(ended.lease)
    until(lambda: mine._held not in (None, ended) and late.held, "nothing is renewed any more")
    until(lambda: candidacy.term, "nor does anyone lead")
    assert mine.members() == [ALICE, late.member]


class Lies(BaseHTTPRequestHandler):
    """Answers what etcd would not, though it is JSON."""

    said = itertools.cycle([b"null", b"[]", b"{}", b'{"result": null}', b'{"kvs": 7}', b'"no"'])

    def do_POST(self) -> None:
        answer = next(self.said)
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


def test_an_endpoint_that_is_no_etcd_is_passed_over(server: Server) -> None:
    """A proxy, say. Its answers are read before they are believed."""
    liar = ThreadingHTTPServer(("127.0.0.1", 0), Lies)
    threading.Thread(target=liar.serve_forever, daemon=True).start()
    there = f"http://127.0.0.1:{server.port}"
    directory = EtcdDirectory(
        [f"http://127.0.0.1:{liar.server_port}", there], ttl_s=TTL_S, prefix="/liar"
    )
    with closing(directory):
        entry, candidacy = directory.join(ALICE), directory.campaign("m", "g", "alice")
        until(lambda: entry.held and candidacy.term, "not entered")
        for _ in range(6):
            directory._clients.reverse()
            directory._clients.sort(key=lambda client: client.base_url == there)
            assert candidacy.record("k", "v") in (True, False)
    alone = EtcdDirectory([f"http://127.0.0.1:{liar.server_port}"], ttl_s=TTL_S)
    with closing(alone):
        entry, candidacy = alone.join(ALICE), alone.campaign("m", "g", "alice")
        assert not entry.held
        assert candidacy.term is None
        with pytest.raises(ClusterError, match="failed to answer a request"):
            [alone.members() for _ in range(6)]
        assert alone._thread.is_alive()
    liar.shutdown()
    liar.server_close()


def test_a_renewal_that_fails_is_not_the_last(
    connect: Callable[[], EtcdDirectory],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """By a fault of ours: the lease it missed is taken anew, and nobody thinks it was kept."""
    mine = connect()
    entry = mine.join(ALICE)
    until(lambda: entry.held, "not entered")
    monkeypatch.setattr(mine, "_renew", lambda: [][0])
    until(lambda: "it is tried again" in caplog.text, "it is not said")
    until(lambda: not entry.held, "a lease that nobody renews is held")
    monkeypatch.undo()
    until(lambda: entry.held, "nothing is renewed any more")
    assert mine.members() == [ALICE]


class Time:
    """Of a test alone: it passes while somebody waits, or asks etcd. As an event, it is set after
    a few waits."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waits = 0

    def clock(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        self.waits += 1
        return self.waits > 12

    is_set = staticmethod(lambda: False)


def renewing(monkeypatch: pytest.MonkeyPatch, ask: Callable[[Time, int], int]) -> list[_HeldLease]:
    """Renew a lease a few times; the leases that were lost. ``ask`` is each request."""
    directory = EtcdDirectory(["http://127.0.0.1:1"], ttl_s=600)  # its own thread waits long
    own, requests, lost = Time(), itertools.count(), []
    thread, ended = directory._thread, directory._stop
    directory._ttl = TTL_S
    directory._held = _HeldLease(7, 0.9 * TTL_S)
    with monkeypatch.context() as patch:
        patch.setattr(directory, "_call", lambda _: ask(own, next(requests)))
        patch.setattr(directory, "_clock", own.clock)
        patch.setattr(directory, "_stop", own)
        patch.setattr(directory, "_lose", lost.append)
        directory._run()
    assert next(requests) > 10
    ended.set()  # else it wakes in another test
    thread.join(LIMIT_S)
    return lost


@pytest.mark.parametrize("unanswered", [(), (0,), (0, 2, 4)])
def test_a_request_that_is_lost_does_not_cost_the_lease(
    monkeypatch: pytest.MonkeyPatch, unanswered: tuple[int, ...]
) -> None:
    """It is given up after a third of the lease's time, and there is time for another."""

    def ask(own: Time, number: int) -> int:
        if number in unanswered:
            own.now += TTL_S / 3
            raise ClusterError("no answer")
        return TTL_S

    assert renewing(monkeypatch, ask) == []


def test_a_renewal_that_is_heard_of_too_late_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has looked meanwhile was told that nobody leads: that term is over."""

    def ask(own: Time, number: int) -> int:
        own.now += 0.0 if number else TTL_S
        return TTL_S

    assert renewing(monkeypatch, ask)[0] == _HeldLease(7, 0.9 * TTL_S)


def test_a_holder_knows_by_the_time_alone(server: Server) -> None:
    """Its thread may stand still in a request: the lease's end is no event, it is a time."""
    ahead = [0.0]
    directory = EtcdDirectory(
        [f"http://127.0.0.1:{server.port}"],
        ttl_s=TTL_S,
        prefix="/time",
        clock=lambda: time.monotonic() + ahead[0],
    )
    entry, candidacy = directory.join(ALICE), directory.campaign("m", "g", "alice")
    until(lambda: entry.held and candidacy.term, "not entered")
    with directory._lock:  # as if the thread were in the middle of a renewal
        ahead[0] = TTL_S
        assert not entry.held
        assert candidacy.term is None
    until(lambda: entry.held and candidacy.term, "not entered again")
    directory.close()


def test_a_kvcore_server_is_found_with_where_its_events_are(
    server: Server, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """From its first engine on, which is there itself, without events: the server tells them."""
    cluster = {
        "etcd": [f"http://127.0.0.1:{server.port}"],
        "prefix": f"/{request.node.name}",
        "name": "kv",
        "ttl_s": TTL_S,
    }
    events = {"endpoint": f"ipc://{tmp_path}/events", "replay_endpoint": f"ipc://{tmp_path}/ask"}
    config = settings(tmp_path / "folder", cluster=cluster, events=events)
    directory = open_directory(config)
    assert directory is not None
    with closing(directory), closing(RunningServer(config)):
        assert directory.members() == []
        with closing(ReferenceEngine(random_llama(), EngineArgs(), config)):
            until(lambda: len(directory.members()) == 2, "they are not entered")
            [leader] = directory.members("leader")
            [found] = directory.members("server")
        assert "events" not in leader.details
        assert found.address == found.details["events"] == events["endpoint"]
        assert found.details["replay"] == events["replay_endpoint"]
        assert found.details["fingerprint"] == leader.details["fingerprint"]
        assert found.name == f"kv-{found.details['fingerprint'][:8]}"
        until(lambda: directory.members() == [found], "the engine has ended")


def test_an_entry_of_another_version_is_named_once_until_it_changes(
    connect: Callable[[], EtcdDirectory], caplog: pytest.LogCaptureFixture
) -> None:
    directory = connect()
    directory.join(ALICE)
    key = directory._key("members", "leader", "other")

    def told() -> int:
        assert [member.name for member in directory.members()] == ["alice"]
        return caplog.text.count("is ignored")

    for times, value in enumerate(("{", "{", "[]"), start=1):
        directory._call(lambda client, value=value: client.put(key, value))
        assert told() == times
        assert told() == times, "it is as it was"
    directory._call(lambda client: client.delete(key))
    assert told() == 3
    directory._call(lambda client: client.put(key, "{"))
    assert told() == 4
