"""Redis and Valkey, with servers that are killed, hang, fill up and want a password."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcore.errors import BlockMissing, ConfigError, TierUnavailable
from kvcore.testing.store_contract import StoreContract, fetch, put, value
from kvcore.tiers.remote import Item
from kvcore.tiers.remote.base import BlockStore
from kvcore.tiers.remote.redis import RedisOptions, RedisStore, open_store
from kvcore_devtools.servers import Server, Start, need_client, redis_like

need_client("redis")

LIMIT_S = 60.0
BOTH = ["redis-server", "valkey-server"]


def connect(server: Server, **options: Any) -> RedisStore:
    return open_store(RedisOptions(url=f"redis://127.0.0.1:{server.port}/0", **options))


@pytest.fixture(scope="module", params=BOTH)
def server(request: pytest.FixtureRequest, start_server: Start) -> Server:
    return start_server(redis_like(request.param))


class TestRedis(StoreContract):
    @pytest.fixture(autouse=True)
    def _server(self, server: Server) -> None:
        self.server = server

    def make_store(self) -> BlockStore:
        return connect(self.server, timeout_s=120.0)


@pytest.fixture
def own(start_server: Start) -> Iterator[Server]:
    """A server that the test may do anything to."""
    server = start_server(redis_like(BOTH[0]))
    yield server
    server.kill()


def test_connections_that_rested_while_a_server_restarted_are_not_used(own: Server) -> None:
    store = connect(own)
    put(store, {"a": b"1234"})
    own.kill()
    own.start()
    put(store, {"b": b"5678"})
    assert fetch(store, "b", 4) == b"5678"
    store.close()


def test_a_killed_server_is_unavailable_and_found_again(own: Server) -> None:
    store = connect(own)
    put(store, {"a": b"1234"})
    own.kill()
    into = memoryview(bytearray(4))
    for _ in range(2):
        with pytest.raises(TierUnavailable):
            store.get([Item("a", [into])])
        with pytest.raises(TierUnavailable):
            store.put([Item("b", [into])])
        with pytest.raises(TierUnavailable):
            store.exists(["a"])
        with pytest.raises(TierUnavailable):
            store.delete(["a"])
    own.start()
    with pytest.raises(BlockMissing):
        fetch(store, "a", 4)
    put(store, {"a": b"5678"})
    assert fetch(store, "a", 4) == b"5678"
    store.close()


def patiently(what: Callable[[], Any]) -> Any:
    """The first answer, of a store that gives up soon."""
    limit = time.monotonic() + LIMIT_S
    while True:
        try:
            return what()
        except TierUnavailable:  # noqa: PERF203  a loop is the point
            assert time.monotonic() < limit


def test_a_server_that_hangs_is_given_up(own: Server) -> None:
    put(connect(own, timeout_s=LIMIT_S), {"a": b"1234"})
    store = connect(own, timeout_s=0.3)
    assert patiently(lambda: fetch(store, "a", 4)) == b"1234"
    own.hang()
    started = time.monotonic()
    with pytest.raises(TierUnavailable):
        fetch(store, "a", 4)
    with pytest.raises(TierUnavailable):
        store.exists(["a"] * 100)
    assert time.monotonic() - started < LIMIT_S, "two timeouts of 0.3 s, on a busy machine"
    own.go_on()
    again = patiently(lambda: fetch(store, "a", 4))
    assert again == b"1234", "an answer to an earlier question is not taken for ours"
    store.close()


def test_no_server_is_needed_to_open_one() -> None:
    store = open_store(RedisOptions(url="redis://127.0.0.1:1/0"))
    with pytest.raises(TierUnavailable):
        store.exists(["a"])
    store.close()


def test_a_full_server_refuses_and_says_so(start_server: Start) -> None:
    server = start_server(
        redis_like(BOTH[0], "--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
    )
    store = connect(server)
    items = [Item(f"k{i}", [memoryview(value(i, 100_000))]) for i in range(60)]
    errors = store.put(items)
    assert errors[0] is None
    assert isinstance(errors[-1], TierUnavailable)
    assert "maxmemory" in str(errors[-1])
    store.close()


def test_a_server_that_evicts_makes_misses(start_server: Start) -> None:
    server = start_server(
        redis_like(BOTH[0], "--maxmemory", "3mb", "--maxmemory-policy", "allkeys-lru")
    )
    store = connect(server)
    names = [f"k{i}" for i in range(60)]
    for i, name in enumerate(names):
        put(store, {name: value(i, 100_000)})
    there = store.exists(names)
    assert there[-1]
    assert not all(there)
    store.close()


def test_a_password_is_read_from_its_file(start_server: Start, tmp_path: Path) -> None:
    server = start_server(redis_like(BOTH[0], "--requirepass", "open sesame"))
    secret = tmp_path / "password"
    secret.write_text("open sesame\n")
    with pytest.raises(TierUnavailable, match=r"(?i)auth"):
        connect(server).exists(["a"])
    assert connect(server, password_file=secret).exists(["a"]) == [False]
    with pytest.raises(ConfigError, match="password_file"):
        connect(server, password_file=tmp_path / "none")


def test_blocks_are_forgotten_after_ttl_s(own: Server) -> None:
    store = connect(own, ttl_s=1)
    put(store, {"a": b"1234"})
    limit = time.monotonic() + LIMIT_S
    while store.exists(["a"]) == [True]:
        assert time.monotonic() < limit
        time.sleep(0.1)
    store.close()


def test_a_url_of_something_else_is_refused() -> None:
    with pytest.raises(ConfigError, match="url"):
        open_store(RedisOptions(url="http://localhost"))
