"""An engine's own pages in a server: whoever stored them, they come back as they were, or not."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcore.config import Config, load_config
from kvcore.connector.build import build_pages
from kvcore.errors import ConfigError, UnsupportedError
from kvcore.memory.buffers import Buffers
from kvcore.model.shape import BlockShape
from kvcore.runtime.page_jobs import Ended, PageJobs
from kvcore.runtime.page_store import page_settings
from kvcore.server import pages as served_pages
from kvcore.server.page_model import for_pages
from kvcore.server.pages import ServedPages
from kvcore.testing.waiting import until
from kvcore.tiers.geometry import Geometry
from kvcore_devtools.server_fixture import RunningServer, server_process, settings
from kvcore_devtools.servers import stand_still

NBYTES = 12 * 4096
ROOM = 64
"""Pages in the host memory of the server of these tests."""

Start = Callable[[Config], RunningServer]
Join = Callable[..., ServedPages]


def geometry(nbytes: int = NBYTES) -> Geometry:
    shape = BlockShape(1, 1, nbytes, 1, "uint8", kv_factor=1)
    return Geometry(shape, b"pages of a test.", ((0, 1),))


def config_of(folder: Path, disk: Path | None = None, **tables: Any) -> Config:
    tables["host"] = {"capacity": f"{ROOM * NBYTES}B", **tables.get("host", {})}
    if disk is not None:
        tables["disk"] = {"path": str(disk), "capacity": "64MiB"}
    return settings(folder, **tables)


def client_of(folder: Path, **server: Any) -> Config:
    given = {"address": "local", "folder": str(folder), "deadline_s": 20.0, **server}
    return load_config(None, {"server": given})


@pytest.fixture
def join() -> Iterator[Join]:
    """Joins clients, which leave when the test ends, with all their threads."""
    made: list[ServedPages] = []
    before = set(threading.enumerate())

    def begin(config: Config, identity: bytes = b"one", nbytes: int = NBYTES) -> ServedPages:
        pages = build_pages(config, geometry(nbytes), identity)
        assert isinstance(pages, ServedPages)
        made.append(pages)
        return pages

    yield begin
    for each in made:
        each.close()
        assert not each._flights
        assert sorted(each._free) == list(range(len(each._staging))), "a place was lost"
    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert not {name for name in left if name.startswith("kvcore-pages")}


def page(content: object, nbytes: int = NBYTES) -> Buffers:
    """Return a page with unique content, in two runs."""
    data = memoryview(random.Random(str(content)).randbytes(nbytes))
    return [data[:1000], data[1000:]]


def put(pages: ServedPages, keys: Sequence[str]) -> list[str]:
    stored = pages.put(keys, [page(key) for key in keys])
    return [key for key, there in zip(keys, stored, strict=True) if there]


def got(pages: ServedPages, keys: Sequence[str]) -> list[str]:
    """Return the keys that were found, after checking that the bytes are those stored."""
    blank = [bytearray(NBYTES) for _ in keys]
    found = pages.get(keys, [[memoryview(b)[:5000], memoryview(b)[5000:]] for b in blank])
    for key, there, data in zip(keys, found, blank, strict=True):
        assert not there or data == b"".join(page(key)), f"page {key} is another one"
    return [key for key, there in zip(keys, found, strict=True) if there]


def names(count: int, prefix: str = "k") -> list[str]:
    return [f"{prefix}{i}" for i in range(count)]


def held(server: RunningServer, tier: str) -> int:
    [model] = server.status()["models"]
    return int(model["tiers"][tier][0])


def test_what_one_client_stores_the_others_find(
    start: Start, join: Join, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_pages, "STAGING_NBYTES", 4 * NBYTES)
    start(config_of(folder, server={"lease_s": 2.0}))
    one, two = join(client_of(folder)), join(client_of(folder))
    keys = names(11)
    assert put(one, keys) == keys
    assert not two.holds("k0")
    assert two.ask([*keys, "other"]) == [True] * 11 + [False]
    assert two.holds("k0")
    assert got(two, ["k3", "none", *keys]) == ["k3", *keys]
    assert put(two, keys) == keys
    assert two.counts()[1:] == (0, 12, 0), "what is held is not written again"
    assert one.counts().written == 11
    until(lambda: one.counts().held == 11)


def test_another_identity_finds_nothing(start: Start, join: Join, folder: Path) -> None:
    start(config_of(folder))
    one, two = join(client_of(folder)), join(client_of(folder), b"two")
    put(one, ["a"])
    assert two.ask(["a"]) == [False]
    assert got(two, ["a"]) == []
    assert two.put(["a"], [page("another")]) == [True]
    assert got(one, ["a"]) == ["a"]
    one.renew()
    assert one.ask(["a"]) == [False]
    again = join(client_of(folder))
    assert again.ask(["a"]) == [True]


def test_what_is_stored_is_found_by_others_at_once(
    start: Start, join: Join, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long what this client only tells the server stays on its way."""
    start(config_of(folder))
    one, two = join(client_of(folder)), join(client_of(folder))
    link, told = one._manager.keeper.link, list[Any]()
    tell, ask = link.tell, link.ask

    def ask_after_what_was_told(request: Any, *given: Any, **named: Any) -> Any:
        while told:
            tell(told.pop(0))
        return ask(request, *given, **named)

    monkeypatch.setattr(link, "tell", lambda request: told.append(request) is None)
    monkeypatch.setattr(link, "ask", ask_after_what_was_told)
    assert put(one, names(3)) == names(3)
    assert two.ask(names(3)) == [True] * 3


def test_a_restart_of_the_server_finds_what_is_on_disk(
    start: Start, join: Join, folder: Path, tmp_path: Path
) -> None:
    config = config_of(folder, tmp_path / "disk")
    server = start(config)
    one = join(client_of(folder, deadline_s=0.5))
    put(one, names(9))
    until(lambda: held(server, "disk") == 9 and server.idle)
    server.close()
    assert got(one, ["k1"]) == []
    assert one.ask(["k1"]) == [False]
    start(config)
    until(lambda: one.ask(["k1"]) == [True])
    assert got(one, names(9)) == names(9)
    assert put(one, ["new"]) == ["new"]


def test_a_store_gives_a_server_what_another_one_wrote(
    start: Start, join: Join, tmp_path: Path
) -> None:
    far = {"plugin": "files", "capacity": "64MiB", "options": {"path": str(tmp_path / "far")}}
    server = start(config_of(tmp_path / "one", tiers={"far": far}))
    one = join(client_of(tmp_path / "one"))
    put(one, names(3))
    until(lambda: held(server, "far") == 3 and server.idle)
    one.close()
    server.close()
    start(config_of(tmp_path / "two", tiers={"far": far}))
    two = join(client_of(tmp_path / "two"))
    until(lambda: two.ask(["k2"]) == [True])
    assert two.ask([*names(3), "other"]) == [True] * 3 + [False]
    assert got(two, names(3)) == names(3)
    other = join(client_of(tmp_path / "two"), b"other")
    assert other.ask(names(3)) == [False] * 3


def test_pages_are_no_blocks_of_events_and_the_oldest_go_first() -> None:
    given = {"disk": {"path": "disk"}, "events": {"endpoint": "tcp://127.0.0.1:5557"}}
    config = for_pages(load_config(None, given))
    assert config.events.endpoint is None
    assert (config.host.policy, config.disk.policy) == ("lru", "lru")
    chosen = for_pages(load_config(None, {"host": {"policy": "lfu"}}))
    assert chosen.host.policy == "lfu"


def test_a_rotten_page_is_dropped_and_the_others_are_served(
    start: Start, join: Join, folder: Path, tmp_path: Path
) -> None:
    config = config_of(folder, tmp_path / "disk")
    server = start(config)
    one = join(client_of(folder))
    put(one, names(3))
    until(lambda: held(server, "disk") == 3 and server.idle)
    one.close()
    server.close()
    [data] = (tmp_path / "disk").rglob("shard-0.data")
    whole = bytearray(data.read_bytes())
    whole[whole.index(bytes(page("k1")[0])) + 5] ^= 1
    data.write_bytes(whole)
    start(config)
    two = join(client_of(folder))
    assert two.ask(names(3)) == [True] * 3
    assert got(two, names(3)) == ["k0", "k2"]
    assert two.counts().corrupt == 1
    assert two.ask(["k1"]) == [False]
    assert put(two, ["k1"]) == ["k1"]
    assert got(two, ["k1"]) == ["k1"]


def test_what_the_server_has_evicted_is_not_found(start: Start, join: Join, folder: Path) -> None:
    """The client believes that it is there, and learns better."""
    server = start(config_of(folder))
    one, two = join(client_of(folder)), join(client_of(folder))
    put(one, ["first"])
    for number in range(ROOM + 4):
        put(two, [f"more{number}"])
    assert held(server, "host") <= ROOM
    assert one.holds("first")
    assert got(one, ["first"]) == []
    assert not one.holds("first")
    assert got(two, [f"more{ROOM + 3}"]) == [f"more{ROOM + 3}"], "the oldest went"


def test_of_pages_stored_together_the_first_stay_longest(
    start: Start, join: Join, folder: Path
) -> None:
    """A prefix is useful without what follows it, but not the other way round."""
    start(config_of(folder))
    one, two = join(client_of(folder)), join(client_of(folder))
    put(one, names(10))
    for number in range(ROOM - 5):
        put(two, [f"more{number}"])
    found = got(one, names(10))
    assert 0 < len(found) < 10
    assert found == names(len(found))


@pytest.mark.parametrize("rounds", [5, pytest.param(40, marks=pytest.mark.exhaustive)])
def test_clients_that_read_and_write_at_once_never_see_a_wrong_page(
    start: Start, join: Join, folder: Path, tmp_path: Path, rounds: int
) -> None:
    """In less host memory than they use, so that pages come and go."""
    host = {"capacity": f"{16 * NBYTES}B"}
    start(config_of(folder, tmp_path / "disk", host=host))
    clients = [join(client_of(folder)) for _ in range(2)]
    failures: list[BaseException] = []

    def work(pages: ServedPages, seed: int) -> None:
        chance = random.Random(seed)
        try:
            for _ in range(rounds):
                keys = chance.sample(names(40), 5)
                put(pages, keys)
                got(pages, chance.sample(names(40), 5))
        except BaseException as error:  # noqa: BLE001 - told by the test's own thread
            failures.append(error)

    threads = [
        threading.Thread(target=work, args=(clients[i % 2], i), daemon=True) for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures
    assert max(pages.counts().read for pages in clients) > rounds


def test_a_clear_is_for_every_client_of_this_identity(
    start: Start, join: Join, folder: Path
) -> None:
    start(config_of(folder))
    one, two, other = (join(client_of(folder), name) for name in (b"one", b"one", b"other"))
    put(one, ["a"])
    put(other, ["a"])
    one.clear()
    assert not one.holds("a")
    assert two.ask(["a"]) == [False]
    assert got(other, ["a"]) == ["a"]


def test_a_server_that_stands_still_costs_one_deadline_and_no_row(
    start: Start, join: Join, folder: Path
) -> None:
    """The scheduler's calls return at once; a lookup ends; a row is given back at its deadline.

    Then the server is killed, and another takes its place.
    """
    given = ["server.address=local", f"server.folder={folder}", f"host.capacity={ROOM * NBYTES}B"]
    with server_process(*given, "host.huge_pages=false") as process:
        one = join(client_of(folder, deadline_s=0.5, lease_s=5.0))
        assert put(one, ["a", "b"]) == ["a", "b"]
        rows = np.zeros((2, NBYTES), np.uint8)
        jobs = PageJobs(one, rows, 20.0)
        assert jobs.find("a")
        stand_still(process.pid)
        began = time.monotonic()
        until(lambda: jobs.find("c") is False)
        assert jobs.find("a") in (False, None)
        jobs.load(1, ["a"], [0])
        ended: list[Ended] = []
        until(lambda: bool(ended.extend(jobs.take_ended()) or ended))
        assert [job.good for job in ended] == [()]
        assert not rows.any()
        assert time.monotonic() - began < 10
        process.kill()
        process.wait()
        assert got(one, ["a"]) == []
        assert put(one, ["b"]) == []
    start(config_of(folder))
    until(lambda: put(one, ["a"]) == ["a"], seconds=60)
    assert got(one, ["a", "b"]) == ["a"]
    jobs.close()


def test_a_server_that_listens_has_imported_what_models_need(folder: Path) -> None:
    """A thread that imports it holds the interpreter, and no client would be answered."""
    given = ["server.address=local", f"server.folder={folder}", f"host.capacity={ROOM * NBYTES}B"]
    with server_process(*given, "host.huge_pages=false") as process:
        assert "libtorch" in Path(f"/proc/{process.pid}/maps").read_text()


def test_a_client_may_start_before_its_server(start: Start, join: Join, folder: Path) -> None:
    one = join(client_of(folder, deadline_s=0.2))
    assert put(one, ["a"]) == []
    start(config_of(folder))
    until(lambda: put(one, ["a"]) == ["a"], seconds=60)


def test_who_cannot_be_served_is_told_why(start: Start, join: Join, folder: Path) -> None:
    start(config_of(folder))
    put(join(client_of(folder)), ["a"])
    with pytest.raises(UnsupportedError, match=r"server\.models"):
        join(client_of(folder), nbytes=2 * NBYTES)
    with pytest.raises(UnsupportedError, match="products of a number"):
        join(client_of(folder), nbytes=100_003)
    both = load_config(
        None,
        {"server": {"address": "local", "folder": str(folder)}, "disk": {"path": str(folder)}},
    )
    with pytest.raises(ConfigError, match=r"given server\.address and disk"):
        build_pages(both, geometry(), b"one")


def test_the_servers_address_is_a_setting_with_a_use(caplog: pytest.LogCaptureFixture) -> None:
    page_settings({"server": {"address": "local"}}, "the test")
    assert not caplog.records


@pytest.mark.exhaustive
def test_pages_of_a_server_in_parts_larger_than_its_staging(
    start: Start, join: Join, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_pages, "STAGING_NBYTES", 1)
    start(config_of(folder))
    one = join(client_of(folder))
    assert len(one._staging) == served_pages.LEAST_STAGED
    assert put(one, names(20)) == names(20)
    assert got(one, names(20)) == names(20)


def test_an_error_between_two_pages_leaves_the_others_their_places(
    start: Start, join: Join, folder: Path
) -> None:
    start(config_of(folder))
    one = join(client_of(folder))
    with pytest.raises(AssertionError, match="a page of 1000 bytes"):
        one.put(names(3), [page("k0")[:1], page("k1"), page("k2")])
    assert put(one, names(3)) == names(3)
    assert got(one, names(3)) == names(3)
