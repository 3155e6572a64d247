"""Agents on real engines, and what breaks in production: for as long as you like.

    python -m kvcore_devtools.soak_agents --minutes 60 --seed 3

Two vLLM engines share a kvcore server with little host memory, a disk and a Redis. Agents work on
them. Agents have the same system prompt and one of a few repositories, wait for their tools between
turns, and send out sub-agents whose reports go into their own context. In each epoch one thing
breaks, and works again before its end:

    store stands still   the Redis is stopped, and goes on
    store is gone        it is killed, and started again, empty
    server is killed     and started again over its disk
    engine is killed     one of the two, and started again
    disk is full         its file system is (needs root, for a file system of its own)

What must hold:

    every answer    equals that of vLLM alone
    memory          of the processes has not grown after the first epochs
    reuse           in every epoch, and of every tier
    nothing left    no graph in flight in the server
    time            of no request is longer than that of the slowest on vLLM alone and kvcore's
                    deadlines together; requests are not counted while an engine is killed

As a program it has one heap for all threads of a process (MALLOC_ARENA_MAX). By default glibc gives
each thread its own, and what the heaps leave unused grows for hours. oneDNN, with which vLLM
multiplies matrices on a CPU, keeps code for the last 1,024 shapes of matrices. A shape has as many
rows as a step has tokens, so vLLM alone grows by 150 MiB in 1,500 requests. Here it keeps 16.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from kvcore.harness.compare import SMALL
from kvcore.harness.engine_process import EngineDied, EngineProcess
from kvcore.harness.models import tiny_model
from kvcore.harness.prompts import words
from kvcore_devtools.server_fixture import server_process, wait_until_idle
from kvcore_devtools.servers import Server, redis_like, servers
from kvcore_devtools.soak import GROWTH, growth

__all__ = ["Ask", "Outcome", "soak", "write_script"]

ENGINES = 2
ANSWER = 6
AGENTS = 4
"""Number of agents that work at a time."""
CONTEXTS = 14
"""Number of agents in the script. Together they need several times the memory of any tier."""
TURNS = 4
PAUSE_S = 0.3
"""The longest time that a tool takes."""
ALONE_S = 15.0
EPOCH_S = 15.0
BROKEN = 0.4
"""The share of an epoch in which something is broken."""
SLACK = 24 << 20
"""Bytes by which the processes may grow, for what allocators keep."""
LOAD_S, SERVER_S, LOOKUP_S = 2.0, 1.0, 0.5
"""Seconds that a load, an answer of the server and a lookup in the store may take."""
DEADLINES_S = LOAD_S + 2 * SERVER_S + LOOKUP_S
VOCABULARY = 512

_ARGS: dict[str, dict[str, Any]] = {
    "llama": {"block_size": 32, "num_gpu_blocks_override": 120},
    "lfm2": {
        "compilation_config": {"custom_ops": ["-rotary_embedding"]},
        "num_gpu_blocks_override": 40,
    },
}
"""Arguments of vLLM by architecture: device memory for two or three contexts. LFM2's rotary kernel
for CPUs depends on the pieces in which a prompt is computed."""


class Ask(NamedTuple):
    """A request of an agent, and what vLLM alone answers."""

    prompt: list[int]
    answer: list[int]


@dataclass
class Outcome:
    """What a soak saw. Times in seconds, memory in bytes for each epoch."""

    alone_s: float = 0.0
    slowest_s: float = 0.0
    slowest_in: str = ""
    answers: int = 0
    retried: int = 0
    broken: Counter[str] = field(default_factory=Counter)
    reused: Counter[str] = field(default_factory=Counter)
    asked: int = 0
    memory: list[int] = field(default_factory=list)

    def grown(self) -> float:
        """Return how much memory has grown (`kvcore_devtools.soak.growth`)."""
        return growth(self.memory, SLACK)

    @property
    def is_late(self) -> bool:
        """True if a request took longer than deadlines explain."""
        return self.slowest_s > self.alone_s + DEADLINES_S

    def __str__(self) -> str:
        tiers = ", ".join(f"{100 * n / self.asked:.0f}% {tier}" for tier, n in self.reused.items())
        memory = [nbytes >> 20 for nbytes in self.memory]
        return (
            f"{self.answers} answers, all right; {self.retried} asked again after a kill\n"
            f"broken: {dict(self.broken)}\n"
            f"tokens reused: {tiers}\n"
            f"slowest: {self.slowest_s:.2f} s ({self.slowest_in}); "
            f"on vLLM alone {self.alone_s:.2f} s, and the deadlines are {DEADLINES_S} s together\n"
            f"memory in MiB: first {memory[:3]}, last {memory[-3:]}, grown to {self.grown():.3f}"
        )


# -- what agents ask -----------------------------------------------------------------------------


def write_script(answer: Callable[[list[int]], list[int]], seed: int) -> list[list[Ask]]:
    """Return the requests of each agent in order; ``answer`` asks vLLM alone."""
    picks = random.Random(seed)

    def text(count: int) -> list[int]:
        return words(picks.randrange(1 << 30), count, range(1, VOCABULARY - 8))

    system, repositories = text(200), [text(picks.randrange(150, 350)) for _ in range(3)]

    def work(context: list[int], turns: int, depth: int) -> tuple[list[Ask], list[int]]:
        asks: list[Ask] = []
        for turn in range(turns):
            asks.append(Ask(context, answer(context)))
            context = [*context, *asks[-1].answer, *text(picks.randrange(30, 140))]
            if turn == 1 and depth == 0:
                more, report = work([*context, *text(40)], 2, 1)
                asks += more
                context = [*context, *report[-30:]]
        return asks, context

    return [
        work([*system, *picks.choice(repositories), *text(40)], TURNS, 0)[0]
        for _ in range(CONTEXTS)
    ]


class _Agents:
    """Agents that ask ``engines`` in turns, each in a thread."""

    def __init__(self, script: Sequence[Sequence[Ask]], seed: int, outcome: Outcome) -> None:
        self._script, self._seed, self._outcome = script, seed, outcome
        self._lock = threading.Lock()
        self._errors: list[BaseException] = []
        self.epoch, self.breaking = 0, ""
        self.engines: list[EngineProcess] = []
        self.killed = threading.Event()

    def run(self, seconds: float, meanwhile: Callable[[float], None]) -> None:
        """Let agents work, and ``meanwhile`` happen. Raises what an agent has raised."""
        until = time.monotonic() + seconds
        threads = [
            threading.Thread(target=self._agent, args=(number, until)) for number in range(AGENTS)
        ]
        for thread in threads:
            thread.start()
        try:
            meanwhile(until)
        finally:
            for thread in threads:
                thread.join()
        if self._errors:
            raise self._errors[0]

    def _agent(self, number: int, until: float) -> None:
        picks = random.Random(f"{self._seed} {self.epoch} {number}")
        try:
            while time.monotonic() < until and not self._errors:
                salt = f"tenant {picks.randrange(2)} {self.epoch // 8}"
                for ask in picks.choice(self._script):
                    self._ask(ask, picks.randrange(len(self.engines)), salt)
                    time.sleep(picks.uniform(0, PAUSE_S))
                    if time.monotonic() > until:
                        break
        except BaseException as error:  # noqa: BLE001 - raised by `run`
            self._errors.append(error)

    def _ask(self, ask: Ask, which: int, salt: str) -> None:
        while True:
            exempt = self.killed.is_set()
            engine, begun = self.engines[which], time.monotonic()
            try:
                got = engine.submit(ask.prompt, ANSWER, cache_salt=salt).result(600)
                break
            except EngineDied:
                if not self.killed.is_set() and engine is self.engines[which]:
                    raise
                self._outcome.retried += 1
                time.sleep(0.2)
        seconds = time.monotonic() - begun
        assert got.token_ids == ask.answer, f"{got.token_ids} for {ask.answer}: {got.kvcore}"
        with self._lock:
            self._outcome.answers += 1
            self._outcome.asked += len(ask.prompt)
            self._outcome.reused.update(got.tiers)
            if not exempt and not self.killed.is_set():
                slowest = self._outcome.slowest_s, self._outcome.slowest_in
                told = max(slowest, (seconds, self.breaking))
                self._outcome.slowest_s, self._outcome.slowest_in = told


# -- what they work on ---------------------------------------------------------------------------


class _Site:
    """The Redis, the server and the engines, and what breaks there."""

    def __init__(self, folder: Path, arch: str, model: Path, redis: Server, disk: Path) -> None:
        self._folder, self._arch, self._model = folder, arch, model
        self._redis = redis
        self._ballast = disk / "ballast" if os.path.ismount(disk) else None
        self._config = folder / "kvcore.toml"
        self._config.write_text(
            f'[host]\ncapacity = "6MiB"\nhuge_pages = false\n'
            f'[disk]\npath = "{disk / "kv"}"\ncapacity = "16MiB"\n'
            f"[transfer]\nload_deadline_s = {LOAD_S}\n"
            f'[server]\naddress = "local"\nfolder = "{folder / "run"}"\ndeadline_s = {SERVER_S}\n'
            f'[tiers.far]\nplugin = "redis"\ncapacity = "256MiB"\n[tiers.far.options]\n'
            f'url = "redis://{redis.address}/0"\nlookup_s = {LOOKUP_S}\n'
        )
        self._serve()
        self.engines = [self._start(which) for which in range(ENGINES)]

    def _serve(self) -> None:
        made = ExitStack()
        process = made.enter_context(server_process(config=self._config))
        self._server, self._server_pid = made, process.pid

    def _start(self, which: int) -> EngineProcess:
        server = {"address": "local", "folder": str(self._folder / "run"), "deadline_s": SERVER_S}
        kvcore = {"server": server, "transfer": {"load_deadline_s": LOAD_S}}
        return _engine(which, self._arch, self._model, kvcore)

    def breakages(self, agents: _Agents) -> dict[str, Callable[[float], None]]:
        """Return what breaks something for some seconds."""

        def stand_still(seconds: float) -> None:
            self._redis.hang()
            time.sleep(seconds)
            self._redis.go_on()

        def lose_store(seconds: float) -> None:
            self._redis.kill()
            time.sleep(seconds)
            self._redis.start()

        def kill_server(seconds: float) -> None:
            self._server.close()
            time.sleep(seconds)
            self._serve()

        def kill_engine(seconds: float) -> None:
            agents.killed.set()
            self.engines[0].kill()
            self.engines[0] = self._start(0)
            agents.killed.clear()

        def fill_disk(seconds: float) -> None:
            assert self._ballast is not None
            with contextlib.suppress(OSError), self._ballast.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 16))
            time.sleep(seconds)
            self._ballast.unlink()

        found: dict[str, Callable[[float], None]] = {
            "store stands still": stand_still,
            "store is gone": lose_store,
            "server is killed": kill_server,
            "engine is killed": kill_engine,
        }
        return found | ({"disk is full": fill_disk} if self._ballast is not None else {})

    def settle(self) -> None:
        """Wait until nothing is in flight. Raises if something stays."""
        for engine in self.engines:
            engine.settle(60.0)
        wait_until_idle(self._folder / "run")

    def memory(self) -> tuple[int, int]:
        """Return the bytes that no other process shares, of the server and the second engine."""
        import psutil  # type: ignore[import-untyped]  # vLLM needs it

        server, engine = psutil.Process(self._server_pid), psutil.Process(self.engines[1].pid)
        tree = [engine, *engine.children(recursive=True)]
        return server.memory_full_info().uss, sum(one.memory_full_info().uss for one in tree)

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
        self._server.close()


def _engine(which: int, arch: str, model: Path, kvcore: dict[str, Any] | None) -> EngineProcess:
    """Start an engine on its share of the cores. Blocks until it takes requests."""
    cores = sorted(os.sched_getaffinity(0))
    mine = cores[which::ENGINES] or cores
    env = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, mine)),
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16",
    }
    args = {**SMALL, **_ARGS[arch]}
    process = EngineProcess(model, engine="vllm", kvcore=kvcore, env=env, **args)
    process.wait_ready()
    return process


@contextmanager
def _own_disk(folder: Path) -> Iterator[Path]:
    """Yield a folder, on a file system of 20 MiB if this process may mount one."""
    disk = folder / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(disk)]
    mounted = os.geteuid() == 0 and subprocess.run(command, check=False).returncode == 0
    try:
        yield disk
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(disk)], check=True)


def soak(
    folder: Path,
    seconds: float,
    seed: int,
    arch: str = "llama",
    progress: Callable[[str], None] = lambda line: None,
) -> Outcome:
    """Run for about ``seconds``. Raises AssertionError where something does not hold."""
    layers = 6 if arch == "lfm2" else 2
    model = tiny_model(arch, layers=layers, head_dim=64, vocabulary=VOCABULARY)
    outcome = Outcome()
    with ExitStack() as stack:
        disk = stack.enter_context(_own_disk(folder))
        redis = stack.enter_context(servers(folder))(redis_like("redis-server"))
        alone = [_engine(which, arch, model, None) for which in range(ENGINES)]
        script = write_script(lambda prompt: alone[0].generate([prompt], ANSWER)[0].token_ids, seed)
        agents = _Agents(script, seed, Outcome())
        agents.engines = alone
        agents.run(ALONE_S, lambda until: None)
        outcome.alone_s = agents._outcome.slowest_s
        for process in alone:
            process.close()
        progress(f"{sum(map(len, script))} requests; the slowest alone {outcome.alone_s:.2f} s")
        agents = _Agents(script, seed, outcome)
        site = _Site(folder, arch, model, redis, disk)
        stack.callback(site.close)
        agents.engines = site.engines
        _epochs(site, agents, outcome, seconds, seed, progress)
    assert outcome.grown() <= GROWTH, f"memory grew by a factor of {outcome.grown():.3f}"
    return outcome


def _epochs(
    site: _Site,
    agents: _Agents,
    outcome: Outcome,
    seconds: float,
    seed: int,
    progress: Callable[[str], None],
) -> None:
    picks, breakages = random.Random(seed), site.breakages(agents)
    left: list[str] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not left:
            left = picks.sample(sorted(breakages), len(breakages))
        name, before = left.pop(), outcome.reused.total()
        agents.breaking = name

        def meanwhile(ends: float, name: str = name) -> None:
            time.sleep(picks.uniform(0, 1 - 2 * BROKEN) * EPOCH_S)
            breakages[name](BROKEN * EPOCH_S)

        agents.run(EPOCH_S, meanwhile)
        if outcome.reused.total() == before:  # on a busy machine it may only just work again
            agents.run(EPOCH_S, lambda until: None)
        site.settle()
        outcome.broken[name] += 1
        assert outcome.reused.total() > before, f"nothing was reused in an epoch: {name}"
        server, engine = site.memory()
        outcome.memory.append(server + engine)
        agents.epoch += 1
        progress(
            f"{name}: {outcome.answers} answers; {server >> 20} MiB in the server, "
            f"{engine >> 20} in the engine"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--arch", choices=sorted(_ARGS), default="llama")
    parser.add_argument("--folder", type=Path, help="where to work; default: a temporary folder")
    options = parser.parse_args(arguments)
    os.environ["MALLOC_ARENA_MAX"] = "1"  # read by processes at their start
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found = soak(Path(folder), 60 * options.minutes, options.seed, options.arch, _progress)
    print(f"\nseed {options.seed}, {options.arch}:\n{found}")
    if found.is_late:
        raise SystemExit("a request took longer than deadlines explain")


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
