"""Loads that go from disk straight into device memory (DISK2D), on the recording device.

Each mistake is put back once, and must be found. The disk tier, its reader and the staging are
those that kvcore ships; the agent that moves the bytes is played.
"""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvcore.memory.device_region import DeviceRegion
from kvcore.transfer.graph import Path as Way
from kvcore.transfer.graph import Span, TransferGraph
from kvcore.transfer.plan import Chain, TierRows, build_load, build_save
from kvcore.worker.streams import IssuedCopies
from kvcore_devtools.gpu import Machine, installed
from kvcore_devtools.gpu.device import RecordedStream
from kvcore_devtools.gpu.memory import span
from support.orders.books import NAMESPACE
from support.orders.disk import DirectBooks, disk_rank
from support.orders.finding import expect_none, find_fault
from support.orders.vllm import VllmRunner

pytestmark = pytest.mark.slow

STEPS = 30


def load(
    machine: Machine,
    seed: int,
    folder: Path,
    books: type[DirectBooks] = DirectBooks,
    enough: int = 8,
    **rank: Any,
) -> int:
    """Run random steps; return the number of blocks that were loaded past host memory.

    How soon a block is on disk depends on the machine: steps go on until ``enough`` were loaded.
    """
    here = folder / str(seed)
    here.mkdir()
    with disk_rank(machine, here, seed, slots=4, **rank) as one:
        leader = books(one, seed)
        runner = VllmRunner(one, runner=1 + seed % 2, depth=2)
        runner.drive(leader, STEPS, enough=lambda: leader.direct >= enough)
        leader.check()
    return leader.direct


@pytest.mark.parametrize("seed", range(4))
def test_every_load_past_host_memory_has_the_right_kv(seed: int, tmp_path: Path) -> None:
    """Some reads fail, and go through host memory."""
    with installed(Machine(seed, index=1)) as machine:
        assert load(machine, seed, tmp_path, threads=1 + seed % 2)
        machine.check()


class _Hasty(DirectBooks):
    """Gives a place to another load as soon as a load was planned."""

    def plan(self, *, drain: bool = False) -> Any:
        for number in list(self._staged):
            self._places += self._staged.pop(number)
        return super().plan(drain=drain)


def test_a_place_that_is_given_away_before_its_copy_has_ended_is_found(tmp_path: Path) -> None:
    """The disk writes over a block that waits for its copy to the engine's pages."""
    find_fault(
        lambda machine, seed: load(machine, seed, tmp_path, _Hasty, enough=40) and None,
        "race",
        "memory/device_region.py",
        "by the disk2d",
    )


def unordered(graph: TransferGraph) -> TransferGraph:
    """Return a graph whose reads do not wait for the copies out of their places."""
    ops = [
        msgspec.structs.replace(op, deps=()) if op.path is Way.DISK2D else op for op in graph.ops
    ]
    return msgspec.structs.replace(graph, ops=tuple(ops))


@pytest.mark.parametrize("waits", [True, False])
def test_a_read_that_does_not_wait_for_the_place_is_found(waits: bool, tmp_path: Path) -> None:
    """A load of more blocks than there are places uses a place again."""

    def trial(machine: Machine, seed: int) -> None:
        here = tmp_path / str(seed)
        here.mkdir()
        with disk_rank(machine, here, seed, failing=0.0) as rank:
            chain = Chain(NAMESPACE, b"", tuple(bytes([i]) * 16 for i in range(4)))
            rank.replay({}, {page: page + 1 for page in range(4)})
            sink = TierRows(rank.tier, Way.H2DISK, Span(0, 4), range(4))
            units = rank.units(range(4))
            rank.worker.submit(build_save(1, chain, range(4), sink, batch_rows=4).bind(units))
            assert rank.worker.engine.wait(1, 60)
            source = TierRows(rank.tier, Way.DISK2D, Span(0, 4), range(4))
            graph = build_load(2, chain, [-1] * 4, [source], batch_rows=1, staged=[0] * 4).bind(
                rank.units(range(4, 8))
            )
            rank.worker.submit(graph if waits else unordered(graph))
            assert rank.worker.engine.wait(2, 60)

    if waits:
        expect_none(trial, "race", seeds=2)
    else:
        find_fault(trial, "race", "memory/device_region.py", "by the disk2d")


def test_a_copy_to_pages_that_does_not_wait_for_the_engine_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    follow = RecordedStream.follow

    def dropped(stream: RecordedStream, event: Any) -> None:
        if not threading.current_thread().name.startswith("kvcore-d2d"):
            follow(stream, event)

    monkeypatch.setattr(RecordedStream, "follow", dropped)
    find_fault(
        lambda machine, seed: load(machine, seed, tmp_path) and None,
        "race",
        "page",
        "thread kvcore-d2d",
    )


@pytest.mark.parametrize("waits", [True, False])
def test_a_block_by_way_of_host_memory_that_is_not_waited_for_is_found(
    waits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy into the staging only queues, and another thread's stream reads it."""
    wait = IssuedCopies.wait

    def put(region: DeviceRegion, place: int, block: memoryview) -> None:
        machine = region._device.machine  # type: ignore[attr-defined]
        at, data = place * region.slot_nbytes, bytes(block)
        address = region.tensor.data_ptr() + at

        def run() -> None:
            ctypes.memmove(address, data, len(data))

        machine.launch("put", run, writes=span(address, len(data)))

    def dropped(copies: IssuedCopies) -> None:
        if waits or not threading.current_thread().name.startswith("kvcore-disk"):
            wait(copies)

    monkeypatch.setattr(DeviceRegion, "put", put)
    monkeypatch.setattr(IssuedCopies, "wait", dropped)

    def trial(machine: Machine, seed: int) -> None:
        load(machine, seed, tmp_path, failing=1.0)

    if waits:
        expect_none(trial, "race", seeds=3)
    else:
        find_fault(trial, "race", "memory/device_region.py", "written by put")
