"""Races of life cycles on the reference engine and a real disk tier, in orders of a seed.

A clear, a restart, a sleep, a change of weights or a pause comes while copies, writes and reads are
at every point of their way (`kvcore_devtools.turns`). Whatever the order: answers are those
of an engine without kvcore, what was cleared stays away, what came later stays, nothing leaks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvcore.config import load_config
from kvcore.harness.prompts import words
from kvcore.testing.engine import EngineArgs, Llama, ReferenceEngine, random_llama
from kvcore.testing.faults import Fault, Rule, Seam
from kvcore.testing.faults.engine import faulty_engine, held, nothing_left
from kvcore_devtools.turns import Turns

pytestmark = pytest.mark.slow

SEEDS = range(6)
ANSWER = 4
FIRST, KEPT, LAST = words(1, 150), words(2, 100), words(3, 170)
SEAMS = (
    Seam.LOAD,
    Seam.SAVE,
    Seam.TIER_READ,
    Seam.TIER_WRITE,
    Seam.FILE_READ,
    Seam.FILE_WRITE,
    Seam.RECORD,
    Seam.SUBMIT,
    Seam.INVALIDATE,
    Seam.REPORT,
)


class Race:
    """Engines over one disk folder, and the turns of their threads."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.turns = Turns(*SEAMS, seed=seed)
        self.weights = random_llama()
        self._folder = folder
        self._made: list[ReferenceEngine] = []

    def start(self, host: str = "1MiB") -> ReferenceEngine:
        """Start an engine. It finds what the ones before it have left on the disk."""
        settings: dict[str, Any] = {
            "host": {"capacity": host, "huge_pages": False},
            "disk": {"path": str(self._folder), "capacity": "16MiB", "sync_interval_s": 0.01},
            "transfer": {"batch_blocks": 2, "sync_load_max": 0},
            "log": {"level": "error"},
        }
        args = EngineArgs(num_pages=64, prefix_cache=False)
        engine = faulty_engine(self.weights, args, load_config(None, settings), self.turns)
        self._made.append(engine)
        return engine

    def ask(self, engine: ReferenceEngine, *prompts: Sequence[int]) -> list[dict[str, int]]:
        """Answer prompts, and return the reused tokens of each by tier. Each step is a turn."""
        requests = [engine.submit(prompt, ANSWER) for prompt in prompts]
        while not engine.idle:
            self.turns.take("step")
            engine.step()
        for request, prompt in zip(requests, prompts, strict=True):
            assert request.answer == right(self.weights, prompt)
        return [request.reused for request in requests]

    def end(self, engine: ReferenceEngine) -> None:
        """Wait for what is in flight, look at what is left, and stop the engine."""
        self.turns.clear()
        engine.settle()
        engine.check_integrity()
        assert not held(engine)
        engine.close()
        self._made.remove(engine)

    def close(self) -> None:
        self.turns.clear()
        for engine in self._made:
            engine.close()


def right(model: Llama, prompt: Sequence[int]) -> list[int]:
    """The answer of an engine without kvcore."""
    with ReferenceEngine(model, EngineArgs(num_pages=64, prefix_cache=False)) as engine:
        return engine.generate([prompt], ANSWER)[0]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[int], Race]]:
    made: list[Race] = []

    def build(seed: int) -> Race:
        made.append(Race(tmp_path / "kv", seed))
        return made[-1]

    with nothing_left():
        yield build
        for race in made:
            race.close()


@pytest.mark.parametrize("seed", range(12))  # in one order of six is a write under way just then
def test_a_clear_beside_a_save_that_lands(start: Callable[[int], Race], seed: int) -> None:
    race = start(seed)
    engine = race.start()

    def script() -> None:
        race.ask(engine, FIRST)
        assert engine.leader is not None
        engine.leader.manager.clear()  # saves and writes of the first are anywhere
        race.ask(engine, KEPT)
        race.ask(engine, LAST)

    race.turns.run(script)
    race.end(engine)
    engine = race.start()
    assert race.ask(engine, FIRST) == [{}], "it was cleared"
    assert race.ask(engine, KEPT, LAST) == [{"disk": 96}, {"disk": 160}], "it came later"
    race.end(engine)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_failed_write_after_a_clear_beside_a_restart(
    start: Callable[[int], Race], seed: int
) -> None:
    race = start(seed)
    engine = race.start()

    def script() -> None:
        race.ask(engine, FIRST)
        assert engine.leader is not None
        engine.leader.manager.clear()
        race.ask(engine, KEPT)
        engine.settle()
        race.turns.set(Rule(Fault.ERROR, Seam.FILE_WRITE, rate=0.5))
        race.ask(engine, LAST)

    race.turns.run(script)
    engine.close()  # what is still written may fail until then
    assert race.turns.struck[Seam.FILE_WRITE, Fault.ERROR], "no write failed"
    race.turns.clear()
    engine = race.start()
    assert race.ask(engine, FIRST) == [{}], "it was cleared"
    assert race.ask(engine, KEPT) == [{"disk": 96}], "it was stored before the write that failed"
    race.ask(engine, LAST)
    race.end(engine)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_sleep_beside_loads_in_flight(start: Callable[[int], Race], seed: int) -> None:
    """It renews the namespace. What the disk has stays there for engines that start later."""
    race = start(seed)
    engine = race.start()
    race.ask(engine, FIRST, KEPT)
    race.end(engine)
    engine = race.start(host="192KiB")
    asked = [engine.submit(prompt, ANSWER) for prompt in (FIRST, KEPT)]

    def script() -> None:
        for _ in range(2 + seed):
            race.turns.take("step")
            engine.step()
        assert engine.leader is not None
        engine.leader.renew()
        race.ask(engine, LAST)
        assert race.ask(engine, FIRST) == [{}], "it was kept before the sleep"

    race.turns.run(script)
    for request, prompt in zip(asked, (FIRST, KEPT), strict=True):
        assert request.answer == right(race.weights, prompt)
    race.end(engine)
    engine = race.start()
    assert race.ask(engine, FIRST, KEPT) == [{"disk": 144}, {"disk": 96}], "a sleep took it"
    race.end(engine)


@pytest.mark.parametrize("seed", SEEDS)
def test_weights_that_change_beside_a_save(start: Callable[[int], Race], seed: int) -> None:
    """KV of the new weights is not found under the files' name, nor the old under the new."""
    race = start(seed)
    engine = race.start()

    def flip() -> None:
        for layer in race.weights.layers:
            layer.v.neg_()

    def script() -> None:
        race.ask(engine, KEPT)
        engine.submit(FIRST, ANSWER + 40)
        for _ in range(2 + 3 * seed):  # it may be anywhere in its answer
            race.turns.take("step")
            engine.step()
        flip()
        assert engine.leader is not None
        engine.leader.renew()
        assert race.ask(engine, KEPT, LAST) == [{}, {}]
        race.ask(engine, FIRST, LAST)

    race.turns.run(script)
    assert race.ask(engine, KEPT, LAST)[0], "the new weights' own KV is reused"
    race.end(engine)
    flip()
    engine = race.start()
    assert race.ask(engine, KEPT, FIRST, LAST)[0] == {"disk": 96}, "the files' weights are back"
    race.end(engine)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_pause_beside_a_read_that_hangs(start: Callable[[int], Race], seed: int) -> None:
    """Aborts, an emptied cache and a new namespace wait for no medium."""
    race = start(seed)
    engine = race.start()
    race.ask(engine, FIRST, KEPT)
    race.end(engine)
    engine = race.start(host="192KiB")
    race.turns.set(Rule(Fault.HANG, Seam.FILE_READ, skip=seed, limit=1, seconds=1000.0))

    def script() -> None:
        asked = [engine.submit(prompt, ANSWER) for prompt in (FIRST, KEPT)]
        while not race.turns.hanging:
            race.turns.take("step")
            engine.step()
        for request in asked:
            engine.abort(request)
        engine.forget()
        assert engine.leader is not None
        engine.leader.renew()
        assert race.turns.hanging, "the pause waited for the read"
        assert race.ask(engine, LAST) == [{}], "others are answered beside it"
        assert race.turns.hanging

    race.turns.run(script)
    race.end(engine)
    engine = race.start()
    assert race.ask(engine, FIRST, KEPT) == [{"disk": 144}, {"disk": 96}]
    race.end(engine)
