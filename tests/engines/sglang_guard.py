"""kvcore fails in each call of a real SGLang. Runs in the engine's process, as a plugin of kvcore.

The parts are found by looking at the classes: a method that is added later is planted too. A part
raises instead of its work, or after it; and then the recovery from that raises as well.

A flush of the engine's cache takes the next turn. It ends the trial of the turn before, and writes
to ``said`` which parts were called, why kvcore has stopped, and which cases there are. Then it
reads from ``word`` what to do:
``anew`` to have kvcore serve again with nothing stored, ``plant`` with the names of parts.
"""

from __future__ import annotations

import contextlib
import gc
import json
from functools import cache
from pathlib import Path
from typing import Any

from kvcore.connector.rank_guard import RankGuard
from kvcore.explain.recorder import RequestRecorder
from kvcore.manager import KVManager
from kvcore.telemetry.metrics import Metrics, PrometheusSink
from kvcore_devtools.planted import Part, methods
from kvcore_sglang import build, hooks
from kvcore_sglang.gate import LayerGate
from kvcore_sglang.leader import Leader
from kvcore_sglang.linker import KVCoreLinker
from kvcore_sglang.ranks import NoLinks
from kvcore_sglang.worker import WorkerConnector

HELPERS = (
    "kvcore_linker", "undetermined", "_slots", "_look_up", "_take_out_landed", "_report_ends",
    "outcome", "trace_headers", "prefill_parts", "_compute_again",
)  # fmt: skip
"""What the hooks call of their own module, besides SGLang's functions."""
PRIVATE = {
    KVCoreLinker: ("_lookup", "_plan", "_inserted", "_tokens", "_namespace", "_prompt"),
    Leader: ("_bring", "_plan_exact", "_load", "_pump", "_gather", "_send", "_complete", "_show"),
    WorkerConnector: ("_submit", "_collect", "_settle", "_take", "_settle_failed"),
    LayerGate: ("_wait_until",),
}
RECOVERY = {
    (Leader, "lookup"): [(Leader, "disable"), (KVCoreLinker, "_stop")],
    (Leader, "load"): [(Leader, "disable"), (NoLinks, "send")],
    (Leader, "inserted"): [(Leader, "disable"), (WorkerConnector, "quiesce")],
    (WorkerConnector, "start_loads"): [
        (WorkerConnector, "abandon"),
        (WorkerConnector, "refuse_rest"),
        (LayerGate, "finish"),
        (Leader, "refuse"),
    ],
    (WorkerConnector, "wait_layer"): [(WorkerConnector, "abandon"), (hooks, "_compute_again")],
    (WorkerConnector, "carry_out"): [(WorkerConnector, "quiesce"), (Leader, "disable")],
}
"""What kvcore calls after an error in a method, by that method."""


@cache
def cases() -> dict[str, list[Part]]:
    """Return the parts that raise together, by name."""
    covered = [Part(owner, name) for owner in (KVCoreLinker, LayerGate) for name in methods(owner)]
    parts = [*covered, *(part._replace(after=True) for part in covered)]
    for owner in (Leader, WorkerConnector, RankGuard, RequestRecorder, KVManager, Metrics):
        parts += [Part(owner, name) for name in methods(owner)]
    parts += [Part(owner, name) for owner, names in PRIVATE.items() for name in names]
    parts += [Part(hooks, name) for name in HELPERS]
    parts += [Part(PrometheusSink, "apply", always=True), Part(NoLinks, "send")]
    found = {str(part): [part] for part in parts}
    for first, seconds in RECOVERY.items():
        for second in seconds:
            both = [Part(*first), Part(*second, always=True)]
            found[" and ".join(map(str, both))] = both
    return found


class Turns:
    """Carries out what the test writes to ``folder``, one turn a flush."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = contextlib.ExitStack()
        self._called: dict[str, list[bool]] = {}
        self._number = 0

    def take(self, linker: KVCoreLinker) -> None:
        """End the trial, and begin what the test wants. A flush may reset a linker twice."""
        word = json.loads((self._folder / "word").read_text())
        if word["number"] != self._number:
            self._number = word["number"]
            self._end(linker)
            self._begin(linker, word)

    def _end(self, linker: KVCoreLinker) -> None:
        """End a trial, and say what came of it."""
        self._stack.close()
        leader = linker.leader
        why = linker._stopped or linker.layer_done_counter.stopped or (leader and leader.disabled)
        called = [name for name, raised in self._called.items() if raised]
        self._called = {}
        known = {name: [str(part) for part in parts] for name, parts in cases().items()}
        _write(self._folder / "said", {"called": called, "why": why, "cases": known})

    def _begin(self, linker: KVCoreLinker, word: dict[str, Any]) -> None:
        if word.get("anew"):
            _anew(linker)
        harmless = bool(word.get("harmless"))
        known = cases()
        parts = {str(part): part for name in word.get("plant", ()) for part in known[name]}
        for name, part in parts.items():
            self._called[name] = self._stack.enter_context(part.planted(harmless=harmless))


def _write(path: Path, what: Any) -> None:
    made = path.with_suffix(".new")
    made.write_text(json.dumps(what))
    made.replace(path)


def _anew(linker: Any) -> None:
    """Have kvcore serve again, with an empty index, which nothing in a real run does."""
    parts, gate = linker._parts, linker.layer_done_counter
    worker = parts.worker
    assert worker.quiesce(30.0)
    worker._collect()
    worker._abandoned, worker.guard.stopped = False, ""
    for left in (worker._todo, worker._loads, worker._chunks, worker._started, worker._given_up):
        left.clear()
    worker._take_reports()
    for left in (gate._batches, gate._orders, gate._unblended):
        left.clear()
    linker._queued, linker._inserting, linker._spoilt, linker._stopped = {}, None, False, ""
    publish = parts.leader._publish or linker.kept_publish
    linker.kept_publish = publish
    parts.leader = build._leader(
        linker._config, parts.served, worker, parts.links, publish, fuses=False
    )


def follow(folder: Path) -> None:
    """Make every flush a turn."""
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    turns, real = Turns(folder), UnifiedRadixCache.reset

    def reset(self: Any) -> None:
        real(self)
        if self.linker is not None:
            turns.take(self.linker.cache_linker)
            gc.freeze()  # a flush collects garbage, which takes longer than a trial

    UnifiedRadixCache.reset = reset
