"""The examples that need no engine; tests/engines/test_vllm_examples.py runs those on vLLM."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("torch")

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from kvcore.config import load_config
from kvcore.plugins import PluginManager
from kvcore.testing.engine import EngineArgs, Llama, ReferenceEngine, random_llama
from kvcore.testing.store_contract import StoreContract
from kvcore.tiers.remote import BlockStore

EXAMPLES = Path(__file__).parents[3] / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The examples' own pyproject.toml, as if pip had installed it."""
    project = tomllib.loads((EXAMPLES / "pyproject.toml").read_text())["project"]
    info = tmp_path / "site" / "kvcore_examples-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")
    plugins = project["entry-points"]["kvcore.plugins"]
    lines = [f"{name} = {module}" for name, module in plugins.items()]
    (info / "entry_points.txt").write_text("\n".join(["[kvcore.plugins]", *lines]) + "\n")
    monkeypatch.syspath_prepend(str(info.parent))
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield
    for module in plugins.values():
        sys.modules.pop(module, None)


@pytest.fixture(scope="module")
def model() -> Llama:
    return random_llama()


PROMPT = list(range(1, 200))
WHOLE = 192
"""Its tokens in whole blocks of 16."""


@pytest.mark.usefixtures("installed")
def test_the_plugins_are_found() -> None:
    found = {(one.kind, one.name): one.origin for one in PluginManager(strict=True).found()}
    assert found["tier", "sqlite"].distribution == "kvcore-examples"
    assert found["policy", "fifo"].distribution == "kvcore-examples"


class TestSqliteStore(StoreContract):
    @pytest.fixture(autouse=True)
    def _file(self, tmp_path: Path) -> None:
        self.path = tmp_path / "blocks.sqlite"

    def make_store(self) -> BlockStore:
        store: BlockStore = example("custom_tier").SqliteStore(str(self.path), 60.0)
        return store


@pytest.mark.usefixtures("installed")
def test_the_tier_outlives_an_engine(model: Llama, tmp_path: Path) -> None:
    tier = {"plugin": "sqlite", "options": {"path": str(tmp_path / "blocks.sqlite")}}
    config = load_config(None, {"host": {"capacity": "1MiB"}, "tiers": {"mine": tier}})
    answers = []
    for reused in ({}, {"mine": WHOLE}):
        with ReferenceEngine(model, EngineArgs(), config) as engine:
            request = engine.submit(PROMPT, 4)
            engine.run()
            assert request.reused == reused
            answers.append(request.answer)
            engine.settle()
    assert answers[0] == answers[1]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("policy", "kept"), [("lru", True), ("fifo", False)])
def test_the_policy_decides(model: Llama, policy: str, kept: bool) -> None:
    """The first prompt is used again before host memory is full. FIFO evicts it all the same."""
    config = load_config(None, {"host": {"capacity": "1MiB", "policy": policy}})
    with ReferenceEngine(model, EngineArgs(prefix_cache=False), config) as engine:

        def reused(number: int) -> int:
            request = engine.submit([number, *PROMPT], 1)
            engine.run()
            engine.settle()
            return sum(request.reused.values())

        assert [reused(number) for number in (500, 1, 2, 500)] == [0, 0, 0, WHOLE]
        assert [reused(number) for number in (3, 4, 5)] == [0, 0, 0]
        assert (reused(500) == WHOLE) == kept


def test_the_router_finds_the_engine_that_holds_most(model: Llama, tmp_path: Path) -> None:
    pytest.importorskip("zmq")

    def settings(name: str) -> dict[str, object]:
        at = f"ipc://{tmp_path}/{name}"
        events = {"endpoint": at, "replay_endpoint": f"{at}.replay", "token_ids": True}
        return {"host": {"capacity": "1MiB"}, "events": {**events, "publisher": "thread"}}

    engines = [
        ReferenceEngine(model, EngineArgs(), load_config(None, settings(name))) for name in "ab"
    ]
    addresses = [(f"ipc://{tmp_path}/{name}", f"ipc://{tmp_path}/{name}.replay") for name in "ab"]
    with contextlib.ExitStack() as stack:
        for engine in engines:
            stack.enter_context(engine)
        engines[0].generate([PROMPT[:100]], 1)
        engines[1].generate([PROMPT], 1)
        for engine in engines:
            engine.settle()
        router = example("router").Router(addresses)
        limit = time.monotonic() + 60
        while router.held(PROMPT) != [96, WHOLE]:
            assert time.monotonic() < limit, router.held(PROMPT)
            router.poll(0.05)
        assert router.held([500, *PROMPT]) == [0, 0]
