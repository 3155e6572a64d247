"""kvcore fails in each call of a real vLLM, run as ``python vllm_guard.py MODEL [start]``.

Engine core and worker are in this process, so that each part of kvcore can be made to raise. The
parts are found by looking at the classes: a method that is added later is planted too. A part
raises instead of its work, or after it; and then the recovery from that raises as well. After each
case kvcore starts anew. Prints, by where the load was and by the part that failed, why kvcore
stopped, and whether the answers were right, as JSON.

With ``start``, what kvcore does at the start raises, and the same is printed of that.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

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
from kvcore_vllm.connector import KVCoreConnector
from kvcore_vllm.messages import KVCoreMetadata
from kvcore_vllm.scheduler import SchedulerSide
from kvcore_vllm.stats import KVCorePromMetrics, KVCoreStats
from kvcore_vllm.worker import WorkerConnector
from kvcore_vllm.worker_guard import WorkerGuard, _Ledger

TOKEN_NBYTES = 4 * 2 * 2 * 64 * 4  # layers, key and value, heads, head size, float32
IN_STEP_TOKENS = 300
TEXTS = {"in the step": (200, 280), "between steps": (340, 400)}
"""Bounds of a text's tokens, by where its load is."""

LEADER = ("_offer", "_launch_load", "_fences", "_take_report", "_load_ended", "_save_computed")
WORKER = ("_submit", "_collect", "_begin_blends", "_settle_failed", "_take")
OWNERS = (SchedulerSide, WorkerGuard, _Ledger, WorkerConnector, KVCoreMetadata, RequestRecorder)
OWNERS += (KVManager, Metrics)
RECOVERY = {
    (SchedulerSide, "_launch_load"): [(SchedulerSide, "stop"), (SchedulerSide, "lose")],
    (SchedulerSide, "_fences"): [(SchedulerSide, "disable"), (SchedulerSide, "last_plan")],
    (WorkerConnector, "begin"): [
        (WorkerConnector, "abandon"),
        (WorkerGuard, "last_report"),
        (_Ledger, "take_report"),
    ],
}
"""What kvcore calls after an error in a method, by that method."""


class Part(NamedTuple):
    """A method that raises: instead of its work or ``after`` it, once or whenever it is called."""

    owner: type
    name: str
    after: bool = False
    always: bool = False

    def __str__(self) -> str:
        when = " after" * self.after + " always" * self.always
        return f"{self.owner.__name__}.{self.name}{when}"

    @contextlib.contextmanager
    def planted(self, *, harmless: bool = False) -> Iterator[list[bool]]:
        """Plant the error, unless ``harmless``. The list is empty until the method was called."""
        found, raised = inspect.getattr_static(self.owner, self.name), list[bool]()
        inner = getattr(found, "__func__", found)
        covered = hasattr(inner, "__kvcore_covered__")
        boundary = inner.__wrapped__ if covered else None
        method = boundary or inner

        @functools.wraps(method)
        def fails(*args: Any, **kwargs: Any) -> Any:
            if harmless or (raised and not self.always):
                raised.append(True)
                return method(*args, **kwargs)
            if self.after:
                method(*args, **kwargs)
            raised.append(True)
            raise RuntimeError(f"planted in {self}")

        if boundary is not None:  # inside of what covers it
            [cell] = [c for c in inner.__closure__ or () if c.cell_contents is boundary]
            cell.cell_contents = fails
        else:
            own = self.name in vars(self.owner)
            setattr(self.owner, self.name, fails)
        try:
            yield raised
        finally:
            if boundary is not None:
                cell.cell_contents = boundary
            elif own:
                setattr(self.owner, self.name, found)
            else:
                delattr(self.owner, self.name)


def methods(owner: type) -> list[str]:
    """Return the names of the methods of a class that are kvcore's and public."""
    return [
        name
        for name, part in inspect.getmembers(owner, inspect.isfunction)
        if not name.startswith("_") and inspect.unwrap(part).__module__.startswith("kvcore")
    ]


def cases() -> dict[str, list[Part]]:
    parts = [Part(KVCoreConnector, name) for name in methods(KVCoreConnector)]
    parts += [part._replace(after=True) for part in parts]
    parts += [Part(owner, name) for owner in OWNERS for name in methods(owner)]
    parts += [Part(SchedulerSide, name) for name in LEADER]
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
    sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)

    def ask(*texts: list[int]) -> list[list[int]]:
        prompts: Any = [{"prompt_token_ids": text} for text in texts]
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return ask


def main(model: str) -> None:
    llm = build(model)
    ask = asker(llm)
    core = llm.llm_engine.engine_core.engine_core
    leader, rank = core.scheduler.connector, get_kv_transfer_group()
    guard = rank._worker
    spec = leader._model

    def empty() -> None:
        limit = time.monotonic() + 30
        while not core.scheduler.reset_prefix_cache(reset_connector=False):
            assert time.monotonic() < limit, "pages are in use"
            core.step()

    def saved() -> None:
        limit = time.monotonic() + 30
        while leader.has_pending_push_work() and time.monotonic() < limit:
            core.step()
            time.sleep(0.002)

    def anew() -> None:
        """Have kvcore serve again, with an empty index, which nothing in a real run does."""
        worker = guard._worker
        worker.quiesce(10.0)
        worker._abandoned, worker._plan = False, type(worker._plan)()
        worker._collect()
        for left in (worker._finished, worker._failed, worker._loads, worker._reports):
            left.clear()
        for left in (worker._bad_pages, worker._todo, worker._given_up, worker._sync):
            left.clear()
        guard._rank.stopped = guard._told = leader._left = ""
        guard._ledger.__init__()
        guard.waiting, guard.pages = {}, set()
        leader._scheduler = leader._build_scheduler(spec)
        leader._scheduler.watch(core.scheduler.kv_cache_manager.block_pool)

    texts = {
        where: windows(Path(model), 1, *bounds, seed=number)[0]
        for number, (where, bounds) in enumerate(TEXTS.items())
    }
    [other] = windows(Path(model), 1, 100, 150, seed=9)
    leader._scheduler.disabled = "for the right answers"
    right = {where: ask(text, other) for where, text in texts.items()}
    found: dict[str, dict[str, Any]] = {where: {} for where in TEXTS}

    def trial(parts: list[Part], where: str, **how: bool) -> tuple[list[list[int]], list[bool]]:
        """Ask while parts are planted. Return the answers, and which of the parts were called."""
        anew()
        empty()
        ask(texts[where])
        saved()
        empty()
        with contextlib.ExitStack() as stack:
            called = [stack.enter_context(part.planted(**how)) for part in parts]
            got = ask(texts[where], other)
            saved()
        return got, [bool(one) for one in called]

    todo = []
    for where in TEXTS:
        _, called = trial(firsts := [parts[0] for parts in cases().values()], where, harmless=True)
        names = {part for part, one in zip(firsts, called, strict=True) if one}
        todo += [(where, *case) for case in cases().items() if case[1][0] in names]
    for where, name, parts in todo:
        got, raised = trial(parts, where)
        why = leader._left or leader._scheduler.disabled or guard.stopped
        empty()
        after = ask(texts[where])  # kvcore stands aside
        found[where][name] = {
            "raised": all(raised),
            "why": why,
            "same": got == right[where],
            "after": after == right[where][:1],
        }
    anew()
    empty()
    ask(texts["in the step"])
    saved()
    empty()
    ask(texts["in the step"])
    reused = leader._scheduler.metrics.snapshot().get("kvcore_hits_total")
    with contextlib.ExitStack() as stack:
        for part in ((SchedulerSide, "close"), (WorkerConnector, "close"), (RankGuard, "run")):
            stack.enter_context(Part(*part).planted())
        leader.shutdown()
        rank.shutdown()
    answer = right["in the step"][0]
    print(json.dumps({**found, "reused": bool(reused), "right": answer}), flush=True)


def start(model: str) -> None:
    """Let what is done at the start raise, and ask."""
    [text] = windows(Path(model), 1, *TEXTS["in the step"], seed=0)
    raised: list[str] = []

    def planted(name: str) -> Callable[..., Any]:
        def fails(*_: Any, **__: Any) -> Any:
            raised.append(name)
            raise RuntimeError(f"planted in {name}")

        return fails

    for name in ("tell_untried", "warm_up_blends", "watch_weights"):
        setattr(kvcore_vllm.connector, name, planted(name))
    PrometheusSink.__init__ = planted("PrometheusSink")  # type: ignore[method-assign]
    ask = asker(build(model))
    found = [ask(text), ask(text)]
    print(json.dumps({"raised": sorted(raised), "answers": [part[0] for part in found]}))


if __name__ == "__main__":
    start(sys.argv[1]) if sys.argv[2:] == ["start"] else main(sys.argv[1])
