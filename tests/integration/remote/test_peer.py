"""The `peer` store over NIXL: nodes in processes of their own, which die, hang and evict."""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvcore.errors import BlockMissing, CorruptBlock, TierError, TierUnavailable
from kvcore.memory.nixl import CHANNEL_NBYTES
from kvcore.model.shape import BlockShape
from kvcore.testing.store_contract import StoreContract, fetch, put, value
from kvcore.tiers.base import BlockRead, BlockWrite, SlotError
from kvcore.tiers.disk import Geometry
from kvcore.tiers.remote import BlockStore, Item, Shard, StoreOptions, StoreTier, peer
from kvcore.tiers.remote.peer.messages import Found
from kvcore.tiers.remote.peer.options import PeerOptions
from kvcore.tiers.remote.peer.rpc import MAX_GUESTS
from kvcore.tiers.remote.peer.store import PeerStore
from kvcore_devtools.peer_node import PATIENCE_S, PeerNode, address
from kvcore_devtools.servers import need_client
from support.clock import Clock

need_client("nixl_cu13")

os.environ.setdefault("UCX_TLS", "tcp")  # as between hosts; what is shared needs no owner that runs

NBYTES = 300_000
MIB = 1 << 20
FOLDER = "kvcore/model/h0-2.l0-4"
A, B = f"{FOLDER}/{'a' * 32}", f"{FOLDER}/{'b' * 32}"

Open = Callable[..., PeerStore]


@pytest.fixture
def open_store() -> Iterator[Open]:
    made: list[PeerStore] = []

    def make(*peers: str, rank: int | None = 0, **options: Any) -> PeerStore:
        options = {
            "guest_ports": "1-65535",
            "listen": address(),
            "lend": 8 * MIB,
            "timeout_s": PATIENCE_S,
            **options,
        }
        made.append(PeerStore(PeerOptions(peers=list(peers), **options), rank))
        return made[-1]

    yield make
    for store in made:
        store.close()


@pytest.fixture(scope="module")
def owner() -> Iterator[PeerNode]:
    """A node that lives through the tests that do it no harm."""
    with PeerNode(lend="8MiB", lease_s=600.0) as node:
        node.call("put", seeds={A: 1, B: 2}, nbytes=NBYTES)
        yield node


class TestPeer(StoreContract):
    """A client's values lie in its own memory; those made later are told of those made before."""

    replaces = False

    @pytest.fixture(autouse=True)
    def _nodes(self) -> None:
        self.nodes: list[str] = []

    def make_store(self) -> BlockStore:
        listen = address()
        store = PeerStore(
            PeerOptions(listen=listen, peers=list(self.nodes), lend=4 * MIB, timeout_s=PATIENCE_S),
            rank=0,
        )
        self.nodes.append(listen)
        return store


def test_values_of_another_process_come_byte_for_byte(owner: PeerNode, open_store: Open) -> None:
    reader = open_store(owner.listen)
    assert reader.exists([A, f"{FOLDER}/{'c' * 32}", B]) == [True, False, True]
    assert fetch(reader, B, NBYTES) == value(2, NBYTES)
    assert fetch(reader, A, NBYTES) == value(1, NBYTES)
    with pytest.raises(CorruptBlock):
        fetch(reader, A, NBYTES - 1)
    with pytest.raises(BlockMissing):
        fetch(reader, f"{FOLDER}/{'c' * 32}", NBYTES)
    assert owner.call("leased") == 0, "every lease is given back"
    leader = open_store(owner.listen, rank=None)
    assert leader.exists([B]) == [True]
    [error] = leader.put([Item(A, [memoryview(b"x")])])
    assert isinstance(error, TierUnavailable)


def test_more_than_a_lane_holds_comes_in_several_reads(open_store: Open) -> None:
    nbytes = 5 * MIB
    names = [f"{FOLDER}/{n:032x}" for n in range(5)]
    with PeerNode(lend="64MiB") as owner:
        owner.call("put", seeds={name: n for n, name in enumerate(names)}, nbytes=nbytes)
        reader = open_store(owner.listen)
        buffers = {name: bytearray(nbytes) for name in names}
        items = [Item(name, [memoryview(into)]) for name, into in buffers.items()]
        assert reader.get(items) == [None] * 5
        assert [bytes(into) for into in buffers.values()] == [value(n, nbytes) for n in range(5)]
    [error] = reader.put([Item(A, [memoryview(bytearray(CHANNEL_NBYTES + 1))])])
    assert isinstance(error, SlotError)


def test_a_full_memory_makes_room_and_says_when_it_cannot(open_store: Open) -> None:
    store = open_store(lend=MIB)
    for n in range(20):
        put(store, {f"{FOLDER}/{n:032x}": value(n, NBYTES)})
    there = store.exists([f"{FOLDER}/{n:032x}" for n in range(20)])
    assert there == [False] * 17 + [True] * 3
    [error] = open_store(lend=0).put([Item(A, [memoryview(b"x")])])
    assert isinstance(error, TierUnavailable)
    assert "raise `lend`" in str(error)


def test_what_is_removed_is_removed_at_every_node_and_read_at_one(open_store: Open) -> None:
    owners = [open_store() for _ in range(2)]
    for owner in owners:
        put(owner, {A: value(1, NBYTES), B: value(2, NBYTES)})
    assert fetch(owners[0], A, NBYTES) == value(1, NBYTES)
    assert owners[0].lent is not None
    assert owners[0].lent.leased == 0, "of its own, too"
    reader = open_store(*(owner._options.listen for owner in owners))
    read, finds = reader._read, []

    def noting(*given: Any) -> Any:
        finds.append(len(given[3]))
        return read(*given)

    reader._read = noting  # type: ignore[method-assign]
    assert fetch(reader, A, NBYTES) == value(1, NBYTES)
    assert sum(finds) == 1
    reader.delete([A])
    assert [owner.exists([A, B]) for owner in owners] == [[False, True]] * 2
    assert reader.exists([A, B]) == [False, True]


def test_a_node_that_answers_less_than_it_was_asked_has_nothing(open_store: Open) -> None:
    reader = open_store("127.0.0.1:1", rank=None)
    reader.peers.ask = lambda requests: {a: Found(b"\1", []) for a in requests}  # type: ignore[method-assign]
    assert reader.exists([A, B]) == [False, False]


def test_another_model_is_told_of_once_and_not_read(
    owner: PeerNode, open_store: Open, caplog: pytest.LogCaptureFixture
) -> None:
    reader = open_store(owner.listen, rank=None)
    names = [f"kvcore/other/h0-2.l0-4/{n:032x}" for n in range(3)]
    with caplog.at_level(logging.WARNING, "kvcore.tiers.peer"):
        assert reader.exists(names) == [False] * 3
        assert reader.exists(names) == [False] * 3
    [record] = [r for r in caplog.records if "no other node holds" in r.msg]
    assert record.getMessage().endswith("KV of kvcore/other, only of kvcore/model")


def test_other_heads_of_a_model_are_nothing_strange(
    owner: PeerNode, open_store: Open, caplog: pytest.LogCaptureFixture
) -> None:
    reader = open_store(owner.listen, rank=None)
    assert reader.exists([f"kvcore/model/h0-4.l0-4/{'a' * 32}"]) == [False]
    assert "no other node holds" not in caplog.text
    assert reader.folders == {FOLDER}


# -- nodes of a promise ------------------------------------------------------------------------


def asked(store: PeerStore) -> list[list[str]]:
    """Whom it asks from now on, question by question."""
    told: list[list[str]] = []
    ask = store.peers.ask

    def noting(requests: Any) -> Any:
        if requests:
            told.append(sorted(requests))
        return ask(requests)

    store.peers.ask = noting  # type: ignore[method-assign]
    return told


def test_a_promised_node_is_asked_before_all_others_and_needs_no_list(
    owner: PeerNode, open_store: Open
) -> None:
    there = f"tcp://{owner.listen}"
    with PeerNode(lend="8MiB") as other:
        other.call("put", seeds={f"{FOLDER}/{'d' * 32}": 4}, nbytes=NBYTES)
        reader = open_store(other.listen, guests=["10.0.0.1", "127.0.0.0/8"])
        into = bytearray(NBYTES)
        told = asked(reader)
        assert reader.exists_at(owner.listen, [A, B]) == [True, True]
        assert reader.get([Item(A, [memoryview(into)], (owner.listen,))]) == [None]
        assert bytes(into) == value(1, NBYTES)
        assert {address for question in told for address in question} == {there}
        assert len(reader.peers) == 1, "a guest is no peer"
        d = f"{FOLDER}/{'d' * 32}"
        assert reader.exists_at(owner.listen, [A, d]) == [True, True], "the others may have it"
        assert reader.get([Item(d, [memoryview(into)], (owner.listen,))]) == [None]
        assert bytes(into) == value(4, NBYTES)
        assert reader.exists([A]) == [False], "without a promise it is not asked"
    assert owner.call("leased") == 0


def test_a_node_that_is_no_guest_is_not_asked(
    owner: PeerNode, open_store: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever may send requests could have KV of its own making read."""
    for reader in (open_store(), open_store(guests=["10.0.0.0/8", "127.0.0.2"], rank=None)):
        told = asked(reader)
        for node in (owner.listen, "nonsense", "localhost:1-99", "::", f"{owner.listen}0000"):
            assert reader.exists_at(node, [A]) == [False]
        [error] = reader.get([Item(A, [memoryview(bytearray(NBYTES))], (owner.listen,))])
        assert isinstance(error, BlockMissing)
        assert told == []
    assert "neither a peer nor in `guests`" in caplog.text
    assert open_store(owner.listen).exists_at(owner.listen, [A]) == [True], "peers are asked anyway"


def test_a_promised_node_that_is_gone_fails_alone(owner: PeerNode, open_store: Open) -> None:
    gone = address()
    reader = open_store(guests=["127.0.0.1"], timeout_s=20.0)
    reader.peers._timeout_s = 0.5
    for _ in range(4):
        with pytest.raises(TierUnavailable):
            reader.exists_at(gone, [A])
    reader = open_store(owner.listen, guests=["127.0.0.1"], timeout_s=20.0)
    reader._warned.add(FOLDER)
    reader.peers._timeout_s = PATIENCE_S
    opened = reader.peers._at(f"tcp://{gone}").breaker
    for _ in range(3):
        opened.started()
        opened.failed()
    assert reader.exists_at(gone, [A]) == [True], "the peers are there"
    into = bytearray(NBYTES)
    assert reader.get([Item(A, [memoryview(into)], (gone,))]) == [None]
    assert bytes(into) == value(1, NBYTES)


def test_a_node_that_is_gone_closes_no_reads_from_the_others(
    owner: PeerNode, open_store: Open
) -> None:
    """What it alone could have had is missing; a store of which nobody answers is down."""
    absent = f"{FOLDER}/{'e' * 32}"

    def read(reader: PeerStore, name: str, *nodes: str) -> TierError | None:
        [error] = reader.get([Item(name, [memoryview(bytearray(NBYTES))], nodes)])
        return error

    with PeerNode() as guest:
        pass  # it has ended
    reader = open_store(owner.listen, guests=["127.0.0.1"], timeout_s=20.0)
    assert read(reader, A) is None, "they have met"
    reader.peers._timeout_s = PATIENCE_S
    ask = reader.peers.ask

    def quickly(requests: Any) -> Any:
        """Whoever is there has all the time; of the dead nobody waits so long."""
        reader.peers._timeout_s = PATIENCE_S if f"tcp://{owner.listen}" in requests else 0.2
        return ask(requests)

    reader.peers.ask = quickly  # type: ignore[method-assign]
    for _ in range(2):
        assert isinstance(read(reader, absent, guest.listen), BlockMissing)
        assert read(reader, B, guest.listen) is None, "the peers are asked too"
    alone = open_store(guests=["127.0.0.1"], timeout_s=20.0)
    alone.peers._timeout_s = 0.2
    assert isinstance(read(alone, A, guest.listen), BlockMissing), "another guest may be there"
    down = open_store(guest.listen, timeout_s=20.0)
    down.peers._timeout_s = 0.2
    assert isinstance(read(down, A), TierUnavailable)


def test_a_node_that_dies_under_a_lease_does_not_bring_the_store_down(open_store: Open) -> None:
    with PeerNode() as owner, PeerNode() as other:
        owner.call("put", seeds={A: 1, B: 2}, nbytes=NBYTES)
        reader = open_store(owner.listen, other.listen, timeout_s=PATIENCE_S)
        assert fetch(reader, B, NBYTES) == value(2, NBYTES)

        def kill() -> None:
            owner.kill()
            reader.peers._timeout_s = 1.0

        interrupted(reader, kill)
        with pytest.raises(BlockMissing):
            fetch(reader, A, NBYTES)


def test_guests_are_forgotten_the_oldest_first(open_store: Open) -> None:
    peers = open_store(rank=None).peers
    names = [f"tcp://guest:{port}" for port in range(1, MAX_GUESTS + 3)]
    for name in names:
        assert peers.available([name]) == [name]
    assert list(peers._guests) == names[2:]
    peers.update(names[-1:])
    assert names[-1] in peers
    assert names[-1] not in peers._guests


def test_where_a_node_says_it_is() -> None:
    def node(ranks: int = 1, **options: Any) -> str:
        return PeerStore.node(
            SimpleNamespace(_options=PeerOptions(trusted_network=True, **options)),  # type: ignore[arg-type]
            ranks,
        )

    assert node(listen="10.0.0.5:7801") == "10.0.0.5:7801"
    assert node(listen="10.0.0.5:7801", ranks=4) == "10.0.0.5:7801-7804"
    assert node(advertise="far", ranks=2) == "far:7801-7802"
    assert node() == "127.0.0.1:7801"
    assert node(listen="0.0.0.0:7801") == f"{socket.gethostname()}:7801"


# -- death ------------------------------------------------------------------------------------


def test_an_owner_that_dies_costs_a_deadline_and_is_found_again(open_store: Open) -> None:
    listen = address()
    with PeerNode(listen=listen) as owner:
        owner.call("put", seeds={A: 1}, nbytes=NBYTES)
        reader = open_store(listen, timeout_s=20.0)
        assert fetch(reader, A, NBYTES) == value(1, NBYTES)
    reader.peers._timeout_s = 0.5
    for _ in range(3):
        began = time.monotonic()
        with pytest.raises(TierUnavailable):
            fetch(reader, A, NBYTES)
        assert time.monotonic() - began < PATIENCE_S
    with pytest.raises(BlockMissing):  # left alone: nobody has it
        fetch(reader, A, NBYTES)
    with pytest.raises(TierUnavailable, match="left alone"):
        reader.exists([A])
    with PeerNode(listen=listen) as again:
        again.call("put", seeds={A: 7}, nbytes=NBYTES)
        reader.peers._timeout_s = PATIENCE_S
        reader.peers._nodes[f"tcp://{listen}"].breaker._opened_at = -1e9  # its pause is over
        assert fetch(reader, A, NBYTES) == value(7, NBYTES)


def interrupted(store: PeerStore, what: Callable[[], object]) -> None:
    """Do something between the lease and the read."""
    read = store._read

    def late(*arguments: Any) -> Any:
        what()
        return read(*arguments)

    store._read = late  # type: ignore[assignment, method-assign]


def test_an_owner_that_dies_under_a_lease(open_store: Open) -> None:
    with PeerNode() as owner:
        owner.call("put", seeds={A: 1, B: 2}, nbytes=NBYTES)
        reader = open_store(owner.listen, timeout_s=20.0)
        assert fetch(reader, B, NBYTES) == value(2, NBYTES)
        reader.peers._timeout_s = 1.0
        interrupted(reader, owner.kill)
        with pytest.raises(TierUnavailable):
            fetch(reader, A, NBYTES)


def test_an_owner_that_hangs_is_not_waited_for_and_its_bytes_harm_nobody(open_store: Open) -> None:
    """What a read that was given up writes later lands in a channel that nobody uses."""
    with PeerNode() as owner:
        owner.call("put", seeds={A: 1, B: 2}, nbytes=NBYTES)
        reader = open_store(owner.listen, timeout_s=20.0)
        assert fetch(reader, B, NBYTES) == value(2, NBYTES)
        agent = reader._agent
        assert agent is not None
        reader._options = reader._options.model_copy(update={"timeout_s": 0.5})
        reader.peers._timeout_s = 0.5
        interrupted(reader, owner.stop)
        into = bytearray(b"\xee" * NBYTES)
        [error] = reader.get([Item(A, [memoryview(into)])])
        assert isinstance(error, TierUnavailable)
        with agent._lock:
            agent._sweep()
        assert len(agent._abandoned) == 1, "it may still write"
        owner.go_on()
        owner.call("sleep", seconds=0.5)
        assert set(into) == {0xEE}
        del reader._read
        reader._options = reader._options.model_copy(update={"timeout_s": PATIENCE_S})
        reader.peers._timeout_s = PATIENCE_S
        assert fetch(reader, A, NBYTES) == value(1, NBYTES)
        limit = time.monotonic() + PATIENCE_S
        while agent._abandoned:  # NIXL says that it has ended: the channel is used again
            assert time.monotonic() < limit
            fetch(reader, A, NBYTES)


def test_an_owner_whose_nixl_hangs_is_not_gone(open_store: Open) -> None:
    """It answers, so its lease is ended, its values are not missing, and they can be had again."""
    owner, go_on = open_store(), threading.Event()
    put(owner, {A: value(1, NBYTES)})
    agent = owner._agent
    assert agent is not None
    progress = agent.progress

    def held_up() -> None:
        go_on.wait()
        progress()

    agent.progress = held_up  # type: ignore[method-assign]
    reader = open_store(guests=["127.0.0.1"], timeout_s=20.0)
    reader._options = reader._options.model_copy(update={"timeout_s": 0.5})
    into = bytearray(NBYTES)
    item = Item(A, [memoryview(into)], (owner._options.listen,))
    try:
        [error] = reader.get([item])
    finally:
        go_on.set()
    assert isinstance(error, TierUnavailable), "a store tier tries these again"
    assert owner.lent is not None
    assert owner.lent.leased == 0
    reader._options = reader._options.model_copy(update={"timeout_s": PATIENCE_S})
    assert reader.get([item]) == [None]
    assert bytes(into) == value(1, NBYTES)


def test_a_read_has_its_whole_time_however_long_they_took_to_meet(
    owner: PeerNode, open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + late[0], sleep=time.sleep)
    for module in (peer.store, peer.agent):
        monkeypatch.setattr(module, "time", clock)
    reader = open_store(owner.listen)
    meet = reader._meet

    def slowly(*arguments: Any) -> None:
        meet(*arguments)
        late[0] += PATIENCE_S + 1.0

    reader._meet = slowly  # type: ignore[assignment, method-assign]
    assert fetch(reader, A, NBYTES) == value(1, NBYTES)


def test_a_reader_that_dies_leaves_no_lease(open_store: Open) -> None:
    """Nor is what it holds evicted while it may still read it."""
    owner, clock = open_store(lend=MIB, lease_s=600.0), Clock(0.0)
    assert owner.lent is not None
    owner.lent._clock = clock
    put(owner, {A: value(1, 900_000)})
    with PeerNode(peers=[owner._options.listen]) as reader:
        assert reader.call("digest", name=A, nbytes=900_000) == (
            hashlib.sha256(value(1, 900_000)).hexdigest()
        )
        assert owner.lent.leased == 0
        reader.call("lease", name=A, of=owner._options.listen)
        assert owner.lent.leased == 1
        reader.kill()
    other = Item(B, [memoryview(value(2, 900_000))])
    [error] = owner.put([other])
    assert isinstance(error, TierUnavailable)
    clock.now += 599
    assert owner.exists([A, B]) == [True, False]
    clock.now += 2
    assert owner.lent.leased == 0
    assert owner.put([other]) == [None]
    assert owner.exists([A, B]) == [False, True]
    owner.lent.check_integrity()


# -- a slot that is used again under a lapsed lease -------------------------------------------


SHAPE = BlockShape(layers=4, kv_heads=2, head_dim=64, block_tokens=16, dtype="float32")
SHARD = Shard.of(Geometry(SHAPE, b"model", ((0, 2),)), 0, "kvcore")
KEYS = [bytes([n]) * 16 for n in range(2)]
SPACE = b"namespace".ljust(16, b"\0")


def test_bytes_of_a_lapsed_lease_are_never_served(open_store: Open) -> None:
    """The owner says that it has lapsed; and where that is not heard, the block's checksum does."""
    owner, clock = open_store(lend=SHARD.block_nbytes + 500, lease_s=600.0), Clock(0.0)
    assert owner.lent is not None
    owner.lent._clock = clock
    writer = StoreTier(owner, SHARD, StoreOptions())
    blocks = [value(n, SHARD.block_nbytes) for n in range(2)]

    def write(n: int) -> None:
        request = BlockWrite(n, KEYS[n], KEYS[0], SPACE, [memoryview(blocks[n])])
        assert writer.write([request]) == [None]

    store = open_store(owner._options.listen)
    reader = StoreTier(store, SHARD, StoreOptions(retries=0))

    def read(n: int) -> TierError | bytes:
        into = bytearray(SHARD.block_nbytes)
        [error] = reader.read([BlockRead(0, KEYS[n], [memoryview(into)])])
        return bytes(into) if error is None else error

    def lapse() -> None:
        clock.now += 601
        write(1)

    write(0)
    assert read(0) == blocks[0]
    interrupted(store, lapse)
    assert isinstance(read(0), BlockMissing)
    store._end_leases = lambda *_: set()  # type: ignore[method-assign]
    write(0)
    assert isinstance(read(0), CorruptBlock)
    for tier in (reader, writer):
        tier._pool.shutdown()
