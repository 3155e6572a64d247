"""Objects: a folder, and S3 as a local server speaks it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from kvcore.errors import ConfigError, TierUnavailable
from kvcore.testing.store_contract import StoreContract, fetch, put
from kvcore.tiers.remote.base import BlockStore, Item
from kvcore.tiers.remote.objects import ObjectOptions, ObjectStore, open_store
from kvcore_devtools.servers import S3_ENVIRONMENT, Server, Start, make_bucket, need_client, s3

need_client("obstore")


class TestFolder(StoreContract):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.path = tmp_path / "shared"

    def make_store(self) -> BlockStore:
        return open_store(ObjectOptions(url=self.path.as_uri()))


@pytest.fixture(scope="module")
def server(start_server: Start) -> Server:
    server = start_server(s3())
    make_bucket(server)
    return server


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in S3_ENVIRONMENT.items():
        monkeypatch.setenv(name, text)


def connect(server: Server, **options: Any) -> ObjectStore:
    config = {"endpoint": f"http://127.0.0.1:{server.port}", "region": "us-east-1"}
    return open_store(ObjectOptions(url="s3://kvcore-test/blocks", config=config, **options))


class TestS3(StoreContract):
    @pytest.fixture(autouse=True)
    def _server(self, server: Server) -> None:
        self.server = server

    def make_store(self) -> BlockStore:
        return connect(self.server, timeout_s=120.0)


def test_a_server_that_hangs_or_dies_is_given_up_and_found_again(start_server: Start) -> None:
    server = start_server(s3())
    make_bucket(server)
    store = connect(server, timeout_s=60.0)
    put(store, {"a": b"1234"})
    quick = connect(server, timeout_s=0.3)
    server.hang()
    started = time.monotonic()
    with pytest.raises(TierUnavailable):
        fetch(quick, "a", 4)
    with pytest.raises(TierUnavailable):
        quick.exists(["a"] * 200)
    assert time.monotonic() - started < 60, "two timeouts of 0.3 s, on a busy machine"
    server.go_on()
    assert fetch(store, "a", 4) == b"1234"
    server.kill()
    with pytest.raises(TierUnavailable):
        store.exists(["a"])
    server.start()
    make_bucket(server)
    assert store.exists(["a"]) == [False]
    for one in (store, quick):
        one.close()


def test_a_missing_bucket_is_no_miss(server: Server) -> None:
    """It would hide a wrong setting for ever."""
    config = {"endpoint": f"http://127.0.0.1:{server.port}", "region": "us-east-1"}
    store = open_store(ObjectOptions(url="s3://nowhere", config=config, timeout_s=60.0))
    errors = store.put([])
    assert errors == []
    from kvcore.tiers.remote import Item

    (error,) = store.put([Item("a", [memoryview(b"1")])])
    assert error is not None
    store.close()


@pytest.mark.parametrize(
    ("url", "config"),
    [("nothing://x", {}), ("s3://kv", {"no_such_setting": "1"})],
)
def test_settings_that_cannot_be_right_are_refused(url: str, config: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="url"):
        open_store(ObjectOptions(url=url, config=config))


def test_a_put_that_fails_reads_no_parts_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that wait for their turn would read slots that are somebody else's by then."""
    store = open_store(ObjectOptions(url=tmp_path.as_uri(), requests=1))
    sent: list[str] = []

    async def put(_: Any, name: str, value: bytes) -> None:
        if name == "a":
            raise ValueError("a client has a fault")
        for _ in range(1000):  # gives way until the failure has long been seen
            await asyncio.sleep(0)
        sent.append(name)

    monkeypatch.setattr(store._obstore, "put_async", put)
    with pytest.raises(ValueError, match="has a fault"):
        store.put([Item(name, [memoryview(b"1")]) for name in "abc"])
    assert sent == ["b", "c"], "the others have ended"
    store.close()


def test_a_folder_is_made(tmp_path: Path) -> None:
    store = open_store(ObjectOptions(url=(tmp_path / "a" / "b").as_uri()))
    put(store, {"x/y": b"1"})
    assert (tmp_path / "a" / "b" / "x" / "y").read_bytes() == b"1"
    store.close()
