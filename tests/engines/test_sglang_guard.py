"""Errors of kvcore in each call of a real SGLang: answers stay right, and the engine lives."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcore.harness.compare import Reference, answers, assert_same_answers, small_engine
from kvcore.harness.engine_process import EngineProcess, Generation
from kvcore.harness.models import tiny_model
from kvcore.harness.prompts import windows

pytestmark = pytest.mark.engine

HERE = Path(__file__).parent
SHORT = 2


def plugin(folder: Path) -> dict[str, str]:
    """Make a plugin of kvcore in ``folder``; return the environment in which it is found."""
    info = folder / "planted-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kvcore.plugins]\nplanted = kvcore_planted\n")
    (folder / "kvcore_planted.py").write_text(
        "from pathlib import Path\n\nimport sglang_guard\n\n"
        "sglang_guard.follow(Path(__file__).parent)\n"
    )
    path = [str(folder), str(HERE), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(path)}


class Trials:
    """An engine in which parts of kvcore are made to raise, and its right answers.

    Answers are short: a trial is a few steps of prefill, and there are a hundred.
    """

    def __init__(self, process: EngineProcess, folder: Path, model: Path, right: Reference) -> None:
        self._process, self._folder, self._number = process, folder, 0
        self._texts = windows(model, 2, 100, 150, seed=3)
        first, second = self._texts  # reversed, they begin as no other text
        self._other, self._last = [first[60:0:-1]], [second[60:0:-1]]
        self._right = right([*self._texts, *self._other, *self._last])

    def _ask(self, texts: list[list[int]], batch: int) -> list[Generation]:
        return answers(self._process, texts, batch=batch, max_tokens=SHORT)

    def turn(self, **word: Any) -> dict[str, Any]:
        """End the trial before, begin another; return what came of the one before."""
        self._number += 1
        (self._folder / "word").write_text(json.dumps({**word, "number": self._number}))
        self._process.reset_prefix_cache()
        said: dict[str, Any] = json.loads((self._folder / "said").read_text())
        return said

    def _same(self, got: list[Generation]) -> bool:
        try:
            assert_same_answers(got, self._right[: len(got)])
        except AssertionError:
            return False
        return all(answer.finish_reason == "length" for answer in got)

    def trial(self, *parts: str, harmless: bool = False) -> dict[str, Any]:
        """Ask while parts raise, and once more; return what came of it.

        The last text is asked alone: whatever else shares a batch, one has no load.
        """
        self.turn(anew=True)
        self._ask(self._texts, 2)
        self._process.settle()
        self.turn(plant=parts, harmless=harmless)
        got = self._ask([*self._texts, *self._other], 3) + self._ask(self._last, 1)
        said = self.turn()
        after = self._ask(self._texts, 2)
        return {**said, "same": self._same(got), "after": self._same(after)}

    def struck(self, name: str, parts: list[str]) -> dict[str, Any]:
        """Try until all ``parts`` were called, or an answer is wrong; return the last trial.

        Some are called for some batches only, and which requests share one is up to their arrival.
        """
        said = self.trial(name)
        for _ in range(TRIES - 1):
            if set(said["called"]) == set(parts) or not (said["same"] and said["after"]):
                break
            said = self.trial(name)
        return said


@pytest.fixture(scope="module")
def model() -> Path:
    """Return a model of two layers: with fewer, no layer waits for its load behind another."""
    return tiny_model("llama")


@pytest.fixture(scope="module")
def right(model: Path) -> Iterator[Reference]:
    with small_engine(model, None, engine="sglang", disable_radix_cache=True) as plain:
        yield Reference(plain, max_tokens=SHORT)


@pytest.fixture(scope="module")
def trials(
    model: Path, right: Reference, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Trials]:
    folder = tmp_path_factory.mktemp("planted")
    (folder / "word").write_text(json.dumps({"number": 0}))
    kvcore = {
        "host": {"capacity": "64MiB", "huge_pages": False},
        "sglang": {"keep_on_flush": True},
    }
    log = folder / "log"
    with small_engine(
        model, kvcore, plugin(folder), "sglang", enable_metrics=True, log=log
    ) as process:
        yield Trials(process, folder, model, right)
        process.close()  # and it ends as it should


LATER = ("RequestRecorder.", "KVManager.", "Metrics.")
"""What the leaders of all engines call. TensorRT-LLM's matrix has it in `make test`."""

TRIES = 4
"""How often parts are planted of which not all are called."""

SERVES_ON = ("PrometheusSink", "Metrics.transferred", "hooks._slots", "KVCoreLinker._stop always")
"""Parts without which kvcore serves on: counts or a save are lost, and nothing else."""

CALLED = {
    "KVCoreLinker": (
        "ask", "blends", "begin_insert", "end_insert", "ended", "finish_layer_wise_loading",
        "load", "lookup", "num_completed_offloads", "offload", "pop_completed_offload", "reset",
        "start_layer_wise_loading",
    ),
    "LayerGate": ("finish", "set_consumer", "start", "wait_until"),
    "Leader": ("done_offers", "inserted", "load", "lookup", "offer"),
    "WorkerConnector": ("carry_out", "finish", "poll", "start_loads", "take_on", "wait_layer"),
    "kvcore_sglang.hooks": ("_look_up", "_report_ends", "_slots", "kvcore_linker", "undetermined"),
    "PrometheusSink": ("apply always",),
}  # fmt: skip
"""Some of what must be among the parts that were found."""


@pytest.mark.parametrize("late", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_an_error_in_any_call_ends_kvcore_and_not_sglang(trials: Trials, late: bool) -> None:
    """What was promised is computed; the answers are those of an engine without kvcore.

    A call that is covered fails instead of its work or, in `make test-all`, ``late``: after it. The
    parts of `LATER` come with those.
    """
    cases = trials.turn()["cases"]
    alone = [name for name, parts in cases.items() if len(parts) == 1 and " after" not in name]
    quiet = trials.trial(*alone, harmless=True)
    assert quiet["same"]
    called = set(quiet["called"])
    found = {
        name: trials.struck(name, parts)
        for name, parts in cases.items()
        if late == (name.endswith(" after") or name.startswith(LATER))
        if parts[0].replace(" after", "").replace(" always", "") in called or parts[0] in called
    }
    assert found
    assert not [name for name, said in found.items() if not said["after"]]
    wrong = [name for name, said in found.items() if not said["same"]]
    assert wrong == [name for name in found if name.endswith("_compute_again always")], (
        "only a request that can be computed neither with its load nor again fails"
    )
    wanted = {f"{owner}.{name}" for owner, names in CALLED.items() for name in names}
    assert late or wanted <= found.keys()
    silent = [name for name, said in found.items() if set(said["called"]) != set(cases[name])]
    assert not silent
    stopped = {name for name in found if not any(part in name for part in SERVES_ON)}
    assert not [name for name in stopped if not found[name]["why"]]
    healthy = trials.trial()
    assert healthy["same"]
    assert healthy["after"]
    assert not healthy["why"]
