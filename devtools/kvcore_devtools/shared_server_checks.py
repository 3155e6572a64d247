"""Checks of fusion with one server shared by a real engine and the reference engine.

`pair`      starts the engines and the server
`shares`    one engine stores chunks, the other blends them, and blends are never taken for exact
`outlives`  the server is killed while prompts are being answered
`misses`    the server plans few of the loads that the engine expects
`returns`   a new server has on its disk what the previous one stored
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcore.config import load_config
from kvcore.errors import BlockMissing
from kvcore.fusion.options import FusionOptions
from kvcore.harness.compare import (
    ALL,
    ANSWER,
    EXACT,
    REUSE,
    answers,
    blended,
    settle_and_empty,
    small_engine,
)
from kvcore.harness.engine_process import EngineProcess, Generation
from kvcore.harness.prompts import mixed, windows
from kvcore.server.messages import LoadRequest
from kvcore.testing.engine import EngineArgs, ReferenceEngine, load
from kvcore.testing.waiting import until
from kvcore_devtools.server_fixture import (
    RunningServer,
    running,
    server_process,
    settings,
    wait_until_idle,
)

__all__ = ["LEAD", "Pair", "Texts", "misses", "outlives", "pair", "returns", "shares"]

LONGEST_S = 600.0
"""Seconds that an answer may take on a busy machine."""
LEAD = 64
"""A limit above the tokens before a prompt's first chunk. These are exact, so they may be stored.
"""


@dataclass(frozen=True)
class Texts:
    """Chunks, prompts made of them, and the answers of an engine without kvcore."""

    chunks: list[list[int]]
    prompts: list[list[int]]
    right: list[list[int]]

    @classmethod
    def of(cls, model: Path, count: int = 10) -> Texts:
        """Make texts for the small model in ``model``, with the reference engine's answers."""
        chunks = windows(model, 6, 150, 260, seed=31)
        prompts = mixed(model, chunks, count, seed=5)
        with ReferenceEngine(load(model), EngineArgs(num_pages=256, prefix_cache=False)) as engine:
            right = [engine.generate([prompt], ANSWER)[0] for prompt in prompts]
        return cls(chunks, prompts, right)

    def check(self, got: Sequence[Generation]) -> None:
        """Assert that these are the right answers to the first prompts."""
        for number, (answer, right) in enumerate(zip(got, self.right, strict=False)):
            assert answer.token_ids == right, (number, answer.kvcore)


@dataclass
class Pair:
    """Two engines that are clients of the server ``process``, and of its successors in ``folder``.

    ``first`` is the reference engine, in this process. ``second`` is the engine under test.
    ``stack`` ends the servers that `serve` starts.
    """

    first: ReferenceEngine
    second: EngineProcess
    process: subprocess.Popen[str]
    folder: Path
    stack: ExitStack

    def serve(self) -> None:
        """Start a server in a process if none runs, and wait until both engines have joined."""
        if self.process.poll() is None:
            return
        self.process = self.stack.enter_context(_server(self.folder))
        until(lambda: _sessions(running(self.folder)) == 2, seconds=LONGEST_S)

    def kill(self) -> None:
        """Kill the server with SIGKILL."""
        self.process.kill()
        self.process.wait()

    @contextmanager
    def server(self, **tables: Any) -> Iterator[RunningServer]:
        """Run a server here in place of the first, and wait until both engines have joined."""
        self.kill()
        tables = {"fusion": {"enabled": True}, "host": {"capacity": "256MiB"}, **tables}
        server = RunningServer(settings(self.folder, **tables))
        try:
            until(lambda: _sessions(server.status()) == 2, seconds=LONGEST_S)
            yield server
        finally:
            server.close()

    def learn(self, prompts: Sequence[Sequence[int]]) -> list[tuple[list[int], int]]:
        """Return the first engine's exact answers, each with the tokens it loaded from the server.

        All it computed is stored when this returns.
        """
        exact = FusionOptions(enabled=False)
        asked = [self.first.submit(prompt, ANSWER, fusion=exact) for prompt in prompts]
        self.first.run()
        self.first.settle()
        wait_until_idle(self.folder)
        return [(request.answer, sum(request.reused.values())) for request in asked]


@contextmanager
def pair(engine: str, model: Path, folder: Path, **kvcore: Any) -> Iterator[Pair]:
    """Start the reference engine, the engine with this name, and a server, all with fusion.

    ``kvcore`` are tables of the engine's settings.
    """
    shared: dict[str, Any] = {
        "server": {"address": "local", "folder": str(folder), "deadline_s": 20.0},
        "fusion": {"enabled": True},
    }
    args = EngineArgs(num_pages=256, prefix_cache=False)
    with (
        ExitStack() as stack,
        _server(folder) as process,
        ReferenceEngine(load(model), args, load_config(None, shared, {})) as first,
        small_engine(model, {**shared, **kvcore}, engine=engine) as second,
    ):
        yield Pair(first, second, process, folder, stack)


def _server(folder: Path) -> AbstractContextManager[subprocess.Popen[str]]:
    given = [f"server.folder={folder}", "host.capacity=256MiB", "fusion.enabled=true"]
    return server_process(*given, "log.level=warning")


def _sessions(status: dict[str, Any]) -> int:
    return sum(len(model["sessions"]) for model in status["models"])


def shares(pair: Pair, texts: Texts) -> None:
    """Check that the second engine blends chunks that the first one stored.

    The blend is exact if every row is recomputed, and differs if none is. Exact requests afterwards
    get exact answers and reuse no blended KV, in either engine.
    """
    pair.learn(texts.chunks)
    rough = answers(pair.second, texts.prompts, fusion=REUSE)
    assert min(blended(rough)) >= 400, [answer.kvcore for answer in rough]
    wrong = sum(a.token_ids != b for a, b in zip(rough, texts.right, strict=True))
    assert wrong >= len(rough) // 2, "nothing was reused"
    settle_and_empty(pair.second)
    everything = answers(pair.second, texts.prompts, batch=4, fusion=ALL)
    texts.check(everything)
    assert min(blended(everything)) >= 400, [answer.kvcore for answer in everything]
    settle_and_empty(pair.second)
    exact = pair.learn(texts.prompts[:4])
    assert [answer for answer, _ in exact] == texts.right[:4]
    assert all(reused < LEAD for _, reused in exact), exact
    texts.check(answers(pair.second, texts.prompts[:4], fusion=EXACT))
    settle_and_empty(pair.second)


def outlives(pair: Pair, texts: Texts) -> None:
    """Check that answers stay right when the server is killed, in flight and later."""
    pair.learn(texts.chunks)
    asked = list(zip(texts.prompts, texts.right, strict=True))[::-1]  # the first ones are stored
    futures = [pair.second.submit(prompt, ANSWER, fusion=ALL) for prompt, _ in asked]
    begun = futures[0].result(LONGEST_S)
    pair.kill()
    got = [begun, *(future.result(LONGEST_S) for future in futures[1:])]
    assert [answer.token_ids for answer in got] == [right for _, right in asked]
    assert blended([begun])[0] >= 400, begun.kvcore
    settle_and_empty(pair.second)
    after = answers(pair.second, texts.prompts, fusion=ALL)
    texts.check(after)
    assert blended(after) == [0] * len(after), "there is nothing to blend"
    settle_and_empty(pair.second)


def misses(pair: Pair, texts: Texts) -> None:
    """Check that an engine computes if blocks vanish between a lookup and its load."""
    with pair.server() as server:
        pair.learn([*texts.chunks, *texts.prompts[:2]])
        known = [[*prompt, *texts.chunks[0], 5, 6, 7] for prompt in texts.prompts[:2]]
        planned = server.server._handlers[LoadRequest]
        refused = []

        def few(client: bytes, asked: Any) -> Any:
            """Plan every third load."""
            refused.append(asked)
            if len(refused) % 3:
                raise BlockMissing("the test removed the block")
            return planned(client, asked)

        server.server._handlers[LoadRequest] = few
        texts.check(answers(pair.second, texts.prompts, batch=2, fusion=ALL))
        settle_and_empty(pair.second)
        got = answers(pair.second, known, fusion=ALL)
        assert len(refused) >= len(texts.prompts), (len(refused), [a.kvcore for a in got])
        server.server._handlers[LoadRequest] = planned
        settle_and_empty(pair.second)
        exact = pair.learn(known)
        assert [a.token_ids for a in got] == [answer for answer, _ in exact]
        texts.check(answers(pair.second, texts.prompts[:4], fusion=EXACT))
        settle_and_empty(pair.second)
        [again] = answers(pair.second, texts.prompts[-1:], fusion=ALL)
        assert again.token_ids == texts.right[-1]
        assert again.reused_tokens >= 400, "loads that fail do not end fusion"
        settle_and_empty(pair.second)


def returns(pair: Pair, texts: Texts, disk: Path) -> None:
    """Check that engines use a disk tier that only a later server has.

    Until its reads are measured, the planner uses prior rates.
    """
    disk.mkdir()
    tables = {"disk": {"path": str(disk), "capacity": "256MiB"}}
    with pair.server(**tables) as server:
        pair.learn(texts.chunks)
        until(lambda: server.idle, seconds=LONGEST_S)
    with pair.server(**tables):
        [weighed] = answers(pair.second, texts.prompts[-1:])
        assert "error" not in weighed.kvcore.get("fusion", {}), weighed.kvcore
        got = answers(pair.second, texts.prompts[:3], fusion=ALL)
        texts.check(got)
        assert min(blended(got)) >= 400, [answer.kvcore for answer in got]
        settle_and_empty(pair.second)
