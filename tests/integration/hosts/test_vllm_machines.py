"""One vLLM whose ranks are on two hosts, with a Redis on a third.

    host a: scheduler, leader, rank 0 ──┐
                                        ├── switch ── host store: Redis
    host b: rank 1                    ──┘

What does not need an engine is in tests/adapters/vllm/test_machines.py.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvcore.errors import KVCoreError
from kvcore.harness.compare import (
    ALL,
    EXACT,
    SMALL,
    answers,
    assert_same_answers,
    blended,
    counted,
    settle_and_empty,
    warm,
)
from kvcore.harness.engine_process import EngineProcess, Generation
from kvcore.harness.models import smollm2, tiny_model
from kvcore.harness.prompts import mixed, windows
from kvcore_devtools.hosts import Network
from kvcore_devtools.servers import Server, Start, free_port, need_client, redis_like
from kvcore_vllm.testing.conformance import STAGED

pytestmark = [pytest.mark.engine, pytest.mark.whole_machine, pytest.mark.exhaustive]

FAULTY = Path(__file__).parents[2] / "engines" / "faulty"
STEP_S = 60
"""Seconds that vLLM waits for a host that has died; by default 300."""
SPOIL = """
import sys, redis
store = redis.Redis.from_url(sys.argv[1])
names = [name for name in store.scan_iter(count=1000) if sys.argv[2].encode() in name]
for name in names:
    value = bytearray(store.get(name))
    value[-1] ^= 1
    store.set(name, bytes(value))
print(len(names))
"""
"""Changes a byte of each value of a part of blocks."""

Two = Callable[..., AbstractContextManager[EngineProcess]]


@pytest.fixture
def two(network: Network, tmp_path: Path) -> Two:
    """Starts a vLLM with ranks on hosts a and b, and yields the process that takes requests.

    ``other`` are kvcore's settings on host b, if they are others; None leaves kvcore out there.
    Ranks on b end as in a power failure: vLLM leaves them running when the first machine ends.
    """

    starts = itertools.count()

    @contextmanager
    def start(
        model: Path, kvcore: dict[str, Any], env: Mapping[str, str] | None = None, **args: Any
    ) -> Iterator[EngineProcess]:
        args = {**SMALL, "nnodes": 2, "master_addr": network["a"].address, **args}
        args |= {"master_port": free_port(), "distributed_executor_backend": "mp"}
        settings = {"b": args.pop("other", kvcore), "a": kvcore}
        made, number = [], next(starts)
        try:
            for rank, name in ((1, "b"), (0, "a")):
                host = network[name]
                own = {"VLLM_HOST_IP": host.address, "GLOO_SOCKET_IFNAME": "eth0"}
                own |= {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(STEP_S), **(env or {})}
                log = tmp_path / f"vllm-{name}-{number}.log"
                made.append(
                    EngineProcess(
                        model,
                        kvcore=settings[name],
                        within=host.command,
                        env=own,
                        log=log,
                        node_rank=rank,
                        **args,
                    )
                )
            made[1].wait_ready()
            yield made[1]
            made[1].close()
        finally:
            for process in reversed(made):
                process.kill()

    return start


@pytest.fixture
def store(network: Network, start_server: Start) -> Server:
    need_client("redis")
    host = network["store"]
    return start_server(redis_like("redis-server", bind=host.address), host)


def settings(store: Server, folder: Path) -> dict[str, Any]:
    """Host memory and a Redis, and a disk, which is off on several machines."""
    options = {"url": f"redis://{store.address}/0", "timeout_s": 30.0, "lookup_s": 60.0}
    return {
        "host": {"capacity": "64MiB", "huge_pages": False},
        "disk": {"path": str(folder / "kv"), "capacity": "64MiB"},
        "tiers": {"far": {"plugin": "redis", "capacity": "64MiB", "options": options}},
        "transfer": {"load_deadline_s": 60.0},
    }


def spoil(network: Network, store: Server, part: str) -> int:
    """Spoil the values of a part of all blocks in the store, and return how many there are."""
    url = f"redis://{store.address}/0"
    return int(network["store"].run([sys.executable, "-c", SPOIL, url, part]))


def assert_whole(tier: str, got: Sequence[Generation], prompts: Sequence[Sequence[int]]) -> None:
    for answer, prompt in zip(got, prompts, strict=True):
        assert answer.tiers.keys() == {tier}, answer.kvcore
        assert answer.tiers[tier] >= len(prompt) - 32, answer.kvcore


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
def test_ranks_on_two_hosts(
    two: Two, network: Network, store: Server, tmp_path: Path, asynchronous: bool
) -> None:
    model = tiny_model("llama", layers=4, heads=4, kv_heads=2)
    documents = windows(model, 6, 100, 400, seed=6)
    kvcore = settings(store, tmp_path)
    args: dict[str, Any] = {"tensor_parallel_size": 2, "asynchronous": asynchronous}
    with two(model, kvcore, **args) as process:
        right = answers(process, documents, cache_salt="alone")
        cold = answers(process, documents[:4], batch=2)
        assert_same_answers(cold, right[:4])
        assert not any(answer.reused_tokens for answer in cold)
        settle_and_empty(process)
        got = answers(process, documents[:4], batch=2)
        assert_same_answers(got, right[:4])
        assert_whole("host", got, documents[:4])
        part = [*documents[0][:64], *documents[4]]
        [expected] = answers(process, [part], cache_salt="alone")
        settle_and_empty(process)
        [found] = answers(process, [part])
        assert_same_answers([found], [expected])
        assert found.tiers == {"host": 64}, found.kvcore
        log = process.log.read_text()
        assert log.count("the tier disk is off") == 1
        assert "tiers=host,far" in log
        network["b"].kill()  # as in a power failure: vLLM ends, and answers nothing wrong
        with pytest.raises(KVCoreError):
            process.submit(documents[5], 8).result(STEP_S + 120)
        process.kill()
    assert not (tmp_path / "kv").exists()

    with two(model, kvcore, **args) as process:  # both machines have started again
        got = answers(process, documents[:2])
        assert_same_answers(got, right[:2])
        assert_whole("far", got, documents[:2])
        assert spoil(network, store, "/h1-2.") > 20, "rank 1 has its part in the store"
        before = counted(process, "kvcore_refused_blocks_total", tier="far")
        got = answers(process, documents[2:4])
        assert_same_answers(got, right[2:4])
        assert not any(answer.reused_tokens for answer in got), "rank 1 read what is spoilt"
        assert counted(process, "kvcore_refused_blocks_total", tier="far") > before
        settle_and_empty(process)
        got = answers(process, documents[:4])
        assert_same_answers(got, right[:4])
        assert_whole("host", got, documents[:4])


def test_a_host_without_kvcore_or_with_other_settings(
    two: Two, store: Server, tmp_path: Path
) -> None:
    """The store holds what rank 0 could load. Rank 1 would not, or would read other tokens."""
    model = tiny_model("llama", layers=4, heads=4, kv_heads=2)
    documents = windows(model, 2, 100, 400, seed=7)
    kvcore = settings(store, tmp_path)
    with two(model, kvcore, tensor_parallel_size=2) as process:
        right = answers(process, documents)
        settle_and_empty(process)
    other = {**kvcore, "block": {"tokens": 32}, "fusion": {"enabled": True}}
    for found, line in ((None, "rank 1 of 2 does not serve kvcore"), (other, ": block, fusion, ")):
        with two(model, kvcore, tensor_parallel_size=2, other=found) as process:
            got = answers(process, documents)
            assert_same_answers(got, right)
            assert not any(answer.reused_tokens for answer in got)
            log = process.log.read_text()
            assert log.count("kvcore stands aside") == 1
            assert line in log


def test_stages_on_two_hosts(two: Two, store: Server, tmp_path: Path) -> None:
    model = smollm2()
    documents = windows(model, 3, 100, 400, seed=8)
    kvcore = settings(store, tmp_path)
    kvcore["host"]["capacity"] = kvcore["tiers"]["far"]["capacity"] = "512MiB"
    args: dict[str, Any] = {"pipeline_parallel_size": 2, "asynchronous": False, **STAGED}
    with two(model, kvcore, **args) as process:
        right = answers(process, documents, cache_salt="alone")
        assert_same_answers(answers(process, documents), right)
        settle_and_empty(process)
        got = answers(process, documents)
        assert_same_answers(got, right)
        assert_whole("host", got, documents)
    with two(model, kvcore, **args) as process:
        got = answers(process, documents)
        assert_same_answers(got, right)
        assert_whole("far", got, documents)


def test_blends_of_ranks_on_two_hosts(two: Two, tmp_path: Path) -> None:
    """Ranks agree on each layer over the network, also where a blend fails on the far rank."""
    model = tiny_model("llama", layers=4, heads=4, kv_heads=2, head_dim=64)
    chunks = windows(model, 6, 150, 260, seed=31)
    asked = mixed(model, chunks, 4, seed=7)
    fail = tmp_path / "fail"
    path = os.pathsep.join([str(FAULTY), os.environ.get("PYTHONPATH", "")])
    kvcore = {
        "host": {"capacity": "256MiB", "huge_pages": False},
        "fusion": {"enabled": True},
        "ops": {"backend": "faulty"},
    }
    env = {"PYTHONPATH": path, "FAULTY_RANK": str(fail)}
    with two(model, kvcore, env, tensor_parallel_size=2) as process:
        right = answers(process, asked, cache_salt="alone", fusion=EXACT)
        warm(process, chunks)
        got = answers(process, asked[:2], fusion=ALL)
        assert_same_answers(got, right[:2])
        assert min(blended(got)) >= 400
        fail.touch()
        assert_same_answers(answers(process, asked[2:], fusion=ALL), right[2:])
        assert counted(process, "kvcore_blends_total", outcome="failed") >= 1
