"""kvcore fails in each call of a real vLLM: ``python vllm_guard.py MODEL [--all] [GROUP ...]``.

Engine core and worker are in this process, so that each part of kvcore can be made to raise. The
parts are found by looking at the classes: a method that is added later is planted too. A part
raises instead of its work; and then the recovery from that raises as well. After each case kvcore
starts anew. A case has its load in the step or between steps, whichever is its turn; with ``--all``
both, and more parts raise, also after their work. Prints, by where the load was and by the part
that failed, why kvcore stopped, and whether the answers were right, as JSON.

First the functions of each group in the connector's module raise at the start, and so does the sink
of the metrics. A group is names with commas between them. Prints what was raised, and the answers,
as a line for each group. Each has a fork of its own, because modules take longest to import.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group

import kvcore_vllm.connector
from kvcore.connector.rank_guard import RankGuard
from kvcore.explain.recorder import RequestRecorder
from kvcore.harness.compare import SMALL
from kvcore.harness.prompts import windows
from kvcore.manager import KVManager
from kvcore.telemetry.metrics import Metrics, PrometheusSink
from kvcore_devtools.planted import Part, methods
from kvcore_vllm.connector import KVCoreConnector
from kvcore_vllm.leader import Leader
from kvcore_vllm.messages import KVCoreMetadata
from kvcore_vllm.saves import Saves
from kvcore_vllm.stats import KVCorePromMetrics, KVCoreStats
from kvcore_vllm.worker import WorkerConnector
from kvcore_vllm.worker_guard import WorkerGuard, _Ledger

TOKEN_NBYTES = 2 * 2 * 2 * 32 * 4  # layers, key and value, heads, head size, float32
IN_STEP_TOKENS = 300
TEXTS = {"in the step": (200, 280), "between steps": (340, 400)}
"""Bounds of a text's tokens, by where its load is."""

LEADER = ("_offer", "_launch_load", "_fences", "_take_report", "_load_ended")
WORKER = ("_submit", "_collect", "_begin_blends", "_settle_failed", "_take")
OWNERS = (Leader, WorkerGuard, _Ledger, WorkerConnector, KVCoreMetadata)
SHARED = (RequestRecorder, KVManager, Metrics)
"""What the leaders of all engines call; TensorRT-LLM's matrix has these every time."""
RECOVERY = {
    (Leader, "_launch_load"): [(Leader, "stop"), (Leader, "lose")],
    (Leader, "_fences"): [(Leader, "disable"), (Leader, "last_plan")],
    (WorkerConnector, "begin"): [
        (WorkerConnector, "abandon"),
        (WorkerGuard, "last_report"),
        (_Ledger, "take_report"),
    ],
}
"""What kvcore calls after an error in a method, by that method."""


def cases(*, everywhere: bool) -> dict[str, list[Part]]:
    owners = (*OWNERS, *(SHARED if everywhere else ()))
    parts = [Part(KVCoreConnector, name) for name in methods(KVCoreConnector)]
    parts += [part._replace(after=True) for part in parts if everywhere]
    parts += [Part(owner, name) for owner in owners for name in methods(owner)]
    parts += [Part(Leader, name) for name in LEADER] + [Part(Saves, "_computed")]
    parts += [Part(WorkerConnector, name) for name in WORKER]
    parts += [Part(KVCoreStats, name) for name in ("aggregate", "is_empty", "reduce")]
    parts += [Part(KVCorePromMetrics, "observe"), Part(PrometheusSink, "apply", always=True)]
    found = {str(part): [part] for part in parts}
    for first, seconds in RECOVERY.items():
        for second in seconds:
            both = [Part(*first), Part(*second, always=True)]
            found[" and ".join(map(str, both))] = both
    return found


def build(model: str) -> LLM:
    own = ("start_method", "forked", "asynchronous")
    return LLM(
        model,
        **{name: value for name, value in SMALL.items() if name not in own},
        disable_log_stats=False,
        async_scheduling=False,
        enforce_eager=True,
        kv_transfer_config={
            "kv_connector": "KVCoreConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "host": {"capacity": "64MiB", "huge_pages": False},
                "transfer": {"sync_load_max": IN_STEP_TOKENS * TOKEN_NBYTES},
            },
        },
    )


def asker(llm: LLM) -> Callable[..., list[list[int]]]:
    sampling = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, detokenize=False)

    def ask(*texts: list[int]) -> list[list[int]]:
        prompts: Any = [{"prompt_token_ids": text} for text in texts]
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return ask


class Rig:
    """A vLLM with kvcore, its answers without kvcore, and trials of parts that raise."""

    def __init__(self, model: str) -> None:
        llm = build(model)
        self._ask = asker(llm)
        self._core = llm.llm_engine.engine_core.engine_core
        self.leader, self.rank = self._core.scheduler.connector, get_kv_transfer_group()
        self._spec = self.leader._model
        self._texts = {
            where: windows(Path(model), 1, *bounds, seed=number)[0]
            for number, (where, bounds) in enumerate(TEXTS.items())
        }
        [self._other] = windows(Path(model), 1, 100, 150, seed=9)
        self.leader._scheduler.disabled = "for the right answers"
        self.right = {where: self._ask(text, self._other) for where, text in self._texts.items()}

    def _empty(self) -> None:
        limit = time.monotonic() + 30
        while not self._core.scheduler.reset_prefix_cache(reset_connector=False):
            assert time.monotonic() < limit, "pages are in use"
            self._core.step()

    def _saved(self) -> None:
        limit = time.monotonic() + 30
        while self.leader.has_pending_push_work() and time.monotonic() < limit:
            self._core.step()
            time.sleep(0.002)

    def _anew(self) -> None:
        """Have kvcore serve again, with an empty index, which nothing in a real run does."""
        guard = self.rank._worker
        worker = guard._worker
        worker.quiesce(10.0)
        worker._abandoned, worker._plan = False, type(worker._plan)()
        worker._collect()
        for left in (worker._finished, worker._failed, worker._loads, worker._reports):
            left.clear()
        for left in (worker._bad_pages, worker._todo, worker._given_up, worker._sync):
            left.clear()
        guard._rank.stopped = guard._told = self.leader._left = ""
        guard._ledger.__init__()
        guard.waiting, guard.pages = {}, set()
        self.leader._scheduler = self.leader._build_scheduler(self._spec)
        self.leader._scheduler.watch(self._core.scheduler.kv_cache_manager.block_pool)

    def warm(self, where: str) -> None:
        """Have a text in host memory, and not in vLLM's pages."""
        self._anew()
        self._empty()
        self._ask(self._texts[where])
        self._saved()
        self._empty()

    def trial(self, parts: list[Part], where: str, **how: bool) -> tuple[bool, list[bool]]:
        """Ask while parts are planted. Return whether it was right, and which were called."""
        self.warm(where)
        with contextlib.ExitStack() as stack:
            called = [stack.enter_context(part.planted(**how)) for part in parts]
            got = self._ask(self._texts[where], self._other)
            self._saved()
        return got == self.right[where], [bool(one) for one in called]

    def called(self, where: str, cases: dict[str, list[Part]]) -> set[Part]:
        """Return the parts that are called without an error."""
        parts = {Part(*part[:2]): None for part, *_ in cases.values()}
        _, called = self.trial([*parts], where, harmless=True)
        return {part for part, one in zip(parts, called, strict=True) if one}

    def why(self) -> str:
        """Return why kvcore has stopped."""
        leader = self.leader
        return leader._left or leader._scheduler.disabled or self.rank._worker.stopped

    def again(self, where: str) -> bool:
        """Ask the text after a trial, and return whether the answer is right."""
        self._empty()
        return self._ask(self._texts[where]) == self.right[where][:1]


def main(model: str, *, everywhere: bool) -> None:
    rig = Rig(model)
    found: dict[str, dict[str, Any]] = {where: {} for where in TEXTS}
    known = cases(everywhere=everywhere)
    called = {where: rig.called(where, known) for where in TEXTS}
    for number, (name, parts) in enumerate(known.items()):
        at = [where for where in TEXTS if Part(*parts[0][:2]) in called[where]]
        for where in at if everywhere or not at else [at[number % len(at)]]:
            same, raised = rig.trial(parts, where)
            why, after = rig.why(), rig.again(where)
            found[where][name] = {"raised": all(raised), "why": why, "same": same, "after": after}
    rig.warm("in the step")
    after = rig.again("in the step")
    reused = rig.leader._scheduler.metrics.snapshot().get("kvcore_hits_total")
    with contextlib.ExitStack() as stack:
        for part in ((Leader, "close"), (WorkerConnector, "close"), (RankGuard, "run")):
            stack.enter_context(Part(*part).planted())
        rig.leader.shutdown()
        rig.rank.shutdown()
    right = rig.right["in the step"][0]
    print(json.dumps({**found, "reused": bool(reused) and after, "right": right}), flush=True)


def start(model: str, names: list[str]) -> None:
    """Let what is done at the start raise, and ask."""
    [text] = windows(Path(model), 1, *TEXTS["in the step"], seed=0)
    raised: list[str] = []

    def planted(name: str) -> Callable[..., Any]:
        def fails(*_: Any, **__: Any) -> Any:
            raised.append(name)
            raise RuntimeError(f"planted in {name}")

        return fails

    for name in names:
        setattr(kvcore_vllm.connector, name, planted(name))
    PrometheusSink.__init__ = planted("PrometheusSink")  # type: ignore[method-assign]
    ask = asker(build(model))
    found = [ask(text), ask(text)]
    told = {"raised": sorted(raised), "answers": [part[0] for part in found]}
    print(json.dumps(told), flush=True)


def starts(model: str, groups: list[str]) -> None:
    """Run each group of a start in a fork."""
    for group in groups:
        child = os.fork()
        if not child:
            start(model, group.split(","))
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    starts(sys.argv[1], [group for group in sys.argv[2:] if group != "--all"])
    main(sys.argv[1], everywhere="--all" in sys.argv)
