"""Clients that die or hang, servers that die: nothing is left, and every answer stays right."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvcore.config import Config, load_config
from kvcore.manager import HOST
from kvcore.server.client import RemoteManager
from kvcore.server.runtime_dir import graph_number
from kvcore.testing.engine import EngineArgs, ReferenceEngine
from kvcore.testing.waiting import until
from kvcore.transfer.graph import NO_PARENT, RowError, UnitTable
from kvcore.transfer.plan import Chain, build_load
from kvcore_devtools.server_fixture import (
    RunningServer,
    blocking_requests,
    expire,
    hurry,
    serve,
    settings,
    words,
)
from kvcore_devtools.servers import stand_still

Start = Callable[[Config], RunningServer]

CLIENT = """
import sys, time
from pathlib import Path
from kvcore.testing.engine import ReferenceEngine, random_llama
from kvcore_devtools.server_fixture import settings, words
lease = {"lease_s": float(sys.argv[3])}
engine = ReferenceEngine(random_llama(), config=settings(Path(sys.argv[1]), server=lease))
def hang(*args, **options):
    print("copying", flush=True)
    time.sleep(3600)
type(engine.workers[0].worker.ops).copy_blocks = hang
engine.submit(words(int(sys.argv[2]), 100), 6)
engine.run()
"""


@pytest.fixture
def client(folder: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts an engine in a process of its own, which hangs in its first copy, for ever."""
    made: list[subprocess.Popen[str]] = []

    def begin(seed: int, lease_s: float = 20.0) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", CLIENT, str(folder), str(seed), str(lease_s)]
        made.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        stdout = made[-1].stdout
        assert stdout is not None
        assert stdout.readline() == "copying\n"
        return made[-1]

    yield begin
    for each in made:
        each.kill()
        each.wait()


def sessions(server: RunningServer) -> list[dict[str, Any]]:
    return [s for model in server.status()["models"] for s in model["sessions"]]


def remote(engine: ReferenceEngine) -> RemoteManager:
    assert engine.leader is not None
    assert isinstance(engine.leader.manager, RemoteManager)
    return engine.leader.manager


def assert_nothing_is_held(server: RunningServer) -> None:
    """Every block can be evicted and every slot is free then. Ends the server."""
    server.close()
    [space] = server.server.models
    assert space.manager.in_flight == 0
    index = space.manager.index
    index.evictions.evict(HOST, 1 << 20)
    assert index.num_used(HOST) == 0, "a pin or a reservation is left"
    space.check_integrity()


def test_an_engine_killed_in_the_middle_of_a_save_leaves_nothing(
    start: Start, client: Any, engine: Any, plain: Any, folder: Path
) -> None:
    config = settings(folder)
    server = start(config)
    dying = client(seed=1)
    [held] = until(lambda: sessions(server))
    assert held["graphs"] == 1
    dying.kill()
    until(lambda: not sessions(server))
    prompt = words(1, 100)
    assert serve(engine(config), prompt) == (plain(prompt), {}), "nothing of it was published"
    until(lambda: server.idle)
    assert serve(engine(config), prompt) == (plain(prompt), {"host": 96})
    until(lambda: server.idle)
    assert_nothing_is_held(server)


def test_an_engine_killed_in_the_middle_of_a_load_leaves_no_pin(
    start: Start, client: Any, engine: Any, folder: Path
) -> None:
    config = settings(folder)
    server = start(config)
    serve(engine(config), words(1, 100))
    until(lambda: server.idle)
    dying = client(seed=1)
    assert until(lambda: len(sessions(server)) == 2 and not server.idle)
    dying.kill()
    until(lambda: len(sessions(server)) == 1 and server.idle)
    assert_nothing_is_held(server)


def test_an_engine_that_only_stands_still_keeps_what_its_copies_use(
    start: Start, client: Any, folder: Path
) -> None:
    server = start(settings(folder, server={"lease_s": 2.0}))
    stopped = client(seed=1, lease_s=2.0)
    stand_still(stopped.pid)
    [held] = until(lambda: [s for s in sessions(server) if s["silent"]])
    assert held["graphs"] == 1, "its copy may go on at any time"
    stopped.kill()
    until(lambda: not sessions(server))
    assert_nothing_is_held(server)


def test_a_leader_that_joins_anew_leaves_no_session_behind(
    start: Start, engine: Any, plain: Any, folder: Path
) -> None:
    """Its workers follow with the next copy, and let go of the memory they had."""
    server = start(settings(folder))
    serving = engine(settings(folder), ranks=2, prefix_cache=False)
    prompts = [words(seed, 100) for seed in range(2)]
    serve(serving, prompts[0])
    keeper = remote(serving).keeper
    first = keeper.member
    assert first is not None
    keeper._unheard = first.number
    keeper._poke.set()
    until(lambda: keeper.member not in (None, first))
    assert keeper.member is not None
    assert {s["session"] for s in sessions(server)} == {first.number, keeper.member.number}
    for prompt in prompts:
        assert serve(serving, prompt)[0] == plain(prompt)
    until(lambda: [s["session"] for s in sessions(server)] == [keeper.member.number])
    assert serve(serving, prompts[1]) == (plain(prompts[1]), {"host": 96})


def test_a_worker_leaves_no_memory_that_it_is_copying_from(
    start: Start, engine: Any, plain: Any, folder: Path
) -> None:
    """A graph of the next session is refused until the copies of this one have ended."""
    config = settings(folder)
    start(config)
    serving, other = engine(config), engine(config)
    manager, worker = remote(other), serving.workers[0].worker
    assert manager.keeper.member is not None
    copying, go_on = threading.Event(), threading.Event()
    copy = worker.ops.copy_blocks

    def held(*given: Any, **options: Any) -> None:
        copying.set()
        assert go_on.wait(60)
        copy(*given, **options)

    worker.ops.copy_blocks = held
    prompt = words(1, 100)
    request = serving.submit(prompt, 6)
    running = threading.Thread(target=serving.run)
    running.start()
    assert copying.wait(60)
    own = worker._session
    assert own
    units = tuple(UnitTable(16, 1, bytes(8)) for _ in worker.groups)
    number = graph_number(manager.keeper.member.number, 1)
    graph = build_load(number, Chain(b"n" * 16, NO_PARENT, (b"k" * 16,)), [0], (), batch_rows=1)
    graph = graph.bind(units)
    graph = msgspec.structs.replace(graph, units=units)
    reports = worker.submit(graph)
    assert [report.failed for report in reports] == [{0: RowError.IO}] * len(graph.ops)
    assert worker._session == own
    go_on.set()
    running.join()
    assert request.answer == plain(prompt)
    assert serve(other, prompt)[0] == plain(prompt)


# -- the server dies --------------------------------------------------------------------------

SETTINGS = """
[server]
address = "local"
folder = "{folder}"
deadline_s = 10.0
lease_s = 5.0
[host]
capacity = "16MiB"
huge_pages = false
[disk]
path = "{folder}-disk"
capacity = "64MiB"
"""


class Process:
    """`kvcore server` in a process of its own."""

    def __init__(self, file: Path) -> None:
        command = [sys.executable, "-c", "from kvcore.cli import main; main()", "server", "-c"]
        self._file = file
        self.process = subprocess.Popen(
            [*command, str(file)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self.process.stdout is not None
        assert "listens on ipc://" in self.process.stdout.readline()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def file(folder: Path, tmp_path: Path) -> Path:
    (tmp_path / "kv-disk").mkdir()
    path = tmp_path / "kvcore.toml"
    path.write_text(SETTINGS.format(folder=folder))
    return path


@pytest.fixture
def process(file: Path) -> Iterator[Callable[[], Process]]:
    made: list[Process] = []

    def begin() -> Process:
        made.append(Process(file))
        return made[-1]

    yield begin
    for each in made:
        each.kill()


def saved(manager: RemoteManager, tokens: int) -> bool:
    return manager.index.num_used("disk") * 16 >= tokens


def test_a_server_killed_under_traffic_costs_a_deadline_and_comes_back_with_its_disk(
    process: Any, file: Path, engine: Any, plain: Any
) -> None:
    server = process()
    serving = engine(load_config(file), prefix_cache=False)
    manager = remote(serving)
    prompts = [words(seed, 100) for seed in range(4)]
    for prompt in prompts:
        assert serve(serving, prompt) == (plain(prompt), {})
    until(lambda: saved(manager, 4 * 96))
    first = manager.keeper.member

    requests = [serving.submit(prompt, 6) for prompt in prompts * 3]
    serving.step()
    server.kill()
    hurry(manager.keeper)
    asked = blocking_requests(manager.keeper)
    serving.run()
    assert [request.answer for request in requests] == [plain(prompt) for prompt in prompts] * 3
    assert len(asked) <= 1, "one deadline, then nothing is asked"
    serving.settle()
    serving.check_integrity()
    expire(manager.keeper)
    until(lambda: manager.keeper.member is None)
    assert serve(serving, prompts[0]) == (plain(prompts[0]), {})

    process()
    until(lambda: manager.keeper.member not in (None, first))
    assert serve(serving, prompts[1]) == (plain(prompts[1]), {"disk": 96})
    assert serve(serving, prompts[1]) == (plain(prompts[1]), {"host": 96})


def test_an_engine_starts_without_its_server_and_joins_it_later(
    process: Any, file: Path, engine: Any, plain: Any
) -> None:
    serving = engine(load_config(file), prefix_cache=False)
    prompt = words(1, 100)
    assert serve(serving, prompt) == (plain(prompt), {})
    process()
    manager = remote(serving)
    until(lambda: manager.keeper.member)
    assert serve(serving, prompt) == (plain(prompt), {})
    assert serve(serving, prompt) == (plain(prompt), {"host": 96})


def test_a_clear_that_no_server_heard_outlives_its_engine(
    process: Any, file: Path, model: Any, engine: Any, plain: Any
) -> None:
    """The server is down when the engine clears, and comes back when the engine is gone."""
    server, prompt = process(), words(1, 100)
    with ReferenceEngine(model, EngineArgs(prefix_cache=False), load_config(file)) as ending:
        serve(ending, prompt)
        manager = remote(ending)
        until(lambda: saved(manager, 96))
        server.kill()
        expire(manager.keeper)
        until(lambda: manager.keeper.member is None)
        assert manager.clear() == 0
    process()
    fresh = engine(load_config(file), prefix_cache=False)
    assert serve(fresh, prompt) == (plain(prompt), {}), "what it had cleared is found again"
    assert serve(fresh, prompt) == (plain(prompt), {"host": 96})
    assert not list(Path(load_config(file).server.folder or "").glob("cleared-*")), "it is paid"
