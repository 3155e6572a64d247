"""Two hosts, one store: engines that share nothing but it answer as one that has no cache at all.

Each engine has its own index, host memory and workers. "Hosts" live in one process here; the stores
with a server of their own are tested in tests/integration/remote.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

pytest.importorskip("transformers")

from kvcore.config import load_config
from kvcore.testing.engine import EngineArgs, Llama, ReferenceEngine
from kvcore.tiers.remote.memory import MemoryStore, shared_store

pytestmark = pytest.mark.slow

Hosts = Callable[..., ReferenceEngine]
VOCABULARY = 512


def words(seed: int, count: int) -> list[int]:
    picks = random.Random(seed)
    return [picks.randrange(1, VOCABULARY) for _ in range(count)]


@pytest.fixture(scope="module")
def plain(model: Llama) -> Iterator[Callable[[Sequence[int]], list[int]]]:
    """Answers without kvcore."""
    with ReferenceEngine(model, EngineArgs(num_pages=128, prefix_cache=False)) as engine:
        yield lambda prompt: engine.generate([prompt], 6)[0]


@pytest.fixture
def name() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def store(name: str) -> MemoryStore:
    return shared_store(name)


@pytest.fixture
def host(model: Llama, name: str) -> Iterator[Hosts]:
    """Starts an engine on a new "host"; all of them share the store of the test."""
    made: list[ReferenceEngine] = []

    def start(
        tier: dict[str, Any] | None = None, tables: dict[str, Any] | None = None, **args: Any
    ) -> ReferenceEngine:
        far = {"plugin": "memory-store", "capacity": "8MiB", **(tier or {})}
        patient = {"name": name, "lookup_s": 20.0, "splits_s": 0.001}
        far["options"] = {**patient, **far.get("options", {})}
        host = {"capacity": "16MiB", "huge_pages": False}
        config = load_config(None, {"host": host, "tiers": {"far": far}, **(tables or {})})
        engine = ReferenceEngine(model, EngineArgs(**args), config)
        made.append(engine)
        return engine

    yield start
    for engine in made:
        engine.settle()
        engine.check_integrity()
        engine.close()


def serve(engine: ReferenceEngine, prompt: Sequence[int], **options: Any) -> tuple[list[int], int]:
    """The answer, and how many tokens came from the store."""
    request = engine.submit(prompt, 6, **options)
    engine.run()
    engine.settle()
    return request.answer, request.reused.get("far", 0)


def counted(engine: ReferenceEngine, name: str, *labels: str) -> float:
    assert engine.leader is not None
    return engine.leader.metrics.snapshot().get(name, {}).get("|".join(labels), 0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_one_host_computes_the_other_finds(host: Hosts, plain: Any, ranks: int) -> None:
    first, second = host(ranks=ranks), host(ranks=ranks)
    prompt = words(1, 100)
    assert serve(first, prompt) == (plain(prompt), 0)
    assert serve(second, prompt) == (plain(prompt), 96)
    longer = [*prompt, *words(2, 60)]
    assert serve(second, longer)[0] == plain(longer)
    assert serve(first, longer) == (plain(longer), 63), "96 are its own; it asks for the rest"
    assert counted(second, "kvcore_store_lookups_total", "far", "found") >= 1


def test_a_restarted_host_finds_what_it_wrote(host: Hosts, plain: Any) -> None:
    prompt = words(3, 80)
    first = host()
    serve(first, prompt)
    first.close()
    assert serve(host(), prompt) == (plain(prompt), 79)


def test_another_tenant_model_or_deployment_finds_nothing(host: Hosts, plain: Any) -> None:
    prompt = words(4, 64)
    first = host()
    serve(first, prompt, salt="mine")
    assert serve(host(), prompt, salt="mine")[1] == 63
    assert serve(host(), prompt, salt="yours") == (plain(prompt), 0)
    assert serve(host(), prompt) == (plain(prompt), 0)
    assert serve(host(tables={"namespace": {"secret": "s" * 16}}), prompt, salt="mine")[1] == 0
    assert serve(host({"options": {"prefix": "test"}}), prompt, salt="mine")[1] == 0
    assert serve(host(tables={"block": {"tokens": 32}}), prompt, salt="mine")[1] == 0


SIZES = [(1, 1), (2, 1), (1, 2), (2, 2)]
"""Tensor-parallel ranks, and pipeline stages."""


@pytest.mark.parametrize(
    ("wrote", "reads"), [(wrote, reads) for wrote in SIZES for reads in SIZES if wrote != reads]
)
def test_what_is_written_at_one_size_is_read_at_another(
    host: Hosts, plain: Any, wrote: tuple[int, int], reads: tuple[int, int]
) -> None:
    prompt = words(5, 100)
    assert serve(host(ranks=wrote[0], stages=wrote[1]), prompt) == (plain(prompt), 0)
    assert serve(host(ranks=reads[0], stages=reads[1]), prompt) == (plain(prompt), 96)


def test_ranks_of_data_parallelism_share_what_any_of_them_computed(
    host: Hosts, plain: Any, store: MemoryStore
) -> None:
    """At once, all of them running, each of another size; nothing is written twice."""
    replicas = [host(ranks=ranks, stages=stages) for ranks, stages in SIZES]
    prompts = [words(30 + number, 64) for number in range(len(replicas))]
    for replica, prompt in zip(replicas, prompts, strict=True):
        assert serve(replica, prompt) == (plain(prompt), 0)
    values = set(store.values)
    for replica, own in zip(replicas, prompts, strict=True):
        for prompt in prompts:
            if prompt is not own:
                assert serve(replica, prompt) == (plain(prompt), 63)
    assert set(store.values) == values


def test_a_rank_whose_part_is_missing_makes_a_miss(
    host: Hosts, plain: Any, store: MemoryStore
) -> None:
    prompt = words(6, 64)
    serve(host(ranks=2), prompt)
    for value in [value for value in store.values if "/h1-2." in value]:
        del store.values[value]
    assert serve(host(ranks=2), prompt) == (plain(prompt), 0)


def test_a_corrupt_value_is_a_miss_and_is_written_anew(
    host: Hosts, plain: Any, store: MemoryStore
) -> None:
    prompt = words(7, 96)
    serve(host(), prompt)
    names = list(store.values)
    for value in names:
        store.values[value] = store.values[value][:-1] + b"\x5a"
    second = host()
    assert serve(second, prompt) == (plain(prompt), 0)
    assert counted(second, "kvcore_corrupt_blocks_total", "far") >= 1
    assert serve(host(), prompt)[1] > 0, "the good values are back"


def test_a_value_that_vanished_after_it_was_seen_is_a_miss(
    host: Hosts, plain: Any, store: MemoryStore
) -> None:
    prompt = words(8, 96)
    serve(host(), prompt)
    second = host()
    engine_get, calls = store.get, []

    def evicting(items: Any) -> Any:
        calls.append(len(items))
        store.values.clear()
        return engine_get(items)

    store.get = evicting  # type: ignore[method-assign]
    answer, _ = serve(second, prompt)
    assert answer == plain(prompt)
    assert calls
    assert counted(second, "kvcore_failures_total", "remote2h", "missing") >= 1
    assert not counted(second, "kvcore_corrupt_blocks_total", "far")
    assert second.leader is not None
    assert second.leader.manager.tiers.breakers.reads["far"].state.value == "closed"


@pytest.mark.parametrize("write", ["write_back", "selective"])
def test_every_write_policy_reaches_the_store(host: Hosts, plain: Any, write: str) -> None:
    first = host({"write": write}, {"host": {"capacity": "256KiB", "huge_pages": False}})
    prompts = [words(seed, 64) for seed in range(9, 15)]
    for _ in range(2):
        for prompt in prompts:
            assert serve(first, prompt)[0] == plain(prompt)
    second = host()
    assert any(serve(second, prompt)[1] for prompt in prompts)


def test_a_store_that_hangs_delays_a_prompt_by_lookup_s_at_most(
    host: Hosts, plain: Any, store: MemoryStore
) -> None:
    import threading

    gate, through = threading.Event(), threading.Event()
    asked = store.exists

    def hang(names: Any) -> Any:
        gate.wait()
        through.set()
        return asked(names)

    store.exists = hang  # type: ignore[method-assign]
    prompt = words(20, 64)
    engine = host({"options": {"lookup_s": 0.2}})
    answer, reused = serve(engine, prompt)
    assert (answer, reused) == (plain(prompt), 0)
    assert not through.is_set(), "it did not wait for the gate"
    assert counted(engine, "kvcore_store_lookups_total", "far", "late") == 1
    gate.set()


def test_clear_removes_from_the_store_what_was_known(
    host: Hosts, plain: Any, store: MemoryStore
) -> None:
    prompt, other = words(21, 64), words(22, 64)
    first, second = host(), host()
    serve(first, prompt)
    serve(second, other)
    assert first.leader is not None
    first.leader.clear()
    first.close()
    assert serve(second, prompt)[1] == 0
    assert serve(host(), other)[1] == 63


@pytest.mark.parametrize(("wrote", "clears"), [(2, 1), (1, 2)])
def test_clear_removes_what_engines_of_another_size_wrote(
    host: Hosts, plain: Any, wrote: int, clears: int
) -> None:
    prompt = words(25, 64)
    serve(host(ranks=wrote), prompt)
    engine = host(ranks=clears)
    assert serve(engine, prompt) == (plain(prompt), 63)
    assert engine.leader is not None
    engine.leader.clear()
    engine.close()
    assert serve(host(ranks=wrote), prompt) == (plain(prompt), 0), "it was cleared"


def test_saves_do_not_write_what_the_store_holds(host: Hosts, store: MemoryStore) -> None:
    """The second host asked: what it then computes or loads goes there once only."""
    prompt = words(23, 64)
    serve(host(), prompt)
    put, written = store.put, []

    def counting(items: Any) -> Any:
        written.extend(item.name for item in items)
        return put(items)

    store.put = counting  # type: ignore[method-assign]
    before = set(store.values)
    serve(host(), [*prompt, *words(24, 32)])
    assert written
    assert not before & set(written)
