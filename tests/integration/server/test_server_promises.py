"""Prefill and decode engines behind servers: whose word a promise is, and what breaks it."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvcore.config import Config
from kvcore.harness.engine_process import EngineProcess
from kvcore.manager import HOST
from kvcore.model.keys import KeyChain
from kvcore.server.client import RemoteManager
from kvcore.testing.engine import ReferenceEngine
from kvcore.testing.engine.requests import Request, State
from kvcore.testing.waiting import until
from kvcore_devtools import disagg_proxy
from kvcore_devtools.server_fixture import (
    RunningServer,
    blocking_requests,
    hurry,
    serve,
    server_process,
    settings,
    wait_until_idle,
    words,
)
from kvcore_devtools.servers import free_port, need_client, stand_still

Start = Callable[[Config], RunningServer]

FOREVER_S = 3600.0
os.environ.setdefault("UCX_TLS", "tcp")


def remote(engine: ReferenceEngine) -> RemoteManager:
    assert engine.leader is not None
    assert isinstance(engine.leader.manager, RemoteManager)
    return engine.leader.manager


def prefill(engine: ReferenceEngine, prompt: list[int]) -> dict[str, Any]:
    """What it promises; its server has the KV by then."""
    request = engine.submit(prompt, 1)
    engine.run()
    engine.settle()
    assert request.promised is not None
    return request.promised


def waiting(engine: ReferenceEngine, prompt: list[int], promise: dict[str, Any]) -> Request:
    """A request that its engine has asked for what is promised of it, and that waits for it."""
    request = engine.submit(prompt, 6, promise=promise)
    for _ in range(20):
        engine.step()
        assert request.state is State.WAITING, "it is computed, though more is on its way"
    return request


def decode(engine: ReferenceEngine, prompt: list[int], promise: dict[str, Any]) -> Any:
    """The answer, and how many tokens came from which tier."""
    request = engine.submit(prompt, 6, promise=promise)
    engine.run()
    engine.settle()
    return request.answer, request.reused


# -- two servers ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Node:
    """`kvcore server` in a process, with memory that others read."""

    folder: Path
    listen: str
    process: subprocess.Popen[str]

    @property
    def config(self) -> Config:
        """Of its engines: a first read over NIXL may take a busy machine long."""
        return settings(self.folder, transfer={"load_deadline_s": 300.0})

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def start_node(folder: Path, *guests: str, timeout_s: float = 20.0) -> Iterator[Node]:
    """A server whose engines may be promised KV at any ``guests``. It lists nobody."""
    need_client("nixl_cu13")
    listen = f"127.0.0.1:{free_port()}"
    options = {
        "listen": listen,
        "guests": list(guests),
        "guest_ports": "1024-65535",
        "lend": "16MiB",
        "timeout_s": timeout_s,
        "lookup_s": 60.0,
        "deadline_s": 60.0,
        "lease_s": 60.0,
    }
    tables = {
        "server.folder": str(folder),
        "server.lease_s": 20.0,
        "host.capacity": "16MiB",
        "host.huge_pages": False,
        "tiers.far.plugin": "peer",
        "tiers.far.capacity": "16MiB",
        "log.level": "warning",
        **{f"tiers.far.options.{name}": value for name, value in options.items()},
    }
    given = [f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in tables.items()]
    with server_process(*given) as process:
        yield Node(folder, listen, process)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """Where prompts are computed, in tests that do it no harm."""
    yield from start_node(tmp_path_factory.mktemp("here") / "kv")


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """Where they are answered, in tests that do it no harm."""
    yield from start_node(tmp_path_factory.mktemp("there") / "kv", "127.0.0.1")


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    """Starts servers of a test's own."""
    with ExitStack() as ends:

        def begin(name: str, *guests: str, **options: Any) -> Node:
            made = contextmanager(start_node)(tmp_path / name, *guests, **options)
            return ends.enter_context(made)

        yield begin


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_what_an_engine_computes_that_of_another_server_loads(
    here: Node, there: Node, engine: Any, plain: Any, ranks: int
) -> None:
    """The promise names the server, whose memory it is. Its engine may be gone by then."""
    answering = engine(there.config, ranks=ranks, promise_s=FOREVER_S)
    prompts = [words(seed, 100) for seed in (10 * ranks, 10 * ranks + 1)]
    kvcore = {
        "server": {"address": "local", "folder": str(here.folder), "deadline_s": 20.0},
        "host": {"huge_pages": False},
    }
    with EngineProcess("random", engine="reference", kvcore=kvcore, produces=True) as first:
        promises = [disagg_proxy.prefill(first, prompt) for prompt in prompts]
        assert {promise["node"] for promise in promises} == {here.listen}
        assert decode(answering, prompts[0], promises[0]) == (plain(prompts[0]), {"far": 96})
        wait_until_idle(here.folder)
        first.kill()
    assert decode(answering, prompts[1], promises[1]) == (plain(prompts[1]), {"far": 96})
    wait_until_idle(there.folder)


def test_nothing_is_read_at_a_node_that_the_server_does_not_invite(
    here: Node, there: Node, node: Any, engine: Any, plain: Any
) -> None:
    """Nor what was promised of another prompt, or to another tenant."""
    prompt, other = words(1, 100), words(2, 100)
    promise = prefill(engine(here.config, produces=True), prompt)
    careful = engine(node("wary", "10.0.0.1").config, promise_s=0.2)
    assert decode(careful, prompt, promise) == (plain(prompt), {})
    answering = engine(there.config, promise_s=FOREVER_S)
    assert decode(answering, other, promise) == (plain(other), {})
    tenants = answering.submit(prompt, 6, salt="tenant", promise=promise)
    answering.run()
    assert (tenants.answer, tenants.reused) == (plain(prompt), {})
    assert decode(answering, prompt, promise) == (plain(prompt), {"far": 96})


def test_a_node_that_is_away_costs_its_silence(node: Any, engine: Any, plain: Any) -> None:
    """As long as the store waits for any node: not the promise's time. And an engine promises
    nothing that its server does not know of."""
    here, there = node("here"), node("there", "127.0.0.1", timeout_s=1.0)
    prompts = [words(seed, 100) for seed in range(3)]
    computing = engine(here.config, produces=True)
    promises = [prefill(computing, prompt) for prompt in prompts[:2]]
    answering = engine(there.config, promise_s=FOREVER_S)
    stand_still(here.process.pid)
    assert decode(answering, prompts[0], promises[0]) == (plain(prompts[0]), {})
    here.kill()
    assert decode(answering, prompts[1], promises[1]) == (plain(prompts[1]), {})
    wait_until_idle(there.folder)
    hurry(remote(computing).keeper)
    alone = computing.submit(prompts[2], 6)
    computing.run()
    assert (alone.answer, alone.promised) == (plain(prompts[2]), None)


def test_a_server_that_is_killed_while_its_engine_waits(
    here: Node, node: Any, engine: Any, plain: Any
) -> None:
    """One deadline is lost, and then the prompt is computed."""
    there = node("there", "127.0.0.1")
    computing = engine(here.config, produces=True)
    promise, other = prefill(computing, words(5, 100)), words(6, 100)
    never = {**promise, "last": last_key(computing, other)}
    answering = engine(there.config, promise_s=FOREVER_S)
    request = waiting(answering, other, never)
    there.kill()
    hurry(remote(answering).keeper)
    asked = blocking_requests(remote(answering).keeper)
    answering.run()
    assert (request.answer, request.reused) == (plain(other), {})
    assert len(asked) <= 1, "one deadline, then nothing is asked"


def last_key(engine: ReferenceEngine, prompt: list[int]) -> str:
    """Of the prompt's last whole block, in hex."""
    assert engine.leader is not None
    chain = KeyChain(engine.leader.namespace_of(Request(0, prompt, 1)), 16)
    chain.extend(prompt)
    return chain.keys[-1].hex()


# -- one server -------------------------------------------------------------------------------


def test_what_another_engine_of_the_server_is_saving_is_waited_for(
    start: Start, engine: Any, plain: Any, folder: Path
) -> None:
    config = settings(folder)
    server = start(config)
    computing = engine(config, produces=True)
    answering = engine(config, promise_s=FOREVER_S)
    prompt = words(1, 100)
    copied = threading.Event()
    ops = computing.workers[0].worker.ops
    copy = ops.copy_blocks

    def when_told(*given: Any, **options: Any) -> None:
        assert copied.wait(60.0)
        copy(*given, **options)

    ops.copy_blocks = when_told
    computed = computing.submit(prompt, 1)
    computing.run()
    assert computed.promised is not None
    assert "node" not in computed.promised, "host memory is here alone"
    request = waiting(answering, prompt, computed.promised)
    copied.set()
    computing.settle()
    answering.run()
    assert (request.answer, request.reused) == (plain(prompt), {"host": 96})
    until(lambda: server.idle)
    [space] = server.server.models
    assert len(space._pending) == 0


CLIENT = """
import json, sys, time
from pathlib import Path
from kvcore.testing.engine import EngineArgs, ReferenceEngine, random_llama
from kvcore_devtools.server_fixture import settings, words
args = EngineArgs(produces=True)
engine = ReferenceEngine(random_llama(), args, settings(Path(sys.argv[1])))
def hang(*args, **options):
    time.sleep(3600)
type(engine.workers[0].worker.ops).copy_blocks = hang
request = engine.submit(words(1, 100), 1)
engine.run()
print(json.dumps(request.promised), flush=True)
time.sleep(3600)
"""


@pytest.fixture
def hung(folder: Path) -> Iterator[Callable[[], Any]]:
    """Starts an engine that promises the KV of `words(1, 100)` and never saves it; gives its
    process, and the promise."""
    with ExitStack() as ends:

        def begin() -> tuple[subprocess.Popen[str], dict[str, Any]]:
            command = [sys.executable, "-c", CLIENT, str(folder)]
            made = ends.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            ends.callback(made.kill)
            assert made.stdout is not None
            return made, json.loads(made.stdout.readline())

        yield begin


def assert_nothing_is_held(server: RunningServer) -> None:
    """Every block can be evicted and every slot is free then. Ends the server."""
    until(lambda: server.idle)
    server.close()
    [space] = server.server.models
    assert space.manager.in_flight == 0
    assert len(space._pending) == 0
    space.manager.index.evictions.evict(HOST, 1 << 20)
    assert space.manager.index.num_used(HOST) == 0, "a pin or a reservation is left"
    space.check_integrity()


def test_who_waits_for_an_engine_that_is_killed_computes(
    start: Start, engine: Any, plain: Any, folder: Path, hung: Any
) -> None:
    config = settings(folder)
    server = start(config)
    dying, promise = hung()
    answering = engine(config, promise_s=FOREVER_S)
    request = waiting(answering, words(1, 100), promise)
    dying.kill()
    answering.run()
    assert (request.answer, request.reused) == (plain(words(1, 100)), {})
    answering.settle()
    assert serve(engine(config), words(1, 100)) == (plain(words(1, 100)), {"host": 96})
    assert_nothing_is_held(server)


def test_who_waits_for_an_engine_that_hangs_computes_when_the_promise_is_over(
    start: Start, engine: Any, plain: Any, folder: Path, hung: Any
) -> None:
    config = settings(folder)
    server = start(config)
    hanging, promise = hung()
    answering = engine(config, promise_s=0.3)
    assert decode(answering, words(1, 100), promise) == (plain(words(1, 100)), {})
    hanging.kill()
    assert_nothing_is_held(server)
