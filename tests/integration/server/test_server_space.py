"""One model on the server, without sockets: a session is believed where it can know."""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq")

from kvcore._util.circuit_breaker import Breaker, BreakerState
from kvcore.errors import FormatError, KVCoreError
from kvcore.fusion.segments import Segments
from kvcore.model.keys import pack_tokens
from kvcore.model.shape import BlockShape
from kvcore.server import messages as m
from kvcore.server.model_cache import ModelCache
from kvcore.server.runtime_dir import RuntimeDir, session_of
from kvcore.testing.waiting import PATIENCE_S, until
from kvcore.transfer.graph import OpReport, RowError, TransferGraph
from kvcore.worker import WorkerLimits
from kvcore_devtools.server_fixture import settings, words

SHAPE = BlockShape(2, 2, 8, 16, "float32")
NAMES = [bytes([i + 1]) * 16 for i in range(4)]
CHAIN, HERE = m.join(NAMES), b"n" * 16
SAVER, LOADER = 5, 6


def ticking(space: ModelCache, what: Callable[[], Any]) -> None:
    """The server's loop, until ``what`` is so."""

    def tick() -> Any:
        space.tick()
        return what()

    until(tick)


@pytest.fixture
def space(folder: Path, tmp_path: Path) -> Iterator[ModelCache]:
    """Four blocks are on disk, and only there."""
    held = RuntimeDir(folder)
    config = settings(folder, disk={"path": str(tmp_path), "capacity": "1MiB"})
    made = ModelCache(config, m.Model.of(SHAPE, b"fingerprint"), held, "arena-1")
    graph = made.save(m.SaveRequest(1, SAVER, CHAIN, HERE), 1).graph
    assert graph is not None
    made.ops_ended(SAVER, ended(graph))
    ticking(made, lambda: not made.background)
    made.manager.index.evictions.evict("host", 100)
    yield made
    made.check_integrity()
    made.close()
    held.close()


def ended(graph: TransferGraph, why: RowError | None = None) -> list[OpReport]:
    """What the session's leader says when every op has gone well, or none has."""
    failed = [{} if why is None else dict.fromkeys(range(*op.rows), why) for op in graph.ops]
    return [
        OpReport(graph.graph_id, op.op_id, rows) for op, rows in zip(graph.ops, failed, strict=True)
    ]


def sources(space: ModelCache) -> list[m.SourceSpan]:
    return space.match(m.MatchRequest(1, LOADER, CHAIN, HERE)).sources


def load(space: ModelCache, ranks: int) -> tuple[TransferGraph, int]:
    """A load of all four, and its read."""
    found = sources(space)
    assert found == [("disk", 0, 4)]
    graph = space.load(m.LoadRequest(1, LOADER, CHAIN, HERE, found, 0, 4), ranks).graph
    assert graph is not None
    assert session_of(graph.graph_id) == LOADER
    [read] = [op.op_id for op in graph.ops if op.path.reads_tier]
    return graph, read


def collect(into: list[dict[int, RowError]]) -> Callable[[dict[int, RowError]], None]:
    return into.append


def test_a_read_begins_when_every_rank_is_ready_for_it(space: ModelCache) -> None:
    graph, read = load(space, ranks=2)
    told: list[dict[int, RowError]] = []
    space.read(LOADER, graph.graph_id, read, 0, collect(told))
    space.read(LOADER, graph.graph_id, read, 0, collect(told))
    with pytest.raises(FormatError, match="no read"):
        space.read(LOADER, graph.graph_id, read, 2, collect(told))
    assert not space.busy, "one rank is not all"
    space.read(LOADER, graph.graph_id, read, 1, collect(told))
    ticking(space, lambda: told)
    assert told == [{}, {}]
    space.read(LOADER, graph.graph_id, read, 1, collect(told))
    assert told == [{}, {}, {}], "whoever asks again is told again"
    space.ops_ended(LOADER, ended(graph))
    assert (sources(space), space.claims(LOADER)) == ([("host", 0, 4)], 0)


@pytest.mark.parametrize("gone", ["says it failed", "withdraws", "is gone"])
def test_slots_stay_taken_while_the_server_reads_into_them(space: ModelCache, gone: str) -> None:
    graph, read = load(space, ranks=1)
    told: list[dict[int, RowError]] = []
    space.read(LOADER, graph.graph_id, read, 0, collect(told))
    if gone == "is gone":
        assert space.end(LOADER) == 1
    else:
        if gone == "withdraws":
            space.withdraw(LOADER, graph.graph_id)
        space.ops_ended(LOADER, ended(graph, RowError.CANCELLED))
    assert space.claims(LOADER) == 1, "the read may be writing"
    assert space.manager.in_flight == 1
    ticking(space, lambda: not space.claims(LOADER))
    assert space.manager.in_flight == 0
    assert sources(space) == [("disk", 0, 4)], "what the session did not get is not vouched for"


def test_a_session_that_says_it_read_what_nobody_read_is_not_believed(space: ModelCache) -> None:
    graph, read = load(space, ranks=1)
    first, *others = sorted(ended(graph), key=lambda report: report.op_id != read)
    space.ops_ended(LOADER, [first])
    with pytest.raises(FormatError, match="has ended"):
        space.read(LOADER, graph.graph_id, read, 0, collect([]))
    space.ops_ended(LOADER, others)
    assert space.claims(LOADER) == 0
    assert sources(space) == [("disk", 0, 4)]


def test_what_the_server_could_not_read_is_not_published_though_the_session_is_content(
    space: ModelCache, tmp_path: Path
) -> None:
    [slot] = space.manager.index.slots("disk", NAMES, 2, 3).tolist()
    [file] = tmp_path.rglob("shard-0.data")
    with file.open("r+b") as data:
        data.seek(slot * space._transport.worker.tiers["disk"].slot_nbytes)
        first = data.read(1)[0]
        data.seek(-1, os.SEEK_CUR)
        data.write(bytes([first ^ 1]))
    graph, read = load(space, ranks=1)
    told: list[dict[int, RowError]] = []
    space.read(LOADER, graph.graph_id, read, 0, collect(told))
    ticking(space, lambda: told)
    assert told == [{2: RowError.CORRUPT}]
    space.ops_ended(LOADER, ended(graph))
    assert sources(space) == [("host", 0, 2)], "the damaged block, and what stands on it, is gone"


def test_a_session_cannot_drop_blocks_or_end_what_is_anothers(space: ModelCache) -> None:
    graph, read = load(space, ranks=1)
    space.ops_ended(SAVER, ended(graph))
    assert space.claims(LOADER) == 1
    with pytest.raises(FormatError, match="no read"):
        space.read(SAVER, graph.graph_id, read, 0, collect([]))
    space.ops_ended(LOADER, ended(graph, RowError.CORRUPT))
    assert sources(space) == [("disk", 0, 4)], "a client cannot judge what lies on disk"


def test_a_cancelled_graphs_reads_fail_for_the_ranks_that_wait(space: ModelCache) -> None:
    graph, read = load(space, ranks=2)
    told: list[dict[int, RowError]] = []
    space.read(LOADER, graph.graph_id, read, 0, collect(told))
    space.withdraw(SAVER, graph.graph_id)
    assert not told
    space.withdraw(LOADER, graph.graph_id)
    assert told == [dict.fromkeys(range(4), RowError.CANCELLED)]
    space.ops_ended(LOADER, ended(graph, RowError.CANCELLED))
    assert space.manager.in_flight == 0


def test_a_load_of_what_was_never_matched_or_is_gone_is_refused(space: ModelCache) -> None:
    def ask(found: list[m.SourceSpan], start: int = 0, stop: int = 4) -> None:
        space.load(m.LoadRequest(1, LOADER, CHAIN, HERE, found, start, stop), 1)

    for found in ([], [("tape", 0, 4)], [("disk", 1, 4)], [("disk", 0, 2), ("host", 2, 4)]):
        with pytest.raises(FormatError):
            ask(found)
    for start, stop in ((0, 5), (4, 4), (3, 2)):
        with pytest.raises(FormatError):
            ask([("disk", 0, 4)], start, stop)
    with pytest.raises(KVCoreError, match="not published"):
        ask([("host", 0, 4)])
    for layers in ((0, 3), (1, 1), (-1, 1)):
        asked = m.LoadRequest(1, LOADER, CHAIN, HERE, [("disk", 0, 4)], 0, 4, [layers])
        with pytest.raises(FormatError, match="of 2"):
            space.load(asked, 1)
    assert space.manager.in_flight == 0


OTHER = [bytes([i + 101]) * 16 for i in range(4)]


@pytest.mark.parametrize(
    ("names", "namespace"),
    [
        ([OTHER[0], NAMES[1]], HERE),
        ([OTHER[0], NAMES[1], NAMES[2], OTHER[1]], HERE),
        ([*OTHER[:2], NAMES[0]], HERE),
        ([NAMES[0], NAMES[2], OTHER[0]], HERE),
        ([NAMES[1], NAMES[0], OTHER[0]], HERE),
        ([*NAMES, OTHER[0]], b"o" * 16),
    ],
)
def test_keys_that_are_no_chain_are_not_stored_and_harm_nobody(
    space: ModelCache, names: list[bytes], namespace: bytes
) -> None:
    """The index rests on parents that are there; it is every session's."""
    with pytest.raises(FormatError, match="not a chain"):
        space.save(m.SaveRequest(1, SAVER, m.join(names), namespace), 1)
    space.check_integrity()
    assert space.clear(HERE) == 4
    assert space.manager.in_flight == 0


@pytest.mark.parametrize(
    "names", [[OTHER[0], NAMES[1], NAMES[2]], NAMES[2:3], [*OTHER, NAMES[0]], NAMES[1::-1]]
)
def test_what_stands_on_other_blocks_is_not_loaded(space: ModelCache, names: list[bytes]) -> None:
    for keys, namespace in ((names, HERE), (NAMES, b"o" * 16)):
        stop = len(keys)
        asked = m.LoadRequest(1, LOADER, m.join(keys), namespace, [("disk", 0, stop)], 0, stop)
        with pytest.raises(FormatError, match="not a chain"):
            space.load(asked, 1)
    space.check_integrity()
    assert sources(space) == [("disk", 0, 4)]
    assert space.manager.in_flight == 0


def test_blocks_that_are_held_on_others_are_not_offered_to_a_tier_as_a_prompt(
    folder: Path, tmp_path: Path
) -> None:
    """A save of which all is there counts as a use, and a tier takes what is used often."""
    held = RuntimeDir(folder)
    disk = {"path": str(tmp_path), "capacity": "1MiB", "write": "selective", "admit_after": 2}
    config = settings(folder, disk=disk)
    space = ModelCache(config, m.Model.of(SHAPE, b"fingerprint"), held, "arena-1")
    graph = space.save(m.SaveRequest(1, SAVER, CHAIN, HERE), 1).graph
    assert graph is not None
    space.ops_ended(SAVER, ended(graph))
    for _ in range(2):
        with pytest.raises(FormatError, match="not a chain"):
            space.save(m.SaveRequest(1, SAVER, m.join(NAMES[1:]), HERE), 1)
    assert space.save(m.SaveRequest(1, SAVER, CHAIN, HERE), 1).graph is None
    ticking(space, lambda: not space.background)
    space.check_integrity()
    assert [space.used[tier][0] for tier in ("host", "disk")] == [4, 4]
    space.close()
    held.close()


@pytest.mark.parametrize("there", [1, 2, 3])
def test_blocks_that_change_parents_while_they_are_saved_harm_nobody(
    folder: Path, tmp_path: Path, there: int
) -> None:
    """A tier is offered what a save has brought when it ends; the keys were checked before."""
    held = RuntimeDir(folder)
    disk = {"path": str(tmp_path), "capacity": "1MiB", "write": "selective", "admit_after": 2}
    config = settings(folder, disk=disk)
    space = ModelCache(config, m.Model.of(SHAPE, b"fingerprint"), held, "arena-1")
    begun = space.save(m.SaveRequest(1, SAVER, m.join(NAMES[: 4 - there]), HERE), 1).graph
    assert begun is not None
    space.ops_ended(SAVER, ended(begun))  # a first use of those that will be gone
    first = space.save(m.SaveRequest(1, SAVER, CHAIN, HERE), 1).graph
    assert first is not None
    space.clear(HERE)
    moved = [OTHER[0], *NAMES[-there:]]
    second = space.save(m.SaveRequest(1, LOADER, m.join(moved), HERE), 1).graph
    assert second is not None
    space.ops_ended(LOADER, ended(second))
    space.ops_ended(SAVER, ended(first))
    ticking(space, lambda: not space.background)
    space.check_integrity()
    assert space.manager.index.path(NAMES[3]) == moved
    space.clear(HERE)
    assert [space.used[tier][0] for tier in ("host", "disk")] == [0, 0]
    space.close()
    held.close()


@pytest.mark.parametrize("stop", [2, 3])
def test_what_stands_on_other_blocks_is_not_fetched_though_its_end_is_not_there(
    space: ModelCache, stop: int
) -> None:
    """A fetch reserves room before it looks where the blocks are."""
    graph = space.save(m.SaveRequest(1, SAVER, OTHER[0], HERE), 1).graph
    assert graph is not None
    space.ops_ended(SAVER, ended(graph))
    ticking(space, lambda: not space.background)
    keys = [OTHER[0], NAMES[1], OTHER[1]][:stop]
    found = [("host", 0, 1), ("disk", 1, stop)]
    asked = m.LoadRequest(1, LOADER, m.join(keys), HERE, found, 0, stop, fetch=True)
    with pytest.raises(KVCoreError, match="not a chain" if stop == 2 else "match again"):
        space.load(asked, 1)
    space.check_integrity()
    assert space.manager.index.path(NAMES[3]) == NAMES


def test_clearing_a_namespace_clears_that_one_and_its_tokens(folder: Path, tmp_path: Path) -> None:
    held = RuntimeDir(folder)
    config = settings(folder, fusion={"enabled": True})
    space = ModelCache(config, m.Model.of(SHAPE, b"fingerprint"), held, "arena-1")
    tokens = pack_tokens(words(1, 64))
    for namespace, names in ((HERE, NAMES), (b"o" * 16, OTHER)):
        graph = space.save(m.SaveRequest(1, SAVER, m.join(names), namespace), 1).graph
        assert graph is not None
        space.ops_ended(SAVER, ended(graph))
        space.learn(m.LearnTokens(1, SAVER, namespace, m.join(names), 0, 0, tokens))
    segments = space._segments
    assert isinstance(segments, Segments)
    assert segments.num_tokens == 128
    assert space.clear(HERE) == 4
    assert segments.num_tokens == 64, "what was said is forgotten with what was stored of it"
    depths = [space.manager.index.match(names).depth for names in (NAMES, OTHER)]
    assert depths == [0, 4]
    found = space.search(m.SearchRequest(1, SAVER, b"o" * 16, tokens)).found
    assert [(start, length) for start, length, *_ in found] == [(0, 64)]
    assert not space.search(m.SearchRequest(1, SAVER, b"x" * 16, tokens)).found, "another tenant's"
    space.close()
    held.close()


def test_a_server_spills_what_a_full_host_tier_would_lose(folder: Path, tmp_path: Path) -> None:
    held = RuntimeDir(folder)
    disk = {"path": str(tmp_path), "capacity": "1MiB", "write": "write_back"}
    config = settings(folder, host={"capacity": "64KiB"}, disk=disk)
    space = ModelCache(config, m.Model.of(SHAPE, b"fingerprint"), held, "arena-1")
    room = space.used["host"][1]
    for i in range(room):
        graph = space.save(m.SaveRequest(1, SAVER, m.join([bytes([i + 1]) * 16]), HERE), 1).graph
        assert graph is not None
        space.ops_ended(SAVER, ended(graph))
    assert space.used["disk"][0] == 0
    ticking(space, lambda: space.used["disk"][0] and not space.background)
    assert space.used["host"][0] < room
    space.close()
    held.close()


# -- a tier that is late ---------------------------------------------------------------------------


class Hung:
    """A disk whose reads stand still until they are let go. The server's time is the test's own."""

    def __init__(self, space: ModelCache, monkeypatch: pytest.MonkeyPatch) -> None:
        disk = space._transport.worker.tiers["disk"]
        read = disk.read
        self.begun, self.go_on, self.now = 0, threading.Event(), 100.0

        def hang(requests: Any) -> Any:
            self.begun += 1
            assert self.go_on.wait(PATIENCE_S)
            return read(requests)

        monkeypatch.setattr(disk, "read", hang)
        monkeypatch.setattr(space, "_clock", lambda: self.now)


def on_disk(space: ModelCache, count: int) -> list[bytes]:
    """The names of ``count`` more prompts of a block, which are on disk, and only there."""
    names = [bytes([100 + i]) * 16 for i in range(count)]
    for name in names:
        graph = space.save(m.SaveRequest(1, SAVER, name, HERE), 1).graph
        assert graph is not None
        space.ops_ended(SAVER, ended(graph))
    ticking(space, lambda: not space.background)
    space.manager.index.evictions.evict("host", 100)
    return names


def load_one(
    space: ModelCache, session: int, name: bytes, told: list[dict[int, RowError]], **more: Any
) -> TransferGraph:
    """A load of one block whose rank is ready. ``told`` gets the end of its read."""
    asked = m.LoadRequest(1, session, name, HERE, [("disk", 0, 1)], 0, 1, **more)
    graph = space.load(asked, 1).graph
    assert graph is not None
    [read] = [op.op_id for op in graph.ops if op.path.reads_tier]
    space.read(session, graph.graph_id, read, 0, collect(told))
    return graph


def breaker_of(space: ModelCache) -> Breaker:
    return space.manager.tiers.breakers.reads["disk"]


def test_a_tier_whose_reads_hang_is_left_alone_whatever_the_session_says(
    space: ModelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three loads are late. The session has given up the first two before."""
    names = on_disk(space, 3)
    hung = Hung(space, monkeypatch)
    for failures, name in enumerate(names, 1):
        graph = load_one(space, LOADER, name, [])
        until(lambda: hung.begun)
        if failures < 3:
            space.ops_ended(LOADER, ended(graph, RowError.DEADLINE))
        assert space.claims(LOADER) == failures, "the read may be writing"
        hung.now += space._late_s - 1
        space.tick()
        assert breaker_of(space)._failures == failures - 1, "slow is not late"
        hung.now += 1
        space.tick()
        space.tick()
        assert breaker_of(space)._failures == failures
    assert breaker_of(space).state is BreakerState.OPEN
    assert not sources(space), "nobody waits for it any more"
    hung.go_on.set()
    ticking(space, lambda: not space._reading)
    space.ops_ended(LOADER, ended(graph))
    assert not space.claims(LOADER)
    assert breaker_of(space).state is BreakerState.OPEN, "what came too late is no success"


def test_a_session_with_a_short_deadline_costs_others_no_tier(
    space: ModelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read that waits behind others has not begun. That it is dropped says nothing of a tier."""
    threads = WorkerLimits().io_queues
    names = on_disk(space, threads + 4)
    hung = Hung(space, monkeypatch)
    for name in names[:threads]:
        load_one(space, LOADER, name, [])
    until(lambda: hung.begun == threads)
    for name in names[threads:]:
        told: list[dict[int, RowError]] = []
        short = load_one(space, SAVER, name, told, deadline_s=0.001)
        ticking(space, lambda told=told: told)  # type: ignore[misc]
        assert set(told[0].values()) == {RowError.DEADLINE}
        space.ops_ended(SAVER, ended(short, RowError.DEADLINE))
    assert (space.claims(SAVER), breaker_of(space)._failures) == (0, 0)
    hung.go_on.set()
    ticking(space, lambda: not space._reading)


def test_a_read_that_waits_behind_others_blames_no_tier(
    space: ModelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is dropped at the server's deadline, though its session would wait for longer."""
    threads = WorkerLimits().io_queues
    names = on_disk(space, threads + 1)
    hung = Hung(space, monkeypatch)
    for name in names[:threads]:
        load_one(space, LOADER, name, [])
    until(lambda: hung.begun == threads)
    monkeypatch.setattr(space, "_late_s", 0.05)
    told: list[dict[int, RowError]] = []
    behind = load_one(space, SAVER, names[-1], told, deadline_s=2 * PATIENCE_S)
    until(lambda: (space.tick(), told)[1], seconds=PATIENCE_S)
    assert set(told[0].values()) == {RowError.DEADLINE}
    hung.now += 1
    space.tick()
    assert breaker_of(space)._failures == threads, "those that had begun"
    space.ops_ended(SAVER, ended(behind, RowError.DEADLINE))
    hung.go_on.set()
    ticking(space, lambda: not space._reading)


def test_a_read_is_not_late_before_its_deadline_was_looked_at(
    space: ModelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To take in reports takes time. A read that waits would be dropped at the next look only."""
    [name] = on_disk(space, 1)
    hung, poll = Hung(space, monkeypatch), space._transport.poll
    load_one(space, LOADER, name, [])

    def slow() -> list[OpReport]:
        found = poll()
        hung.now += space._late_s
        return found

    monkeypatch.setattr(space._transport, "poll", slow)
    space.tick()
    assert breaker_of(space)._failures == 0
    space.tick()
    assert breaker_of(space)._failures == 1
    hung.go_on.set()
    ticking(space, lambda: not space._reading)
