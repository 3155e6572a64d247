"""Each mistake that a review found in an order of calls is put back once, and must be found.

A mistake is found if some seed has a fault of the kind that the mistake is. The same runs without
the mistake are clean: see the other modules here.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest

from kvcore.connector.worker import Load, StepWorker
from kvcore.memory.arena import HostArena
from kvcore.memory.copy import link
from kvcore.memory.copy.base import DeviceOps
from kvcore.memory.device import Event, device_of
from kvcore.testing.waiting import until
from kvcore.transfer.graph import TransferGraph
from kvcore.transfer.plan import Chain, build_load, build_save
from kvcore.worker import WorkerLimits
from kvcore.worker.streams import CopyStreams
from kvcore_devtools.gpu import (
    SHAPE,
    GpuRank,
    Machine,
    RecordingDevice,
    RecordingOps,
    installed,
)
from kvcore_devtools.gpu.device import RecordedEvent, RecordedStream
from support.orders.books import NAMESPACE, Books, Step
from support.orders.failing import fail_first_attempts
from support.orders.finding import expect_none, find_fault
from support.orders.sglang import SglangScheduler
from support.orders.trtllm import TrtllmExecutor
from support.orders.vllm import VllmRunner

pytestmark = pytest.mark.slow

STEPS = 20


def found(
    run: Callable[[Machine, GpuRank, int], None],
    kind: str | tuple[str, ...],
    *words: str,
    limits: WorkerLimits | None = None,
    make_ops: Callable[[Machine], DeviceOps] = RecordingOps,
) -> None:
    """Run a rank with one seed after the other; see `find_fault`."""
    find_fault(on_rank(run, limits, make_ops), kind, *words)


def not_found(run: Callable[[Machine, GpuRank, int], None], kind: str) -> None:
    expect_none(on_rank(run), kind)


def on_rank(
    run: Callable[[Machine, GpuRank, int], None],
    limits: WorkerLimits | None = None,
    make_ops: Callable[[Machine], DeviceOps] = RecordingOps,
) -> Callable[[Machine, int], None]:
    def trial(machine: Machine, seed: int) -> None:
        rank = GpuRank(machine, limits=limits, ops=make_ops(machine))
        try:
            run(machine, rank, seed)
        finally:
            machine.finish()
            rank.worker.close(timeout=5)

    return trial


def in_copy_thread() -> bool:
    return threading.current_thread().name.startswith(("kvcore-h2d", "kvcore-d2h"))


def vllm(
    machine: Machine, rank: GpuRank, seed: int, *, runner: int = 2, books: Books | None = None
) -> None:
    VllmRunner(rank, runner=runner, depth=2).run(books or Books(rank, seed), STEPS)


def chain(blocks: int) -> Chain:
    return Chain(NAMESPACE, b"", tuple(bytes([i]) * 16 for i in range(blocks)))


def save(rank: GpuRank, graph_id: int, pages: list[int], slots: list[int]) -> TransferGraph:
    units = rank.units(pages)
    return build_save(graph_id, chain(len(pages)), slots, None, batch_rows=2).bind(units)


def load(rank: GpuRank, graph_id: int, pages: list[int], slots: list[int]) -> TransferGraph:
    units = rank.units(pages)
    return build_load(graph_id, chain(len(pages)), slots, [], batch_rows=2).bind(units)


# -- the worker's streams -------------------------------------------------------------------


def test_a_dropped_mark_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies do not wait for the engine's work so far."""
    follow = RecordedStream.follow
    monkeypatch.setattr(
        RecordedStream,
        "follow",
        lambda stream, event: None if in_copy_thread() else follow(stream, event),
    )
    found(vllm, "race", "a copy of layers", "forward")


def test_a_mark_that_comes_after_the_submission_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy thread can take the op before it knows what the op's copies wait for."""
    start_after = CopyStreams.start_after
    late = list[tuple[CopyStreams, int, Event]]()
    monkeypatch.setattr(
        CopyStreams, "start_after", lambda streams, *what: late.append((streams, *what))
    )

    def run(machine: Machine, rank: GpuRank, seed: int) -> None:
        rank.replay({}, {3: 1})
        rank.worker.submit(save(rank, 1, [3], [0]))
        rank.worker.engine.wait_issued(1)
        start_after(*late.pop())

    found(run, "race", "page 3")


def test_a_done_event_on_the_wrong_stream_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the copies is recorded where there are none."""
    record = RecordedStream.record

    def wrong(stream: RecordedStream, *, timed: bool = False) -> RecordedEvent:
        if in_copy_thread():
            stream = RecordedStream(stream.machine, stream.machine.new_stream())
        return record(stream, timed=timed)

    monkeypatch.setattr(RecordedStream, "record", wrong)
    found(vllm, "race", "a copy of layers")


def test_a_thread_that_does_not_enter_the_device_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of the worker keeps GPU 0 as its current device, in a rank of GPU 1 (G3)."""
    monkeypatch.setattr(RecordingDevice, "enter", lambda device: None)
    monkeypatch.setattr(RecordingDevice, "current", lambda device: contextlib.nullcontext())
    found(vllm, "device", "current device 0 in a rank of device 1", "kvcore-")


# -- the engine's steps ---------------------------------------------------------------------


class _Careless(Books):
    """Names no graph in the fence of a step."""

    def plan(self, *, drain: bool = False) -> Step:
        step = super().plan(drain=drain)
        step.fence = []
        return step


@pytest.mark.parametrize("engine", ["vllm 1", "vllm 2", "trtllm"])
def test_a_dropped_fence_is_found(engine: str) -> None:
    """A page is given away while a save still reads it."""

    def run(machine: Machine, rank: GpuRank, seed: int) -> None:
        books = _Careless(rank, seed)
        if engine == "trtllm":
            TrtllmExecutor(rank, layerwise=True, overlap=True).run(books, STEPS)
        else:
            vllm(machine, rank, seed, runner=int(engine[-1]), books=books)

    found(run, "race", "page", "read by a copy of layers", "written by a forward")


class _Hasty(Books):
    """Starts the saves of what a forward computes before the forward."""

    def plan(self, *, drain: bool = False) -> Step:
        step = super().plan(drain=drain)
        step.early_saves += step.late_saves
        step.late_saves = []
        return step


def test_late_saves_before_the_forward_are_found() -> None:
    def run(machine: Machine, rank: GpuRank, seed: int) -> None:
        vllm(machine, rank, seed, books=_Hasty(rank, seed))

    found(run, "race", "a copy of layers", "forward")


@pytest.mark.parametrize("how", ["zeroing", "a copy on write"])
def test_what_the_second_runner_writes_before_the_fence_is_found(how: str) -> None:
    """Runner V2 zeroes and copies pages first; `handle_preemptions` comes later (G10)."""

    def run(machine: Machine, rank: GpuRank, seed: int, version: int = 2) -> None:
        runner = VllmRunner(rank, runner=version)
        rank.replay({}, {3: 1, 4: 2})
        runner.step(Step(early_saves=[save(rank, 1, [3], [0])], reads={4: 2}))
        if how == "zeroing":
            runner.zeroes = [3]
        else:
            runner.copies = [(4, 3)]
        runner.step(Step(fence=[1], reads={4: 2}))

    found(run, "race", "page 3", how)

    def first(machine: Machine, rank: GpuRank, seed: int) -> None:
        run(machine, rank, seed, version=1)

    not_found(first, "race")


def test_a_load_that_runs_beside_the_zeroing_of_its_pages_is_found() -> None:
    """Runner V1 zeroes after `handle_preemptions`: a load that starts there does not wait (G10)."""

    def run(machine: Machine, rank: GpuRank, seed: int) -> None:
        rank.fill(0, 1)
        runner = VllmRunner(rank, runner=1)
        runner.zeroes = [3]
        runner.step(Step(sync_loads=[load(rank, 1, [3], [0])], reads={3: 1}))

    found(run, "race", "page 3", "zeroing")


# -- retries --------------------------------------------------------------------------------


@pytest.mark.parametrize("forgetful", [False, True])
def test_a_retry_outside_of_the_fence_is_found(
    forgetful: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's thread that polls repeats a load, ordered after its own stream only (G20)."""
    retry = StepWorker._retry

    def forget(worker: StepWorker[str], load: Load[str]) -> None:
        load.after = worker._worker.mark()  # of this thread, without the forward stream
        retry(worker, load)

    if forgetful:
        monkeypatch.setattr(StepWorker, "_retry", forget)
    fail_first_attempts(monkeypatch, share=1.0)

    def run(machine: Machine, rank: GpuRank, seed: int) -> None:
        scheduler = SglangScheduler(rank, layerwise=True, leads=True)
        rank.fill(0, 1)
        graph = load(rank, 1, [3], [0])
        with scheduler.forward.issuing():
            rank.replay({}, {3: 7})  # of the request that had the page before
        with scheduler.schedule.issuing():
            scheduler.worker.start_loads([graph])

        def report() -> None:
            scheduler.device.enter()
            until(scheduler.worker.poll)

        thread = threading.Thread(target=report)
        thread.start()
        thread.join()

    if forgetful:
        found(run, "race", "page 3", "a copy of layers")
        return
    not_found(run, "race")


# -- memory ---------------------------------------------------------------------------------


def test_staging_of_the_link_that_is_not_waited_for_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A copy is gathered into the staging while the one before is still on the link."""
    monkeypatch.setattr(link, "SLOT_BYTES", (2 * SHAPE.nbytes + 512,))

    @contextlib.contextmanager
    def taken(staging: object) -> Iterator[None]:
        yield

    monkeypatch.setattr(link._Staging, "taken", taken)

    def run(machine: Machine, rank: GpuRank, seed: int) -> None:
        vllm(machine, rank, seed)

    def staged(machine: Machine) -> link.LinkOps:
        return link.LinkOps(RecordingOps(machine), way=link.Way.STAGED)

    found(run, "race", "device memory", limits=WorkerLimits(copy_threads=2), make_ops=staged)


def test_copies_that_are_queued_when_the_engine_sleeps_are_found() -> None:
    """The pages are unmapped while a save still reads them (G19)."""

    def run(machine: Machine, rank: GpuRank, seed: int, *, asleep: bool = False) -> None:
        runner = VllmRunner(rank, runner=2)
        rank.replay({}, {3: 1})
        runner.step(Step(early_saves=[save(rank, 1, [3], [0])], reads={3: 1}))
        if asleep:
            assert runner.worker.quiesce(10)
        for region in rank.regions:
            machine.unmap(region)

    found(run, "in use", "layer 0")

    def waits(machine: Machine, rank: GpuRank, seed: int) -> None:
        run(machine, rank, seed, asleep=True)

    not_found(waits, "in use")


def test_a_copy_that_is_issued_while_the_engine_sleeps_is_found() -> None:
    def run(machine: Machine, rank: GpuRank, seed: int) -> None:
        for region in rank.regions:
            machine.unmap(region)
        rank.worker.submit(save(rank, 1, [3], [0]))
        rank.worker.wait_device(1)

    found(run, "memory", "layer 0", "unmapped")


def test_an_arena_that_is_unregistered_while_a_copy_runs_is_found() -> None:
    """The arena is closed without the wait for the copies, as after a session that is over."""

    def run(machine: Machine, rank: GpuRank, seed: int) -> None:
        rank.worker.submit(save(rank, 1, [3], [0]))
        until(lambda: machine.counts["launches"] > 0)
        rank.arena.close()

    found(run, "in use", "slot 0 of the arena", "unregistered")


class _Greedy(Books):
    """Gives slots of the arena to new blocks while copies still use them."""

    def busy_slots(self) -> set[int]:
        return set()


def test_a_slot_that_is_rewritten_before_its_copy_has_ended_is_found() -> None:
    def run(machine: Machine, rank: GpuRank, seed: int) -> None:
        vllm(machine, rank, seed, books=_Greedy(rank, seed))

    found(run, "race", "of the arena")


# -- the process ----------------------------------------------------------------------------


@pytest.mark.parametrize("drains", [False, True])
def test_an_error_that_a_failed_registration_leaves_is_found(
    drains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's next kernel fails, although the arena's failure was only a warning (G6)."""
    if not drains:
        monkeypatch.setattr(
            RecordingDevice,
            "register",
            lambda device, address, nbytes: device.machine.register(address, nbytes),
        )
    with installed(Machine(0, lockable=4096)) as machine:
        arena = HostArena(SHAPE, 64, huge_pages=False, pin=device_of(None))
        assert not arena.pinned
        with contextlib.suppress(RuntimeError):
            machine.launch("a kernel of the engine", lambda: None)
        arena.close()
    assert [fault.kind for fault in machine.faults] == ([] if drains else ["pending error"])


@pytest.mark.parametrize("in_step", [False, True])
def test_a_registration_in_a_step_of_the_engine_is_found(in_step: bool) -> None:
    """All requests stand still while memory is locked (G2)."""
    with installed(Machine(0)) as machine:
        with machine.in_step() if in_step else contextlib.nullcontext():
            arena = HostArena(SHAPE, 64, huge_pages=False, pin=device_of(None))
        arena.close()
    kinds = {fault.kind for fault in machine.faults}
    assert kinds == ({"stall"} if in_step else set())
