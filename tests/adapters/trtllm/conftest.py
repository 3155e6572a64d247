"""Harnesses that stand in for TensorRT-LLM, with and without kvcore in them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from kvcore.harness.models import tiny_model
from kvcore.transfer.graph import Path as Direction
from kvcore.transfer.graph import RowError
from kvcore.worker import worker as kvcore_worker  # after the skip
from kvcore_trtllm.testing import Harness, HarnessArgs, Limits, installed
from kvcore_trtllm.testing.model import load
from support.trtllm_harness import ANSWER, BLOCK, Make


@pytest.fixture(scope="module")
def folder() -> Path:
    return tiny_model("llama")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Makes a folder with a config and a few bytes of weights."""
    import transformers

    hf: Any = transformers

    def make(kind: str = "LlamaConfig", **fields: Any) -> Path:
        sizes = {
            "num_hidden_layers": 3,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "hidden_size": 64,
            "intermediate_size": 64,
            "vocab_size": 128,
        }
        getattr(hf, kind)(**{**sizes, **fields}).save_pretrained(tmp_path)
        (tmp_path / "model.bin").write_bytes(b"weights")
        return tmp_path

    return make


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return load(folder)


@pytest.fixture(scope="module")
def adapter() -> Iterator[Any]:
    """The adapter's connector module, imported over the stand-ins."""
    with installed("1.3"):
        import kvcore_trtllm.connector

        yield kvcore_trtllm.connector


@pytest.fixture(scope="module")
def reference(folder: Path, model: Any) -> Iterator[Callable[..., list[int]]]:
    """Answers of the same engine without a connector, each asked once."""
    known: dict[tuple[tuple[int, ...], int], list[int]] = {}
    with Harness(folder, HarnessArgs(num_pages=128), model=model) as plain:

        def ask(prompt: list[int], max_tokens: int = ANSWER) -> list[int]:
            place = (tuple(prompt), max_tokens)
            if place not in known:
                [known[place]] = plain.generate([prompt], max_tokens)
                plain.forget()
            return known[place]

        yield ask


@pytest.fixture
def make(folder: Path, model: Any, adapter: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes harnesses with kvcore in them, and checks when they end that nothing is left over."""
    import json

    made: list[Harness] = []

    def build(
        kvcore: dict[str, Any] | None = None,
        limits: Limits | None = None,
        llm_args: dict[str, Any] | None = None,
        connector: tuple[type, type] | None = None,
        **args: Any,
    ) -> Harness:
        settings = {
            "host": {"capacity": "16MiB"},
            "block": {"tokens": BLOCK},
            "trtllm": {"min_load_tokens": 1, "stage_wait_s": 30},
            "log": {"level": "debug"},
        }
        for table, values in (kvcore or {}).items():
            settings[table] = {**settings.get(table, {}), **values}  # type: ignore[dict-item]
        monkeypatch.setenv("TRTLLM_KVCORE_CONFIG", json.dumps(settings))
        harness = Harness(
            folder,
            HarnessArgs(limits=limits or Limits(), **args),
            connector=connector or (adapter.KVCoreScheduler, adapter.KVCoreWorker),
            llm_args=llm_args,
            model=model,
        )
        made.append(harness)
        return harness

    yield build
    for harness in made:
        leader = harness.scheduler and harness.scheduler._leader
        if leader:
            leader.check_integrity()
        harness.table.check_integrity()
        harness.close()


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What to do to copies between host memory and pages.

    ``load`` and ``save`` are seconds to wait, ``loads`` and ``saves`` are gates to wait for,
    ``fail`` is a number of load ops of one rank to fail from now on.
    """
    control: dict[str, Any] = {"load": 0.0, "save": 0.0, "fail": 0, "victim": None}
    for gate in ("loads", "saves"):
        control[gate] = threading.Event()
        control[gate].set()
    run = kvcore_worker.DeviceCopy.run

    def controlled(self: Any, graph: Any, op: Any, rows: list[int]) -> Any:
        loads = op.path is Direction.H2D
        time.sleep(control["load" if loads else "save"])
        control["loads" if loads else "saves"].wait(timeout=60)
        if loads and control["fail"] and control["victim"] in (None, self):
            control["fail"] -= 1
            control["victim"] = self
            return dict.fromkeys(rows, RowError.INTERNAL)
        return run(self, graph, op, rows)

    monkeypatch.setattr(kvcore_worker.DeviceCopy, "run", controlled)
    return control
