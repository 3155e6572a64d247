"""A rank over a server's arena, on the recording device: registered in chunks, by another thread.

Each mistake is put back once, and must be found. The worker, its mapping of the arena and the
copies over the link are those that kvcore ships; the server is its files.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcore.memory import pinned
from kvcore.memory.arena import HostArena
from kvcore.memory.copy.link import LinkOps, Way
from kvcore.memory.hugepages import PAGE
from kvcore.server import worker as served
from kvcore.server.mapped import MappedArenas
from kvcore.testing.waiting import until
from kvcore.transfer.graph import TransferGraph
from kvcore.transfer.plan import Chain, build_save
from kvcore_devtools.gpu import Machine, RecordingDevice, installed
from kvcore_devtools.gpu.hosts import WatchedEngine
from support.orders.books import NAMESPACE, Step
from support.orders.finding import expect_none, find_fault
from support.orders.served import ServedBooks, ServedRank
from support.orders.vllm import VllmRunner

pytestmark = pytest.mark.slow

STEPS = 15
WAYS = [None, *Way]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(pinned, "CHUNK_NBYTES", PAGE)
    monkeypatch.setattr(served, "TEND_S", 0.01)
    caplog.set_level(logging.CRITICAL, "kvcore")


def serve(machine: Machine, seed: int, folder: Path, *, restarts: int = 0, **rank: Any) -> None:
    """Run random steps, and more of them after each restart of the server."""
    one = ServedRank(machine, folder / str(seed), way=WAYS[seed % len(WAYS)], **rank)
    runner = VllmRunner(one, runner=1 + seed % 2, depth=2)
    try:
        for number in range(restarts + 1):
            leader = ServedBooks(one, seed)
            runner.drive(leader, STEPS)
            leader.check()
            if number < restarts:
                one.restart()
    finally:
        machine.finish()
        one.worker.close(timeout=5)
        one.server.close()


@pytest.mark.parametrize("seed", range(4))
def test_every_way_over_the_link_serves_a_servers_memory(seed: int, tmp_path: Path) -> None:
    """The server ends between the steps, and another one comes: its memory is another."""
    with installed(Machine(seed, index=1)) as machine:
        serve(machine, seed, tmp_path, restarts=1)
        machine.check()
        assert machine.counts["registrations"] == 2 * 3


@pytest.mark.parametrize("seed", range(4))
def test_memory_that_the_driver_refuses_serves_all_the_same(seed: int, tmp_path: Path) -> None:
    """Two of three chunks may be registered: then none is, and copies are from pageable memory."""
    with installed(Machine(seed, index=1, lockable=7 * PAGE)) as machine:
        serve(machine, seed % 3, tmp_path)  # a kernel does not serve it
        machine.check()
        assert not machine.memory.registered
        assert machine.counts["registrations"] == 3


# -- mistakes, each put back once ------------------------------------------------------------


def test_a_chunk_that_is_not_registered_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver is asked about one address, which is registered."""
    chunks = pinned._chunks

    def some(nbytes: int, unit: int) -> Iterator[tuple[int, int]]:
        every = list(chunks(nbytes, unit))
        assert len(every) > 2
        yield from every[:-1]

    monkeypatch.setattr(pinned, "_chunks", some)
    find_fault(
        lambda machine, seed: serve(machine, seed, tmp_path),
        "memory",
        "of the arena, but it is not registered",
    )


def test_memory_that_copies_take_for_registered_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing could be registered, and copies go on as if it were (G1, the other way round)."""
    over = LinkOps._link
    monkeypatch.setattr(
        LinkOps,
        "_link",
        lambda ops, src, dst: (found := over(ops, src, dst)) and found._replace(registered=True),
    )

    def trial(machine: Machine, seed: int) -> None:
        machine.lockable = 0
        serve(machine, seed, tmp_path)

    find_fault(trial, "memory", "of the arena, but it is not registered")


def test_a_chunk_that_ends_inside_a_block_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy then spans two registrations, which no document allows."""
    monkeypatch.setattr(
        pinned,
        "_chunks",
        lambda nbytes, unit: ((at, min(PAGE, nbytes - at)) for at in range(0, nbytes, PAGE)),
    )

    def trial(machine: Machine, seed: int) -> None:
        serve(machine, WAYS.index(Way.STAGED), tmp_path)

    find_fault(trial, "memory", "spans two registrations", seeds=1)


def test_an_arena_that_is_used_while_it_is_registered_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph is accepted before the last chunk is there."""
    register, go_on, began = RecordingDevice.register, threading.Event(), threading.Event()

    def slow(device: RecordingDevice, address: int, nbytes: int) -> None:
        register(device, address, nbytes)
        began.set()
        assert go_on.wait(60)

    monkeypatch.setattr(RecordingDevice, "register", slow)
    made = MappedArenas._map

    def early(arenas: MappedArenas, told: Any, file: int) -> Any:
        found = made(arenas, told, file)
        found.ready = True
        return found

    def trial(machine: Machine, seed: int) -> None:
        go_on.clear()
        began.clear()
        try:
            rank = ServedRank(machine, tmp_path / str(seed), way=Way.STAGED, waits=False)
            rank.replay({}, {3: 1})
            assert began.wait(60), "the first chunk is registered"
            refused = rank.worker.submit(save(rank, [23]))
            assert not refused
            rank.worker.wait_device(session_graph(rank))
        finally:
            machine.finish()
            go_on.set()
            rank.worker.close(timeout=5)
            rank.server.close()

    expect_none(trial, "memory", seeds=2)  # the graph is refused
    monkeypatch.setattr(MappedArenas, "_map", early)
    find_fault(trial, "memory", "slot 23 of the arena, but it is not registered", seeds=2)


def session_graph(rank: ServedRank) -> int:
    return ServedBooks(rank, 0)._number()


def save(rank: ServedRank, slots: list[int], page: int = 3) -> TransferGraph:
    chain = Chain(NAMESPACE, b"", tuple(bytes([slot]) * 16 for slot in slots))
    units = rank.units([page] * len(slots))
    return build_save(session_graph(rank), chain, slots, None, batch_rows=2).bind(units)


@pytest.mark.parametrize("patient", [True, False])
def test_a_session_that_is_left_while_its_copies_run_is_found(
    patient: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is gone, and its memory is unregistered under a copy that is queued."""
    monkeypatch.setattr(served, "KEPT_S", 0.0)
    if not patient:
        monkeypatch.setattr(WatchedEngine, "in_flight", property(lambda engine: 0))

    def trial(machine: Machine, seed: int) -> None:
        rank = ServedRank(machine, tmp_path / f"{patient}-{seed}", way=Way.STAGED)
        runner = VllmRunner(rank, runner=2)
        try:
            rank.replay({}, {3: 1})
            runner.step(Step(early_saves=[save(rank, [0])], reads={3: 1}))
            rank.server.close()
            until(lambda: not rank.worker._session and not rank.worker._arenas._mapped)
        finally:
            machine.finish()
            rank.worker.close(timeout=5)

    if patient:
        expect_none(trial, "in use", seeds=3)
    else:
        find_fault(trial, "in use", "slot 0 of the arena", "unregistered")


def test_memory_that_is_registered_in_a_step_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's thread registers the arena with the first graph (G2)."""
    get = MappedArenas.get

    def at_once(arenas: MappedArenas, told: dict[str, Any]) -> HostArena | None:
        found = get(arenas, told)
        if found is not None and not found.pinned:
            assert arenas._pin is not None
            found.pin(arenas._pin)
        return found

    def lazily(arenas: MappedArenas, told: Any, device: Any, wanted: Any) -> None:
        file = arenas._open(told)
        with arenas._lock:
            if not arenas._mapped:
                arenas._map(told, file).ready = True
        os.close(file)

    monkeypatch.setattr(MappedArenas, "get", at_once)
    monkeypatch.setattr(MappedArenas, "_bring", lazily)
    find_fault(
        lambda machine, seed: serve(machine, seed, tmp_path), "stall", "registered in a step"
    )


def test_a_tender_that_does_not_enter_the_device_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that registers keeps GPU 0 as its current device, in a rank of GPU 1 (G3)."""
    monkeypatch.setattr(RecordingDevice, "enter", lambda device: None)
    monkeypatch.setattr(
        RecordingDevice,
        "register",
        lambda device, address, nbytes: device.machine.register(address, nbytes),
    )
    monkeypatch.setattr(RecordingDevice, "current", lambda device: contextlib.nullcontext())
    find_fault(
        lambda machine, seed: serve(machine, seed, tmp_path),
        "device",
        "cudaHostRegister",
        "thread kvcore-tender",
    )
