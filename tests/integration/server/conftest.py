"""Servers and their clients, closed and checked when a test ends."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("zmq")

from kvcore.config import Config
from kvcore.testing.engine import EngineArgs, Llama, ReferenceEngine, random_llama
from kvcore_devtools.server_fixture import RunningServer


@pytest.fixture(scope="session")
def model() -> Llama:
    return random_llama()


@pytest.fixture(scope="session")
def plain(model: Llama) -> Iterator[Callable[[Sequence[int]], list[int]]]:
    """Answers without kvcore."""
    with ReferenceEngine(model, EngineArgs(num_pages=128, prefix_cache=False)) as engine:
        yield lambda prompt: engine.generate([prompt], 6)[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def start() -> Iterator[Callable[[Config], RunningServer]]:
    """Starts servers; each is closed, and must be sound, when the test ends."""
    running: list[RunningServer] = []

    def begin(config: Config) -> RunningServer:
        running.append(RunningServer(config))
        return running[-1]

    yield begin
    for each in running:
        each.close()
        each.server.check_integrity()


@pytest.fixture
def engine(model: Llama) -> Iterator[Callable[..., ReferenceEngine]]:
    """Starts engines; each must be idle and sound when the test ends."""
    made: list[ReferenceEngine] = []

    def begin(config: Config, **args: Any) -> ReferenceEngine:
        made.append(ReferenceEngine(model, EngineArgs(**args), config))
        return made[-1]

    yield begin
    for each in made:
        each.settle()
        each.check_integrity()
        each.close()
