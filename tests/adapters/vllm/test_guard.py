"""An error in any call of vLLM: it goes on, and what it counts on comes or is told as failed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput

import kvcore_vllm.connector
from kvcore.config import load_config
from kvcore.connector import rank_guard
from kvcore.connector.forward_timer import ForwardTimer
from kvcore.connector.fusion_worker import FusionWorker, RefusingFusionWorker
from kvcore.connector.guard import covers
from kvcore.errors import ConfigError, RankLostError, TransferError, UnsupportedError
from kvcore.memory.device import device_of
from kvcore.telemetry.metrics import Metrics
from kvcore.transfer.graph import RowError
from kvcore_vllm.connector import KVCoreConnector
from kvcore_vllm.leader import Leader
from kvcore_vllm.messages import KVCoreMetadata, Promises, StepPlan
from kvcore_vllm.stats import KVCorePromMetrics, KVCoreStats
from kvcore_vllm.worker import WorkerConnector
from kvcore_vllm.worker_guard import WorkerGuard
from support.vllm_leader import BLOCK, PAGES, LeaderRig
from support.vllm_steps import begin
from support.worker import UNIT_TOKENS, ScriptedWorker, blend_of, load_graph

WITHOUT_CONTEXT = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}


def connector_of(rig: LeaderRig) -> KVCoreConnector:
    made = KVCoreConnector.__new__(KVCoreConnector)
    made._scheduler, made._worker, made._offered = rig.side, None, {}
    made._config, made._hooks, made._metrics = rig.config, [], Metrics()
    made._waiting, made._pages, made._left, made._parted = [], [], "", None
    made._taken, made._cold = (None, Promises()), None
    made._stages, made._awaited = None, False
    made._vllm_config = SimpleNamespace(  # type: ignore[assignment]
        parallel_config=SimpleNamespace(**WITHOUT_CONTEXT)
    )
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=BLOCK))
    made._kv_cache_config = SimpleNamespace(  # type: ignore[assignment]
        kv_cache_groups=[group], num_blocks=8
    )
    return made


NOTHING = KVConnectorOutput()


def boom(*_: Any, **__: Any) -> Any:
    raise RuntimeError("a mistake of ours")


def plan_of(connector: KVCoreConnector) -> StepPlan:
    metadata = connector.build_connector_meta(SchedulerOutput.make_empty())
    assert isinstance(metadata, KVCoreMetadata)
    return metadata.plan()


INTERFACES = [
    (KVConnectorBase_V1, KVCoreConnector),
    (SupportsHMA, KVCoreConnector),
    (KVConnectorStats, KVCoreStats),
    (KVConnectorPromMetrics, KVCorePromMetrics),
]


@pytest.mark.parametrize(("interface", "ours"), INTERFACES)
def test_every_method_of_vllms_interface_is_covered(interface: type, ours: type) -> None:
    """Also one that a later version adds, if kvcore defines it."""
    names = [name for name, part in inspect.getmembers(interface) if inspect.isroutine(part)]
    assert names
    assert [name for name in names if name[0] != "_" and not covers(ours, name)] == []


# -- the scheduler's half -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inside", "call", "answer"),
    [
        ("_offer", lambda c, r: c.get_num_new_matched_tokens(r, 0), (0, False)),
        ("update_connector_output", lambda c, r: c.update_connector_output(NOTHING), None),
        ("request_finished", lambda c, r: c.request_finished(r, [1]), (False, None)),
        ("take_events", lambda c, r: list(c.take_events()), []),
        ("take_stats", lambda c, r: c.get_kv_connector_stats(), None),
        ("hit_sources", lambda c, r: c.get_external_cache_hit_sources(r, 16), {}),
        ("reset", lambda c, r: c.reset_cache(), False),
    ],
)  # fmt: skip
def test_an_error_ends_kvcore_and_not_vllm(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    inside: str,
    call: Callable[[KVCoreConnector, Any], Any],
    answer: Any,
) -> None:
    rig = LeaderRig()
    connector = connector_of(rig)
    rig.ask("r")
    with monkeypatch.context() as patch:
        patch.setattr(rig.side, inside, boom)
        assert call(connector, rig.requests["r"]) == answer
    assert rig.side.disabled.startswith("an error in ")
    [line] = [line for line in caplog.records if line.levelname == "ERROR"]
    assert "kvcore stands aside until the engine restarts" in line.getMessage()
    assert "a mistake of ours" in caplog.text
    assert connector.get_num_new_matched_tokens(rig.requests["r"], 0) == (0, False)
    assert rig.side.metrics.snapshot()["kvcore_standing_aside"] == {"": {"leader": 1}}
    assert not connector.has_pending_push_work(), "vLLM would never be idle"


def offer(rig: LeaderRig, connector: KVCoreConnector, *, in_step: bool) -> Any:
    """Have kvcore offer 400 tokens that are in host memory, or on disk."""
    rig.ask("r")
    if in_step:
        graph = taken(rig)
        rig.end(graph)
        rig.side._plan.async_loads.clear()
        rig.ask("s")
    name = "s" if in_step else "r"
    assert connector.get_num_new_matched_tokens(rig.requests[name], 0) == (400, not in_step)
    return rig.requests[name]


def taken(rig: LeaderRig) -> Any:
    rig.side.update_state_after_alloc(rig.requests["r"], PAGES, 400)
    return rig.side._plan.async_loads[-1][1]


@pytest.mark.parametrize("in_step", [False, True])
@pytest.mark.parametrize("where", ["plan_load", "launch", "pages_of"])
def test_a_promised_load_that_cannot_be_planned_is_told_as_failed(
    monkeypatch: pytest.MonkeyPatch, where: str, in_step: bool
) -> None:
    """Also if its graph is in the plan already. No copy is left to write to the pages later."""
    rig = LeaderRig()
    connector = connector_of(rig)
    request = offer(rig, connector, in_step=in_step)
    owner: Any = rig.side._paging if where == "pages_of" else rig.manager
    with monkeypatch.context() as patch:
        patch.setattr(owner, where, boom)
        connector.update_state_after_alloc(request, PAGES, 400)
    assert rig.side.disabled == "an error in update_state_after_alloc"
    plan = plan_of(connector)
    assert plan.async_loads == []
    assert plan.failed_loads == ([] if in_step else [request.request_id])
    assert plan.unfilled == (list(range(1, 26)) if in_step else [])


@pytest.mark.parametrize("in_step", [False, True])
def test_a_step_that_cannot_be_planned_fails_its_loads_and_saves_nothing(
    monkeypatch: pytest.MonkeyPatch, in_step: bool
) -> None:
    rig = LeaderRig()
    connector = connector_of(rig)
    request = offer(rig, connector, in_step=in_step)
    connector.update_state_after_alloc(request, PAGES, 400)
    rig.side._users.add(load_graph(77), [3])  # a save that was sent in an earlier step
    with monkeypatch.context() as patch:
        patch.setattr(rig.side, "_fences", boom)
        plan = plan_of(connector)
    assert plan.sync_loads == plan.async_loads == plan.early_saves == plan.late_saves == []
    assert plan.unfilled == (list(range(1, 26)) if in_step else [])
    assert plan.failed_loads == ([] if in_step else [request.request_id])
    assert plan.fence == [77], "a page may be given away while it is read"
    assert rig.manager.in_flight == 0


@pytest.mark.parametrize("in_step", [False, True])
@pytest.mark.parametrize("second", ["stop", "lose", "last_plan"])
def test_a_leader_whose_recovery_fails_is_called_no_more_and_its_promises_fail(
    monkeypatch: pytest.MonkeyPatch, second: str, in_step: bool
) -> None:
    rig = LeaderRig()
    connector = connector_of(rig)
    request = offer(rig, connector, in_step=in_step)
    monkeypatch.setattr(rig.side, second, boom)
    monkeypatch.setattr(rig.manager, "plan_load", boom)
    monkeypatch.setattr(rig.side, "_fences", boom)
    connector.update_state_after_alloc(request, PAGES, 400)
    metadata: Any = connector.build_connector_meta(SchedulerOutput.make_empty())
    assert metadata.stopped, "the workers stop too"
    assert metadata.promises.waiting == (() if in_step else (request.request_id,))
    assert metadata.promises.pages == (tuple(range(1, 26)) if in_step else ())
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    again: Any = connector.build_connector_meta(SchedulerOutput.make_empty())
    assert again.promises == Promises(), "each is failed once"
    assert connector.reset_cache() is False, "what was to be erased may not be"
    connector.shutdown()


# -- the start ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("a folder without weight files"),
        UnsupportedError("half an adapter"),
        FileNotFoundError("config.json"),
        KeyError("num_hidden_layers"),
    ],
)
def test_a_model_that_cannot_be_described_runs_without_kvcore(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    connector = connector_of(LeaderRig())
    connector._scheduler = None
    connector._vllm_config = connector._kv_cache_config = SimpleNamespace()  # type: ignore[assignment]

    def fails(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(connector, "_check_sleep", lambda: None)
    monkeypatch.setattr(kvcore_vllm.connector, "dense_windows", lambda *_: "")
    monkeypatch.setattr(kvcore_vllm.connector, "describe", fails)
    assert connector._describe() is None
    assert str(error) in caplog.text
    assert connector.reset_cache() is None
    stats = connector.get_kv_connector_stats()
    assert stats is not None, "it is told once"
    assert stats.data["kvcore_standing_aside"]
    assert connector.get_kv_connector_stats() is None


def test_wrong_settings_still_stop_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    connector = connector_of(LeaderRig())
    connector._vllm_config = SimpleNamespace()  # type: ignore[assignment]

    def fails(*_: Any) -> Any:
        raise ConfigError("disk.capacity")

    monkeypatch.setattr(kvcore_vllm.connector, "build_scheduler_side", fails)
    with pytest.raises(ConfigError, match=r"disk\.capacity"):
        connector._build_scheduler(SimpleNamespace())  # type: ignore[arg-type]
    monkeypatch.setattr(kvcore_vllm.connector, "build_scheduler_side", boom)
    assert connector._build_scheduler(SimpleNamespace()) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_rank_that_could_not_read_the_model_fails_what_the_leader_plans(ranks: int) -> None:
    """Otherwise a request would wait forever for its load.

    ``ranks`` have other tokens of a page each.
    """
    connector = connector_of(LeaderRig())
    connector._model = None
    spec = SimpleNamespace(block_size=UNIT_TOKENS // ranks, dcp_sharded=True)
    groups = [SimpleNamespace(kv_cache_spec=spec)]
    connector._kv_cache_config = SimpleNamespace(kv_cache_groups=groups)  # type: ignore[assignment]
    alone = SimpleNamespace(
        tensor_parallel_size=1,
        nnodes_within_dp=1,
        **WITHOUT_CONTEXT | {"decode_context_parallel_size": ranks},
    )
    connector._vllm_config = SimpleNamespace(parallel_config=alone)  # type: ignore[assignment]
    connector.register_kv_caches({})
    plan = StepPlan(async_loads=[("r", load_graph(1))], sync_loads=[load_graph(2)])
    connector.handle_preemptions(KVCoreMetadata.of(plan))
    connector.wait_for_save()
    assert connector.get_transfer_results(set()).failed_recving == {"r"}
    assert connector.get_block_ids_with_load_errors() == {2}


# -- the worker's half --------------------------------------------------------------------------


@pytest.fixture
def scripted() -> ScriptedWorker:
    return ScriptedWorker()


@pytest.fixture
def worker(scripted: ScriptedWorker) -> WorkerConnector:
    return WorkerConnector(
        scripted.parts,
        RefusingFusionWorker(UNIT_TOKENS),
        layer_of={"layer": 0},
        page_tokens=(UNIT_TOKENS,),
        clock=ForwardTimer(device_of(None)),
    )


def step(guard: WorkerGuard, plan: StepPlan) -> tuple[set[str], set[str], set[int], Any]:
    """Make the calls of one step of vLLM; return requests done and failed, pages and the report."""
    begin(guard, plan, guard._worker)
    guard.start((), layerwise=True)
    guard.wait_for_layer("layer")
    guard.forward_launched()
    guard.end_forward()
    finished, failed = guard.finished_loads()
    return finished, failed, guard.take_bad_pages(), guard.take_report()


CALLS = [
    "begin", "tend_tiers", "_submit", "blend", "wait_for_layer", "forward_launched", "end_forward",
    "finished_loads", "take_bad_pages", "take_report",
]  # fmt: skip


@pytest.mark.parametrize("inside", [*CALLS, "_begin_blends", "_lose", ""])
def test_a_rank_that_fails_still_meets_the_others_once_for_each_blend(
    monkeypatch: pytest.MonkeyPatch, scripted: ScriptedWorker, inside: str
) -> None:
    """They ask each other before each blend, and would wait for it for ever."""
    met: list[bool] = []

    def agree(well: bool) -> bool:
        met.append(well)
        return False

    worker = WorkerConnector(
        scripted.parts,
        RefusingFusionWorker(UNIT_TOKENS, agree),
        layer_of={"layer": 0},
        page_tokens=(UNIT_TOKENS,),
        clock=ForwardTimer(device_of(None)),
    )
    guard = WorkerGuard(worker)
    plan = StepPlan(blends=[blend_of("a", load_graph(1)), blend_of("b", load_graph(2))])
    with monkeypatch.context() as patch:
        if inside:
            patch.setattr(worker, inside, boom)
        step(guard, plan)
    assert met == [False, False]
    if guard.stopped:
        step(guard, StepPlan(blends=[blend_of("c", load_graph(3))]))
        assert met == [False, False, False]


@pytest.mark.parametrize("inside", CALLS)
def test_what_is_cleared_is_unreadable_on_a_rank_that_has_stopped(
    monkeypatch: pytest.MonkeyPatch,
    worker: WorkerConnector,
    scripted: ScriptedWorker,
    inside: str,
) -> None:
    """It would be found again after a restart."""
    guard = WorkerGuard(worker)
    with monkeypatch.context() as patch:
        patch.setattr(worker, inside, boom)
        step(guard, StepPlan(sync_loads=[load_graph(1)]))
    assert guard.stopped
    step(guard, StepPlan(invalidate=[("disk", [(0, 4)])]))
    assert scripted.invalidated == [("disk", [(0, 4)])]


@pytest.mark.parametrize("inside", CALLS)
def test_an_error_of_a_worker_fails_all_that_is_promised_and_nothing_twice(
    monkeypatch: pytest.MonkeyPatch,
    worker: WorkerConnector,
    scripted: ScriptedWorker,
    inside: str,
) -> None:
    guard = WorkerGuard(worker)
    before = load_graph(1)
    assert step(guard, StepPlan(async_loads=[("earlier", before)])) == (set(), set(), set(), None)
    plan = StepPlan(
        async_loads=[("r", load_graph(2))],
        failed_loads=["refused"],
        sync_loads=[load_graph(5)],
        late_saves=[load_graph(6)],
        unfilled=[9],
    )
    scripted.on_wait = lambda: scripted.end_once(plan.sync_loads[0])
    with monkeypatch.context() as patch:
        patch.setattr(worker, inside, boom)
        finished, failed, pages, report = step(guard, plan)
    assert guard.stopped.startswith("an error in ")
    late = inside in ("take_bad_pages", "take_report")
    more, *_ = step(guard, StepPlan()) if late else (set(), None)
    assert finished | more == failed | more == {"earlier", "r", "refused"}
    assert pages == ({9} if inside == "take_report" else {5, 9})
    told = {op.graph_id for op in report.reports if RowError.REFUSED in op.failed.values()}
    assert {1, 2} <= told <= {1, 2, 5, 6}, "the leader waits for nothing, and stops"
    assert {1, 2} <= set(scripted.cancelled)
    after = StepPlan(async_loads=[("s", load_graph(7))], sync_loads=[load_graph(8)])
    finished, failed, pages, report = step(guard, after)
    assert (finished, failed, pages) == ({"s"}, {"s"}, {8})
    assert {op.graph_id for op in report.reports} == {7, 8}
    assert step(guard, StepPlan()) == (set(), set(), set(), None)


def test_vllm_ends_if_a_copy_may_still_write_to_its_pages(
    monkeypatch: pytest.MonkeyPatch, worker: WorkerConnector, scripted: ScriptedWorker
) -> None:
    monkeypatch.setattr(rank_guard, "LAND_S", 0.01)
    guard = WorkerGuard(worker)
    begin(guard, StepPlan(async_loads=[("r", load_graph(1))]), worker)
    scripted.count_on_device = lambda: 1
    monkeypatch.setattr(worker, "end_forward", boom)
    with pytest.raises(TransferError, match="did not end"):
        guard.end_forward()


def test_a_plan_that_cannot_be_read_stops_the_rank_and_fails_what_vllm_counts_on(
    worker: WorkerConnector,
) -> None:
    guard = WorkerGuard(worker)
    guard.count_on(Promises(("r",), (5, 6)))
    guard.begin(KVCoreMetadata(b"\xc1"))
    assert guard.finished_loads() == ({"r"}, {"r"})
    assert guard.take_bad_pages() == {5, 6}
    report = guard.take_report()
    assert report is not None
    assert report.stopped == guard.stopped == "an error in handle_preemptions"
    assert guard.take_report() is None


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("second", ["abandon", "decline_blends"])
def test_a_second_error_on_a_rank_ends_vllm_only_where_others_wait(
    monkeypatch: pytest.MonkeyPatch, scripted: ScriptedWorker, second: str, alone: bool
) -> None:
    blends = RefusingFusionWorker(UNIT_TOKENS, *([] if alone else [lambda well: well]))
    worker = WorkerConnector(
        scripted.parts, blends, layer_of={"layer": 0}, page_tokens=(UNIT_TOKENS,),
        clock=ForwardTimer(device_of(None)),
    )  # fmt: skip
    guard = WorkerGuard(worker)
    monkeypatch.setattr(worker, "begin", boom)
    monkeypatch.setattr(worker, second, boom)
    plan = StepPlan(blends=[blend_of("a", load_graph(1))])
    if second == "decline_blends" and not alone:
        with pytest.raises(RankLostError):
            step(guard, plan)
    else:
        assert step(guard, plan)[1] == {"a"}


# -- weights ------------------------------------------------------------------------------------


def test_a_plan_from_before_a_change_of_weights_loads_and_saves_nothing(
    worker: WorkerConnector, scripted: ScriptedWorker
) -> None:
    """The leader learns of the change with the step's report; its next plan is of the new ones."""
    guard = WorkerGuard(worker)
    guard.weights_changed()
    plan = StepPlan(
        async_loads=[("r", load_graph(1))],
        sync_loads=[load_graph(2)],
        late_saves=[load_graph(3)],
        number=1,
    )
    finished, failed, pages, report = step(guard, plan)
    assert (finished, failed, pages) == ({"r"}, {"r"}, {2})
    assert scripted.submitted == []
    assert report.weights == 1
    assert all(RowError.REFUSED not in op.failed.values() for op in report.reports)
    scripted.on_wait = lambda: scripted.end_once(after.sync_loads[0])
    after = StepPlan(sync_loads=[load_graph(4)], late_saves=[load_graph(5)], number=2, weights=1)
    *_, pages, _ = step(guard, after)
    assert pages == set()
    assert scripted.submitted == [4, 5]


def test_the_leader_finds_nothing_from_before_a_change_of_weights() -> None:
    rig = LeaderRig()
    connector = connector_of(rig)
    assert rig.ask("r")[0] == 400
    output = KVConnectorOutput()
    output.kv_connector_worker_meta = kvcore_vllm.connector.KVCoreWorkerMetadata(
        [kvcore_vllm.messages.StepReport(weights=1), kvcore_vllm.messages.StepReport(weights=1)]
    )
    connector.update_connector_output(output)
    assert rig.ask("r") == (0, False)
    assert rig.ask("new") == (0, False)
    assert plan_of(connector).weights == 1
    assert rig.index.num_used("disk") == 25, "it is others'"


def test_a_second_change_of_weights_before_the_leader_knows_of_the_first_is_told_too(
    worker: WorkerConnector, scripted: ScriptedWorker
) -> None:
    """Plans are under way when the weights change: what they were made for is of other weights."""
    rig, guard = LeaderRig(), WorkerGuard(worker)
    connector = connector_of(rig)

    def carry_out(plan: StepPlan) -> Any:
        plan.late_saves = [load_graph(plan.number)]
        *_, report = step(guard, plan)
        return report

    def tell(report: Any) -> None:
        output = KVConnectorOutput()
        output.kv_connector_worker_meta = kvcore_vllm.connector.KVCoreWorkerMetadata([report])
        connector.update_connector_output(output)

    first, second = plan_of(connector), plan_of(connector)
    guard.weights_changed()
    told = carry_out(first)
    guard.weights_changed()  # before the leader has heard of the first change
    tell(told)
    third = plan_of(connector)
    tell(carry_out(second))
    carry_out(third)
    assert scripted.submitted == [], "a plan from before the second change"
    fourth = plan_of(connector)
    carry_out(fourth)
    assert scripted.submitted == [fourth.number]


class Pool:
    """vLLM's pages, as far as their cache goes: a new map after each time it was emptied."""

    def __init__(self) -> None:
        self.empty()

    def empty(self) -> None:
        self.cached_block_hash_to_block: dict[str, int] = {}


@pytest.mark.parametrize("emptied", [False, True])
@pytest.mark.parametrize("early", [False, True])
def test_what_goes_on_from_kv_of_earlier_weights_is_not_saved(emptied: bool, early: bool) -> None:
    """vLLM's own prefix cache holds it until it is emptied, maybe before the leader knows."""
    rig, pool = LeaderRig(), Pool()
    connector = connector_of(rig)
    connector.bind_gpu_block_pool(pool)  # type: ignore[arg-type]
    ran = [plan_of(connector), plan_of(connector)][-1].number

    def changed() -> None:
        output = KVConnectorOutput()
        output.kv_connector_worker_meta = kvcore_vllm.connector.KVCoreWorkerMetadata(
            [kvcore_vllm.messages.StepReport(weights=ran + 1)]
        )
        connector.update_connector_output(output)

    if not early:
        changed()
    if emptied:
        pool.empty()
    plan_of(connector)
    if early:
        changed()
    rig.ask("new")
    rig.ask("goes on", 32)
    assert rig.side._requests["new"].may_save
    assert rig.side._requests["goes on"].may_save is emptied
    plan_of(connector)
    pool.empty()
    rig.ask("later", 32)
    assert rig.side._requests["later"].may_save


@pytest.mark.parametrize(
    ("settings", "found", "kept"),
    [
        ({}, False, 25),
        ({"namespace": {"weights_change": "never"}}, True, 25),
        ({"vllm": {"keep_on_reset": False}}, False, 0),
        ({"namespace": {"weights_change": "never"}, "vllm": {"keep_on_reset": False}}, False, 0),
    ],
)
def test_a_reset_renews_the_namespace_and_leaves_tiers_alone(
    settings: dict[str, Any], found: bool, kept: int
) -> None:
    rig = LeaderRig()
    rig.side._config = load_config(None, settings)
    assert connector_of(rig).reset_cache() is True
    assert rig.index.num_used("disk") == kept
    assert (rig.ask("r")[0] == 400) is found


def test_saves_that_were_not_sent_do_not_outlive_a_reset() -> None:
    """vLLM may take the memory of the pages away before the next step."""
    rig = LeaderRig()
    rig.side._plan.early_saves.append(load_graph(3))
    rig.side.reset()
    assert rig.side._plan.early_saves == []


def test_weights_that_change_at_any_time_are_apart_from_the_start() -> None:
    usual, apart, again = (side_with(when) for when in ("never", "any_time", "any_time"))
    spaces = {side.namespaces.of("", None).digest for side in (usual, apart, again)}
    assert len(spaces) == 3


def side_with(when: str) -> Leader:
    rig = LeaderRig(settings={"namespace": {"weights_change": when}})
    return rig.side


def test_a_request_that_reads_no_cache_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = LeaderRig()
    rig.ask("r")
    rig.requests["r"].skip_reading_prefix_cache = True
    monkeypatch.setattr(rig.manager, "get_match", boom)
    assert rig.ask("r") == (0, False)


def test_a_refused_load_counts_its_own_tokens(caplog: pytest.LogCaptureFixture) -> None:
    rig = LeaderRig()
    rig.ask("r")
    graph = rig.load("r")
    rig.end(graph, RowError.INTERNAL)
    rig.side._plan.async_loads.clear()
    rig.side.update_connector_output(KVConnectorOutput(failed_recving={"r"}))
    tracked = rig.side._requests["r"]
    tracked.load_tokens = 400
    rig.side.update_state_after_alloc(rig.requests["r"], PAGES, 0)
    tracked.offer = kvcore_vllm.leader.Offer(0, 64, 64)
    tracked.hit = rig.manager.get_match(rig.chain.keys, rig.space)
    rig.side.update_state_after_alloc(rig.requests["r"], PAGES, 64)
    assert tracked.load_tokens == 64


@pytest.mark.parametrize("trouble", ["", "no model", "no worker"])
@pytest.mark.parametrize("others", [True, False])
def test_every_rank_meets_the_others_before_blends_are_prepared(
    worker: WorkerConnector, monkeypatch: pytest.MonkeyPatch, trouble: str, others: bool
) -> None:
    """Also one that has no worker: to prepare blends is a collective, and the others would wait."""
    said: list[bool] = []
    warmed: list[bool] = []

    def build(*_: Any) -> Any:
        if trouble == "no worker":
            raise MemoryError("no host memory on this rank")
        worker._blends = FusionWorker.__new__(FusionWorker)
        monkeypatch.setattr(worker._blends, "warm_up", lambda *, timed: warmed.append(timed))
        return worker

    def agree(well: bool) -> bool:
        said.append(well)
        return well and others

    monkeypatch.setattr(kvcore_vllm.connector, "build_worker_connector", build)
    for name, stand_in in {"collectives": lambda _: None, "Agreement": lambda _: agree}.items():
        monkeypatch.setattr(f"kvcore_vllm.build.{name}", stand_in)
    monkeypatch.setattr(kvcore_vllm.connector, "watch_weights", lambda *_: None)
    made = KVCoreConnector.__new__(KVCoreConnector)
    made._config = load_config(overrides={"fusion": {"enabled": True}}, env={})
    made._model = None if trouble == "no model" else SimpleNamespace()  # type: ignore[assignment]
    alone = SimpleNamespace(nnodes_within_dp=1, **WITHOUT_CONTEXT)
    made._vllm_config = SimpleNamespace(parallel_config=alone)  # type: ignore[assignment]
    made._metrics = Metrics()
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=16))
    made._kv_cache_config = SimpleNamespace(  # type: ignore[assignment]
        kv_cache_groups=[group], num_blocks=8
    )
    made.register_kv_caches({})
    assert said == [not trouble]
    assert warmed == ([True] if others and not trouble else [])
