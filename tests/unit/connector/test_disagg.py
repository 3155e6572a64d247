"""Promises: what one engine tells another of a prompt's KV, and how long that is waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore._util.circuit_breaker import Breaker, BreakerState
from kvcore.config import load_config
from kvcore.connector.clients import Clients
from kvcore.connector.disagg import accept, promised
from kvcore.errors import FormatError, TierUnavailable
from kvcore.index import BlockIndex, TierSpec
from kvcore.manager import KVManager
from kvcore.manager.base import Backing
from kvcore.manager.remote_lookup import StoreLookup
from kvcore.model.keys import KeyChain, Namespace
from kvcore.model.parts import Part, evenly
from kvcore.model.points import PointCounts, PointRows
from kvcore.model.shape import BlockShape
from kvcore.telemetry.metrics import Metrics
from kvcore.tiers import finder as polling
from kvcore.tiers.base import BlockRead
from kvcore.tiers.remote import Item, Promise, Shard, StoreFinder
from kvcore.tiers.remote.memory import MemoryStore
from kvcore.tiers.remote.shard_registry import ShardRegistry
from kvcore.transfer.graph import Path, TransferGraph, UnitTable
from kvcore.worker.executors import TierRead
from kvcore_vllm.handover import Handover
from support.budget import examples
from support.transfers import load_blocks


def chain(tokens: Sequence[int], tenant: str = "") -> KeyChain:
    made = KeyChain(Namespace(b"model", cache_salt=tenant), 16)
    made.extend(tokens)
    return made


def has(blocks: int, node: str = "", points: PointRows | None = None) -> Any:
    """What is asked of a manager that has ``blocks`` of any prompt."""
    return SimpleNamespace(node=node, points=points, expected=lambda keys: min(len(keys), blocks))


PROMPT = list(range(1, 101))
POINTS = PointCounts(every=2, state_rows=3, window_sizes=((2, 1),))
"""Of a model that can go on behind every second block."""
SHAPE = BlockShape(1, 1, 16, 8, "float32")
SHARD = Shard("kvcore", "base", Part.whole(SHAPE), SHAPE)


def test_a_promise_is_taken_for_the_same_prompt_alone() -> None:
    told = promised(chain(PROMPT), 6, has(6))
    assert told is not None
    assert accept(told, chain([*PROMPT, 5, 6]), 3.0) == Promise(6, 3.0)
    with pytest.raises(FormatError, match="another prompt"):
        accept(told, chain([9, *PROMPT[1:]]), 3.0)
    with pytest.raises(FormatError, match="another prompt"):
        accept(told, chain(PROMPT[:90]), 3.0)
    with pytest.raises(FormatError, match=r"namespace \(model, .* ranks and stages\)"):
        accept(told, chain(PROMPT, "tenant"), 3.0)
    with pytest.raises(FormatError, match=r"block\.tokens"):
        accept({**told, "block_tokens": 32}, chain(PROMPT), 3.0)
    with pytest.raises(FormatError, match="version"):
        accept({**told, "version": 9}, chain(PROMPT), 3.0)
    assert "node" not in told
    there = promised(chain(PROMPT), 6, has(6, "10.0.0.5:7801-7804"))
    assert there is not None
    assert accept(there, chain(PROMPT), 3.0) == Promise(6, 3.0, "10.0.0.5:7801-7804")
    with pytest.raises(FormatError, match="node"):
        accept({**told, "node": "x" * 301}, chain(PROMPT), 3.0)
    assert promised(chain(PROMPT), 0, has(6)) is None
    assert promised(chain(PROMPT[:10]), 1, has(6)) is None
    assert promised(chain(PROMPT), 6, has(0)) is None


def test_a_promise_of_a_resume_point_names_its_last_row() -> None:
    told = promised(chain(PROMPT), 6, has(4, "n:1", POINTS))
    assert told is not None
    keys = chain(PROMPT).keys
    assert (told["version"], told["blocks"]) == (2, 4)
    assert told["last"] == POINTS.chain(keys, 4)[-1].hex() != keys[3].hex()
    assert accept(told, chain([*PROMPT, 5, 6]), 3.0, POINTS) == Promise(4, 3.0, "n:1")
    with pytest.raises(FormatError, match="another prompt"):
        accept(told, chain([9, *PROMPT[1:]]), 3.0, POINTS)
    with pytest.raises(FormatError, match="another prompt"):
        accept(told, chain(PROMPT[:60]), 3.0, POINTS)
    with pytest.raises(FormatError, match="another prompt"):  # its points have another form
        accept(told, chain(PROMPT), 3.0, PointCounts(every=2, state_rows=2))
    with pytest.raises(FormatError, match="behind block 3; supported here are multiples of 2"):
        accept({**told, "blocks": 3}, chain(PROMPT), 3.0, POINTS)


def test_who_keeps_points_and_who_does_not_refuse_each_others_promises() -> None:
    """An engine of an older kvcore promises blocks alone, after which the model could not go on."""
    blocks = promised(chain(PROMPT), 6, has(6))
    point = promised(chain(PROMPT), 6, has(6, points=POINTS))
    assert blocks is not None
    assert point is not None
    with pytest.raises(FormatError, match="version 1; supported here is 2"):
        accept(blocks, chain(PROMPT), 3.0, POINTS)
    with pytest.raises(FormatError, match="version 2; supported here is 1"):
        accept(point, chain(PROMPT), 3.0)
    assert accept(point, chain(PROMPT), 3.0, POINTS) == Promise(6, 3.0)


@given(
    st.dictionaries(
        st.sampled_from(["version", "namespace", "blocks", "last", "x"]),
        st.none() | st.integers() | st.text() | st.binary(),
    )
)
def test_what_is_no_promise_is_refused(garbage: dict[str, Any]) -> None:
    with pytest.raises(FormatError):
        accept(
            {**(promised(chain(PROMPT), 6, has(6)) or {}), **garbage, "y": 1}, chain(PROMPT), 1.0
        )


class Filling(MemoryStore):
    """Values come while it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []
        self.down = False

    def exists(self, names: Sequence[str]) -> list[bool]:
        if self.down:
            raise TierUnavailable("down")
        self.asked.append(len(names))
        return super().exists(names)


class Leader:
    def __init__(self, store: Filling) -> None:
        self.finder = StoreFinder(store, [SHARD], name="far", lookup_s=20, absent_s=60)
        self.index = BlockIndex([TierSpec("far", 100)])
        self.breaker = Breaker("far")
        self.lookup = StoreLookup("far", self.index, self.breaker, self.finder)

    def found(self, keys: Sequence[bytes], promise: Promise | None) -> tuple[int, str]:
        assert self.lookup.ask(keys, promise)
        while (believed := self.lookup.settle(keys, b"n" * 16)) is None:
            self.lookup.wait(1.0)
        return believed.stop, believed.outcome


@pytest.fixture
def store() -> Filling:
    return Filling()


@pytest.fixture
def leader(store: Filling) -> Iterator[Leader]:
    made = Leader(store)
    yield made
    made.finder.close()


def fill(store: Filling, keys: Sequence[bytes]) -> None:
    store.put([Item(SHARD.name(key), [memoryview(b"?")]) for key in keys])


def test_what_is_promised_is_waited_for(leader: Leader, store: Filling) -> None:
    keys = chain(PROMPT).keys
    coming, exists = [keys[:2], keys[2:5], keys[5:6]], store.exists

    def then_some_come(names: Sequence[str]) -> list[bool]:
        there = exists(names)
        if coming:
            fill(store, coming.pop(0))
        return there

    store.exists = then_some_come  # type: ignore[method-assign]
    assert leader.found(keys, Promise(6, 60.0)) == (6, "found")
    assert len(store.asked) > 3


class Reporting(Filling):
    """With nodes, which report the folders of what they hold."""

    has_nodes = True

    @property
    def folders(self) -> set[str]:
        return {name.rpartition("/")[0] for name in list(self.values)}

    def exists_at(self, node: str, names: Sequence[str]) -> list[bool]:
        return self.exists(names)


WIDE = BlockShape(4, 2, 16, 8, "float32")
SIZES = [
    [Part(heads, layers) for heads in evenly(2, ranks) for layers in evenly(4, stages)]
    for ranks in (1, 2)
    for stages in (1, 2)
]
"""What the ranks of an engine have of a block, with one and two ranks in one and two stages."""


@pytest.mark.parametrize("kind", [Filling, Reporting])
@settings(max_examples=examples(30))
@given(st.data())
def test_an_engine_of_another_size_is_waited_for_until_all_its_ranks_have_stored(
    kind: type[Filling], data: st.DataObject
) -> None:
    """Each of which stores its parts of the blocks in order, at its own pace."""
    ours, theirs = (data.draw(st.sampled_from(SIZES)) for _ in range(2))
    store, whole = kind(), Shard("kvcore", "base", Part.whole(WIDE), WIDE)
    shards, others = ([whole.sibling(part) for part in parts] for parts in (ours, theirs))
    registry = ShardRegistry(store, shards, every_s=0.0)
    ShardRegistry(store, others, every_s=60.0, announces=True).refresh()
    keys = chain(PROMPT).keys
    order = data.draw(st.permutations([shard for shard in others for _ in keys]))
    came = dict.fromkeys(others, 0)
    exists = store.exists

    def then_one_comes(names: Sequence[str]) -> list[bool]:
        there = exists(names)
        if order:
            shard = order.pop()
            store.put([Item(shard.name(keys[came[shard]]), [memoryview(b"?")])])
            came[shard] += 1
        return there

    store.exists = then_one_comes  # type: ignore[method-assign]
    with (
        closing(StoreFinder(store, shards, name="far", registry=registry)) as finder,
        patch.object(polling, "PROMISE_POLL_S", 0.0),
    ):
        query = finder.ask(keys, Promise(6, 60.0, "here:1" if store.has_nodes else ""))
        assert query is not None
        while not query.ended:
            assert query.found <= min(came.values())
            finder.wait(0.01)
    assert (query.found, query.failed, set(came.values())) == (6, False, {6})


def test_it_is_asked_for_though_it_was_not_there_a_moment_ago(
    leader: Leader, store: Filling
) -> None:
    keys = chain(PROMPT).keys
    assert leader.found(keys, None) == (0, "absent")
    assert not leader.lookup.ask(keys)
    fill(store, keys[:4])
    assert leader.found(keys, Promise(4, 60.0)) == (4, "found")
    assert not leader.lookup.ask(keys, Promise(4, 60.0)), "what was promised is here"


def test_a_promise_that_is_not_kept_costs_its_time_and_no_more(
    leader: Leader, store: Filling
) -> None:
    keys = chain(PROMPT).keys
    fill(store, keys[:1])
    began = time.monotonic()
    assert leader.found(keys, Promise(6, 0.3)) == (1, "found")
    assert time.monotonic() - began >= 0.3
    assert leader.breaker.allows(), "the store answers, whatever was promised"
    assert not leader.lookup.ask(keys), "it is not waited for again"


def test_a_dead_store_ends_the_waiting(leader: Leader, store: Filling) -> None:
    store.down = True
    assert leader.found(chain(PROMPT).keys, Promise(6, 600.0)) == (0, "failed")


class Elsewhere(Filling):
    """Values of another engine lie at a node of its own, and are not found in general."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[str] = []

    def exists(self, names: Sequence[str]) -> list[bool]:
        return [False] * len(names)

    def exists_at(self, node: str, names: Sequence[str]) -> list[bool]:
        self.nodes.append(node)
        if node == "gone:1":
            raise TierUnavailable("gone")
        return super().exists(names)


def test_a_promises_node_is_asked_and_remembered_for_the_load() -> None:
    """And one that is gone fails its own promise alone, though they are asked together."""
    store = Elsewhere()
    leader = Leader(store)
    mine, other = chain(PROMPT).keys, chain([7, *PROMPT]).keys
    fill(store, [*mine, *other])
    assert leader.found(mine, None) == (0, "absent")
    with leader.finder._changed:  # the next two are one round
        assert leader.lookup.ask(mine, Promise(4, 60.0, "here:1"))
        assert leader.lookup.ask(other, Promise(4, 60.0, "gone:1"))
    assert leader.found(mine, None) == (6, "found")
    assert leader.found(other, None) == (0, "failed")
    assert set(store.nodes) == {"here:1", "gone:1"}
    assert leader.lookup.nodes(mine) == {"here:1"}
    assert leader.lookup.nodes(other) == set()
    leader.finder.close()


class Nodes(Elsewhere):
    """As above, and it says so. A node called ``hung`` answers when it is let."""

    has_nodes = True

    def __init__(self) -> None:
        super().__init__()
        self.hangs, self.let = threading.Event(), threading.Event()

    def exists(self, names: Sequence[str]) -> list[bool]:
        return Filling.exists(self, names)

    def exists_at(self, node: str, names: Sequence[str]) -> list[bool]:
        if node == "hung:1":
            self.hangs.set()
            assert self.let.wait(60)
        return super().exists_at(node, names)


def prompts(count: int) -> list[list[bytes]]:
    return [list(chain([n + 1, *PROMPT]).keys) for n in range(count)]


def test_nodes_that_are_gone_cost_their_own_promises_alone() -> None:
    """However many: neither what a living one promises, nor what is asked of all."""
    store = Nodes()
    leader = Leader(store)
    *gone, promised_here, held = prompts(8)
    fill(store, [*promised_here, *held])
    for keys in gone:
        assert leader.found(keys, Promise(4, 60.0, "gone:1")) == (0, "failed")
    assert leader.breaker.state is BreakerState.CLOSED
    assert leader.found(promised_here, Promise(6, 60.0, "here:1")) == (6, "found")
    assert leader.found(held, None) == (6, "found")
    leader.finder.close()


def test_a_node_that_hangs_keeps_nobody_else_waiting() -> None:
    store = Nodes()
    leader = Leader(store)
    hung, held = prompts(2)
    fill(store, [*hung, *held])
    assert leader.lookup.ask(hung, Promise(6, 600.0, "hung:1"))
    assert store.hangs.wait(60)
    assert leader.found(held, None) == (6, "found"), "it is asked meanwhile"
    store.let.set()
    assert leader.found(hung, None) == (6, "found")
    leader.finder.close()
    assert not any(thread.is_alive() for thread in leader.finder._threads.values())


def test_a_living_node_is_asked_though_the_others_do_not_answer() -> None:
    """They are left alone; and that a node answers says nothing of them either."""
    store = Nodes()
    leader = Leader(store)
    here, *others = prompts(5)
    fill(store, here)
    store.down = True
    for keys in others[:3]:
        assert leader.found(keys, None) == (0, "failed")
    assert leader.breaker.state is BreakerState.OPEN
    store.down = False
    assert leader.found(here, Promise(6, 60.0, "here:1")) == (6, "found")
    assert leader.breaker.state is BreakerState.OPEN
    assert not leader.lookup.ask(others[3])
    leader.finder.close()


def test_where_all_look_in_one_place_a_promise_that_fails_counts() -> None:
    """The name of a node means nothing to such a store: it is the store that is down."""
    leader = Leader(Elsewhere())
    for keys in prompts(3):
        assert leader.found(keys, Promise(4, 60.0, "gone:1")) == (0, "failed")
    assert leader.breaker.state is BreakerState.OPEN
    leader.finder.close()


@pytest.mark.parametrize("how", ["load", "prefetch"])
def test_the_node_of_a_promise_goes_to_the_ranks(how: str) -> None:
    """A prefetch is of no request: who promised the blocks is known of them."""
    store, graphs, reads = Elsewhere(), list[TransferGraph](), list[BlockRead]()
    finder = StoreFinder(store, [SHARD], name="far", lookup_s=20, absent_s=60)
    manager = KVManager(
        BlockIndex([TierSpec("host", 100), TierSpec("far", 100)]),
        SimpleNamespace(submit=lambda graph, lane: graphs.append(graph)),  # type: ignore[arg-type]
        backing=[Backing("far", Path.REMOTE2H, Path.H2REMOTE, finder=finder)],
    )
    keys = chain(PROMPT).keys
    fill(store, keys[:4])
    hit = manager.get_match(keys, b"n" * 16)
    assert manager.ask_stores(hit, promise=Promise(4, 60.0, "here:1"))
    while manager.ask_stores(hit := manager.get_match(keys, b"n" * 16)):
        manager.wait_stores(1.0)
    if how == "load":
        load_blocks(manager, hit, 0, 4, [UnitTable(1, 1, bytes(8 * 4))])
    else:
        planned = manager.plan_fetch(hit)
        assert planned is not None
        manager.launch(planned)
    [graph] = graphs
    assert graph.nodes == ("here:1",)
    tier = SimpleNamespace(read=lambda given: reads.extend(given) or [None] * len(given))
    arena = SimpleNamespace(slot_buffers=lambda slot: [])
    TierRead({"far": tier}, arena).run(graph, graph.ops[0], [0, 1])  # type: ignore[arg-type, dict-item]
    assert [read.nodes for read in reads] == [("here:1",)] * 2
    finder.close()


def test_what_a_tier_has_or_is_receiving_may_be_promised() -> None:
    index = BlockIndex([TierSpec("host", 100), TierSpec("far", 100)])
    manager = KVManager(
        index,
        SimpleNamespace(submit=lambda graph, lane: None),  # type: ignore[arg-type]
        backing=[Backing("far", Path.REMOTE2H, Path.H2REMOTE, node="n:1")],
    )
    keys = chain(PROMPT).keys
    assert promised(chain(PROMPT), 6, manager) is None
    index.lifecycle.commit(index.lifecycle.reserve("far", keys, 0, 2, b"n" * 16))
    save = index.lifecycle.reserve("host", keys, 0, 4, b"n" * 16)
    for blocks, known in ((6, 4), (3, 3)):
        told = promised(chain(PROMPT), blocks, manager)
        assert told is not None
        assert accept(told, chain(PROMPT), 3.0) == Promise(known, 3.0, "n:1")
    index.lifecycle.abort(save)
    left = promised(chain(PROMPT), 6, manager)
    assert left is not None
    assert left["blocks"] == 2


# -- vLLM's roles -----------------------------------------------------------------------------


def request(params: dict[str, Any] | None) -> Any:
    """What is looked at of a vLLM request."""
    return SimpleNamespace(request_id="r", num_prompt_tokens=100, kv_transfer_params=params)


def handover(role: str, manager: Any, **tables: Any) -> Handover:
    return Handover(role, 5.0, manager, Clients(load_config(overrides=tables, env={})), Metrics())


@pytest.mark.parametrize(
    ("role", "params", "promises"),
    [
        ("kv_producer", None, True),
        ("kv_producer", {"kvcore": {"report": True}}, True),
        ("kv_both", None, False),
        ("kv_both", {"do_remote_decode": True}, True),
        ("kv_consumer", {"do_remote_decode": False}, False),
    ],
)
def test_who_promises_what(role: str, params: dict[str, Any] | None, promises: bool) -> None:
    told = handover(role, has(9, "n:1")).reply(request(params), chain(PROMPT), 9, {}, {}, None)
    asked = params is not None and "kvcore" in params
    assert (told is not None) == (promises or asked)
    if told is None:
        return
    assert ("reused_tokens" in told["kvcore"]) == asked
    assert ("promise" in told["kvcore"]) == promises
    if promises:
        accepted = handover("kv_consumer", has(0)).accepted
        assert accepted(request(told), chain(PROMPT)) == Promise(6, 5.0, "n:1"), (
            "no more than the prompt"
        )
        assert accepted(request(told), chain(PROMPT, "tenant")) is None
    for nothing in (None, {}, {"kvcore": True}, {"kvcore": {"promise": 3}}):
        assert handover(role, has(0)).accepted(request(nothing), chain(PROMPT)) is None


@pytest.mark.parametrize("saved", [0, 1, 6])
def test_no_more_is_promised_than_was_saved(saved: int) -> None:
    producer = handover("kv_producer", has(9))
    told = producer.reply(request(None), chain(PROMPT), saved, {}, {}, None)
    assert (told is None) == (saved == 0)
    if told is not None:
        assert producer.accepted(request(told), chain(PROMPT)) == Promise(saved, 5.0)
