"""kvcore fails in each call of TensorRT-LLM: no token is wrong, and the executor goes on.

The parts of kvcore that raise are found by looking at the classes: a method that is added later is
planted too. A part raises instead of its work, or after it; and then the recovery from that raises
as well. Each trial has an engine of its own. Its pages are filled with NaN before kvcore fails, so
that KV which did not come shows.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from kvcore.config import FORWARDED_VARIABLE
from kvcore.connector.blend_clock import BlendClock
from kvcore.connector.fusion_chunks import ChunkPlanner
from kvcore.connector.fusion_worker import PromisedFusionWorker, _Meetings
from kvcore.connector.guard import covers
from kvcore.connector.messages import Codec
from kvcore.connector.rank_guard import RankGuard
from kvcore.errors import EngineMustEnd
from kvcore.explain.recorder import RequestRecorder
from kvcore.fusion.decoder import InStep
from kvcore.fusion.fusor import Fusor
from kvcore.fusion.placed import PlacedChunks
from kvcore.manager import KVManager
from kvcore.telemetry.metrics import Metrics
from kvcore.transfer.engine import TransferEngine
from kvcore.transfer.op_thread import OpThread
from kvcore.transfer.path_queue import PathQueue
from kvcore.worker.worker import DeviceCopy, KVWorker
from kvcore_devtools.planted import Part, methods
from kvcore_trtllm.fusion import TrtllmLayers
from kvcore_trtllm.fusion_scheduler import TrtllmFusionScheduler
from kvcore_trtllm.leader import Leader
from kvcore_trtllm.messages import KVCoreMetadata
from kvcore_trtllm.promises import Promises
from kvcore_trtllm.salt import fusion_salt
from kvcore_trtllm.testing import Harness, HarnessArgs, Limits, State, standins
from kvcore_trtllm.worker import Tally, WorkerConnector
from support.collector import forget_imports, forget_records
from support.trtllm_harness import BLOCK, settle, tokens

pytestmark = pytest.mark.slow  # a model runs in the harness

KNOWN, OTHER, ANSWER = tokens(1, 100), tokens(2, 60), 2
CHUNKS = [tokens(3, 96), tokens(4, 64)]
MIXED = [*KNOWN[:32], *tokens(5, 9), *CHUNKS[0], *tokens(6, 7), *CHUNKS[1], *tokens(7, 8)]
SPANS = [(41, 137), (144, 208)]
"""A prompt that begins with tokens that are held, and where `CHUNKS` are in it."""
LOADS = {"in the step": "1GiB", "between steps": 0}
"""``transfer.sync_load_max``, by where a load is."""
BLEND = "in a blend"

LEADS = (Leader, RequestRecorder, KVManager, Metrics, Promises)
WORKS = (WorkerConnector, Tally, RankGuard, KVWorker)
PRIVATE = {
    Leader: (
        "_hit", "_match", "_promise", "_load", "_begin", "_keep_promise", "_count", "_go_on",
        "_take", "_save_computed", "_save_blocks", "_save", "_use", "_fence", "_end_step",
        "_planned", "_take_report", "_complete", "_drop",
    ),
    WorkerConnector: (
        "_start", "_accept", "_take_on", "_submit", "_collect", "_take", "_ended",
        "_settle_failed", "_known", "_encoded", "_exchange", "_tell", "_answer", "_check_step",
        "_agree", "_follow_loads",
    ),
    KVCoreMetadata: ("plan",),
    Codec: ("encode", "decode"),
    DeviceCopy: ("run",),
}  # fmt: skip


BLENDS = (
    TrtllmFusionScheduler, ChunkPlanner, PromisedFusionWorker, TrtllmLayers, Fusor, PlacedChunks,
    BlendClock, InStep, _Meetings, TransferEngine,
)  # fmt: skip
"""What a blend goes through, besides."""
OF_BLENDS = {
    Leader: ("_blend", "_promise_blend", "_order", "_bring"),
    WorkerConnector: ("_blend", "_begin_blends", "_arrived", "_wait_loads"),
    PromisedFusionWorker: (
        "_make", "_carry_out", "_there", "_done", "_ready", "_placed", "_served", "_pages",
        "_follow", "_report",
    ),
    PathQueue: ("take", "_taken"),
    OpThread: ("_execute", "_execute_joined", "_take_outcome", "_end"),
    DeviceCopy: ("run_joined",),
}  # fmt: skip


def parts_of(adapter: Any, ranks: int, where: str = "") -> list[Part]:
    """Return the parts that raise, each alone. The leader is the same with any number of ranks."""
    halves = (adapter.KVCoreScheduler, adapter.KVCoreWorker)
    covered = [Part(half, name) for half in halves for name in methods(half) if name in vars(half)]
    blends = where == BLEND
    owners = [*(LEADS if ranks == 1 else ()), *WORKS, *(BLENDS if blends else ())]
    parts = [*covered, *(part._replace(after=True) for part in covered)]
    parts += [Part(owner, name) for owner in owners for name in methods(owner)]
    private = [*PRIVATE.items(), *(OF_BLENDS.items() if blends else ())]
    left_out = {*LEADS} - {*owners}
    parts += [
        Part(owner, name) for owner, names in private for name in names if owner not in left_out
    ]
    return parts


RECOVERY = {
    Part(Leader, "match"): [Part(Leader, "stop"), Part(Leader, "forget")],
    Part(Leader, "allocated"): [Part(Leader, "lose"), Part(Leader, "disable")],
    Part(Leader, "_load"): [Part(Leader, "disable"), Part(Leader, "last_plan")],
    Part(Leader, "_fence"): [Part(Leader, "last_plan")],
    Part(Leader, "build_plan"): [Part(Leader, "last_plan"), Part(Leader, "why_broken")],
    Part(WorkerConnector, "_start"): [
        Part(WorkerConnector, "abandon"),
        Part(WorkerConnector, "refuse_rest"),
        Part(WorkerConnector, "_encoded"),
        Part(Leader, "_take_report"),
    ],
    Part(WorkerConnector, "begin"): [Part(WorkerConnector, "take_on")],
    Part(WorkerConnector, "finished"): [Part(WorkerConnector, "_exchange")],
    Part(WorkerConnector, "_collect"): [Part(WorkerConnector, "quiesce")],
    Part(WorkerConnector, "wait_for_layer"): [Part(WorkerConnector, "refuse_rest")],
}
"""What kvcore calls after an error in a part."""
OF_A_BLEND = {
    Part(Leader, "_blend"): [Part(Leader, "stop"), Part(Leader, "forget")],
    Part(Leader, "_order"): [Part(Leader, "disable"), Part(Leader, "last_plan")],
    Part(WorkerConnector, "_blend"): [
        Part(WorkerConnector, "abandon"),
        Part(WorkerConnector, "refuse_rest"),
        Part(WorkerConnector, "decline_blends"),
        Part(PromisedFusionWorker, "decline"),
    ],
    Part(PromisedFusionWorker, "begin"): [Part(WorkerConnector, "decline_blends")],
    Part(WorkerConnector, "_arrived"): [Part(PromisedFusionWorker, "_follow")],
    Part(PlacedChunks, "layer"): [
        Part(PromisedFusionWorker, "_quiet"),
        Part(PlacedChunks, "write"),
    ],
}


def cases_of(adapter: Any, ranks: int, where: str, called: set[Part]) -> dict[str, list[Part]]:
    """Return the parts that raise together, by name, of those that are called without an error."""
    parts = parts_of(adapter, ranks, where)
    found = {str(part): [part] for part in parts if part._replace(after=False) in called}
    recovery = {**RECOVERY, **OF_A_BLEND} if where == BLEND else RECOVERY
    for first, seconds in recovery.items():
        for second in seconds:
            both = [first, second._replace(always=True)]
            found[" and ".join(map(str, both))] = both
    return found


@dataclass
class Found:
    """What came of a trial.

    Attributes:
        raised: which parts were called.
        wrong: a token was wrong.
        failed: a request got an error.
        ended: the kind of the error that ended the engine; empty if it lives.
        why: why kvcore has stopped.
        after: the same requests were answered right after it.
    """

    raised: list[bool]
    wrong: bool
    failed: bool
    ended: str
    why: str
    after: bool


class Trials:
    """Engines in which parts of kvcore raise."""

    def __init__(self, folder: Path, model: Any, adapter: Any, reference: Any) -> None:
        self._folder, self._model, self._adapter = folder, model, adapter
        self._reference = reference
        self.blended: list[int] = []  # the answer of the first blend

    @contextlib.contextmanager
    def engine(self, where: str, ranks: int) -> Iterator[Harness]:
        """An engine whose host memory has `KNOWN` and `CHUNKS`, and whose pages have nothing."""
        settings = {
            "host": {"capacity": "4MiB", "huge_pages": False},
            "block": {"tokens": BLOCK},
            "trtllm": {"min_load_tokens": 1, "stage_wait_s": 30},
            "transfer": {"sync_load_max": LOADS.get(where, "1GiB")},
            "fusion": {"enabled": where == BLEND, "min_tokens": 32},
            "log": {"level": "error"},
        }
        halves = (self._adapter.KVCoreScheduler, self._adapter.KVCoreWorker)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(FORWARDED_VARIABLE, json.dumps(settings))
            args = HarnessArgs(ranks, 16, limits=Limits(goes_on=True))
            harness = Harness(self._folder, args, connector=halves, model=self._model)
        with harness:
            for text in [KNOWN, *(CHUNKS if where == BLEND else ())]:
                harness.generate([text], 1)
            settle(harness)
            for pool in harness.model.pools:
                pool.fill_(float("nan"))
            yield harness

    def ask(self, harness: Harness, where: str = "") -> tuple[bool, bool]:
        """Return whether a token is wrong, and whether a request failed.

        A blend is right if it is what a blend without an error makes, and if it is exact.
        """
        prompts = [MIXED if where == BLEND else KNOWN, OTHER]
        salts = [fusion_salt(ratio=0.2, chunks=SPANS) if where == BLEND else None, None]
        requests = [
            harness.submit(prompt, ANSWER, cache_salt=salt)
            for prompt, salt in zip(prompts, salts, strict=True)
        ]
        harness.run(10.0)
        right = [[self._reference(prompt, ANSWER)] for prompt in prompts]
        if where == BLEND:
            right[0].append(self.blended or requests[0].generated)
            self.blended = right[0][1]
        wrong = [
            all(request.generated != answer[: len(request.generated)] for answer in answers)
            for request, answers in zip(requests, right, strict=True)
        ]
        return any(wrong), any(request.state is not State.DONE for request in requests)

    def _answers(self, harness: Harness, where: str, ranks: int) -> bool:
        """Return whether all is answered right from now on.

        A rank without the leader may have stopped while no transfer was under way. The leader
        learns of it with the next one, whose step fails.
        """
        for left in reversed(range(ranks)):
            harness.forget()
            wrong, failed = self.ask(harness, where)
            if wrong or (failed and not left):
                return False
        return True

    def trial(self, parts: list[Part], where: str, ranks: int = 1, **how: bool) -> Found:
        """Ask while parts raise, and once more."""
        ended = ""
        with self.engine(where, ranks) as harness:
            leader, workers = harness.scheduler._leader, harness.workers
            wrong = failed = False
            with contextlib.ExitStack() as stack:
                called = [stack.enter_context(part.planted(**how)) for part in parts]
                try:
                    wrong, failed = self.ask(harness, where)
                except EngineMustEnd as error:
                    ended = type(error).__name__
            why = harness.scheduler._left or leader.disabled
            why = why or "".join(worker._side._rank.stopped for worker in workers)
            after = bool(ended) or self._answers(harness, where, ranks)
        forget_records()
        return Found([bool(one) for one in called], wrong, failed, ended, why, after)


@pytest.fixture(scope="module")
def trials(folder: Path, model: Any, adapter: Any, reference: Callable[..., list[int]]) -> Trials:
    return Trials(folder, model, adapter, reference)


SERVES_ON = ("Metrics.transferred", "DeviceCopy.run")
"""Parts without which kvcore serves on: counts are lost, or a copy, which is repeated."""
FREE = (
    "KVCoreScheduler.get_num_new_matched_tokens", "KVCoreScheduler.request_finished",
    "Leader.match", "Leader.finished", "Leader.take_news", "Leader._hit", "Leader._count",
    "Leader._save", "Leader._end_step", "Leader._fence", "Leader._take_report", "RequestRecorder.",
    "KVManager.complete", "KVManager.maintain", "KVManager.plan_save", "KVManager.get_match",
    "Metrics.",
)  # fmt: skip
"""Parts that cost no request: they are not between what TensorRT-LLM was promised and its KV."""
MEETS = ("Tally.exchange", "Tally.first", "KVCoreMetadata.plan", "Codec.decode")
"""Parts in which other ranks wait for a rank, or in which it reads what they will wait for."""
TWICE = (
    "WorkerConnector.begin and WorkerConnector.take_on always",
    "WorkerConnector.finished and WorkerConnector._exchange always",
)
"""The same, after two errors."""
COPIES = "WorkerConnector._collect and WorkerConnector.quiesce always"
"""It is not known whether copies still write to pages that TensorRT-LLM gives to others."""
COMPUTED = (
    "KVWorker.wait_layer", "TrtllmLayers.serving", "TrtllmLayers.write", "PlacedChunks.layer",
    "PlacedChunks.write", "BlendClock.stop", "BlendClock.waiting", "DeviceCopy.run_joined",
    "WorkerConnector._arrived", "PromisedFusionWorker._pages", "PromisedFusionWorker._placed",
    "PromisedFusionWorker._served", "PlacedChunks.layer and PlacedChunks.write always",
)  # fmt: skip
"""Parts of a blend of which all ranks learn at their next meeting. Then they compute."""
IN_LAYERS = (
    "TrtllmLayers.embed", "TrtllmLayers.reduce", "TrtllmLayers.run", "Fusor.blend", "InStep.alone",
    "InStep.lasting", "InStep.meet", "TrtllmLayers.agree",
)  # fmt: skip
"""Parts in which ranks make sums and the like together. A rank that is alone computes."""
BESIDE_LAYERS = (
    "KVCoreWorker.start_load_kv", "PromisedFusionWorker._carry_out", "PromisedFusionWorker._done",
    "PromisedFusionWorker._ready", "PromisedFusionWorker._report", "PromisedFusionWorker._there",
    "RankGuard.expect", "RankGuard.meet", "RankGuard.run", "Tally.expect",
    "WorkerConnector._accept", "WorkerConnector._take_on", "WorkerConnector.begin",
    "WorkerConnector.on", "WorkerConnector.read", "WorkerConnector.take_on", "_Meetings.agree",
    "_Meetings.ask", "_Meetings.note",
    "WorkerConnector._blend and PromisedFusionWorker.decline always",
    "WorkerConnector._blend and WorkerConnector.decline_blends always",
    "PromisedFusionWorker.begin and WorkerConnector.decline_blends always",
    "PlacedChunks.layer and PromisedFusionWorker._quiet always",
)  # fmt: skip
"""Parts after whose error other ranks wait for a rank, if the step has a blend."""
CALLED = {
    "KVCoreScheduler": (
        "build_connector_meta", "get_num_new_matched_tokens", "request_finished",
        "update_state_after_alloc", "update_state_after_alloc_by_layer_group",
    ),
    "KVCoreWorker": (
        "forward_ended", "get_finished", "save_kv_layer", "start_load_kv", "wait_for_layer_load",
        "wait_for_save",
    ),
    "WorkerConnector": ("begin", "end_forward", "finished", "on", "read", "wait_for_layer"),
    "Tally": ("exchange", "expect"),
}  # fmt: skip
"""Some of what must be among the parts that were found."""
CALLED_IN_A_BLEND = {
    "TrtllmFusionScheduler": ("fetched", "order", "plan", "take_report"),
    "PromisedFusionWorker": ("begin", "carry_out", "take_reports"),
    "TrtllmLayers": ("agree", "embed", "run", "serving", "write"),
    "PlacedChunks": ("layer", "write"),
}


@pytest.mark.parametrize(
    ("where", "ranks"),
    [
        ("between steps", 1),
        (BLEND, 2),  # in the step
        pytest.param(BLEND, 1, marks=pytest.mark.exhaustive),
        pytest.param("in the step", 1, marks=pytest.mark.exhaustive),
        pytest.param("in the step", 2, marks=pytest.mark.exhaustive),
        pytest.param("between steps", 2, marks=pytest.mark.exhaustive),
    ],
)
def test_an_error_in_any_call_ends_kvcore_and_not_tensorrt_llm(
    trials: Trials, adapter: Any, where: str, ranks: int
) -> None:
    """At most the requests fail that were promised KV, where it is not known to have come."""
    blends = where == BLEND
    parts = [part for part in parts_of(adapter, ranks, where) if not part.after]
    quiet = trials.trial(parts, where, ranks, harmless=True)
    assert (quiet.wrong, quiet.failed, quiet.why, quiet.after) == (False, False, "", True)
    forget_imports()  # each connector searches for its model in what is left
    called = {part for part, one in zip(parts, quiet.raised, strict=True) if one}
    cases = cases_of(adapter, ranks, where, called)
    owners = {**CALLED, **(CALLED_IN_A_BLEND if blends else {})}
    wanted = {f"{owner}.{name}" for owner, names in owners.items() for name in names}
    assert wanted <= cases.keys()
    found = {name: trials.trial(case, where, ranks) for name, case in cases.items()}
    assert not [name for name, said in found.items() if said.wrong]
    assert not [name for name, said in found.items() if not said.after]
    assert not [name for name, said in found.items() if not all(said.raised)]
    goes_on = {*SERVES_ON, *((*COMPUTED, *IN_LAYERS) if blends else ())}
    stopped = {name for name in found if name not in goes_on and not found[name].ended}
    assert not [name for name in stopped if not found[name].why]
    dear = [name for name, said in found.items() if said.failed and " and " not in name]
    assert not [name for name in dear if name.startswith(FREE)]
    ended = {name: said.ended for name, said in found.items() if said.ended}
    assert ended.pop(COPIES) == "PagesInUse"
    lost = {*MEETS, *TWICE, *((*IN_LAYERS, *BESIDE_LAYERS) if blends else ())}
    assert ended.keys() == (lost & found.keys() if ranks > 1 else set())
    assert set(ended.values()) <= {"RankLostError"}


@pytest.mark.parametrize("where", LOADS)
@pytest.mark.parametrize("name", ["listener", "on_broken", "on_reuse", "pump", "hear_blends"])
def test_an_error_in_what_the_halves_tell_each_other(trials: Trials, where: str, name: str) -> None:
    def fail(*_: object) -> Any:
        raise RuntimeError("an error of kvcore")

    with trials.engine(where, 1) as harness:
        leader, side = harness.scheduler._leader, harness.workers[0]._side
        side._start = fail if name == "on_broken" else side._start
        owner = leader if name in ("on_reuse", "hear_blends") else side
        setattr(leader._outbox if name == "pump" else owner, name, fail)
        wrong, failed = trials.ask(harness)
        assert not wrong
        assert failed == (name == "on_broken" or (name, where) == ("listener", "between steps"))
        harness.forget()
        trials.ask(harness)  # the leader does not know yet that its worker has stopped
        harness.forget()
        wrong, _ = trials.ask(harness)
        assert not wrong


def test_an_engine_ends_whatever_fails_in_its_end(trials: Trials, adapter: Any) -> None:
    ends = [Part(adapter.KVCoreScheduler, "shutdown"), Part(WorkerConnector, "close")]
    ends += [Part(Leader, "close"), Part(RequestRecorder, "close"), Part(KVWorker, "close")]
    for part in [*ends, Part(adapter.KVCoreWorker, "shutdown", after=True)]:
        with contextlib.ExitStack() as stack, trials.engine("in the step", 1):
            called = stack.enter_context(part.planted())
        assert called, f"{part} was not called"


@pytest.mark.parametrize("interface", ["KvCacheConnectorScheduler", "KvCacheConnectorWorker"])
def test_every_method_of_the_interface_is_covered(adapter: Any, interface: str) -> None:
    """Also one that a later version adds, if kvcore defines it."""
    ours = adapter.KVCoreWorker if interface.endswith("Worker") else adapter.KVCoreScheduler
    theirs = getattr(standins, interface)
    names = {name for name in dir(ours) if callable(getattr(ours, name)) and name[0] != "_"}
    assert names >= {name for name in vars(theirs) if name[0] != "_"}
    given = {name for name in names if getattr(ours, name) is getattr(theirs, name, None)}
    assert given <= {"bind_connector_meta", "get_connector_meta"}
    assert not [name for name in names - given if not covers(ours, name)]
