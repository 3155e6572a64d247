"""`kvcore.memory.device` on a real GPU, and copies of KV beyond 2^31 elements."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from kvcore.errors import UnsupportedError
from kvcore.memory.arena import HostArena
from kvcore.memory.cuda_batch import batch_copy
from kvcore.memory.device import CudaDevice, Device, device_of
from kvcore.memory.layout import Axis, KVLayout, KVView, Plane, arena_layout
from kvcore.model.shape import BlockShape
from support.gpu_rig import DEVICE, IS_GPU, MISSING, SHAPE, fitting, keep_busy, wait_for_device

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)
on_a_gpu = pytest.mark.skipif(not IS_GPU, reason="a CPU registers no memory and queues no work")


@pytest.fixture
def device() -> Device:
    return device_of(DEVICE)


@pytest.fixture
def arena(device: Device) -> Iterator[HostArena]:
    made = HostArena(SHAPE, 4, pin=device)
    yield made
    made.close()


def assert_no_error_is_pending() -> None:
    """torch's next launch would raise an error that a call left behind."""
    ones = torch.ones(64, device=DEVICE)
    assert (ones + 1).sum().item() == 128
    wait_for_device()


@on_a_gpu
def test_memory_registered_twice_is_refused_and_leaves_no_error(
    device: Device, arena: HostArena
) -> None:
    assert arena.pinned
    memory = arena.tensor()
    address, nbytes = memory.data_ptr(), memory.nbytes
    with pytest.raises(UnsupportedError, match="the driver refuses"):
        device.register(address, nbytes)
    assert_no_error_is_pending()
    assert device.reaches(memory)


@on_a_gpu
@pytest.mark.parametrize("address", [0, 1 << 46])
def test_memory_that_is_not_there_is_refused_and_leaves_no_error(
    device: Device, address: int
) -> None:
    with pytest.raises(UnsupportedError, match="the driver refuses"):
        device.register(address, 1 << 20)
    assert_no_error_is_pending()
    device.unregister(address)
    assert_no_error_is_pending()


@on_a_gpu
def test_an_arena_that_was_closed_is_no_longer_registered(device: Device) -> None:
    """The same addresses can be registered again: nothing of a closed arena is left."""
    for _ in range(3):
        arena = HostArena(SHAPE, 4, pin=device)
        assert arena.pinned
        arena.close()
    assert_no_error_is_pending()


@on_a_gpu
def test_pageable_memory_is_out_of_reach(device: Device, arena: HostArena) -> None:
    assert device.reaches(arena.tensor())
    assert not device.reaches(torch.zeros(1 << 20))
    assert device.reaches(torch.zeros(1, device=DEVICE))


@on_a_gpu
def test_a_thread_that_enters_the_device_works_on_it() -> None:
    """On the last GPU, which is not the one that threads begin with if there are several."""
    last = torch.cuda.device_count() - 1
    entered = device_of(torch.device("cuda", last))
    seen: list[int] = []

    def work() -> None:
        entered.enter()
        seen.append(torch.cuda.current_device())
        stream = entered.stream()
        with stream.issuing():
            seen.append(torch.zeros(1, device="cuda").device.index)
        stream.record().wait()

    before = torch.cuda.current_device()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert seen == [last, last]
    assert torch.cuda.current_device() == before


def test_a_stream_follows_an_event(device: Device) -> None:
    """What one stream writes late, another reads after it."""
    source, target = torch.zeros(1 << 20, device=DEVICE), torch.zeros(1 << 20, device=DEVICE)
    wait_for_device()  # they are zero, whatever stream comes next
    first, second = device.stream(), device.stream()
    with first.issuing():
        keep_busy()
        source += 7
    second.follow(first.record())
    with second.issuing():
        target.copy_(source)
    done = second.record()
    done.wait()
    assert done.passed()
    assert bool((target == 7).all())


@on_a_gpu
def test_events_pass_in_order_and_tell_the_time_between(device: Device) -> None:
    stream = device.stream()
    with stream.issuing():
        start = stream.record(timed=True)
        keep_busy()
        end = stream.record(timed=True)
    assert not end.passed()  # the work takes far longer than issuing it
    end.wait()
    assert start.passed()
    assert end.since(start) > 0


def test_what_is_uploaded_arrives(device: Device) -> None:
    """The array may be changed as soon as the call returns."""
    for number in range(50):
        array = np.full(1000, number)
        there = device.upload(array) if IS_GPU else device.upload(array.copy())
        array[:] = -1
        assert there.device == device.name
        assert bool((there == number).all())


@on_a_gpu
def test_a_device_without_an_index_is_the_current_one() -> None:
    assert CudaDevice(torch.device("cuda")).name == torch.device(
        "cuda", torch.cuda.current_device()
    )


# -- copies by address ----------------------------------------------------------------------


def three_runs(arena: HostArena) -> tuple[torch.Tensor, torch.Tensor, list[np.ndarray]]:
    """Return host memory, device memory, and three runs from the first to the second."""
    here = arena.tensor().view(torch.uint8)
    here.copy_(torch.from_numpy(np.random.default_rng(1).integers(0, 256, len(here), np.uint8)))
    there = torch.zeros(len(here), dtype=torch.uint8, device=DEVICE)
    wait_for_device()
    offsets, sizes = np.array([0, 4096, 70_001]), np.array([7, 60_000, 1])
    return here, there, [there.data_ptr() + offsets, here.data_ptr() + offsets, sizes]


def assert_copied(here: torch.Tensor, there: torch.Tensor) -> None:
    wanted = torch.zeros_like(here)
    for first, count in ((0, 7), (4096, 60_000), (70_001, 1)):
        wanted[first : first + count] = here[first : first + count]
    assert torch.equal(there.cpu(), wanted)


@on_a_gpu
def test_the_driver_makes_copies_in_one_call(device: Device, arena: HostArena) -> None:
    """If it refuses, kvcore makes them one by one: right, and slower. The code is a CUresult."""
    batch = batch_copy()
    if batch is None:
        pytest.skip("the driver has no cuMemcpyBatchAsync: copies are made one by one")
    here, there, (dst, src, sizes) = three_runs(arena)
    before, stream = here.clone(), torch.cuda.Stream(DEVICE)
    for to, of in ((dst, src), (src, dst)):
        code = batch(to, of, sizes, stream.cuda_stream)
        stream.synchronize()
        assert code == 0, f"cuMemcpyBatchAsync refuses with error {code}"
        assert_copied(before, there)
        if to is dst:
            here.zero_()
    assert_copied(before, here)


@pytest.mark.parametrize("on", ["own stream", "default stream"])
@pytest.mark.parametrize("registered", [True, False])
def test_copies_by_address_arrive(
    device: Device, arena: HostArena, on: str, registered: bool
) -> None:
    here, there, arrays = three_runs(arena)
    with device.stream().issuing() if on == "own stream" else nullcontext():
        device.copy_batch(*arrays, registered=registered)
        device.current_stream().record().wait()
    assert_copied(here, there)
    assert_no_error_is_pending()


@on_a_gpu
def test_a_capture_goes_on_while_a_thread_of_kvcores_works(device: Device) -> None:
    """It registers memory and asks an event, which a capture forbids other threads to do."""
    given, other = torch.ones(64, device=DEVICE), torch.ones(64, device=DEVICE)
    wait_for_device()
    seen: list[object] = []

    def work() -> None:
        device.enter()
        stream = device.stream()
        with stream.issuing():
            other.add_(1)
        event = stream.record()
        event.wait()
        arena = HostArena(SHAPE, 4, pin=device)
        seen.extend((event.passed(), arena.pinned))
        arena.close()

    graph, thread = torch.cuda.CUDAGraph(), threading.Thread(target=work)
    with torch.cuda.graph(graph):
        got = given + 1
        thread.start()
        thread.join(60)
        got = got * 2
    graph.replay()
    wait_for_device()
    assert seen == [True, True]
    assert bool((got == 4).all())


# -- KV beyond 2^31 elements ----------------------------------------------------------------

TOKENS, DIM = 16, 64
SMALL = BlockShape(1, 1, DIM, TOKENS, "bfloat16")
FAR = (1 << 31) + 4096
"""Elements from one page to the next."""
NEEDED = 2 * 2 * FAR


def far_pages() -> KVView:
    """Two pages whose second begins beyond 2^31 elements of real memory, all of it written to."""
    memory = torch.zeros(FAR + 2 * TOKENS * DIM, dtype=torch.bfloat16, device=DEVICE)
    planes = tuple(Plane(0, part * DIM, FAR, 0, Axis(2 * DIM), Axis(1), DIM) for part in range(2))
    return KVView(KVLayout("bfloat16", 2, TOKENS, 1, (planes,)), [memory])


@on_a_gpu
@pytest.mark.parametrize("on", ["own stream", "default stream"])
def test_pages_beyond_two_to_the_31_are_copied_both_ways(device: Device, on: str) -> None:
    with device.stream().issuing() if on == "own stream" else nullcontext():
        copied_both_ways(device)


def copied_both_ways(device: Device) -> None:
    free, _ = torch.cuda.mem_get_info(DEVICE)
    if free < NEEDED:
        pytest.skip(f"needs {NEEDED >> 30} GiB of device memory, {free >> 30} are free")
    view = far_pages()
    arena = HostArena(SMALL, 2, pin=device)
    flat = KVView(arena.layout(), [arena.tensor()])
    there = torch.zeros(2 * SMALL.nbytes // 2, dtype=torch.bfloat16, device=DEVICE)
    on_device = KVView(arena_layout(SMALL, 2), [there])
    second = view.tensors[0][FAR : FAR + 2 * TOKENS * DIM]
    want = torch.randn(second.shape, device=DEVICE).to(torch.bfloat16)
    page, slot = np.array([1]), np.array([0])
    tried = []
    for target in (flat, on_device):
        for ops in fitting(view, target):
            second.copy_(want)
            ops.copy_blocks(view, page, target, slot)
            wait_for_device()
            second.fill_(float("nan"))
            ops.copy_blocks(target, slot, view, page)
            wait_for_device()
            assert torch.equal(second, want), ops.name
            tried.append(ops.name)
    assert "triton" in tried
    assert not bool(view.tensors[0][: 2 * TOKENS * DIM].any()), "the first page was written to"
    arena.close()
