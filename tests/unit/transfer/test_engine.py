"""The transfer engine against executors that record, fail, and hang on command."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.errors import CapacityError, TransferError
from kvcore.transfer.active import OpState
from kvcore.transfer.engine import TransferEngine
from kvcore.transfer.executor import OpPart
from kvcore.transfer.graph import (
    COPY_BYTES,
    SKIP,
    OpReport,
    Path,
    Priority,
    RowError,
    Span,
    TransferGraph,
    TransferOp,
    UnitTable,
)
from kvcore.transfer.op_thread import OpThread, OpTiming
from kvcore.transfer.path_queue import BYTES_ISSUED, SAVES_ISSUED, PathQueue
from kvcore.transfer.plan import Chain, TierRows, build_load, build_save, layer_steps
from support.budget import examples

WAIT = 20.0


class Recorder:
    """An executor that logs what it ran, fails the rows it is told to, and can be held."""

    def __init__(self, log: list[tuple[int, int, tuple[int, ...]]], lock: threading.Lock) -> None:
        self.log = log
        self.lock = lock
        self.fail: dict[int, RowError] = {}
        self.explode = False
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def run(self, graph: TransferGraph, op: TransferOp, rows: list[int]) -> dict[int, RowError]:
        self.entered.set()
        assert self.gate.wait(WAIT)
        if self.explode:
            raise RuntimeError("planted")
        with self.lock:
            self.log.append((graph.graph_id, op.op_id, tuple(rows)))
        return {row: self.fail[row] for row in rows if row in self.fail}


class EngineRig:
    def __init__(self, **options: object) -> None:
        self.log: list[tuple[int, int, tuple[int, ...]]] = []
        lock = threading.Lock()
        self.at = {path: Recorder(self.log, lock) for path in Path}
        self.timings: list[OpTiming] = []
        self.engine = TransferEngine(self.at, observer=self.timings.append, **options)  # type: ignore[arg-type]

    def finish(self, graph: TransferGraph) -> dict[int, OpReport]:
        assert self.engine.wait(graph.graph_id, WAIT)
        return {report.op_id: report for report in self.engine.poll()}


@pytest.fixture
def rig() -> EngineRig:
    made = EngineRig()
    yield made  # type: ignore[misc]
    for recorder in made.at.values():
        recorder.gate.set()
    assert made.engine.close(timeout=WAIT)


def units(rows: int) -> tuple[UnitTable, ...]:
    return (UnitTable.of(np.zeros((rows, 1), dtype=np.int64), 16),)


def chain(rows: int) -> Chain:
    return Chain(b"n", b"", tuple(bytes([i]) for i in range(rows)))


def load(graph_id: int, host: int, disk: int, **options: object) -> TransferGraph:
    rows = host + disk
    sources = [TierRows("disk", Path.DISK2H, Span(host, rows), range(disk))] if disk else []
    options = {"batch_rows": 2, "layers": layer_steps(4)} | options
    return build_load(graph_id, chain(rows), range(rows), sources, **options).bind(units(rows))  # type: ignore[arg-type]


def save(graph_id: int, rows: int, copy_rows: int | None = None) -> TransferGraph:
    sink = TierRows("disk", Path.H2DISK, Span(0, rows), range(rows))
    return build_save(
        graph_id, chain(rows), range(rows), sink, batch_rows=2, copy_rows=copy_rows
    ).bind(units(rows))


def test_every_op_runs_once_after_its_deps(rig: EngineRig) -> None:
    graph = load(1, 3, 5)
    rig.engine.submit(graph)
    reports = rig.finish(graph)
    assert set(reports) == {op.op_id for op in graph.ops}
    assert all(not report.failed for report in reports.values())
    order = [op_id for _, op_id, _ in rig.log]
    assert sorted(order) == [op.op_id for op in graph.ops]
    for op in graph.ops:
        assert all(order.index(dep) < order.index(op.op_id) for dep in op.deps)
    assert rig.engine.in_flight == 0
    assert sum(timing.rows for timing in rig.timings) == sum(op.rows.size for op in graph.ops)
    rig.engine.check_integrity()


@given(st.data())
@settings(max_examples=examples(30, 1), deadline=None)
def test_random_graphs_end_and_respect_deps(data: st.DataObject) -> None:
    rig = EngineRig()
    graphs = []
    for graph_id in range(data.draw(st.integers(1, 4))):
        ops = []
        for op_id in range(data.draw(st.integers(1, 8))):
            start = data.draw(st.integers(0, 5))
            stop = data.draw(st.integers(start + 1, 6))
            deps = data.draw(st.sets(st.integers(0, op_id - 1))) if op_id else set()
            path = data.draw(st.sampled_from(list(Path)))
            tier = "" if path.touches_device else "t"
            ops.append(TransferOp(op_id, path, Span(start, stop), None, tier, tuple(deps)))
        graphs.append(
            TransferGraph(
                graph_id,
                data.draw(st.sampled_from(Priority)),
                b"",
                b"",
                chain(6).keys,
                tuple(range(6)),
                tuple(range(6)),
                units(6),
                tuple(ops),
                staged=tuple(range(6)),
            )
        )
    bad_row = data.draw(st.integers(0, 5))
    rig.at[Path.DISK2H].fail = {bad_row: RowError.CORRUPT}
    for graph in graphs:
        rig.engine.submit(graph)
    for graph in graphs:
        assert rig.engine.wait(graph.graph_id, WAIT)
    reports = {(r.graph_id, r.op_id): r for r in rig.engine.poll()}
    order = [(graph_id, op_id) for graph_id, op_id, _ in rig.log]
    for graph in graphs:
        for op in graph.ops:
            report = reports[graph.graph_id, op.op_id]
            for dep in op.deps:
                up = reports[graph.graph_id, dep]
                assert set(up.failed) & set(range(*op.rows)) <= set(report.failed)
                if (graph.graph_id, op.op_id) in order and (graph.graph_id, dep) in order:
                    assert order.index((graph.graph_id, dep)) < order.index(
                        (graph.graph_id, op.op_id)
                    )
    rig.engine.check_integrity()
    assert rig.engine.close(timeout=WAIT)


@given(
    layers=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    behind=st.integers(1, 6),
)
@settings(max_examples=examples(30, 1), deadline=None)
def test_a_wave_is_copied_layer_by_layer_and_before_the_next(
    layers: list[int], behind: int
) -> None:
    rig = EngineRig()
    copies = rig.at[Path.H2D]
    copies.gate.clear()
    held = load(99, 1, 0, layers=())
    rig.engine.submit(held)
    assert copies.entered.wait(WAIT)  # from here on everything queues up
    first, second = rig.engine.wave(), rig.engine.wave()
    late = load(50, 2, 0, layers=layer_steps(behind, growth=1))
    rig.engine.submit(late, second)
    wave = [load(i, 2, 0, layers=layer_steps(n, growth=1)) for i, n in enumerate(layers)]
    for graph in wave:
        rig.engine.submit(graph, first)
    own = load(51, 2, 0)
    rig.engine.submit(own)
    copies.gate.set()
    assert all(rig.engine.wait(graph.graph_id, WAIT) for graph in [held, late, *wave, own])
    expected = [(i, layer) for layer in range(6) for i, n in enumerate(layers) if layer < n]
    expected += [(50, layer) for layer in range(behind)] + [(51, op.op_id) for op in own.ops]
    assert [(graph_id, op_id) for graph_id, op_id, _ in rig.log[1:]] == expected
    rig.engine.check_integrity()
    assert rig.engine.close(timeout=WAIT)


ROW_BYTES = 1000
"""More than the ops of a test: the clock of the waves counts these too."""


class Gated(EngineRig):
    """A rig whose copies to the device run one after another when told; one is always held."""

    def __init__(self) -> None:
        super().__init__(nbytes=lambda op: op.rows.size * ROW_BYTES)
        self.turns = threading.Semaphore(0)
        self.begun: list[tuple[int, int]] = []  # graph and rows
        self._ops = 0
        plain = self.at[Path.H2D].run

        def run(graph: TransferGraph, op: TransferOp, rows: list[int]) -> dict[int, RowError]:
            self.begun.append((graph.graph_id, len(rows)))
            assert self.turns.acquire(timeout=WAIT)
            return plain(graph, op, rows)

        self.at[Path.H2D].run = run  # type: ignore[method-assign]

    def submit(self, graph: TransferGraph) -> None:
        self._ops += len(graph.ops)
        self.engine.submit(graph)
        if not self.begun:
            self._until_begun(1)

    def go_on(self) -> None:
        """End the copy that is held, if there is another to hold."""
        if len(self.begun) < self._ops:
            self.turns.release()
            self._until_begun(len(self.begun) + 1)

    def end(self) -> None:
        self.turns.release(self._ops)

    def _until_begun(self, count: int) -> None:
        limit = time.monotonic() + WAIT
        while len(self.begun) < count:
            assert time.monotonic() < limit
            time.sleep(0.0002)


@given(
    loads=st.lists(st.tuples(st.integers(1, 24), st.integers(0, 6)), min_size=2, max_size=7),
    piece=st.integers(1, 5),
)
@settings(max_examples=examples(60), deadline=None)
def test_the_load_with_the_fewest_bytes_left_is_first_until_others_have_had_as_many(
    loads: list[tuple[int, int]], piece: int
) -> None:
    """After each load so many more copies are begun, before the next one comes."""
    rig = Gated()
    came, clock = [], []  # copies and rows that were begun before each load came
    for graph_id, (rows, more) in enumerate(loads):
        came.append(len(rig.begun))
        clock.append(sum(begun for _, begun in rig.begun))
        rig.submit(load(graph_id, rows, 0, layers=(), copy_rows=piece))
        for _ in range(more):
            rig.go_on()
    rig.end()
    assert all(rig.engine.wait(graph_id, WAIT) for graph_id in range(len(loads)))
    for early, late in itertools.combinations(range(len(loads)), 2):
        left = [i for i, (g, _) in enumerate(rig.begun) if g == early and i >= came[late]]
        its = [i for i, (g, _) in enumerate(rig.begun) if g == late]
        if not left:
            continue
        if clock[late] - clock[early] + loads[late][0] < loads[early][0]:
            assert max(its) < min(left), "it is shorter, and waits for the longer one"
        else:
            assert max(left) < min(its), "others have had as much, and it is overtaken again"
    rig.engine.check_integrity()
    assert rig.engine.close(timeout=WAIT)


def test_a_step_waits_for_no_load_that_was_there_before() -> None:
    rig = Gated()
    rig.submit(load(1, 6, 0, layers=(), copy_rows=2))
    wave = rig.engine.wave()
    rig.engine.submit(load(2, 50, 0, layers=layer_steps(2)), wave)
    rig.engine.submit(load(3, 50, 0, layers=layer_steps(2)), wave)
    rig.turns.release(7)
    assert all(rig.engine.wait(graph_id, WAIT) for graph_id in (1, 2, 3))
    assert [graph_id for graph_id, _ in rig.begun] == [1, 2, 3, 2, 3, 1, 1]
    assert rig.engine.close(timeout=WAIT)


@pytest.mark.parametrize("row", [0, 3, 5])
def test_a_piece_that_fails_fails_its_rows_and_no_others(rig: EngineRig, row: int) -> None:
    rig.at[Path.H2D].fail = {row: RowError.INTERNAL}
    rig.engine.submit(load(1, 6, 0, layers=(), copy_rows=2))
    assert rig.engine.wait(1, WAIT)
    failed = {r.op_id: r.failed for r in rig.engine.poll()}
    assert failed == {i: {row: RowError.INTERNAL} if i == row // 2 else {} for i in range(3)}


def test_a_failed_row_is_skipped_downstream_and_the_others_go_on(rig: EngineRig) -> None:
    rig.at[Path.DISK2H].fail = {4: RowError.CORRUPT}
    graph = load(1, 2, 4)
    rig.engine.submit(graph)
    reports = rig.finish(graph)
    failed = {op.op_id: reports[op.op_id].failed for op in graph.ops if reports[op.op_id].failed}
    read = next(op for op in graph.ops if op.path is Path.DISK2H and op.rows.covers(4))
    copy = next(op for op in graph.ops if op.path is Path.H2D and op.rows.covers(4))
    assert failed == {read.op_id: {4: RowError.CORRUPT}, copy.op_id: {4: RowError.UPSTREAM}}
    assert (1, copy.op_id, (5,)) in rig.log


def test_an_executor_that_raises_fails_its_rows_and_its_thread_lives(rig: EngineRig) -> None:
    rig.at[Path.D2H].explode = True
    first = save(1, 3)
    rig.engine.submit(first)
    reports = rig.finish(first)
    assert reports[0].failed == dict.fromkeys(range(3), RowError.INTERNAL)
    assert not any(path_log[0] == 1 for path_log in rig.log), "a failed copy was written to disk"
    rig.at[Path.D2H].explode = False
    second = save(2, 3)
    rig.engine.submit(second)
    assert all(not report.failed for report in rig.finish(second).values())


def test_a_tier_that_raises_has_failed_like_one_that_says_so(rig: EngineRig) -> None:
    """Its breaker must hear of it."""
    rig.at[Path.H2DISK].explode = True
    graph = save(1, 2)
    rig.engine.submit(graph)
    failed = [report.failed for report in rig.finish(graph).values()]
    assert failed == [{}, dict.fromkeys(range(2), RowError.IO)]


def test_loads_overtake_saves_that_wait(rig: EngineRig) -> None:
    disk = rig.at[Path.DISK2H]
    disk.gate.clear()
    spill_like = [
        TransferGraph(
            i,
            Priority.SPILL,
            b"",
            b"",
            chain(1).keys,
            (0,),
            (0,),
            (),
            (TransferOp(0, Path.DISK2H, Span(0, 1), None, "disk"),),
        )
        for i in range(3)
    ]
    for graph in spill_like:
        rig.engine.submit(graph)
    assert disk.entered.wait(WAIT)
    urgent = load(9, 0, 1)
    rig.engine.submit(urgent)
    disk.gate.set()
    for graph in [*spill_like, urgent]:
        assert rig.engine.wait(graph.graph_id, WAIT)
    reads = [graph_id for graph_id, op_id, _ in rig.log if op_id == 0]
    assert reads.index(9) == 1, f"the load waited behind saves: {reads}"


def test_a_layer_can_be_used_while_the_next_is_in_flight(rig: EngineRig) -> None:
    graph = load(1, 2, 0)
    gate = threading.Semaphore(0)
    plain = rig.at[Path.H2D].run

    def stepwise(graph: TransferGraph, op: TransferOp, rows: list[int]) -> dict[int, RowError]:
        assert gate.acquire(timeout=WAIT)
        return plain(graph, op, rows)

    rig.at[Path.H2D].run = stepwise  # type: ignore[method-assign]
    rig.engine.submit(graph)
    assert not rig.engine.wait_issued(1, 0, timeout=0.01)
    gate.release()
    assert rig.engine.wait_issued(1, 0, timeout=WAIT)
    assert not rig.engine.wait_issued(1, 3, timeout=0.01)
    gate.release(5)
    assert rig.engine.wait_issued(1, 3, timeout=WAIT)


def test_a_medium_that_hangs_leaves_the_device_free(rig: EngineRig) -> None:
    for path in (Path.DISK2H, Path.H2DISK):
        rig.at[path].gate.clear()
    saving, loading = save(1, 4), load(2, 0, 2)
    rig.engine.submit(saving)
    assert rig.engine.wait_device(1, WAIT)
    assert rig.engine.wait_idle(0)
    assert rig.engine.in_flight
    rig.engine.submit(loading)
    assert not rig.engine.wait_idle(0), "its pages wait for what the disk reads"
    rig.at[Path.DISK2H].gate.set()
    assert rig.engine.wait(2, WAIT)
    assert rig.engine.wait_idle(0)
    assert rig.engine.in_flight


def test_a_load_into_host_memory_alone_keeps_no_page_from_being_idle(rig: EngineRig) -> None:
    rig.at[Path.DISK2H].gate.clear()
    graph = load(1, 0, 2)
    nowhere = UnitTable.of(np.full((2, 1), SKIP), graph.units[0].unit_tokens)
    rig.engine.submit(msgspec.structs.replace(graph, units=(nowhere,)))
    assert rig.engine.wait_idle(0)
    assert rig.engine.in_flight


def test_who_waits_for_pages_sees_loads_end_at_their_deadline(rig: EngineRig) -> None:
    """Nobody polls meanwhile: an engine that flushes its cache does nothing else."""
    rig.at[Path.DISK2H].gate.clear()
    rig.engine.submit(load(1, 0, 2, deadline_s=0.02))
    assert rig.engine.wait_idle(WAIT)
    assert rig.engine.in_flight, "the read still runs"


def test_who_waits_for_a_whole_graph_is_not_woken_for_a_part(rig: EngineRig) -> None:
    device = rig.at[Path.H2D]
    device.gate.clear()
    rig.engine.submit(load(1, host=0, disk=4))
    assert rig.engine.wait_report(WAIT)
    assert device.entered.wait(WAIT)
    assert not rig.engine.wait_graph(0.02)
    assert rig.engine.poll(), "parts of it were there"
    device.gate.set()
    assert rig.engine.wait_graph(WAIT)
    assert rig.engine.poll()
    assert not rig.engine.wait_graph(0.0), "it was polled"


def test_cancel_ends_what_has_not_started(rig: EngineRig) -> None:
    rig.at[Path.DISK2H].gate.clear()
    graph = load(1, 0, 4)
    rig.engine.submit(graph)
    assert rig.at[Path.DISK2H].entered.wait(WAIT)
    rig.engine.cancel(1)
    early = {r.op_id: r.failed for r in rig.engine.poll()}
    assert set(early) == {1, 2, 3}, "the running read must not be reported before it ends"
    assert rig.engine.wait_device(1, WAIT)
    assert not rig.engine.wait(1, 0.01)
    rig.at[Path.DISK2H].gate.set()
    assert rig.engine.wait(1, WAIT)
    assert [(r.op_id, r.failed) for r in rig.engine.poll()] == [(0, {})]
    assert [entry[1] for entry in rig.log] == [0], "a cancelled copy ran"


def test_a_load_past_its_deadline_never_touches_the_device(rig: EngineRig) -> None:
    ahead = [0.0]
    rig.engine._clock = lambda: time.monotonic() + ahead[0]
    rig.at[Path.DISK2H].gate.clear()
    graph = load(1, 0, 2, deadline_s=600)
    rig.engine.submit(graph)
    assert rig.at[Path.DISK2H].entered.wait(WAIT)
    ahead[0] = 601.0
    assert rig.engine.wait_device(1, WAIT), "a hung read must not hold the request"
    rig.at[Path.DISK2H].gate.set()
    assert rig.engine.wait(1, WAIT)
    reports = {r.op_id: r.failed for r in rig.engine.poll()}
    assert reports == {0: {}, 1: dict.fromkeys(range(2), RowError.DEADLINE)}
    assert [entry[1] for entry in rig.log] == [0]


def test_the_queue_is_bounded_and_says_so() -> None:
    rig = EngineRig(queue_depth=3)
    rig.at[Path.D2H].gate.clear()
    rig.engine.submit(save(1, 2))
    with pytest.raises(CapacityError, match=r"queue_depth"):
        rig.engine.submit(save(2, 4))
    rig.at[Path.D2H].gate.set()
    assert rig.engine.wait(1, WAIT)
    rig.engine.submit(save(2, 4))
    assert rig.engine.wait(2, WAIT)
    assert rig.engine.close(timeout=WAIT)


def test_what_cannot_run_is_refused_before_it_is_queued() -> None:
    lock = threading.Lock()
    engine = TransferEngine({Path.D2H: Recorder([], lock)})
    with pytest.raises(TransferError, match="h2disk"):
        engine.submit(save(1, 1))
    assert engine.in_flight == 0
    assert engine.close(timeout=WAIT)
    with pytest.raises(TransferError, match="closed"):
        engine.submit(build_save(2, chain(1), [0], None, batch_rows=1).bind(units(1)))


def test_close_finishes_saves_in_flight() -> None:
    rig = EngineRig()
    rig.at[Path.D2H].gate.clear()
    rig.engine.submit(save(1, 6))
    threading.Timer(0.05, rig.at[Path.D2H].gate.set).start()
    assert rig.engine.close(drain=True, timeout=WAIT)
    assert {op_id for _, op_id, _ in rig.log} == {0, 1, 2, 3}


def test_close_without_drain_drops_what_waits() -> None:
    rig = EngineRig()
    rig.at[Path.D2H].gate.clear()
    rig.engine.submit(save(1, 6))
    assert rig.at[Path.D2H].entered.wait(WAIT)
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(rig.engine.close, drain=False, timeout=WAIT)
        while not rig.engine.poll():  # what waits is dropped, and told
            rig.engine.wait(1, 0.01)
        rig.at[Path.D2H].gate.set()
        assert closing.result()
    assert {op_id for _, op_id, _ in rig.log} == {0}


class Queue:
    """What an executor has issued: it ends when the test says so. Thread-safe."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.error: Exception | None = None

    def wait(self) -> None:
        assert self.ended.wait(WAIT)
        if self.error is not None:
            raise self.error

    def seconds(self) -> float:
        return 0.0


class Issuer(Recorder):
    """A recorder that issues its work."""

    def __init__(self, log: list[tuple[int, int, tuple[int, ...]]], lock: threading.Lock) -> None:
        super().__init__(log, lock)
        self.queue: list[Queue] = []

    def run(  # type: ignore[override]
        self, graph: TransferGraph, op: TransferOp, rows: list[int]
    ) -> dict[int, RowError] | Queue:
        failed = super().run(graph, op, rows)
        if failed:
            return failed
        with self.lock:
            self.queue.append(Queue())
            return self.queue[-1]


class IssuingRig(EngineRig):
    def __init__(self, **options: object) -> None:
        self.log = []
        lock = threading.Lock()
        on_device = {path: Issuer(self.log, lock) for path in Path if path.touches_device}
        self.at = {path: on_device.get(path) or Recorder(self.log, lock) for path in Path}
        self.on_device = list(on_device.values())
        self.timings = []
        self.engine = TransferEngine(self.at, observer=self.timings.append, **options)  # type: ignore[arg-type]

    def until(self, reached: Callable[[], bool]) -> None:
        limit = time.monotonic() + WAIT
        while not reached():
            assert time.monotonic() < limit
            time.sleep(0.001)

    def let_end(self) -> None:
        for issuer in self.on_device:
            for one in list(issuer.queue):
                one.ended.set()

    def end_all(self) -> None:
        def ended() -> bool:
            self.let_end()
            return not self.engine.in_flight

        self.until(ended)

    def states(self, graph: TransferGraph) -> list[OpState]:
        with self.engine._lock:
            return list(self.engine._runs[graph.graph_id].states)


def test_what_depends_on_an_issued_op_waits_for_its_end() -> None:
    rig = IssuingRig()
    graph = save(1, 2)
    rig.engine.submit(graph)
    assert rig.engine.wait_issued(1, timeout=WAIT)
    assert not rig.engine.wait(1, 0.01)
    assert rig.log == [(1, 0, (0, 1))], "a block is written whose copy has not ended"
    assert rig.engine.poll() == []
    rig.let_end()
    assert rig.engine.wait(1, WAIT)
    assert [entry[1] for entry in rig.log] == [0, 1]
    assert rig.engine.close(timeout=WAIT)


def test_close_waits_for_what_was_issued() -> None:
    rig = IssuingRig()
    rig.engine.submit(load(1, 1, 0))
    assert rig.engine.wait_issued(1, timeout=WAIT)
    assert not rig.engine.close(timeout=0.05), "copies that run were left alone"
    rig.let_end()
    assert rig.engine.close(timeout=WAIT)


def test_few_bytes_of_a_load_are_issued_so_that_a_small_one_comes_soon() -> None:
    rig = IssuingRig(nbytes=lambda op: op.rows.size * COPY_BYTES)
    copies = rig.at[Path.H2D]
    assert isinstance(copies, Issuer)
    large, small = load(1, 9, 0, layers=(), copy_rows=1), load(2, 1, 0, layers=(), copy_rows=1)
    most = BYTES_ISSUED // COPY_BYTES
    rig.engine.submit(large)
    rig.until(lambda: len(copies.queue) == most)
    rig.engine.submit(small)
    assert rig.states(small) == [OpState.READY]
    copies.queue[0].ended.set()
    rig.until(lambda: len(copies.queue) == most + 1)
    assert rig.states(small) == [OpState.ISSUED]
    assert rig.states(large).count(OpState.READY) == 9 - most
    step = load(3, 2, 0, layers=layer_steps(4))
    rig.engine.submit(step, rig.engine.wave())
    rig.until(lambda: all(state is OpState.ISSUED for state in rig.states(step)))
    assert rig.engine.wait_issued(1, timeout=WAIT), "it is waited for: nothing keeps it back"
    assert not any(state is OpState.READY for state in rig.states(large))
    rig.end_all()
    rig.engine.check_integrity()
    assert rig.engine.close(timeout=WAIT)


def test_a_copy_larger_than_may_be_issued_is_issued_alone() -> None:
    rig = IssuingRig(nbytes=lambda op: op.rows.size * COPY_BYTES)
    graphs = [load(i, 4, 0, layers=()) for i in range(3)]
    for graph in graphs:
        rig.engine.submit(graph)
    assert rig.engine.wait_issued(0, timeout=WAIT)
    assert [rig.states(graph) for graph in graphs[1:]] == [[OpState.READY]] * 2
    rig.end_all()
    assert rig.engine.close(timeout=WAIT)


def test_a_save_that_is_waited_for_passes_what_is_left_of_a_large_one() -> None:
    rig = IssuingRig(nbytes=lambda op: op.rows.size * COPY_BYTES)
    copies = rig.at[Path.D2H]
    assert isinstance(copies, Issuer)
    large, small = save(1, 9, copy_rows=1), save(2, 1, copy_rows=1)
    rig.engine.submit(large)
    rig.until(lambda: len(copies.queue) == SAVES_ISSUED)
    rig.engine.submit(small)
    assert rig.engine.wait_issued(2, timeout=WAIT), "it waits behind all of the large one"
    assert rig.states(large)[:9].count(OpState.READY) == 9 - SAVES_ISSUED
    assert rig.engine.wait_issued(1, timeout=WAIT), "it is waited for: nothing keeps it back"
    assert not any(path is not Path.D2H for path in written(rig, large)), "a part is missing"
    rig.end_all()
    assert written(rig, large) == [Path.D2H] * 9 + [Path.H2DISK] * 5
    assert not any(report.failed for report in rig.engine.poll())
    assert rig.engine.close(timeout=WAIT)


def written(rig: EngineRig, graph: TransferGraph) -> list[Path]:
    """Return the paths of a graph's ops in the order in which they have run."""
    return [graph.ops[op_id].path for number, op_id, _ in rig.log if number == graph.graph_id]


@given(
    rows=st.integers(1, 9),
    most=st.integers(1, 9),
    cancel=st.booleans(),
    spoils=st.sets(st.integers(0, 8), max_size=2),
)
@settings(max_examples=examples(40, 1), deadline=None)
def test_a_save_in_parts_ends_once_all_that_was_issued_of_it_has(
    rows: int, most: int, cancel: bool, spoils: set[int]
) -> None:
    """Its pages are given to others then. What a part did not bring is not written to the disk."""
    rig = IssuingRig()
    copies = rig.at[Path.D2H]
    assert isinstance(copies, Issuer)
    graph = save(1, rows, copy_rows=most)
    copies.fail = dict.fromkeys(spoils, RowError.INTERNAL)
    rig.engine.submit(graph)
    if cancel:
        rig.engine.cancel(1)
    while not rig.engine.wait_device(1, 0.001):
        for one in [one for one in list(copies.queue) if not one.ended.is_set()][:1]:
            one.ended.set()
    assert all(one.ended.is_set() for one in copies.queue), "a copy still reads the pages"
    assert rig.engine.wait(1, WAIT)
    reports = {report.op_id: report.failed for report in rig.engine.poll()}
    assert set(reports) == {op.op_id for op in graph.ops}
    brought: set[int] = set()
    for op in graph.ops:
        failed, its = reports[op.op_id], set(range(*op.rows))
        if op.path is Path.D2H:
            gone = cancel and set(failed.values()) == {RowError.CANCELLED}
            assert failed.keys() == (its if gone else its & spoils)
            brought |= its - failed.keys()
        else:
            assert its - failed.keys() <= brought, "a block is written that has no bytes"
            assert cancel or its - failed.keys() == its & brought
    rig.engine.check_integrity()
    assert rig.engine.close(timeout=WAIT)


class Joiner(Issuer):
    """An issuer that takes several ops at once. Graphs in ``spoils`` let no other be copied."""

    def __init__(self, log: list[tuple[int, int, tuple[int, ...]]], lock: threading.Lock) -> None:
        super().__init__(log, lock)
        self.joins: list[list[int]] = []
        self.spoils: set[int] = set()

    def run(  # type: ignore[override]
        self, graph: TransferGraph, op: TransferOp, rows: list[int]
    ) -> dict[int, RowError] | Queue:
        if graph.graph_id in self.spoils:
            raise RuntimeError("planted")
        return super().run(graph, op, rows)

    def run_joined(self, parts: Sequence[OpPart]) -> Queue:
        assert self.gate.wait(WAIT)
        if self.spoils & {part.graph.graph_id for part in parts}:
            raise RuntimeError("planted")
        with self.lock:
            self.joins.append([part.graph.graph_id for part in parts])
            self.log += [(graph.graph_id, op.op_id, tuple(rows)) for graph, op, rows in parts]
            self.queue.append(Queue())
            return self.queue[-1]


class JoiningRig(IssuingRig):
    def __init__(self, **options: object) -> None:
        self.log = []
        lock = threading.Lock()
        self.saves = Joiner(self.log, lock)
        self.at = {path: Recorder(self.log, lock) for path in Path} | {Path.D2H: self.saves}
        self.on_device = [self.saves]
        self.timings = []
        self.engine = TransferEngine(self.at, observer=self.timings.append, **options)  # type: ignore[arg-type]

    def hold(self) -> None:
        """Let as many saves be issued as may be: what comes now waits."""
        for graph_id in range(900, 900 + SAVES_ISSUED):
            self.engine.submit(
                build_save(graph_id, chain(1), [0], None, batch_rows=1).bind(units(1))
            )
        self.until(lambda: len(self.saves.queue) == SAVES_ISSUED)


@given(
    steps=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=8), min_size=1, max_size=3),
    spoils=st.sets(st.integers(0, 23), max_size=2),
    breaks=st.booleans(),
)
@settings(max_examples=examples(40), deadline=None)
def test_saves_of_a_step_that_wait_together_are_joined_and_end_each_for_itself(
    steps: list[list[int]], spoils: set[int], breaks: bool
) -> None:
    rig = JoiningRig(nbytes=lambda op: op.rows.size * (COPY_BYTES // 12))
    rig.hold()
    rig.saves.spoils = spoils
    graphs, wave_of = {}, {}
    for sizes in steps:
        wave = rig.engine.wave()
        for rows in sizes:
            graph_id = len(graphs)
            graphs[graph_id], wave_of[graph_id] = save(graph_id, rows), wave
            rig.engine.submit(graphs[graph_id], wave)
    if breaks:
        for one in rig.saves.queue:
            one.error = RuntimeError("planted: the device has failed")
    rig.end_all()
    reports: dict[int, dict[int, dict[int, RowError]]] = {}
    for report in rig.engine.poll():
        reports.setdefault(report.graph_id, {})[report.op_id] = report.failed
    for graph_id, graph in graphs.items():
        assert set(reports[graph_id]) == {op.op_id for op in graph.ops}
        fails = graph_id in spoils
        expected = dict.fromkeys(range(graph.num_rows), RowError.INTERNAL) if fails else {}
        assert reports[graph_id][0] == expected, "it failed with another, or without a cause"
        copied = [rows for number, op_id, rows in rig.log if (number, op_id) == (graph_id, 0)]
        assert copied == ([] if fails else [tuple(range(graph.num_rows))])
    for joined in rig.saves.joins:
        assert len({wave_of[graph_id] for graph_id in joined}) == 1
        assert sum(graphs[graph_id].num_rows for graph_id in joined) <= 12
    for wave in set(wave_of.values()):
        its = [graph_id for graph_id in graphs if wave_of[graph_id] == wave]
        if not spoils and len(its) > 1 and sum(graphs[i].num_rows for i in its) <= 12:
            assert its in rig.saves.joins, "several copies, where one was enough"
    assert (
        sum(timing.rows for timing in rig.timings if timing.op.path is Path.D2H)
        == sum(graph.num_rows for graph in graphs.values()) + SAVES_ISSUED
    )
    rig.engine.check_integrity()
    assert rig.engine.close(timeout=WAIT)


def test_saves_that_were_joined_are_one_of_what_may_be_issued() -> None:
    rig = JoiningRig()
    rig.hold()
    first, second = rig.engine.wave(), rig.engine.wave()
    for graph_id in range(6):
        rig.engine.submit(save(graph_id, 1), first if graph_id < 3 else second)
    for one in list(rig.saves.queue):
        one.ended.set()
    rig.until(lambda: len(rig.saves.joins) == SAVES_ISSUED)
    assert rig.saves.joins == [[0, 1, 2], [3, 4, 5]]
    copies = [rig.engine.issued(graph_id) for graph_id in range(6)]
    assert all(one == copies[0] for one in copies[:3])
    assert copies[0] != copies[3]
    rig.end_all()
    assert rig.engine.close(timeout=WAIT)


def test_who_waits_for_saves_has_them_issued_together_and_no_others() -> None:
    rig = JoiningRig()
    rig.hold()
    wave = rig.engine.wave()
    for graph_id in range(6):
        rig.engine.submit(save(graph_id, 1), wave)
    rig.saves.gate.clear()
    rig.engine.put_first([1, 4, 5])
    rig.saves.gate.set()
    for graph_id in (1, 4, 5):
        assert rig.engine.wait_issued(graph_id, timeout=WAIT)
    issued = {graph_id for graph_id, _, _ in rig.log if graph_id < 900}
    assert issued == {1, 4, 5}
    assert len(rig.saves.queue) <= SAVES_ISSUED + 2
    rig.end_all()
    assert rig.engine.close(timeout=WAIT)


@pytest.mark.parametrize("at", ["_finish", "ends", "_taken"])
def test_an_error_of_the_engine_ends_all_that_were_joined(
    monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    rig = JoiningRig()
    rig.hold()
    wave = rig.engine.wave()
    for graph_id in range(4):
        rig.engine.submit(save(graph_id, 1), wave)
    finish = rig.engine._finish

    def broken(run: Any, position: int, failed: dict[int, RowError]) -> None:
        if run.graph.graph_id == 2 and not failed:
            raise RuntimeError("planted: the books are wrong")
        finish(run, position, failed)

    taken = PathQueue._taken

    def broken_too(queue: PathQueue, graph_id: int, position: int, *, counted: bool) -> Any:
        if graph_id == 2:
            raise RuntimeError("planted: the books are wrong")
        return taken(queue, graph_id, position, counted=counted)

    if at == "_finish":
        monkeypatch.setattr(rig.engine, "_finish", broken)
    elif at == "_taken":
        monkeypatch.setattr(PathQueue, "_taken", broken_too)
    else:
        monkeypatch.setattr(OpThread, "_execute_joined", None)
    rig.end_all()
    failed = {r.graph_id: r.failed for r in rig.engine.poll() if r.op_id == 0}
    assert set(failed) >= set(range(4)), "somebody waits for it for ever"
    assert failed[2] == {0: RowError.INTERNAL}
    assert rig.engine.stopped
    assert rig.engine.close(timeout=WAIT)


def give_up(rig: IssuingRig, how: str, ahead: list[float]) -> None:
    if how == "cancel":
        rig.engine.cancel(1)
    elif how == "deadline":
        ahead[0] = 601.0
    elif how == "row":
        rig.at[Path.DISK2H].fail = dict.fromkeys(range(9), RowError.CORRUPT)


@given(
    host=st.integers(0, 2),
    disk=st.integers(1, 3),
    how=st.sampled_from(["nothing", "cancel", "deadline", "row"]),
    breaks=st.booleans(),
)
@settings(max_examples=examples(40), deadline=None)
def test_an_op_that_was_issued_ends_well_whatever_happens_to_its_graph(
    host: int, disk: int, how: str, breaks: bool
) -> None:
    """Only a device that fails can fail it, and nothing else fails later than the wait for it."""
    rig, ahead = IssuingRig(), [0.0]
    rig.engine._clock = lambda: time.monotonic() + ahead[0]
    rig.at[Path.DISK2H].gate.clear()
    graph = load(1, host, disk, deadline_s=600)
    rig.engine.submit(graph)
    from_host = {op.op_id for op in graph.ops if op.path is Path.H2D and not op.deps}
    rig.until(lambda: all(rig.states(graph)[i] is OpState.ISSUED for i in from_host))
    copies = rig.at[Path.H2D]
    assert isinstance(copies, Issuer)
    if breaks and from_host:
        copies.queue[0].error = RuntimeError("planted: the device has failed")
    give_up(rig, how, ahead)
    early = {r.op_id: r.failed for r in rig.engine.poll()}
    assert not from_host & set(early), "an issued op cannot be given up"
    rig.at[Path.DISK2H].gate.set()
    assert rig.engine.wait_issued(1, timeout=WAIT)
    early |= {r.op_id: r.failed for r in rig.engine.poll()}
    while not rig.engine.wait(1, 0.01):
        rig.let_end()
    late = {r.op_id: r.failed for r in rig.engine.poll()}
    assert {i for i in from_host if (early | late)[i]} == ({0} if breaks and from_host else set())
    known = {row for failed in early.values() for row in failed}
    assert {row for i in set(late) - from_host for row in late[i]} <= known
    rig.engine.check_integrity()
    assert rig.engine.close(timeout=WAIT)
