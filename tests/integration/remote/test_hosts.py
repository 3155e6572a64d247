"""Two engines on two "hosts" share a real store: what one computes the other loads, the answers are
those of an engine without a cache, and a server that dies costs recomputation, nothing else."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("transformers")

from kvcore.config import load_config
from kvcore.testing.engine import EngineArgs, Llama, ReferenceEngine, random_llama
from kvcore.testing.waiting import until
from kvcore_devtools.servers import (
    S3_ENVIRONMENT,
    Server,
    Start,
    free_port,
    make_bucket,
    mooncake_master,
    need_client,
    redis_like,
    s3,
)
from support.pairs import covering

PATIENT_S = 60.0
"""Longer than anything takes on a busy machine, where the test is not of a timeout."""


class Store(NamedTuple):
    """A tier's table, and its server where there is one to kill."""

    tier: dict[str, Any]
    server: Server | None = None


def _redis(program: str) -> Callable[[Start, Path], Store]:
    def make(start: Start, folder: Path) -> Store:
        need_client("redis")
        server = start(redis_like(program))
        return Store(_tier("redis", url=f"redis://127.0.0.1:{server.port}/0"), server)

    return make


def _folder(start: Start, folder: Path) -> Store:
    need_client("obstore")
    return Store(_tier("objects", url=folder.as_uri()))


def _files(start: Start, folder: Path) -> Store:
    need_client("nixl_cu13")
    return Store(_tier("files", path=str(folder)))


def _s3(start: Start, folder: Path) -> Store:
    need_client("obstore")
    server = start(s3())
    make_bucket(server)
    config = {"endpoint": f"http://127.0.0.1:{server.port}", "region": "us-east-1"}
    return Store(_tier("objects", url="s3://kvcore-test", config=config), server)


def _mooncake(start: Start, folder: Path) -> Store:
    need_client("mooncake.store")
    server = start(mooncake_master())
    master = f"127.0.0.1:{server.port}"
    return Store(_tier("mooncake", master=master, host="127.0.0.1", lend="64MiB"))


def _peer(start: Start, folder: Path) -> Store:
    """No server: each host lends memory of its own to the others. Its ranks have a port each."""
    need_client("nixl_cu13")
    return Store(_tier("peer", peers=[str(free_port(2)) for _ in range(2)], lend="4MiB"))


def _as_node(tier: dict[str, Any], number: int, ranks: Sequence[int]) -> dict[str, Any]:
    """Of a `peer` tier, its settings on one of its hosts, which have so many ranks."""
    ports = zip(map(int, tier["options"]["peers"]), ranks, strict=True)
    nodes = [f"127.0.0.1:{port}-{port + count - 1}" for port, count in ports]
    own = {"listen": nodes[number].partition("-")[0], "peers": nodes}
    return {**tier, "options": {**tier["options"], **own}}


def _tier(plugin: str, **options: Any) -> dict[str, Any]:
    patient = {"timeout_s": PATIENT_S, "lookup_s": PATIENT_S, "deadline_s": PATIENT_S}
    patient["splits_s"] = 0.001  # what the other writes is known at once
    return {"plugin": plugin, "capacity": "16MiB", "options": {**patient, **options}}


STORES = {
    "redis": _redis("redis-server"),
    "valkey": _redis("valkey-server"),
    "folder": _folder,
    "files": _files,
    "s3": _s3,
    "mooncake": _mooncake,
    "peer": _peer,
}


def words(seed: int, count: int) -> list[int]:
    picks = random.Random(seed)
    return [picks.randrange(1, 512) for _ in range(count)]


@pytest.fixture(scope="module")
def model() -> Llama:
    return random_llama()


@pytest.fixture(scope="module")
def plain(model: Llama) -> Iterator[Callable[[Sequence[int]], list[int]]]:
    with ReferenceEngine(model, EngineArgs(num_pages=128, prefix_cache=False)) as engine:
        yield lambda prompt: engine.generate([prompt], 6)[0]


@pytest.fixture
def host(model: Llama) -> Iterator[Callable[..., ReferenceEngine]]:
    """Starts one host after the other; ``ranks`` are those of the first and of the second."""
    made: list[ReferenceEngine] = []

    def start(
        tier: dict[str, Any], ranks: Sequence[int] = (1, 1), **options: Any
    ) -> ReferenceEngine:
        tier, number = {**tier, "options": {**tier["options"], **options}}, len(made)
        if tier["plugin"] == "peer":
            tier = _as_node(tier, number, ranks)
        tables = {"host": {"capacity": "16MiB", "huge_pages": False}, "tiers": {"far": tier}}
        args = EngineArgs(ranks=ranks[number % len(ranks)])
        engine = ReferenceEngine(model, args, load_config(None, tables))
        made.append(engine)
        serve(engine, words(0, 8))  # its ranks open their tiers with the first step
        return engine

    yield start
    for engine in made:
        engine.settle()
        engine.check_integrity()
        engine.close()


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in S3_ENVIRONMENT.items():
        monkeypatch.setenv(name, text)


def serve(engine: ReferenceEngine, prompt: Sequence[int]) -> tuple[list[int], int]:
    request = engine.submit(prompt, 6)
    engine.run()
    engine.settle()
    return request.answer, request.reused.get("far", 0)


@pytest.fixture
def store(request: pytest.FixtureRequest, start_server: Start, tmp_path: Path) -> Store:
    return STORES[request.param](start_server, tmp_path / "shared")


CROSSINGS = list(itertools.product(sorted(STORES), (1, 2), (1, 2)))
IN_MAKE_TEST = covering(CROSSINGS)
"""Every store with one and two ranks on either host, and every two numbers of ranks."""


@pytest.mark.parametrize(
    ("store", "ranks"),
    [
        pytest.param(
            name, ranks, marks=[] if (name, *ranks) in IN_MAKE_TEST else pytest.mark.exhaustive
        )
        for name, *ranks in CROSSINGS
    ],
    ids=lambda value: value if isinstance(value, str) else str(tuple(value)),
    indirect=["store"],
)
def test_what_one_host_computes_the_other_loads(
    store: Store, host: Callable[..., ReferenceEngine], plain: Any, ranks: Sequence[int]
) -> None:
    """Whatever numbers of ranks they have."""
    first, second = host(store.tier, ranks), host(store.tier, ranks)
    for seed, engine in enumerate((first, second), 100):
        serve(engine, words(seed, 20))  # a rank that lends memory does so from its first block on
    prompt = words(1, 100)
    assert serve(first, prompt) == (plain(prompt), 0)
    assert serve(second, prompt) == (plain(prompt), 96)
    longer = [*prompt, *words(2, 60)]
    assert serve(second, longer)[0] == plain(longer)
    assert serve(first, longer) == (plain(longer), 63)


@pytest.mark.parametrize("name", ["redis", "s3"])
def test_a_server_that_dies_costs_recomputation(
    name: str,
    start_server: Start,
    host: Callable[..., ReferenceEngine],
    plain: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Killed between the answer and the load, gone for a while, back and empty."""
    store = STORES[name](start_server, tmp_path)
    assert store.server is not None
    prompts = [words(seed, 80) for seed in range(10, 16)]
    first, second = host(store.tier), host(store.tier, retries=0)
    for prompt in prompts:
        serve(first, prompt)
    request = second.submit(prompts[0], 6)
    assert second.leader is not None
    manager = second.leader.manager
    server, plan_load, planned = store.server, manager.plan_load, False

    def kill_first(*args: Any, **named: Any) -> Any:
        nonlocal planned
        planned = True
        server.kill()
        return plan_load(*args, **named)

    with monkeypatch.context() as patch:
        patch.setattr(manager, "plan_load", kill_first)
        second.run()
    assert planned
    assert request.answer == plain(prompts[0])
    for prompt in prompts[1:4]:
        assert serve(second, prompt) == (plain(prompt), 0)
    lookups, writes = manager.tiers.lookups["far"]._breaker, manager.tiers.breakers.writes["far"]
    for breaker in (lookups, writes):
        assert not breaker.allows(), breaker.name
        breaker._opened_at = -1e9  # its pause is over
    store.server.start()
    if name == "s3":
        make_bucket(store.server)
    assert serve(second, prompts[4]) == (plain(prompts[4]), 0), "the store came back empty"
    assert lookups.allows()
    assert serve(second, words(30, 80))[0] == plain(words(30, 80))
    assert serve(host(store.tier), words(30, 80))[1] == 79, "and takes blocks again"


def test_a_server_that_hangs_is_not_waited_for(
    start_server: Start, host: Callable[..., ReferenceEngine], plain: Any, tmp_path: Path
) -> None:
    store = STORES["redis"](start_server, tmp_path)
    assert store.server is not None
    serve(host(store.tier), words(40, 80))
    second = host(store.tier, timeout_s=0.5, lookup_s=0.2, retries=0)
    store.server.hang()
    for seed in (40, 41, 42):
        assert serve(second, words(seed, 80)) == (plain(words(seed, 80)), 0)
    store.server.go_on()


def test_a_store_that_was_down_at_a_clear_is_cleared_by_the_next_engine(
    start_server: Start,
    host: Callable[..., ReferenceEngine],
    plain: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine that cleared has ended before the store, which keeps what it holds, is back."""
    monkeypatch.setenv("KVCORE__SERVER__FOLDER", str(tmp_path / "notes"))
    need_client("redis")
    server = start_server(redis_like("redis-server", "--appendonly", "yes"))
    tier = _tier("redis", url=f"redis://127.0.0.1:{server.port}/0")
    prompt = words(50, 80)
    first = host(tier, retries=0)
    serve(first, prompt)
    second = host(tier, retries=0)
    assert serve(second, prompt) == (plain(prompt), 79)
    server.kill()
    for engine in (first, second):
        assert engine.leader is not None
        engine.leader.manager.clear()
        until(lambda engine=engine: engine.leader.manager.tiers.lookups["far"]._finder._pending)
        engine.settle()
        engine.close()
    server.start()
    third = host(tier)
    assert serve(third, prompt) == (plain(prompt), 0), "what they had cleared is found again"
    until(lambda: not list((tmp_path / "notes").glob("owed-*")))
    assert serve(host(tier), prompt) == (plain(prompt), 79), "what was written since is there"
