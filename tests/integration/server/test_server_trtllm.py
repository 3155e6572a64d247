"""TensorRT-LLM's adapter, in its harness, behind a server: it shares KV with another engine, and a
promise that it made holds when the server is gone."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvcore.config import Config, load_config
from kvcore.errors import UnsupportedError
from kvcore.harness.models import tiny_model
from kvcore.server import worker as worker_module
from kvcore.server.runtime_dir import SessionLock
from kvcore.testing.conformance.driver import Ask, Driver, Engine, Setup, find_driver
from kvcore.testing.conformance.reference import ReferenceDriver
from kvcore.testing.waiting import until
from kvcore_devtools.server_fixture import RunningServer, blocking_requests, expire, hurry, words

ANSWER = 6
Start = Callable[[Config], RunningServer]
Begin = Callable[..., Engine]


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return tiny_model("llama")


@pytest.fixture
def tables(folder: Path) -> dict[str, Any]:
    """Settings of the server and its clients alike."""
    server = {"address": "local", "folder": str(folder), "deadline_s": 20.0, "lease_s": 20.0}
    return {"server": server, "host": {"capacity": "16MiB", "huge_pages": False}}


@pytest.fixture
def begin(checkpoint: Path, tables: dict[str, Any]) -> Iterator[Begin]:
    """Starts engines by name; each must be sound when the test ends."""
    made: list[Engine] = []

    def start(name: str, ranks: int = 1) -> Engine:
        driver: Driver = ReferenceDriver() if name == "reference" else find_driver(name)
        made.append(driver.start(Setup(checkpoint, tables, ranks)))
        return made[-1]

    yield start
    for engine in made:
        engine.settle()
        engine.check()
        engine.stop()


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Iterator[Callable[[Sequence[int]], list[int]]]:
    """Answers without kvcore."""
    engine = ReferenceDriver().start(Setup(checkpoint))
    yield lambda prompt: engine.ask([Ask(prompt, ANSWER)])[0].tokens
    engine.stop()


def serve(engine: Engine, prompt: Sequence[int]) -> tuple[list[int], dict[str, int]]:
    """The answer and what was reused, with nothing in the engine's own cache."""
    [answer] = engine.ask([Ask(prompt, ANSWER)])
    engine.settle()
    engine.forget()
    return answer.tokens, answer.reused


@pytest.mark.parametrize("ranks", [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("engines", [("reference", "trtllm"), ("trtllm", "reference")])
def test_what_one_engine_computes_the_other_kind_loads(
    start: Start,
    begin: Begin,
    plain: Any,
    tables: dict[str, Any],
    engines: tuple[str, str],
    ranks: tuple[int, int],
) -> None:
    server = start(load_config(None, tables))
    first, second = (begin(*each) for each in zip(engines, ranks, strict=True))
    prompt = words(1, 100)
    assert serve(first, prompt) == (plain(prompt), {})
    until(lambda: server.idle)
    if engines[1] == "trtllm" and ranks[1] > 1:  # its ranks map the memory behind the first one
        assert serve(second, prompt)[0] == plain(prompt)
    assert serve(second, prompt) == (plain(prompt), {"host": 96})
    longer = [*prompt, *words(2, 60)]
    assert serve(second, longer)[0] == plain(longer)
    until(lambda: server.idle)
    answer, reused = serve(first, longer)
    assert answer == plain(longer)
    assert reused == {"host": 159 if engines[0] == "reference" else reused.get("host", 0)}
    assert reused["host"] >= 144


def leader(engine: Any) -> Any:
    return engine._harness.scheduler._leader


class Looks:
    """Counts how often it is looked whether a session is over."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.count = 0
        over = SessionLock.over.fget

        def looked(held: SessionLock) -> bool:
            self.count += 1
            return bool(over(held))  # type: ignore[misc]

        patch.setattr(SessionLock, "over", property(looked))

    def wait(self, more: int) -> None:
        before = self.count
        until(lambda: self.count >= before + more)


def test_a_promise_holds_when_the_server_ends_behind_it(
    start: Start,
    begin: Begin,
    plain: Any,
    tables: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server ends, its files removed, between the promise and the plan of the load; and the
    engine takes its time."""
    monkeypatch.setattr(worker_module, "TEND_S", 0.01)
    monkeypatch.setattr(worker_module, "KEPT_S", float("inf"))
    looks = Looks(monkeypatch)
    server = start(load_config(None, tables))
    engine = begin("trtllm")
    prompts = [words(seed, 100) for seed in range(2)]
    for prompt in prompts:
        assert serve(engine, prompt) == (plain(prompt), {})
    manager = leader(engine).manager
    plan = manager.plan_load

    def then_the_end(*given: Any, **options: Any) -> Any:
        planned = plan(*given, **options)
        server.close()
        hurry(manager.keeper)
        looks.wait(5)
        return planned

    manager.plan_load = then_the_end
    assert serve(engine, prompts[0]) == (plain(prompts[0]), {"host": 96})
    manager.plan_load = plan
    [worker] = engine._harness.workers  # type: ignore[attr-defined]
    monkeypatch.setattr(worker_module, "KEPT_S", 0.0)
    until(lambda: not worker._side._worker._session)  # and in the end it is given back
    expire(manager.keeper)
    until(lambda: manager.keeper.member is None)
    assert serve(engine, prompts[1]) == (plain(prompts[1]), {}), "there is nothing to reuse"


def test_nothing_is_promised_before_every_worker_has_the_memory(
    start: Start, begin: Begin, plain: Any, tables: dict[str, Any]
) -> None:
    server = start(load_config(None, tables))
    prompt = words(1, 100)
    serve(begin("reference"), prompt)
    until(lambda: server.idle)
    engine = begin("trtllm")
    [worker] = engine._harness.workers  # type: ignore[attr-defined]
    refuse = lambda *given: (_ for _ in ()).throw(UnsupportedError("no memory to map it"))  # noqa: E731
    worker._side._worker._arenas._map = refuse
    assert serve(engine, prompt) == (plain(prompt), {}), "and no request fails"
    del worker._side._worker._arenas._map
    assert serve(engine, prompt) == (plain(prompt), {"host": 96})


def test_a_promise_that_is_not_kept_gives_its_blocks_back(
    start: Start, begin: Begin, tables: dict[str, Any]
) -> None:
    server = start(load_config(None, tables))
    engine = begin("trtllm")
    prompt = words(1, 100)
    serve(engine, prompt)
    until(lambda: server.idle)
    asking = leader(engine)
    request = engine._harness.submit(prompt, ANSWER)  # type: ignore[attr-defined]
    assert asking.match(request, 0)[0] == 96
    assert not server.idle, "the server keeps them for the promise"
    asking.forget(request.request_id)
    until(lambda: server.idle)
    engine._harness.run()  # type: ignore[attr-defined]


def test_a_promise_costs_no_more_than_a_deadline_when_the_server_hangs(
    start: Start, begin: Begin, plain: Any, tables: dict[str, Any]
) -> None:
    server = start(load_config(None, tables))
    engine = begin("trtllm")
    prompts = [words(seed, 100) for seed in range(3)]
    for prompt in prompts:
        serve(engine, prompt)
    until(lambda: server.idle)
    hangs = threading.Event()

    def hang() -> None:
        hangs.set()
        time.sleep(0.05)

    server.server.step = hang  # type: ignore[method-assign]
    assert hangs.wait(timeout=60), "until then it answers"
    keeper = leader(engine).manager.keeper
    hurry(keeper)
    asked = blocking_requests(keeper)
    for prompt in prompts:
        assert serve(engine, prompt) == (plain(prompt), {})
    assert len(asked) == 1, "one deadline, then nothing is asked"
    del server.server.step


# -- fusion ---------------------------------------------------------------------------------------

CHUNKS = [words(seed, 96) for seed in (31, 32)]
PROMPT = words(33, 20) + CHUNKS[0] + words(34, 12) + CHUNKS[1] + words(35, 9)


def blend(engine: Engine, ratio: float) -> tuple[list[int], dict[str, int]]:
    """The answer with fusion and what was reused, with nothing in the engine's own cache."""
    [answer] = engine.ask([Ask(PROMPT, ANSWER, fusion={"ratio": ratio})])
    engine.settle()
    engine.forget()
    return answer.tokens, answer.reused


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("engines", [("reference", "trtllm"), ("trtllm", "reference")])
def test_a_chunk_that_one_kind_of_engine_computed_the_other_blends(
    start: Start,
    begin: Begin,
    plain: Any,
    tables: dict[str, Any],
    engines: tuple[str, str],
    ranks: int,
) -> None:
    tables["fusion"] = {"enabled": True, "min_tokens": 32}
    server = start(load_config(None, tables))
    first, second = begin(engines[0]), begin(engines[1], ranks)
    for chunk in CHUNKS:
        serve(first, chunk)
    until(lambda: server.idle)
    answer, reused = blend(second, 1.0)
    assert answer == plain(PROMPT), "every row is computed: it is the exact answer"
    assert reused["blend"] >= 180
    answer, reused = blend(second, 0.0)
    assert answer != plain(PROMPT), "no row is computed: the chunks are the other engine's"
    assert reused["blend"] >= 180
    exact, reused = serve(first, PROMPT)
    assert exact == plain(PROMPT)
    assert sum(reused.values()) <= 16, "nobody takes the blend's KV for exact"
    assert serve(second, PROMPT)[0] == plain(PROMPT)


def test_a_blend_that_was_promised_is_computed_when_the_server_ends_behind_it(
    start: Start, begin: Begin, plain: Any, tables: dict[str, Any]
) -> None:
    tables["fusion"] = {"enabled": True, "min_tokens": 32}
    tables["server"]["deadline_s"] = 1.0
    server = start(load_config(None, tables))
    engine = begin("trtllm")
    for chunk in CHUNKS:
        serve(engine, chunk)
    until(lambda: server.idle)
    fusion = leader(engine)._fusion
    in_host = fusion.in_host

    def then_the_end(*given: Any) -> Any:
        found = in_host(*given)
        server.close()
        return found

    fusion.in_host = then_the_end
    assert blend(engine, 0.0)[0] == plain(PROMPT)


def test_a_server_that_ends_while_chunks_are_looked_for_costs_the_blend_alone(
    start: Start, begin: Begin, plain: Any, tables: dict[str, Any]
) -> None:
    tables["fusion"] = {"enabled": True, "min_tokens": 32}
    tables["server"]["deadline_s"] = 1.0
    server = start(load_config(None, tables))
    engine = begin("trtllm")
    for chunk in CHUNKS:
        serve(engine, chunk)
    until(lambda: server.idle)
    chunks = leader(engine)._fusion.chunks
    plan = chunks.plan

    def then_the_end(*given: Any) -> Any:
        found = plan(*given)
        server.close()
        return found

    chunks.plan = then_the_end
    assert blend(engine, 0.0) == (plain(PROMPT), {})
    assert not leader(engine).disabled, "the next server is served"
