"""Blends in the steps of vLLM's runners, on the recording device.

The fusion worker, the walk through the layers and torch's operations of a blend are those that
kvcore ships. What a blend has written is compared with what the same layers
make without streams, when the engine reads it in later steps.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
from torch import Tensor

from kvcore.connector.fusion_messages import BlendTime
from kvcore.connector.fusion_worker import FusionWorker
from kvcore.fusion.plan import LayerKV
from kvcore.worker import KVWorker, WorkerLimits
from kvcore_devtools.gpu import Machine, installed, queued_torch
from support.orders.blends import BlendBooks, BlendRank, ToyLayers, blends_of
from support.orders.finding import expect_none, find_fault
from support.orders.vllm import VllmRunner

pytestmark = pytest.mark.slow

STEPS = 3


@pytest.fixture(autouse=True)
def _no_traceback_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    """Keep no log of failed blends: pytest would keep the memory of their frames in use."""
    caplog.set_level(logging.CRITICAL, "kvcore.fusion")


def blend(machine: Machine, seed: int, *, depth: int = 2, **books: Any) -> int:
    """Run random steps with blends; return the number of blends.

    With ``depth`` 1 the host waits for each step, which orders most of what it issues later.
    """
    rank = BlendRank(machine, pages=16, limits=WorkerLimits(copy_threads=1 + seed % 2))
    blends = blends_of(rank, seed)
    try:
        with queued_torch(machine) as at_once:
            leader = BlendBooks(rank, seed, blends, at_once, **books)
            runner = VllmRunner(
                rank, runner=1 + seed % 2, full=seed % 3 == 0, depth=depth, blends=blends
            )
            runner.drive(leader, STEPS)
        leader.check()
    finally:
        machine.finish()
        rank.worker.close(timeout=5)
    return leader.count


def blend_alone(machine: Machine, seed: int, *, declines: bool = False) -> None:
    """Make blends one after the other, as in steps that the host does not wait for."""
    rank = BlendRank(machine, pages=16, limits=WorkerLimits(copy_threads=2))
    blends = blends_of(rank, seed)
    layers = blends._layers
    assert isinstance(layers, ToyLayers)
    try:
        with queued_torch(machine) as at_once:
            leader = BlendBooks(rank, seed, blends, at_once, share=1.0, failing=0.0)
            for _ in range(3):
                rank.replay({}, dict.fromkeys(leader._free, 1))  # for requests that have ended
                orders = leader.plan().blends
                if declines:
                    layers.failing.update((order.request_id, -1) for order in orders)
                blends.begin(orders, rank.worker.mark)
                bad = blends.run(lambda layer: None)
                assert bool(bad) is (declines and bool(orders))
                rank.replay({}, dict.fromkeys(bad, 1))  # the engine computes
    finally:
        machine.finish()
        rank.worker.close(timeout=5)


@pytest.mark.parametrize("seed", range(4))
def test_every_blend_writes_what_it_writes_without_streams(seed: int) -> None:
    with installed(Machine(seed, index=1)) as machine:
        assert blend(machine, seed, depth=1 + seed // 2, share=0.9)
        machine.check()


def test_a_blend_is_timed_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock's events pass on the device, and its seconds are reported in a later step."""
    with installed(Machine(2, index=1)) as machine:
        rank = BlendRank(machine, pages=16)
        blends = blends_of(rank, 2)
        with queued_torch(machine) as at_once:
            leader = BlendBooks(rank, 2, blends, at_once, failing=0.0, share=1.0)
            runner = VllmRunner(rank, runner=2, depth=2, blends=blends)
            found, take = list[BlendTime](), blends.take_times
            monkeypatch.setattr(blends, "take_times", lambda: found.extend(take()) or [])
            runner.drive(leader, STEPS)
            machine.finish()
            found += take()
        rank.close()
    assert len(found) == leader.count
    assert all(one.seconds >= 0 for one in found)
    steps = [counts for name, counts in machine.by_op.items() if name.startswith("step")]
    assert not any(counts["host_waits"] for counts in steps)


# -- mistakes, each put back once ------------------------------------------------------------


def test_blends_one_after_the_other_are_in_order() -> None:
    expect_none(blend_alone, "race", seeds=2)


def test_a_layer_that_is_not_waited_for_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compute stream does not wait for the chunks' copies of a layer."""
    monkeypatch.setattr(KVWorker, "wait_layer", lambda worker, graph_id, layer: None)
    find_fault(  # the read is from the pages to the positions
        blend_alone,
        "race",
        "page",
        "written by a copy of layers",
        "read by a copy of layers",
    )


def test_a_wait_for_the_layer_before_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = KVWorker.wait_layer
    monkeypatch.setattr(
        KVWorker, "wait_layer", lambda worker, graph_id, layer: wait(worker, graph_id, layer - 1)
    )
    find_fault(blend_alone, "race", "page", "a copy of layers")


def test_an_exact_prefix_that_is_not_waited_for_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blend reads pages into which this step loads the tokens before it."""
    run = FusionWorker.run
    monkeypatch.setattr(FusionWorker, "run", lambda worker, landed: run(worker, lambda layer: None))
    find_fault(
        partial(blend, share=1.0, failing=0.0),
        "race",
        "page",
        "read by a copy of layers",
        "written by a copy of layers",
    )


def test_chunks_that_come_while_a_step_uses_their_pages_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pages were those of a request for which the running step still computes."""
    begin = FusionWorker.begin

    def early(worker: FusionWorker, orders: Any, mark: Any) -> Any:
        return begin(worker, orders, worker._worker.device.stream().record)

    monkeypatch.setattr(FusionWorker, "begin", early)
    find_fault(blend_alone, "race", "page", "by a copy of layers", "by a full graph")


def test_chunks_of_a_declined_blend_that_are_not_waited_for_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their copies still run when the engine computes the request instead."""

    def trial(machine: Machine, seed: int) -> None:
        blend_alone(machine, seed, declines=True)

    expect_none(trial, "race", seeds=1)
    monkeypatch.setattr(FusionWorker, "_follow", lambda worker, order: None)
    find_fault(trial, "race", "page", "written by a copy of layers")


def test_a_blend_on_a_stream_that_the_forward_does_not_follow_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done = FusionWorker._done

    def aside(worker: FusionWorker, *given: Any) -> bool:
        with worker._worker.device.stream().issuing():
            return done(worker, *given)

    monkeypatch.setattr(FusionWorker, "_done", aside)
    find_fault(blend, "race", "the engine's write of a blend", "page")


def test_a_result_that_is_written_from_memory_of_another_stream_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The write runs beside the layers, and the buffer of a layer is filled again meanwhile."""
    write = ToyLayers.write

    def aside(layers: ToyLayers, layer: int, kv: LayerKV, slots: Tensor) -> None:
        device = layers._rank.worker.device
        main, side = device.current_stream(), device.stream()
        side.follow(main.record())
        with side.issuing():
            write(layers, layer, kv, slots)

    monkeypatch.setattr(ToyLayers, "write", aside)
    find_fault(blend, "race", "read by the engine's write of a blend")
