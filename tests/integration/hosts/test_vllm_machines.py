"""One vLLM whose ranks are on two hosts, with a Redis on a third.

    host a: scheduler, leader, rank 0 ──┐
                                        ├── switch ── host store: Redis
    host b: rank 1                    ──┘

What does not need an engine is in tests/adapters/vllm/test_machines.py.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvcore._util.curve import make_keys
from kvcore.errors import KVCoreError
from kvcore.harness.compare import (
    ALL,
    EXACT,
    SETTLE_S,
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
from kvcore.testing.waiting import until
from kvcore_devtools.hosts import Host, Network
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


def settings(store: Server) -> dict[str, Any]:
    """Host memory and a Redis."""
    options = {"url": f"redis://{store.address}/0", "timeout_s": 30.0, "lookup_s": 60.0}
    return {
        "host": {"capacity": "64MiB", "huge_pages": False},
        "tiers": {"far": {"plugin": "redis", "capacity": "64MiB", "options": options}},
        "transfer": {"load_deadline_s": 60.0},
    }


PART_NBYTES = 4 * 2 * 16 * 32 * 4
"""Layers x k/v x tokens x dim x bytes: a rank's part of a block of the tiny model."""


def disks(folder: Path, capacity: str, host: str = "64MiB") -> tuple[dict[str, Any], ...]:
    """Settings of hosts a and b, each with a disk of its own."""
    return tuple(
        {
            "host": {"capacity": host, "huge_pages": False},
            "disk": {"path": str(folder / name), "capacity": capacity},
            "transfer": {"load_deadline_s": 60.0},
        }
        for name in ("a", "b")
    )


def spoil(network: Network, store: Server, part: str) -> int:
    """Spoil the values of a part of all blocks in the store, and return how many there are."""
    url = f"redis://{store.address}/0"
    return int(network["store"].run([sys.executable, "-c", SPOIL, url, part]))


def assert_whole(
    tier: str, got: Sequence[Generation], prompts: Sequence[Sequence[int]], rest: int = 32
) -> None:
    for answer, prompt in zip(got, prompts, strict=True):
        assert answer.tiers.keys() == {tier}, answer.kvcore
        assert answer.tiers[tier] >= len(prompt) - rest, answer.kvcore


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
def test_ranks_on_two_hosts(two: Two, network: Network, store: Server, asynchronous: bool) -> None:
    model = tiny_model("llama", layers=4, heads=4, kv_heads=2)
    documents = windows(model, 6, 100, 400, seed=6)
    kvcore = settings(store)
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
        assert "tiers=host,far" in process.log.read_text()
        network["b"].kill()  # as in a power failure: vLLM ends, and answers nothing wrong
        with pytest.raises(KVCoreError):
            process.submit(documents[5], 8).result(STEP_S + 120)
        process.kill()

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


def test_a_host_without_kvcore_or_with_other_settings(two: Two, store: Server) -> None:
    """The store holds what rank 0 could load. Rank 1 would not, or would read other tokens."""
    model = tiny_model("llama", layers=4, heads=4, kv_heads=2)
    documents = windows(model, 2, 100, 400, seed=7)
    kvcore = settings(store)
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


@pytest.mark.parametrize("tier", ["far", "disk"])
def test_stages_on_two_hosts(two: Two, store: Server, tmp_path: Path, tier: str) -> None:
    model = smollm2()
    documents = windows(model, 3, 100, 400, seed=8)
    on_a, on_b = disks(tmp_path, "512MiB", "512MiB")
    if tier == "far":
        on_a = on_b = settings(store)
        on_a["host"]["capacity"] = on_a["tiers"]["far"]["capacity"] = "512MiB"
    args: dict[str, Any] = {"pipeline_parallel_size": 2, "asynchronous": False, **STAGED}
    with two(model, on_a, other=on_b, **args) as process:
        right = answers(process, documents, cache_salt="alone")
        assert_same_answers(answers(process, documents), right)
        settle_and_empty(process)
        got = answers(process, documents)
        assert_same_answers(got, right)
        assert_whole("host", got, documents)
    with two(model, on_a, other=on_b, **args) as process:
        got = answers(process, documents)
        assert_same_answers(got, right)
        assert_whole(tier, got, documents)


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


# -- disks --------------------------------------------------------------------------------------


def rot(folder: Path, shard: int) -> int:
    """Change bytes of each block of a shard, and return how many there are."""
    [data] = folder.rglob(f"shard-{shard}.data")
    blocks = data.stat().st_size // PART_NBYTES
    with data.open("r+b") as file:
        for slot in range(blocks):
            file.seek(slot * PART_NBYTES + 64)
            file.write(b"\xa5" * 64)
    return blocks


def test_disks_of_two_hosts(two: Two, tmp_path: Path) -> None:
    """Each rank keeps its part on its own host; a block is there if it is on both."""
    model = tiny_model("llama", layers=4, heads=4, kv_heads=2)
    documents = windows(model, 6, 100, 400, seed=9)
    on_a, on_b = disks(tmp_path, "64MiB")
    args: dict[str, Any] = {"tensor_parallel_size": 2, "other": on_b}
    with two(model, on_a, **args) as process:
        right = answers(process, documents, cache_salt="alone")
        cold = answers(process, documents, batch=2)
        assert_same_answers(cold, right)
        assert not any(answer.reused_tokens for answer in cold)
        process.settle(SETTLE_S)
    for name, shard in (("a", 0), ("b", 1)):
        data = [path.name for path in (tmp_path / name).rglob("*.data")]
        assert data == [f"shard-{shard}.data"], "a host has the part of its own rank"

    with two(model, on_a, **args) as process:  # both machines have started again
        got = answers(process, documents[:3], batch=2)
        assert_same_answers(got, right[:3])
        assert_whole("disk", got, documents[:3])
        assert rot(tmp_path / "b", 1) > 20
        got = answers(process, documents[3:])
        assert_same_answers(got, right[3:])
        assert not any(answer.reused_tokens for answer in got), "rank 1 read what has rotted"
        assert counted(process, "kvcore_refused_blocks_total", tier="disk") > 0
        settle_and_empty(process)  # they are written anew
    shutil.rmtree(tmp_path / "b")

    with two(model, on_a, **args) as process:  # host b has a new disk
        got = answers(process, documents[:4])
        assert_same_answers(got, right[:4])
        assert not any(answer.reused_tokens for answer in got), "half a block was served"
        process.settle(SETTLE_S)
    with two(model, on_a, **args) as process:
        got = answers(process, documents)
        assert_same_answers(got, right)
        assert_whole("disk", got[:4], documents[:4])
        assert not any(answer.reused_tokens for answer in got[4:])


def test_disks_of_two_hosts_evict(two: Two, tmp_path: Path) -> None:
    """The disks hold a third of the prompts, and host memory fewer."""
    model = tiny_model("llama", layers=4, heads=4, kv_heads=2)
    documents = windows(model, 12, 150, 400, seed=10)
    blocks = sum(len(document) // 16 for document in documents)
    capacity = blocks // 3 * 2 * PART_NBYTES
    on_a, on_b = disks(tmp_path, str(capacity), str(capacity // 2))
    args: dict[str, Any] = {"tensor_parallel_size": 2, "other": on_b}
    right: list[Generation] = []
    for turn in range(2):
        with two(model, on_a, **args) as process:
            if not turn:
                right = answers(process, documents, cache_salt="alone")
            reused = 0
            for step in (1, -1):  # the last ones first: those are still there
                got = answers(process, documents[::step], batch=2)
                assert_same_answers(got, right[::step])
                settle_and_empty(process)
                reused += sum(answer.tiers.get("disk", 0) for answer in got)
            assert counted(process, "kvcore_evictions_total", tier="disk") > 0
            assert reused > 0
            sizes = [sum(f.stat().st_size for f in (tmp_path / n).rglob("shard*")) for n in "ab"]
            assert max(sizes) <= capacity // 2


# -- a server on each ---------------------------------------------------------------------------


class Served:
    """Settings of servers and ranks on hosts a and b, and the servers."""

    def __init__(self, network: Network, folder: Path) -> None:
        self._network, self._folder = network, folder
        make_keys(folder / "keys", "b")
        self._address = f"tcp://{network['a'].address}:{free_port()}"
        self._running: dict[str, Any] = {}

    def settings(self, name: str) -> dict[str, Any]:
        return {
            "host": {"capacity": "64MiB", "huge_pages": False},
            "disk": {"path": str(self._folder / name / "disk"), "capacity": "64MiB"},
            "transfer": {"load_deadline_s": 60.0},
            "server": {
                "address": self._address,
                "folder": str(self._folder / name / "kv"),
                "keys": str(self._folder / "keys"),
                "machines": ["b"],
                "deadline_s": 20.0,
                "lease_s": 5.0,
            },
        }

    def log(self, name: str) -> str:
        return (self._folder / f"server-{name}.log").read_text()

    def start(self, name: str) -> None:
        host: Host = self._network[name]
        (self._folder / name / "disk").mkdir(parents=True, exist_ok=True)
        lines = []
        for table, values in self.settings(name).items():
            lines += [f"[{table}]", *(f"{key} = {json.dumps(v)}" for key, v in values.items())]
        config = self._folder / f"{name}.toml"
        config.write_text("\n".join(lines))
        command = [sys.executable, "-c", "from kvcore.cli import main; main()", "server"]
        command += ["-c", str(config)]
        command += ["--machine", "1"] if name == "b" else []
        with (self._folder / f"server-{name}.log").open("ab") as log:
            self._running[name] = host.start(command, stdout=log, stderr=log)

    def kill(self, name: str) -> None:
        process = self._running.pop(name)
        process.kill()
        process.wait()


@pytest.mark.parametrize("arch", ["llama", "lfm2"])
def test_servers_of_two_hosts(two: Two, network: Network, tmp_path: Path, arch: str) -> None:
    """KV outlives the engine on both hosts; a server that is killed costs hits alone.

    LFM2 has states. A hit of it ends where they were kept, at a multiple of 128 tokens.
    """
    model = tiny_model(arch, layers=4 if arch == "llama" else 6, heads=4, kv_heads=2)
    documents = windows(model, 5, 260, 400, seed=12)
    served = Served(network, tmp_path)
    args: dict[str, Any] = {"tensor_parallel_size": 2, "other": served.settings("b")}
    rest = 32
    if arch == "lfm2":
        rest = 160
        args["compilation_config"] = {"custom_ops": ["-rotary_embedding"]}
    for name in ("a", "b"):
        served.start(name)
    until(lambda: "the server of machine 1 has joined" in served.log("a"))
    with two(model, served.settings("a"), **args) as process:
        right = answers(process, documents, cache_salt="alone")
        cold = answers(process, documents[:4], batch=2)
        assert_same_answers(cold, right[:4])
        assert not any(answer.reused_tokens for answer in cold)
        settle_and_empty(process)
        got = answers(process, documents[:4], batch=2)
        assert_same_answers(got, right[:4])
        assert_whole("host", got, documents[:4], rest)
        process.settle(SETTLE_S)

    with two(model, served.settings("a"), **args) as process:  # the servers have gone on
        got = answers(process, documents[:4], batch=2)
        assert_same_answers(got, right[:4])
        assert_whole("host", got, documents[:4], rest)
        served.kill("b")
        settle_and_empty(process)
        assert_same_answers(answers(process, documents), right)
        before = served.log("a").count("session begins")
        served.start("b")
        until(lambda: served.log("a").count("session begins") > before)
        settle_and_empty(process)
        got = answers(process, documents[:4])
        assert_same_answers(got, right[:4])
        assert_whole("disk", got, documents[:4], rest)
        served.kill("a")
        settle_and_empty(process)
        assert_same_answers(answers(process, documents), right)
