"""What several unit tests stand on."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from kvcore.tiers.disk import aio


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], EntryPoint]:
    """Writes a module and returns the entry point that names it."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(name: str, source: str) -> EntryPoint:
        module = f"plugin_{tmp_path.name}_{name}"
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(source))
        return EntryPoint(name, module, "kvcore.plugins")

    return make


@pytest.fixture(scope="session")
def idle_queues() -> Iterator[list[aio._Context]]:
    idle: list[aio._Context] = []
    yield idle
    for context in idle:
        context.close()


@pytest.fixture(scope="class")
def kept_queues(idle_queues: list[aio._Context]) -> Iterator[None]:
    """Tiers that are opened by the hundred hand on their queues of asynchronous I/O: the kernel
    takes some 20 ms to let one go. What is tried of the queues themselves has its own."""
    make = aio._Context
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aio, "_Context", lambda: idle_queues.pop() if idle_queues else make())
        patch.setattr(make, "close", lambda context: idle_queues.append(context))
        yield


@pytest.fixture(scope="session")
def model() -> Any:
    """The reference engine's random Llama."""
    from kvcore.testing.engine import random_llama

    return random_llama()
