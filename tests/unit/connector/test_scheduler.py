"""What the leaders of all engines share: counting, saves, reports and clears."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.config import load_config
from kvcore.connector.leader import LeaderCore, LeaderParts, LeaderTraits
from kvcore.connector.step_transport import Outbox
from kvcore.explain.recorder import RequestRecorder
from kvcore.explain.request_log import Cause, RequestLog
from kvcore.index import BlockIndex, TierSpec
from kvcore.manager import Hit, KVManager, TransferOptions
from kvcore.manager.base import Source
from kvcore.model.keys import KeyChain
from kvcore.model.shape import BlockShape
from kvcore.model.spec import LayerGroup, ModelDescription
from kvcore.telemetry.metrics import Metrics
from kvcore.transfer.graph import OpReport, RowError, TransferGraph

BLOCK = 16
MODEL = ModelDescription(
    BlockShape(4, 2, 64, BLOCK, "float16"), (LayerGroup(0, BLOCK, (0, 1, 2, 3)),), b"f" * 32, 1
)
PROMPT = list(range(1, 50))


class Leader(LeaderCore[Any]):
    """An engine's leader, as small as it can be."""

    def __init__(
        self, fusion: Any = None, *, host_only: bool = False, copy: int | None = None
    ) -> None:
        self.released: list[str] = []
        self.stopped = 0
        outbox, metrics = Outbox(), Metrics("leader")
        recorder = RequestRecorder(RequestLog())
        recorder.count_in(metrics)
        parts = LeaderParts[Any](
            manager=KVManager(
                BlockIndex([TierSpec("host", 64)]),
                outbox,
                options=TransferOptions(copy_blocks=copy),
                metrics=metrics,
            ),
            transport=outbox,
            metrics=metrics,
            recorder=recorder,
            fusion=fusion,
            releases=[lambda: self.released.append("tiers")],
        )
        traits = LeaderTraits(no_page=-1, min_load_tokens=1, layerwise=True, host_only=host_only)
        super().__init__(load_config(None, {}), MODEL, parts, traits)

    def _stop_running(self) -> None:
        self.stopped += 1

    def chain(self) -> KeyChain:
        chain = KeyChain(self.namespaces.of(), BLOCK)
        chain.extend(PROMPT)
        return chain

    def save(self, pages: list[int], tokens: list[int] | None = PROMPT) -> TransferGraph | None:
        chain = self.chain()
        return self._save(chain, len(chain.keys), [pages], tokens, lambda graph: None)

    def end(
        self, graph: TransferGraph, why: RowError | None = None, *, only: int | None = None
    ) -> list[bool]:
        """Every op ends, well or for a reason, or ``only`` one does not; which free the pages."""
        failed = {
            op.op_id: dict.fromkeys(range(*op.rows), why)
            for op in graph.ops
            if why is not None and only in (None, op.op_id)
        }
        return [
            self._complete(OpReport(graph.graph_id, op.op_id, failed.get(op.op_id, {})))
            for op in graph.ops
        ]

    def counted(self, name: str) -> dict[str, float]:
        found: dict[str, float] = self.metrics.snapshot().get(name, {})
        return found


class Chunks:
    """Stands for the planner of chunks: it notes what it learns."""

    def __init__(self) -> None:
        self.learned: list[tuple[int, int, list[int]]] = []
        self.calls: list[str] = []
        self.chunks = self

    def learn(self, chain: KeyChain, start: int, stop: int, tokens: list[int]) -> None:
        self.learned.append((start, stop, list(tokens)))

    def forget(self) -> None:
        self.calls.append("forget")

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def chunks() -> Chunks:
    return Chunks()


@pytest.fixture
def leader(chunks: Chunks) -> Leader:
    return Leader(chunks)


# -- what a lookup counts as --------------------------------------------------------------------


@given(
    blocks=st.integers(0, 4),
    asked=st.integers(1, 80),
    host=st.integers(0, 3),
    below=st.integers(0, 3),
    host_only=st.booleans(),
)
def test_a_lookup_is_counted_by_one_rule(
    blocks: int, asked: int, host: int, below: int, host_only: bool
) -> None:
    """The same for every engine: all that the engine lacks is missed, for one reason."""
    leader = Leader(host_only=host_only)
    sources = [Source("host", 0, host)] if host else []
    sources += [Source("disk", host, host + below)] if below else []
    keys = [bytes([n]) * 16 for n in range(host + below)]
    hit = Hit(keys, leader.namespaces.of().digest, tuple(sources))
    computed = blocks * BLOCK
    found = host if host_only else host + below
    gain = found * BLOCK - computed
    leader.recorder.looked_up("r", PROMPT, computed, hit, leader.namespaces.of(), BLOCK)
    leader._missed_little("r", hit, gain, computed, computed + asked)
    journal = leader.recorder.journal
    assert journal is not None
    record = journal.get("r")
    assert record is not None
    causes = {miss.cause for miss in record.misses}
    if gain > 0 or asked < BLOCK:
        expected = "too_short"
        assert Cause.TOO_SHORT in causes
    elif host_only and (host + below) * BLOCK > computed:
        expected = "pending"
        assert Cause.LATE in causes
    else:
        expected = "not_cached"
    assert leader.counted("kvcore_misses_total") == {expected: 1}
    assert leader.counted("kvcore_lookup_tokens_total") == {"miss|": asked}


# -- saves and reports --------------------------------------------------------------------------


def test_tokens_are_learned_once_they_are_copied(leader: Leader, chunks: Chunks) -> None:
    graph = leader.save([3, 4, 5, 6])
    assert graph is not None
    leader.check_integrity()
    assert leader._users.graphs == {graph.graph_id}
    assert chunks.learned == []
    assert any(leader.end(graph))
    assert chunks.learned == [(0, 3, PROMPT)]
    assert not leader._users.graphs
    leader.check_integrity()
    assert leader.save([3, 4, 5, 6]) is None, "all of it is held"
    assert chunks.learned == [(0, 3, PROMPT)] * 2


def test_tokens_of_a_failed_save_are_not_learned(leader: Leader, chunks: Chunks) -> None:
    graph = leader.save([3, 4, 5, 6])
    assert graph is not None
    leader.end(graph, RowError.IO)
    assert chunks.learned == []
    leader.check_integrity()


def test_a_save_in_parts_frees_its_pages_with_the_last_one(chunks: Chunks) -> None:
    leader = Leader(chunks, copy=1)
    graph = leader.save([3, 4, 5, 6])
    assert graph is not None
    assert leader.end(graph) == [False, False, True]
    assert chunks.learned == [(0, 3, PROMPT)]
    leader.check_integrity()


@pytest.mark.parametrize("part", range(3))
def test_tokens_of_a_save_of_which_a_part_failed_are_not_learned(chunks: Chunks, part: int) -> None:
    leader = Leader(chunks, copy=1)
    graph = leader.save([3, 4, 5, 6])
    assert graph is not None
    assert leader.end(graph, RowError.INTERNAL, only=part) == [False, False, True]
    assert chunks.learned == []
    leader.check_integrity()


def test_tokens_are_not_learned_after_a_clear(leader: Leader, chunks: Chunks) -> None:
    """The copy has ended, and its report comes after the clear that erased all tokens."""
    graph = leader.save([3, 4, 5, 6])
    assert graph is not None
    leader.clear()
    leader.end(graph)
    assert chunks.learned == []


def test_a_blends_tokens_are_not_a_loads(leader: Leader) -> None:
    leader._failed("r", {"host": 32, "disk": 16, "blend": 200})
    assert leader.counted("kvcore_lookup_tokens_total") == {"miss|": 48}


def test_tokens_that_do_not_determine_the_kv_are_not_learned(
    leader: Leader, chunks: Chunks
) -> None:
    graph = leader.save([3, 4, 5, 6], None)
    assert graph is not None
    leader.end(graph)
    assert chunks.learned == []


def test_a_worker_that_refuses_ends_it(leader: Leader, caplog: pytest.LogCaptureFixture) -> None:
    graph = leader.save([3, 4, 5, 6])
    assert graph is not None
    leader.end(graph, RowError.REFUSED)
    leader.disable("again")
    assert leader.disabled == "a worker refused its work"
    assert [r.message for r in caplog.records if "stands aside" in r.message] == [
        "a worker refused its work: kvcore stands aside until the engine restarts"
    ]


def test_a_failed_load_is_one_miss_of_its_tokens(leader: Leader) -> None:
    space = leader.namespaces.of()
    hit = Hit(leader.chain().keys, space.digest, (Source("host", 0, 3),))
    leader.recorder.looked_up("r", PROMPT, 0, hit, space, BLOCK)
    leader.recorder.loaded("r", leader._by_tier(hit, 10, 48), 11)
    leader.recorder.failed("r", 38)
    counted = leader.counted("kvcore_lookup_tokens_total")
    assert counted == {"hit|host": 38, "miss|": 11 + 38}
    assert leader.counted("kvcore_misses_total") == {"load_failed": 1}


# -- upkeep -------------------------------------------------------------------------------------


def test_after_a_clear_nothing_from_before_is_found(leader: Leader, chunks: Chunks) -> None:
    """Not by this engine, which has a namespace of its own from then on, nor by requests that
    run."""
    before = leader.chain()
    graph = leader.save([3, 4, 5, 6])
    assert graph is not None
    leader.end(graph)
    assert leader.manager.get_match(before.keys, before.namespace.digest).depth == 3
    leader.clear()
    assert leader.manager.get_match(before.keys, before.namespace.digest).depth == 0
    assert leader.chain().keys != before.keys
    assert leader.stopped == 1
    assert chunks.calls == ["forget"]


def test_closing_releases_the_tiers_last(leader: Leader, chunks: Chunks) -> None:
    leader.close()
    assert (chunks.calls, leader.released) == (["close"], ["tiers"])


def test_the_checks_find_a_save_that_is_not_followed(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader, "_use", lambda graph: None)
    leader.save([3, 4, 5, 6])
    with pytest.raises(AssertionError, match="not in flight"):
        leader.check_integrity()
