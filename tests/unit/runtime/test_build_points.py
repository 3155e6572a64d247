"""Leader and worker of a model with resume points: what is told, what is off, what comes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from kvcore.config import Config, load_config  # noqa: E402  # after the skip
from kvcore.connector.build import build_leader, build_worker  # noqa: E402
from kvcore.connector.page_table import Paging, PointPages  # noqa: E402
from kvcore.connector.step_transport import Outbox  # noqa: E402
from kvcore.errors import LayoutError  # noqa: E402
from kvcore.events.feed import Content  # noqa: E402
from kvcore.index import BlockIndex, Event, TierSpec  # noqa: E402
from kvcore.manager import HOST, KVManager  # noqa: E402
from kvcore.memory.layout import Arrangement, KVView, from_strides  # noqa: E402
from kvcore.model.keys import ROOT_PARENT, KeyChain, Namespace  # noqa: E402
from kvcore.model.points import PointShape, StateGroup, point_keys  # noqa: E402
from kvcore.model.shape import BlockShape  # noqa: E402
from kvcore.model.spec import LayerGroup, ModelDescription  # noqa: E402
from kvcore.runtime import build  # noqa: E402
from kvcore.runtime.tiers import PreparedBacking, prepare_backings  # noqa: E402
from kvcore.worker.lifecycle import close_worker, open_tiers  # noqa: E402
from support.transfers import load_blocks  # noqa: E402

BLOCK, PAGES = 16, 6
SHAPE = BlockShape(layers=2, kv_heads=2, head_dim=8, block_tokens=BLOCK, dtype="float32")
GROUPS = (LayerGroup(0, BLOCK, (0, 1)), LayerGroup(1, 2 * BLOCK, (), of="states"))
POINT = PointShape((StateGroup(1, ("a", "b"), 2400),), SHAPE.nbytes, 2)
PLAIN = ModelDescription(SHAPE, GROUPS[:1], bytes(16), 1)
MODEL = ModelDescription(SHAPE, GROUPS, bytes(16), 1, point=POINT)
ROWS = 2
DIGEST = Namespace(bytes(16)).digest
PAGING = Paging(GROUPS, BLOCK, no_page=-1, point=POINT)


def settings(**tables: dict[str, object]) -> Config:
    overrides: dict[str, dict[str, object]] = {"host": {"capacity": "1MiB", "huge_pages": False}}
    return load_config(overrides={**overrides, **tables}, env={})


def keys(blocks: int = 4) -> list[bytes]:
    return KeyChain(Namespace(bytes(16)), BLOCK).extend(range(blocks * BLOCK))


# --- what is told -----------------------------------------------------------------------------


def publish(index: BlockIndex, chain: Sequence[bytes], start: int = 0) -> None:
    reservation = index.lifecycle.reserve(HOST, chain, start, len(chain), DIGEST)
    index.lifecycle.commit(reservation)


def told_of(model: ModelDescription) -> tuple[BlockIndex, list[Event]]:
    told: list[Event] = []
    parts = build_leader(settings(), model, Outbox(), on_event=told.append)
    return parts.manager.index, told  # type: ignore[return-value]


def test_blocks_are_told_without_the_rows_behind_them() -> None:
    index, told = told_of(MODEL)
    publish(index, POINT.chain(keys(), 2))
    publish(index, POINT.chain(keys(), 4))
    assert told == [
        Event(True, HOST, tuple(keys()[:2])),
        Event(True, HOST, tuple(keys()[2:]), keys()[1]),
    ]


def test_rows_alone_are_not_told() -> None:
    """An event may begin at a row of a point, or within the point."""
    index, told = told_of(MODEL)
    chain = POINT.chain(keys(), 2)
    publish(index, chain[:2])
    publish(index, chain[:3], 2)
    publish(index, chain, 3)
    assert told == [Event(True, HOST, tuple(keys()[:2]))]


def test_what_is_removed_is_told_as_it_is() -> None:
    index, told = told_of(MODEL)
    chain = POINT.chain(keys(), 2)
    publish(index, chain)
    index.evictions.evict(HOST, 3)
    [_, removed] = told
    assert (removed.stored, removed.tier, set(removed.keys)) == (False, HOST, set(chain[1:]))


def test_a_model_without_points_tells_everything() -> None:
    """Whatever keys look like."""
    index, told = told_of(PLAIN)
    publish(index, POINT.chain(keys(), 2))
    assert [event.keys for event in told] == [POINT.chain(keys(), 2)]


@given(
    rows=st.integers(1, 4),
    saves=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5)), max_size=8),
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=4),
)
def test_who_listens_knows_the_blocks_that_are_held(
    rows: int, saves: list[tuple[int, int]], cuts: list[int]
) -> None:
    """Chains and the points behind them come in pieces; every block is told once, no row is."""
    index, told = BlockIndex([TierSpec(HOST, 200)]), list[Event]()
    index.watch(lambda event: build._tell_blocks(told.append, event))
    blocks: dict[bytes, bytes] = {}
    for first, count in saves:
        tokens = [first * BLOCK + token for token in range(count * BLOCK)]
        plain = KeyChain(Namespace(bytes(16)), BLOCK).extend(tokens)
        blocks |= dict(zip(plain, [ROOT_PARENT, *plain], strict=False))
        chain = [*plain, *point_keys(plain[-1], rows)]
        while (held := index.held(HOST, chain)) < len(chain):
            publish(index, chain[: held + cuts[held % len(cuts)]], held)
    known: dict[bytes, bytes] = {}
    for event in told:
        for key, parent in zip(event.keys, (event.parent, *event.keys), strict=False):
            assert key not in known
            known[key] = parent
    assert known == blocks


def test_who_begins_to_listen_is_told_of_blocks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer that missed events gets all that is held, which must not have rows either."""
    contents: list[Callable[[], Content]] = []

    def opened(
        config: Config, index: BlockIndex, *_: object, told: Callable[..., tuple[bytes, bytes]]
    ) -> None:
        contents.append(lambda: {tier: told(*index.admin.published(tier)) for tier in index.tiers})

    monkeypatch.setattr(build, "open_events", opened)
    index = build_leader(settings(), MODEL, Outbox()).manager.index
    assert isinstance(index, BlockIndex)
    publish(index, POINT.chain(keys(), 2))
    publish(index, POINT.chain(keys(), 4))
    packed, parents = contents[0]()[HOST]
    found = [(packed[i : i + 16], parents[i : i + 16]) for i in range(0, len(packed), 16)]
    assert sorted(found) == sorted(zip(keys(), [ROOT_PARENT, *keys()], strict=False))


@pytest.mark.parametrize("model", [PLAIN, MODEL], ids=["plain", "points"])
def test_a_subscriber_is_told_of_blocks_alone(tmp_path: Path, model: ModelDescription) -> None:
    """A consumer that comes late is told the same of what was held before."""
    pytest.importorskip("zmq")
    from kvcore.events import Subscriber
    from kvcore.events.zmq_bus import ZmqSource

    ends = {"endpoint": f"ipc://{tmp_path}/pub", "replay_endpoint": f"ipc://{tmp_path}/ask"}
    config = settings(events={**ends, "publisher": "thread"})
    parts = build_leader(config, model, Outbox())
    assert parts.events is not None
    chain = POINT.chain(keys(), 2)
    publish(parts.manager.index, chain)  # type: ignore[arg-type]
    parts.events.feed.renew()
    parts.events.feed.tick()  # as after more events than there is room for
    consumer = Subscriber(ZmqSource(*ends.values()), answer_s=60)
    while not consumer.synced:
        consumer.resync()
    while HOST not in consumer.tiers():
        consumer.poll(1)
    expected = chain if model is PLAIN else keys()[:2]
    assert set(consumer.tiers()[HOST]) == set(expected)
    consumer.close()
    for release in parts.releases:
        release()


# --- what is off ------------------------------------------------------------------------------


@pytest.fixture
def found_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk tier as one to which other engines write too."""

    def prepared(*given: Any, **named: Any) -> list[PreparedBacking]:
        finder: Any = object()
        return [
            replace(one, backing=replace(one.backing, finder=finder))
            for one in prepare_backings(*given, **named)
        ]

    monkeypatch.setattr(build, "prepare_backings", prepared)


@pytest.mark.usefixtures("found_elsewhere")
@pytest.mark.parametrize("model", [PLAIN, MODEL], ids=["plain", "points"])
def test_stores_are_asked_for_the_points_of_a_model(disk: Config, model: ModelDescription) -> None:
    parts = build_leader(disk, model, Outbox())
    assert isinstance(parts.manager, KVManager)
    assert parts.manager.tiers.lookups["disk"]._points is model.point
    for release in parts.releases:
        release()


@pytest.mark.parametrize("to_device", ["on", "off"])
def test_nothing_is_staged_on_the_device_and_it_is_said(
    tmp_path: Path, to_device: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kvcore.connector")
    config = settings(disk={"path": str(tmp_path), "capacity": "1MiB", "to_device": to_device})
    off = to_device == "off"
    assert (build.device_slots(config, PLAIN, None) > 0) is not off
    assert "disk.to_device" not in caplog.text
    assert build.device_slots(config, MODEL, MODEL.point) == 0
    assert ("disk.to_device has no effect" in caplog.text) is not off


@pytest.mark.parametrize("arrangement", Arrangement)
def test_host_memory_is_blockwise(arrangement: Arrangement) -> None:
    """A row of a point is one run of bytes."""
    config = settings(
        host={"capacity": "1MiB", "huge_pages": False, "arrangement": arrangement.value}
    )
    kv, states = memory()
    for model, expected in ((MODEL, Arrangement.BLOCKWISE), (PLAIN, arrangement)):
        rank = build_worker(config, model, 0, [kv], states if model is MODEL else None)
        assert rank.worker.arena.arrangement is expected
        close_worker(rank.worker)


def test_states_that_are_not_as_described_are_refused() -> None:
    kv, states = memory()
    with pytest.raises(LayoutError, match="cache of b"):
        build_worker(settings(), MODEL, 0, [kv], {1: [states[1][0], states[1][1][:, :599]]})
    with pytest.raises(ValueError, match="shorter"):
        build_worker(settings(), MODEL, 0, [kv], {1: states[1][:1]})


# --- what comes back --------------------------------------------------------------------------


def memory() -> tuple[KVView, dict[int, list[torch.Tensor]]]:
    """Pages with random KV and states: two layers of each."""
    tensors = [torch.rand(PAGES, 2, BLOCK, 16) for _ in range(2)]
    states = [torch.rand(PAGES, 3, 200), torch.rand(PAGES, 600)]
    return KVView(from_strides(tensors, SHAPE), tensors), {1: states}


class Halves:
    """A leader and its only rank, which exchange messages without delay."""

    def __init__(self, config: Config) -> None:
        self.kv, self.states = memory()
        self.outbox = Outbox(pump=self._pump)
        self.leader = build_leader(config, MODEL, self.outbox)
        self.rank = build_worker(config, MODEL, 0, [self.kv], self.states)
        open_tiers(self.rank.worker, self.rank.open_tier, self.leader.open_tiers)

    def _pump(self, timeout: float) -> None:
        graphs, self.outbox.graphs = self.outbox.graphs, []
        for graph in graphs:
            self.rank.worker.submit(graph)
        self.rank.worker.wait_report(timeout)
        for report in self.rank.worker.poll():
            self.outbox.deliver(report)

    def save(self, table: list[int], blocks: int, page: int) -> None:
        manager = self.leader.manager
        planned = manager.plan_save(keys(), DIGEST, blocks, point=True)
        assert planned is not None
        assert planned.graph.point is not None
        start, stop = planned.blocks.start, planned.blocks.start + planned.graph.point
        pages = PointPages(ROWS, blocks, {1: page})
        tables = PAGING.whole_units([table, []], start, stop, pages)
        assert tables is not None
        assert manager.wait(manager.launch(planned, tables).graph_id, 30)

    def load(self, table: list[int], page: int, limit: int | None = None) -> tuple[int, set[str]]:
        """Return how many blocks were found, and where."""
        manager = self.leader.manager
        hit = manager.get_match(keys(), DIGEST, limit)
        point = PointPages(hit.point, hit.blocks, {1: page})
        tables = PAGING.units([table, []], 0, hit.blocks, point=point)
        graph = load_blocks(manager, hit, 0, hit.depth, tables)
        assert manager.wait(graph.graph_id, 30)
        return hit.blocks, set(hit.blocks_by_tier())

    def content(self, table: list[int], page: int) -> list[torch.Tensor]:
        kv = [tensor[table].clone() for tensor in self.kv.tensors]
        return [*kv, *(tensor[page].clone() for tensor in self.states[1])]

    def close(self) -> None:
        close_worker(self.rank.worker)
        for release in self.leader.releases:
            release()


@pytest.fixture
def disk(tmp_path: Path) -> Config:
    return settings(disk={"path": str(tmp_path), "capacity": "1MiB", "to_device": "on"})


def test_points_come_back_from_host_memory_and_from_disk_after_a_restart(disk: Config) -> None:
    torch.manual_seed(0)
    first = Halves(disk)
    short, long = first.content([4, 1], 2), first.content([4, 1, 0, 5], 3)
    first.save([4, 1], 2, page=2)
    first.save([4, 1, 0, 5], 4, page=3)
    assert first.load([2, 3], 0, limit=3) == (2, {HOST})
    assert all(map(torch.equal, first.content([2, 3], 0), short))
    first.close()

    second = Halves(disk)
    assert second.load([3, 2, 1, 0], 5) == (4, {"disk"})
    assert all(map(torch.equal, second.content([3, 2, 1, 0], 5), long))
    assert second.load([0, 1], 4, limit=2) == (2, {HOST, "disk"}), "its rows are on disk alone"
    assert all(map(torch.equal, second.content([0, 1], 4), short))
    second.close()
