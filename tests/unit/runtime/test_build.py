"""Leader and worker built from a config, and the number of slots on which they agree."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from kvcore.cluster import Member, register  # noqa: E402
from kvcore.cluster.static import StaticDirectory  # noqa: E402
from kvcore.config import Config, load_config  # noqa: E402
from kvcore.connector.build import (  # noqa: E402  # after the skip
    ManagerParts,
    WorkerParts,
    build_leader,
    build_worker,
)
from kvcore.connector.page_table import Paging  # noqa: E402
from kvcore.connector.step_transport import Outbox  # noqa: E402
from kvcore.errors import ConfigError, UnsupportedError  # noqa: E402
from kvcore.manager import HOST, Event  # noqa: E402
from kvcore.memory.arena import slot_bytes  # noqa: E402
from kvcore.memory.layout import KVView, from_strides  # noqa: E402
from kvcore.model.keys import KeyChain, Namespace  # noqa: E402
from kvcore.model.shape import BlockShape  # noqa: E402
from kvcore.model.spec import LayerGroup, ModelDescription  # noqa: E402
from kvcore.runtime.build import copy_blocks, geometry, host_slots  # noqa: E402
from kvcore.transfer.graph import COPY_BYTES  # noqa: E402
from kvcore.worker.lifecycle import close_worker, open_tiers  # noqa: E402
from support.transfers import load_blocks, save_blocks  # noqa: E402

PAGE, BLOCK, PAGES = 32, 16, 6


def model(kv_heads: int = 2, ranks: int = 1) -> ModelDescription:
    shape = BlockShape(layers=2, kv_heads=kv_heads, head_dim=8, block_tokens=BLOCK, dtype="float32")
    return ModelDescription(shape, (LayerGroup(0, PAGE, (0, 1)),), bytes(16), ranks)


def settings(**tables: dict[str, object]) -> Config:
    overrides: dict[str, dict[str, object]] = {"host": {"capacity": "1MiB", "huge_pages": False}}
    return load_config(overrides={**overrides, **tables}, env={})


# --- room -------------------------------------------------------------------------------------


@given(
    kv_heads=st.integers(1, 16),
    ranks=st.integers(1, 16),
    capacity=st.integers(1, 1 << 24),
    batch=st.integers(1, 64),
    below=st.booleans(),
)
def test_all_ranks_together_stay_below_the_capacity(
    kv_heads: int, ranks: int, capacity: int, batch: int, below: bool
) -> None:
    """Slots for what comes from a tier below are there only if one is."""
    tiers = {"disk": {"path": "/nowhere"}} if below else {}
    config = settings(host={"capacity": capacity}, transfer={"batch_blocks": batch}, **tiers)
    whole = model(kv_heads, ranks)
    one = sum(slot_bytes(whole.rank_shape(rank)) for rank in range(ranks))
    if capacity < one:
        with pytest.raises(UnsupportedError, match="does not hold one block"):
            host_slots(config, whole)
        return
    slots = host_slots(config, whole)
    assert slots.total * one <= capacity < (slots.total + 1) * one
    assert slots.indexed >= 1
    assert slots.staging == (min(2 * batch, slots.total // 4) if below else 0)


@given(kv_heads=st.integers(1, 16), ranks=st.integers(1, 16), capacity=st.integers(0, 1 << 22))
def test_room_grows_with_the_capacity(kv_heads: int, ranks: int, capacity: int) -> None:
    whole = model(kv_heads, ranks)
    assume(capacity >= sum(slot_bytes(whole.rank_shape(rank)) for rank in range(ranks)))
    disk = {"path": "/nowhere"}
    less = host_slots(settings(host={"capacity": capacity}, disk=disk), whole)
    more = host_slots(settings(host={"capacity": 2 * capacity}, disk=disk), whole)
    assert more.indexed > less.indexed
    assert more.staging >= less.staging


@given(kv_heads=st.integers(1, 1 << 20), ranks=st.integers(1, 16))
def test_a_copy_of_a_load_has_the_bytes_that_can_be_waited_for(kv_heads: int, ranks: int) -> None:
    whole = model(kv_heads, ranks)
    largest = max(slot_bytes(whole.rank_shape(rank)) for rank in range(ranks))
    blocks = copy_blocks(whole)
    assert blocks == 1 or blocks * largest <= COPY_BYTES < (blocks + 1) * largest


@pytest.mark.parametrize(
    ("kv_heads", "ranks", "heads"),
    [(4, 2, ((0, 2), (2, 4))), (1, 2, ((0, 1), (0, 1))), (2, 1, ((0, 2),))],
)
def test_stored_blocks_say_which_heads_a_rank_keeps(
    kv_heads: int, ranks: int, heads: tuple[tuple[int, int], ...]
) -> None:
    whole = model(kv_heads, ranks)
    found = geometry(whole)
    assert (found.shape, found.model, found.heads) == (whole.shape, whole.fingerprint, heads)


# --- leader and worker ------------------------------------------------------------------------


def pages() -> KVView:
    """Pages of a rank with random KV: ``[pages, heads, tokens, K|V]``, a tensor for each layer."""
    torch.manual_seed(0)
    tensors = [torch.rand(PAGES, 2, PAGE, 16) for _ in range(2)]
    return KVView(from_strides(tensors, model().shape), tensors)


class Halves:
    """A leader and its only rank, which exchange messages without delay."""

    def __init__(self, config: Config, view: KVView) -> None:
        self.events: list[Event] = []
        self.outbox = Outbox(pump=self._pump)
        self.leader: ManagerParts = build_leader(
            config, model(), self.outbox, on_event=self.events.append
        )
        self.rank: WorkerParts = build_worker(config, model(), 0, [view])
        open_tiers(self.rank.worker, self.rank.open_tier, self.leader.open_tiers)

    def _pump(self, timeout: float) -> None:
        graphs, self.outbox.graphs = self.outbox.graphs, []
        for graph in graphs:
            self.rank.worker.submit(graph)
        self.rank.worker.wait_report(timeout)
        for report in self.rank.worker.poll():
            self.outbox.deliver(report)

    def close(self) -> None:
        close_worker(self.rank.worker)
        for release in self.leader.releases:
            release()


@pytest.fixture
def disk(tmp_path: Path) -> Config:
    return settings(disk={"path": str(tmp_path), "capacity": "1MiB"})


@pytest.fixture
def halves(disk: Config) -> Iterator[Halves]:
    made = Halves(disk, pages())
    yield made
    made.close()


TOKENS = 3 * BLOCK
DIGEST = Namespace(bytes(16)).digest
PAGING = Paging(model().groups, BLOCK, no_page=-1)


def keys() -> list[bytes]:
    return KeyChain(Namespace(bytes(16)), BLOCK).extend(range(TOKENS))


def save(halves: Halves, table: list[int]) -> None:
    manager = halves.leader.manager
    graph = save_blocks(
        manager, keys(), DIGEST, 3, lambda start, stop: PAGING.whole_units([table], start, stop)
    )
    assert graph is not None
    assert manager.wait(graph.graph_id, 30)


def load(halves: Halves, table: list[int]) -> dict[str, int]:
    """Load what is held into ``table``; return the blocks by tier."""
    manager = halves.leader.manager
    hit = manager.get_match(keys(), DIGEST)
    graph = load_blocks(manager, hit, 0, hit.depth, PAGING.units([table], 0, hit.depth))
    assert manager.wait(graph.graph_id, 30)
    return hit.blocks_by_tier()


def kv(view: KVView, table: list[int]) -> list[torch.Tensor]:
    """Return the KV of the tokens in ``table``, for each layer: ``[heads, tokens, K|V]``."""
    return [
        torch.cat([tensor[page] for page in table], dim=1)[:, :TOKENS].clone()
        for tensor in view.tensors
    ]


def test_what_is_saved_is_loaded_again(disk: Config, halves: Halves) -> None:
    view = halves.rank.worker.groups[0].view
    before = kv(view, [4, 1])
    save(halves, [4, 1])
    assert load(halves, [0, 3]) == {HOST: 3}
    assert all(map(torch.equal, kv(view, [0, 3]), before))
    assert halves.events[0].stored
    assert halves.events[0].tier == HOST
    slots = host_slots(disk, model())
    assert halves.rank.worker.arena.num_slots == slots.total
    manager = halves.leader.manager
    assert manager.index.num_slots(HOST) == slots.indexed
    assert manager.flights.staging == list(range(slots.indexed, slots.total))


def test_a_second_engine_finds_what_the_first_left_on_disk(
    disk: Config, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kvcore.connector")
    first = Halves(disk, pages())
    before = kv(first.rank.worker.groups[0].view, [4, 1])
    save(first, [4, 1])
    first.close()
    second = Halves(disk, pages())
    assert "tier restored name=disk blocks=3" in caplog.text
    view = second.rank.worker.groups[0].view
    for tensor in view.tensors:
        tensor.fill_(float("nan"))
    assert load(second, [2, 5]) == {"disk": 3}
    assert all(map(torch.equal, kv(view, [2, 5]), before))
    second.close()


def test_metrics_are_named_by_their_half_and_may_be_off(disk: Config, halves: Halves) -> None:
    save(halves, [4, 1])
    assert halves.rank.metrics.delta()
    silent = build_leader(settings(metrics={"enabled": False}), model(), Outbox())
    silent.metrics.looked_up({}, 1)
    assert not silent.metrics.delta()


def test_a_rank_holds_its_own_heads_only() -> None:
    whole = model(kv_heads=4, ranks=2)
    parts = build_worker(settings(), whole, 1, [pages()])
    assert parts.worker.arena.shape == whole.rank_shape(1)
    assert parts.worker.arena.nbytes <= settings().host.capacity // 2
    close_worker(parts.worker)


def test_a_worker_that_cannot_be_had_leaves_no_memory_behind() -> None:
    """A thread that touches memory ahead of its use keeps that memory alive."""
    host = {"capacity": "16MiB", "prefault": "1MiB"}
    with pytest.raises(ConfigError, match="nobody"):
        build_worker(settings(host=host, ops={"backend": "nobody"}), model(), 0, [pages()])
    assert "kvcore-prefault" not in {thread.name for thread in threading.enumerate()}


def test_settings_that_name_no_plugin_are_refused() -> None:
    with pytest.raises(ConfigError, match="nobody"):
        build_leader(settings(host={"policy": "nobody"}), model(), Outbox())


@pytest.mark.parametrize("who", ["process", "thread"])
def test_events_of_the_settings_are_published_beside_the_engines(tmp_path: Path, who: str) -> None:
    pytest.importorskip("zmq")
    from kvcore.events import Subscriber
    from kvcore.events.zmq_bus import ZmqSource

    ends = {"endpoint": f"ipc://{tmp_path}/pub", "replay_endpoint": f"ipc://{tmp_path}/ask"}
    events = {**ends, "publisher": who}
    config = load_config(overrides={"host": {"capacity": "1MiB"}, "events": events})
    told: list[Event] = []
    parts = build_leader(config, model(), Outbox(2), on_event=told.append)
    index = parts.manager.index
    index.lifecycle.commit(index.lifecycle.reserve(HOST, [b"k" * 16], 0, 1, b"n" * 16))
    consumer = Subscriber(ZmqSource(*ends.values()), answer_s=60)
    while not consumer.synced:
        consumer.resync()
    while HOST not in consumer.tiers():
        consumer.poll(1)
    assert consumer.tiers() == {HOST: {b"k" * 16: None}}
    assert [event.keys for event in told] == [(b"k" * 16,)]
    consumer.close()
    for release in parts.releases:
        release()


@pytest.mark.parametrize("who", ["process", "thread"])
def test_a_bus_that_cannot_be_had_is_no_reason_not_to_serve(
    caplog: pytest.LogCaptureFixture, who: str
) -> None:
    config = load_config(
        overrides={
            "host": {"capacity": "1MiB"},
            "events": {"endpoint": "@tcp://127.0.0.1:nowhere", "publisher": who},
        }
    )
    assert build_leader(config, model(), Outbox(2)).events is None
    assert "no block events" in caplog.text


def test_a_bus_whose_client_is_missing_is_left_out_by_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    for name in ("kvcore.events.zmq_bus", "kvcore._util.zmq_socket"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    config = load_config(
        overrides={
            "host": {"capacity": "1MiB"},
            "events": {"endpoint": "@tcp://127.0.0.1:5557", "publisher": "thread"},
        }
    )
    assert build_leader(config, model(), Outbox(2)).events is None
    assert "pip install pyzmq" in caplog.text


def test_each_data_parallel_rank_has_an_endpoint_of_its_own() -> None:
    from kvcore.events.plan import rank_endpoint

    assert rank_endpoint("tcp://*:5557", None) == rank_endpoint("tcp://*:5557", 0) == "tcp://*:5557"
    assert rank_endpoint("tcp://*:5557", 3) == "tcp://*:5560"
    assert rank_endpoint("ipc:///tmp/pub", 3) == "ipc:///tmp/pub_dp3"
    with pytest.raises(ConfigError, match="PORT"):
        rank_endpoint("tcp://nowhere", 1)


def test_a_leader_is_entered_with_where_its_events_are_and_leaves(tmp_path: Path) -> None:
    pytest.importorskip("zmq")
    settings = {
        "host": {"capacity": "1MiB"},
        "events": {"endpoint": f"ipc://{tmp_path}/pub", "topic": "t"},
        "cluster": {"name": "a", "model": "m", "members": {"a-dp1": {"model": "m"}}},
    }
    config = load_config(overrides=settings, env={})
    parts = build_leader(config, model(), Outbox(2), data_parallel_rank=1)
    assert parts.directory is not None
    assert [member.name for member in parts.directory.members("leader")] == ["a-dp1"]
    assert parts.directory.close in parts.releases
    for release in parts.releases:
        release()
    with pytest.raises(ConfigError, match="not listed"):
        build_leader(config, model(), Outbox(2))


def test_what_others_are_told_of_a_leader() -> None:
    from kvcore.events.open import endpoints

    zmq = {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558", "trusted_network": True}
    events = {**zmq, "nats": "nats://n:1"}
    told = endpoints(load_config(overrides={"events": events}, env={}), 2)
    assert told == {
        "topic": "kvcore",
        "events": "tcp://*:5559",
        "replay": "tcp://*:5560",
        "nats": "nats://n:1",
    }
    assert endpoints(load_config(env={})) == {}


def test_a_star_in_an_address_becomes_the_hosts_name(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[Member] = []
    monkeypatch.setattr(StaticDirectory, "join", lambda _, member: joined.append(member))
    monkeypatch.setattr("socket.gethostname", lambda: "node7")
    config = load_config(overrides={"cluster": {"members": {"a": {}}}}, env={})
    register(config, "leader", {"events": "tcp://*:5557"})
    assert joined[0].address == joined[0].details["events"] == "tcp://node7:5557"
    assert joined[0].name.startswith("node7-")
