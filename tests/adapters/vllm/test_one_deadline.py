"""All that a request of vLLM waits for in kvcore counts for one deadline, 30 s here.

What it has waited for in vain is followed by what host memory has.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.outputs import KVConnectorOutput

from kvcore.fusion.options import FusionOptions
from kvcore.manager import Readiness
from kvcore.manager.base import Promise
from kvcore.model.keys import KeyChain
from kvcore.transfer.graph import OpReport, RowError, TransferGraph
from kvcore_vllm import leader
from kvcore_vllm.fusion_scheduler import VllmFusionRequest
from support.vllm_leader import BLOCK, PAGES, PROMPT, LeaderRig
from support.vllm_leader import request as leader_request

WAIT = (None, False)
COMPUTE = (0, False)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., LeaderRig]:
    def made(**options: Any) -> LeaderRig:
        rig = LeaderRig(**options)
        monkeypatch.setattr(leader.time, "monotonic", lambda: rig.now)  # type: ignore[attr-defined]
        return rig

    return made


@pytest.fixture
def rig(make: Callable[..., LeaderRig]) -> LeaderRig:
    return make()


def fails(rig: LeaderRig, name: str, graph: TransferGraph, why: RowError) -> None:
    """The load fails in all its rows, and vLLM tells so as it does: in both of its lists."""
    for op in graph.ops:
        rig.side._complete(OpReport(graph.graph_id, op.op_id, dict.fromkeys(range(*op.rows), why)))
    told = KVConnectorOutput(finished_recving={name}, failed_recving={name})
    rig.side.update_connector_output(told)


def comes(rig: LeaderRig, name: str, graph: TransferGraph) -> None:
    rig.end(graph)
    rig.side.update_connector_output(KVConnectorOutput(finished_recving={name}))


def is_computed(rig: LeaderRig, name: str) -> None:
    """vLLM schedules the request with nothing to load."""
    rig.side.update_state_after_alloc(rig.requests[name], PAGES, 0)


def in_host(rig: LeaderRig, blocks: int) -> None:
    made = rig.index.lifecycle.reserve("host", rig.chain.keys, 0, blocks, rig.space)
    rig.index.lifecycle.commit(made)


def misses(rig: LeaderRig) -> dict[str, int]:
    return dict(rig.side.metrics.snapshot().get("kvcore_misses_total", {}))


class Store:
    """A store of which a rig's requests wait while it is `silent`."""

    def __init__(self, rig: LeaderRig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.silent, self.asked = True, 0
        monkeypatch.setattr(rig.manager, "ask_stores", self._ask)

    def _ask(self, *_: Any) -> bool:
        self.asked += 1
        return self.silent


@pytest.fixture
def store(rig: LeaderRig, monkeypatch: pytest.MonkeyPatch) -> Store:
    return Store(rig, monkeypatch)


def no_slots(rig: LeaderRig, monkeypatch: pytest.MonkeyPatch, when: Readiness) -> None:
    """There are slots for blocks in host memory alone; for others ``when``."""

    def can_load(hit: Any, start: int, stop: int) -> Readiness:
        below = set(hit.blocks_by_tier(start, stop)) - {"host"}
        return when if below else Readiness.READY

    monkeypatch.setattr(rig.manager, "can_load", can_load)


# -- a load that fails ---------------------------------------------------------------------------


def test_a_late_load_as_vllm_tells_it_counts_as_late_and_is_not_tried_again(rig: LeaderRig) -> None:
    assert rig.ask("a") == (400, True)
    load = rig.load("a")
    rig.now += 30.0
    fails(rig, "a", load, RowError.DEADLINE)
    assert rig.ask("a") == COMPUTE
    is_computed(rig, "a")
    assert misses(rig) == {"deadline": 1}, "one miss, by the reason that the alert reads"


def test_a_late_load_is_followed_by_what_host_memory_has(make: Callable[..., LeaderRig]) -> None:
    """Also if the planner gave it up before the deadline of all loads."""
    rig = make(in_step=False)
    in_host(rig, 10)
    rig.ask("a")
    load = rig.load("a")
    rig.now += 1.0
    fails(rig, "a", load, RowError.DEADLINE)
    assert rig.ask("a") == (160, True)
    rig.side.update_state_after_alloc(rig.requests["a"], PAGES, 160)
    [*_, (_, second)] = rig.side._plan.async_loads
    assert second.deadline_s == pytest.approx(3.0)
    comes(rig, "a", second)


@pytest.mark.parametrize("waited", [0.0, 10.0, 26.0, 28.0, 40.0])
def test_a_load_that_failed_as_vllm_tells_it_leaves_the_rest_of_the_deadline(
    rig: LeaderRig, waited: float
) -> None:
    rig.ask("a")
    load = rig.load("a")
    rig.now += waited
    fails(rig, "a", load, RowError.CANCELLED)
    if waited > 27:
        assert rig.ask("a") == COMPUTE, "what is left is too short to begin"
        return
    assert rig.ask("a") == (400, True)
    assert rig.load("a").deadline_s == 30.0 - waited


def test_a_failed_load_that_counted_is_no_second_miss(
    rig: LeaderRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.ask("a")
    fails(rig, "a", rig.load("a"), RowError.CANCELLED)
    no_slots(rig, monkeypatch, Readiness.NEVER)
    assert rig.ask("a") == COMPUTE
    is_computed(rig, "a")
    assert misses(rig) == {"load_failed": 1}


# -- slots ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("waited", [0.0, 10.0, 27.0])
def test_waiting_for_slots_counts(make: Callable[..., LeaderRig], waited: float) -> None:
    """All of host memory is in use, and another's load has the staging slots."""
    rig = make(host=1)
    key = b"k" * 16
    rig.index.lifecycle.commit(rig.index.lifecycle.reserve("host", [key], 0, 1, rig.space))
    rig.index.pin("host", key)
    rig.ask("a")
    first = rig.load("a")
    assert rig.ask("b") == WAIT
    rig.now += waited
    assert rig.ask("b") == WAIT, "waiting for room beats computing"
    rig.end(first)
    assert rig.ask("b") == (400, True)
    assert rig.load("b").deadline_s == 30.0 - waited


@pytest.mark.parametrize("asked_between", [0, 1, 50])
def test_a_wait_for_slots_that_eats_the_deadline_ends(
    rig: LeaderRig, monkeypatch: pytest.MonkeyPatch, asked_between: int
) -> None:
    """However often vLLM asks meanwhile."""
    no_slots(rig, monkeypatch, Readiness.LATER)
    assert rig.ask("a") == WAIT
    for _ in range(asked_between):
        rig.now += 26.0 / asked_between
        assert rig.ask("a") == WAIT
    rig.now = 27.5
    assert rig.ask("a") == COMPUTE
    is_computed(rig, "a")
    assert misses(rig) == {"busy": 1}


@pytest.mark.parametrize("when", [Readiness.LATER, Readiness.NEVER])
def test_without_slots_what_host_memory_has_is_loaded(
    rig: LeaderRig, monkeypatch: pytest.MonkeyPatch, when: Readiness
) -> None:
    in_host(rig, 10)
    no_slots(rig, monkeypatch, when)
    if when is Readiness.LATER:
        assert rig.ask("a") == WAIT
        rig.now += 30.0
    assert rig.ask("a") == (160, False)


@pytest.mark.parametrize("blocks", [0, 10])
def test_too_many_graphs_are_waited_for_until_the_deadline(
    rig: LeaderRig, monkeypatch: pytest.MonkeyPatch, blocks: int
) -> None:
    """What is in host memory waits for them, too."""
    if blocks:
        in_host(rig, blocks)
    monkeypatch.setattr(rig.manager, "can_load", lambda *_: Readiness.LATER)
    assert rig.ask("a") == WAIT
    rig.now += 29.0
    assert rig.ask("a") == (WAIT if blocks else COMPUTE)
    rig.now += 1.0
    assert rig.ask("a") == COMPUTE


# -- stores --------------------------------------------------------------------------------------


def test_waiting_for_a_store_counts(rig: LeaderRig, store: Store) -> None:
    assert rig.ask("a") == WAIT
    rig.now += 4.0
    store.silent = False
    assert rig.ask("a") == (400, True)
    assert rig.load("a").deadline_s == 26.0


def test_a_lookup_that_comes_twice_counts_twice(rig: LeaderRig, store: Store) -> None:
    """A store is asked again after a load that failed."""
    assert rig.ask("a") == WAIT
    rig.now += 4.0
    store.silent = False
    rig.ask("a")
    load = rig.load("a")
    rig.now += 10.0
    fails(rig, "a", load, RowError.CANCELLED)
    store.silent = True
    assert rig.ask("a") == WAIT
    rig.now += 5.0
    store.silent = False
    assert rig.ask("a") == (400, True)
    assert rig.load("a").deadline_s == 11.0


@pytest.mark.parametrize("blocks", [0, 10])
def test_a_store_is_not_waited_for_beyond_the_deadline(
    rig: LeaderRig, store: Store, blocks: int
) -> None:
    if blocks:
        in_host(rig, blocks)
    assert rig.ask("a") == WAIT
    rig.now += 28.0
    assert rig.ask("a") == (blocks * BLOCK, False)
    assert store.asked == 1, "its answer could begin nothing any more"


# -- what another engine has promised ------------------------------------------------------------


def promise(rig: LeaderRig, monkeypatch: pytest.MonkeyPatch, wait_s: float) -> None:
    told = Promise(25, wait_s)
    monkeypatch.setattr(rig.side._handover, "accepted", lambda *_: told)


def test_waiting_for_a_promise_has_a_limit_of_its_own(
    rig: LeaderRig, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    promise(rig, monkeypatch, 120.0)
    for _ in range(4):
        assert rig.ask("a") == WAIT
        rig.now += 29.0
    store.silent = False
    assert rig.ask("a") == (400, True)
    assert rig.load("a").deadline_s == 30.0


def test_what_follows_a_promise_counts(
    rig: LeaderRig, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The promised blocks have come, long before they had to, and wait for slots."""
    promise(rig, monkeypatch, 120.0)
    assert rig.ask("a") == WAIT
    rig.now += 50.0
    store.silent = False
    no_slots(rig, monkeypatch, Readiness.LATER)
    assert rig.ask("a") == WAIT
    rig.now += 30.0
    assert rig.ask("a") == COMPUTE


def test_a_store_that_is_silent_beyond_a_promise_is_waited_for_as_others_are(
    rig: LeaderRig, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    promise(rig, monkeypatch, 60.0)
    assert rig.ask("a") == WAIT
    rig.now += 80.0
    assert rig.ask("a") == WAIT, "20 s of them counted"
    rig.now += 8.0
    assert rig.ask("a") == COMPUTE


# -- adapters and chunks -------------------------------------------------------------------------


def test_waiting_for_the_files_of_an_adapter_counts(rig: LeaderRig) -> None:
    found: list[str] = []
    files: Any = SimpleNamespace(
        ask=lambda name, path: 1, told=lambda name, path, number: found[0] if found else None
    )
    rig.side._requests._identities._files = files
    chain = KeyChain(rig.side.namespaces.of("a:1"), BLOCK)
    chain.extend(PROMPT)
    host = rig.index.lifecycle
    host.commit(host.reserve("disk", chain.keys, 0, 25, chain.namespace.digest))
    asked = rig.requests["a"] = leader_request("a")
    asked.lora_request = LoRARequest("a", 1, "/mnt/adapters/a")
    assert rig.ask("a") == WAIT
    rig.now += 12.0
    found.append("a:1")
    assert rig.ask("a") == (400, True)
    assert rig.load("a").deadline_s == 18.0


class Fusion:
    """A fusion whose chunks are being fetched while it `waits`. It keeps the fetches' deadlines."""

    layer_steps = ()

    def __init__(self, rig: LeaderRig) -> None:
        self.fetching, self.deadlines = True, list[float]()
        rig.side._fusion = cast("Any", self)
        rig.side._requests._fusion = cast("Any", self)

    def track(self, request: Any) -> VllmFusionRequest:
        return VllmFusionRequest(request.request_id, FusionOptions())

    def waits(self, fusing: VllmFusionRequest) -> bool:
        return fusing.fetched and self.fetching

    def plan(self, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(stop=400)

    def fetch(self, fusing: VllmFusionRequest, *given: Any) -> None:
        fusing.fetched = True
        self.deadlines.append(given[3])

    def in_host(self, plan: Any) -> None:
        return None


def test_chunks_of_a_blend_have_the_rest_of_the_deadline(rig: LeaderRig, store: Store) -> None:
    fusion = Fusion(rig)
    assert rig.ask("a") == WAIT
    rig.now += 10.0
    store.silent = False
    assert rig.ask("a") == WAIT
    assert fusion.deadlines == [20.0]
    rig.now += 5.0
    fusion.fetching = False
    assert rig.ask("a") == (400, True), "there is no blend, so the prefix is loaded"
    assert rig.load("a").deadline_s == 15.0


def test_who_has_waited_too_long_fetches_no_chunks(rig: LeaderRig, store: Store) -> None:
    fusion = Fusion(rig)
    assert rig.ask("a") == WAIT
    rig.now += 28.0
    assert rig.ask("a") == COMPUTE
    assert fusion.deadlines == []


# -- a deadline begins anew ----------------------------------------------------------------------


def test_a_request_that_was_computed_and_preempted_has_all_of_the_deadline(
    rig: LeaderRig, store: Store
) -> None:
    assert rig.ask("a") == WAIT
    rig.now += 28.0
    assert rig.ask("a") == COMPUTE
    assert rig.ask("a") == COMPUTE, "vLLM had no pages for it, and asks again"
    is_computed(rig, "a")
    store.silent = False
    assert rig.ask("a") == (400, True)
    assert rig.load("a").deadline_s == 30.0


def test_a_request_that_loaded_in_its_step_and_was_preempted_has_all_of_the_deadline(
    rig: LeaderRig, store: Store
) -> None:
    in_host(rig, 25)
    assert rig.ask("a") == WAIT
    rig.now += 28.0
    assert rig.ask("a") == (400, False)
    rig.side.update_state_after_alloc(rig.requests["a"], PAGES, 400)
    [graph] = rig.side._plan.sync_loads
    rig.end(graph)
    assert rig.manager.clear()
    host = rig.index.lifecycle
    host.commit(host.reserve("disk", rig.chain.keys, 0, 25, rig.space))
    store.silent = False
    assert rig.ask("a") == (400, True)
    assert rig.load("a").deadline_s == 30.0


def test_loads_that_came_are_no_attempts_that_failed(rig: LeaderRig) -> None:
    """A request that was preempted twice is still tried once more after a load that failed."""
    for _ in range(2):
        assert rig.ask("a") == (400, True)
        comes(rig, "a", rig.load("a"))
        assert rig.manager.clear()
        host = rig.index.lifecycle
        host.commit(host.reserve("disk", rig.chain.keys, 0, 25, rig.space))
    rig.ask("a")
    fails(rig, "a", rig.load("a"), RowError.CANCELLED)
    assert rig.ask("a") == (400, True)
