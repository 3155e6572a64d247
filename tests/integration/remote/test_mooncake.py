"""Mooncake Store: a real master, clients in this process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvcore.errors import BlockMissing, TierUnavailable
from kvcore.memory.hugepages import Pages
from kvcore.testing.store_contract import StoreContract, fetch, put, value
from kvcore.tiers.remote import Item
from kvcore.tiers.remote.base import BlockStore
from kvcore.tiers.remote.mooncake import MooncakeOptions, MooncakeStore
from kvcore_devtools.servers import Server, Start, mooncake_master, need_client

need_client("mooncake.store")

MIB = 1 << 20


def connect(server: Server, lend: int = 0, **options: Any) -> MooncakeStore:
    master = f"127.0.0.1:{server.port}"
    return MooncakeStore(
        MooncakeOptions(master=master, host="127.0.0.1", lend=lend, **options), rank=0
    )


@pytest.fixture(scope="module")
def server(start_server: Start) -> Iterator[Server]:
    """A master, and one client that lends the memory."""
    server = start_server(mooncake_master())
    lender = connect(server, 256 * MIB)
    lender.exists(["join"])
    yield server
    lender.close()


class TestMooncake(StoreContract):
    replaces = False

    @pytest.fixture(autouse=True)
    def _server(self, server: Server) -> None:
        self.server = server

    def make_store(self) -> BlockStore:
        return connect(self.server, timeout_s=120.0)


class Watched:
    """Mooncake's client, and which places it was told of."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.addresses: list[list[int]] = []

    def __getattr__(self, name: str) -> Any:
        called = getattr(self._client, name)
        if "multi_buffers" not in name:
            return called

        def watch(names: Any, addresses: Any, sizes: Any) -> Any:
            self.addresses += addresses
            return called(names, addresses, sizes)

        return watch


def test_large_blocks_go_straight_to_and_from_the_arena(server: Server) -> None:
    arena = Pages(4 * MIB)
    store = connect(server)
    store.attach(arena.view)
    block, back = arena.view[:MIB], arena.view[2 * MIB : 3 * MIB]
    block[:] = value(1, MIB)
    header = memoryview(bytes(range(128)))
    store.exists(["join"])
    store._client = watched = Watched(store._client)
    assert store.put([Item("straight", [header, block])]) == [None]
    into = memoryview(bytearray(128))
    assert store.get([Item("straight", [into, back])]) == [None]
    assert (bytes(into), bytes(back)) == (bytes(header), bytes(block))
    places = [address - arena.address for _, address in watched.addresses]
    assert places == [0, 2 * MIB]
    assert not any(0 <= first - arena.address < 4 * MIB for first, _ in watched.addresses)
    store.close()


def test_a_small_block_goes_in_one_piece_over_tcp(server: Server) -> None:
    arena = Pages(4 * MIB)
    store = connect(server)
    store.attach(arena.view)
    blocks = [arena.view[i * MIB : i * MIB + 5000] for i in range(3)]
    for i, block in enumerate(blocks):
        block[:] = value(i, 5000)
    headers = [memoryview(value(10 + i, 128)) for i in range(3)]
    store.exists(["join"])
    store._client = watched = Watched(store._client)
    pairs = list(zip(headers, blocks, strict=True))
    assert store.put([Item(f"one/{i}", pair) for i, pair in enumerate(pairs)]) == [None] * 3
    for block in blocks:
        block[:] = bytes(5000)
    into = [memoryview(bytearray(128)) for _ in pairs]
    items = [Item(f"one/{i}", [into[i], block]) for i, block in enumerate(blocks)]
    assert store.get(items) == [None] * 3
    assert into == headers
    assert [bytes(block) for block in blocks] == [value(i, 5000) for i in range(3)]
    assert [len(places) for places in watched.addresses] == [1] * 6
    store.close()


def test_what_does_not_lie_in_the_arena_goes_in_several_calls(server: Server) -> None:
    store = connect(server)
    values = {f"large/{i}": value(i, 3 * MIB) for i in range(7)}
    put(store, values)
    assert all(fetch(store, name, 3 * MIB) == data for name, data in values.items())
    put(store, {"huge": value(9, 17 * MIB)})
    assert fetch(store, "huge", 17 * MIB) == value(9, 17 * MIB)
    store.close()


def test_a_full_store_refuses_or_evicts(server: Server) -> None:
    own = connect(server)
    for i in range(100):
        errors = own.put([Item(f"full/{i}", [memoryview(bytearray(4 * MIB))])])
        assert errors[0] is None or isinstance(errors[0], TierUnavailable)
    there = own.exists([f"full/{i}" for i in range(100)])
    assert any(there)
    assert not all(there), "400 MiB in 256"
    own.delete([f"full/{i}" for i in range(100)])
    own.close()


def test_a_master_that_is_gone_is_unavailable_and_found_again(start_server: Start) -> None:
    server = start_server(mooncake_master())
    store = connect(server, 32 * MIB)
    put(store, {"a": b"1" * 4096})
    server.kill()
    with pytest.raises(TierUnavailable):
        store.exists(["a"])
    (error,) = store.put([Item("b", [memoryview(b"2")])])
    assert isinstance(error, TierUnavailable)
    server.start()
    for _ in range(60):  # the client tells the new master what it lends, once a second
        (error,) = store.put([Item("c", [memoryview(b"3" * 4096)])])
        if error is None:
            break
        time.sleep(0.5)
    assert fetch(store, "c", 4096) == b"3" * 4096
    with pytest.raises(BlockMissing):
        fetch(store, "a", 4096)
    store.close()


def test_no_master_is_needed_to_open_one() -> None:
    store = MooncakeStore(MooncakeOptions(master="127.0.0.1:1", host="127.0.0.1"))
    for _ in range(2):
        with pytest.raises(TierUnavailable, match="cannot be joined"):
            store.exists(["a"])
    store.close()
