"""What several unit tests stand on."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def rigs() -> Iterator[list[Any]]:
    """What a test puts here is closed when it ends."""
    made: list[Any] = []
    yield made
    for rig in made:
        rig.close()


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], EntryPoint]:
    """Writes a module and returns the entry point that names it."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(name: str, source: str) -> EntryPoint:
        module = f"plugin_{tmp_path.name}_{name}"
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(source))
        return EntryPoint(name, module, "kvcore.plugins")

    return make
