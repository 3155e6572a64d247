"""Copies between a GPU and the host by every way, over the recording device."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.errors import TransferError
from kvcore.memory.copy import HeadRange, builtin_ops, link, select_ops
from kvcore.memory.copy.base import Copy, Units
from kvcore.memory.copy.cache import ViewCache
from kvcore.memory.copy.link import LinkOps, Way
from kvcore.memory.copy.native import NativeOps
from kvcore.memory.copy.pieces import run_bytes, unit_pieces
from kvcore.memory.device import device_of
from kvcore.memory.layout import KVView, arena_layout, from_strides, trtllm_layout
from kvcore.model.shape import BlockShape
from kvcore_devtools.gpu import Machine, RecordingOps, installed
from kvcore_devtools.gpu.streams import StreamQueue
from support.budget import examples
from support.links import on_gpu, on_host
from support.strides import (
    StridedCopy,
    clone,
    contents,
    copies,
    fill,
    memory,
    one_by_one,
)

WAYS = [*Way, None]
GPU = torch.device("cuda", 0)


def ops_of(way: Way | None, machine: Machine) -> LinkOps:
    """The GPU's "kernels" are the native copies: they look at addresses alone."""
    kernels = RecordingOps(machine, NativeOps())
    return LinkOps(kernels, kernels, way)


def batches(machine: Machine) -> list[list[int]]:
    """Return the sizes of each batch of copies."""
    return [call.what.tolist() for call in machine.calls if call.kind == "batch"]


def followed(machine: Machine) -> list[tuple[StreamQueue, StreamQueue]]:
    """Return the streams that wait for another one, each with that other one."""
    waits = [
        (call.stream, call.what.work.stream) for call in machine.calls if call.kind == "follow"
    ]
    return [(stream, other) for stream, other in waits if stream is not other]


@given(
    copy=copies([1, 3, 8, 16], [1, 2, 5, 8]),
    to_host=st.booleans(),
    registered=st.booleans(),
    data=st.data(),
    seed=st.integers(0, 9),
)
@settings(max_examples=examples(150))
def test_every_way_copies_what_it_should_and_nothing_else(
    copy: StridedCopy, to_host: bool, registered: bool, data: st.DataObject, seed: int
) -> None:
    way = data.draw(st.sampled_from([way for way in WAYS if registered or way is not Way.KERNEL]))
    before, expected = contents(copy.src), copy.expected()
    with pytest.MonkeyPatch.context() as patch, installed(Machine(seed)) as machine:
        patch.setattr(link, "SLOT_BYTES", (data.draw(st.sampled_from([512, 4096, 1 << 20])),))
        for name in ("SHORTEST_RUN", "PIECE_BYTES", "CALL_BYTES", "SMALL_LOAD"):
            patch.setattr(link, name, data.draw(st.sampled_from([1, 64, 1 << 20])))
        if to_host:
            src, dst = on_gpu(machine, copy.src), on_host(machine, copy.dst, registered=registered)
        else:
            src, dst = on_host(machine, copy.src, registered=registered), on_gpu(machine, copy.dst)
        ops_of(way, machine).copy_blocks(*copy._replace(src=src, dst=dst))
    machine.check()
    assert not (registered and machine.counts["host_waits"])
    assert contents(copy.dst) == expected
    assert contents(copy.src) == before, "wrote to the source"


def arena(shape: BlockShape, slots: int, arrangement: str = "blockwise") -> KVView:
    count = slots * shape.nbytes // shape.itemsize
    return KVView(arena_layout(shape, slots, arrangement), [memory(count, shape.itemsize)])


def engine(shape: BlockShape, pages: int, page: int, order: str) -> KVView:
    """vLLM's pages: K beside V. "NHD" keeps the heads of a token together."""
    size = {
        "HND": (pages, shape.kv_heads, page, 2 * shape.head_dim),
        "NHD": (pages, page, shape.kv_heads, 2 * shape.head_dim),
    }[order]
    tensors = [memory(int(np.prod(size)), shape.itemsize).view(size) for _ in range(shape.layers)]
    if order == "NHD":
        tensors = [tensor.transpose(1, 2) for tensor in tensors]
    return KVView(from_strides(tensors, shape), tensors)


SHAPE = BlockShape(4, 2, 64, 32, "bfloat16")
ALL = HeadRange(0, 0, 2)


def pieces(src: KVView, dst: KVView, units: list[int], tokens: int, heads: HeadRange = ALL) -> Any:
    layers = range(src.layout.layers)
    found = unit_pieces(src, dst, layers, tokens, heads).of(np.array(units), np.array(units))
    assert int(found.sizes.sum()) == len(units) * tokens * heads.size * SHAPE.nbytes // 64
    return found


def test_a_block_to_a_block_is_one_piece_and_two_blocks_are_never_joined() -> None:
    """Two blocks may lie in two registrations, which one copy must not span."""
    src, dst = arena(SHAPE, 8), arena(SHAPE, 8)
    assert pieces(src, dst, [5], 32).sizes.tolist() == [SHAPE.nbytes]
    assert pieces(src, dst, [5, 2, 3], 32).sizes.tolist() == 3 * [SHAPE.nbytes]
    assert len(pieces(src, dst, [5], 32, HeadRange(1, 1, 1)).sizes) == SHAPE.layers
    layerwise = arena(SHAPE, 8, "layerwise")
    assert len(pieces(src, layerwise, [5], 32).sizes) == SHAPE.layers
    assert len(pieces(layerwise, layerwise, [1, 2, 5], 32).sizes) == 3 * SHAPE.layers


def test_units_of_a_block_are_joined() -> None:
    shape = BlockShape(2, 1, 8, 32, "bfloat16", kv_factor=1)
    src, dst = arena(shape, 8), arena(shape, 8)
    units = np.array([8, 9, 10, 11, 13])  # units 8 to 11 are block 2
    found = unit_pieces(src, dst, range(2), 8, HeadRange(0, 0, 1)).of(units, units)
    assert sorted(found.sizes.tolist()) == [128, 128, 512, 512]


def test_pages_of_heads_come_by_head_and_pages_of_tokens_by_row() -> None:
    shape, dst = SHAPE, arena(SHAPE, 8)
    one = trtllm_layout(shape, 8, 32, "HND")
    hnd = KVView(one, [memory(8 * shape.nbytes // 2, 2)])
    # V of a layer's last head is followed by K of the next layer's first, on both sides.
    assert len(pieces(hnd, dst, [5], 32).sizes) == 4 * 2 * 2 - 3
    rows = pieces(engine(shape, 8, 32, "NHD"), dst, [5], 32)
    assert set(rows.sizes.tolist()) == {64 * 2}


def test_pieces_are_not_joined_across_tensors() -> None:
    """They may be two allocations, which one copy must not span."""
    shape = BlockShape(2, 1, 8, 4, "bfloat16", kv_factor=1)
    whole = memory(2 * 8 * 4, 2)
    dst = arena(shape, 1)
    tensors = [part.view(1, 1, 4, 8) for part in whole.split(32)]
    src = KVView(from_strides(tensors, shape), tensors)
    found = unit_pieces(src, dst, range(2), 4, HeadRange(0, 0, 1))
    assert found.sizes.tolist() == [64, 64]


@pytest.fixture
def gpu() -> Iterator[Machine]:
    with installed(Machine(eager=0.0)) as machine:
        yield machine
        machine.check()


LLAMA = BlockShape(32, 8, 128, 256, "bfloat16")


def flat(layout: Any, tensors: int, nbytes: int) -> KVView:
    """A view that is only looked at: of memory that is never touched."""
    return KVView(layout, [torch.empty(nbytes // 2, dtype=torch.bfloat16) for _ in range(tensors)])


def chosen(src: KVView, dst: KVView, units: int, tokens: int, kernel: bool = True) -> Way:
    taken: list[Way] = []

    class Watched(LinkOps):
        def _copy_by(self, way: Way, one: Any, over: Any) -> None:
            taken.append(way)

    ops = Watched(NativeOps(), NativeOps() if kernel else None)
    assert ops.supports(src, dst)
    ops.copy_blocks(src, np.arange(units), dst, np.arange(units), unit_tokens=tokens)
    return taken[0]


@pytest.mark.parametrize(
    ("order", "page", "to_host", "units", "registered", "way"),
    [
        ("NHD", 16, True, 256, True, Way.STAGED),
        ("NHD", 16, False, 256, True, Way.STAGED),
        ("NHD", 16, False, 1, True, Way.STAGED),  # 2 MiB
        ("NHD", 16, True, 256, False, Way.STAGED),
        ("one HND", 256, True, 16, True, Way.ENGINE),
        ("one HND", 256, False, 16, True, Way.ENGINE),
        ("one HND", 256, True, 16, False, Way.STAGED),  # 64 KiB a call
    ],
)
def test_the_way_follows_pieces_direction_and_memory(
    order: str, page: int, to_host: bool, units: int, registered: bool, way: Way, gpu: Machine
) -> None:
    host = flat(arena_layout(LLAMA, 16), 1, 16 * LLAMA.nbytes)
    on_host(gpu, host, registered=registered)
    pages = 16 * 256 // page
    if order == "one HND":
        ours = flat(trtllm_layout(LLAMA, pages, page, "HND"), 1, 16 * LLAMA.nbytes)
    else:
        tensors = [
            torch.empty(pages, page, 8, 256, dtype=torch.bfloat16).transpose(1, 2)
            for _ in range(32)
        ]
        ours = KVView(from_strides(tensors, LLAMA), tensors)
    ours = on_gpu(gpu, ours)
    ends = (ours, host) if to_host else (host, ours)
    assert chosen(*ends, units, min(page, 256)) is way


def test_small_loads_go_by_kernel_if_it_reaches_the_memory(gpu: Machine) -> None:
    host, ours = on_host(gpu, arena(SHAPE, 4)), on_gpu(gpu, engine(SHAPE, 4, 32, "NHD"))
    assert chosen(host, ours, 2, 32) is Way.KERNEL
    assert chosen(ours, host, 2, 32) is Way.STAGED
    assert chosen(host, ours, 2, 32, kernel=False) is Way.STAGED
    on_host(gpu, host, registered=False)
    assert chosen(host, ours, 2, 32) is Way.STAGED


def test_a_gpu_never_falls_back_to_copies_by_the_plane(gpu: Machine) -> None:
    """Whether memory is registered decides in each copy, not once when the worker starts."""
    ours, host = on_gpu(gpu, engine(SHAPE, 4, 32, "NHD")), arena(SHAPE, 4)
    for registered in (False, True):
        on_host(gpu, host, registered=registered)
        for ends in ((ours, host), (host, ours)):
            assert select_ops(*ends, builtin_ops()).name == "link"
    assert select_ops(host, host, builtin_ops()).name == "native"
    assert not LinkOps().supports(host, host)
    mixed = KVView(host.layout, [ours.tensors[0], host.tensors[0]])
    assert not LinkOps().supports(mixed, host)


@pytest.mark.parametrize("to_host", [True, False])
def test_a_staged_block_crosses_the_link_in_one_piece(to_host: bool, gpu: Machine) -> None:
    ours, host = on_gpu(gpu, engine(SHAPE, 8, 16, "NHD")), on_host(gpu, arena(SHAPE, 4))
    ends = (ours, host) if to_host else (host, ours)
    units = np.array([1, 0, 6, 7]), np.array([6, 7, 1, 0])  # of the engine, of the host
    a, b = units if to_host else units[::-1]
    ops_of(Way.STAGED, gpu).copy_blocks(*ends[:1], a, *ends[1:], b, unit_tokens=16)
    assert batches(gpu) == [[SHAPE.nbytes] * 2]


def test_a_load_of_some_tokens_takes_their_blocks_whole(gpu: Machine) -> None:
    """Token by token it would be a piece for each token of a head."""
    ours, host = on_gpu(gpu, engine(SHAPE, 8, 16, "NHD")), on_host(gpu, arena(SHAPE, 4))
    here, there = np.arange(40, 61), np.arange(75, 96)  # tokens 11 to 31 of block 2
    ops_of(Way.STAGED, gpu).copy_blocks(host, there, ours, here, unit_tokens=1)
    assert batches(gpu) == [[SHAPE.nbytes]]


def test_the_staging_is_bounded_and_reused_in_the_order_of_streams(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine itself reports a stream that does not wait for the one before it."""
    monkeypatch.setattr(link, "SLOT_BYTES", (2 * SHAPE.nbytes,))
    ours, host = on_gpu(gpu, engine(SHAPE, 16, 32, "NHD")), on_host(gpu, arena(SHAPE, 16))
    ops, device = ops_of(Way.STAGED, gpu), device_of(GPU)
    first, second = device.stream(), device.stream()
    for stream, units in ((first, np.arange(8)), (second, np.arange(8, 16))):
        with stream.issuing():
            ops.copy_blocks(ours, units, host, units, unit_tokens=32)
    assert gpu.allocated == [2 * SHAPE.nbytes] * link.SLOTS
    nbytes = [sum(sizes) for sizes in batches(gpu)]
    assert max(nbytes) <= 2 * SHAPE.nbytes
    assert sum(nbytes) == 16 * SHAPE.nbytes
    held = {call.stream for call in gpu.calls if call.kind == "hold"}
    assert held > {first.queue, second.queue}, "and the stream of the kernels"
    before = len(followed(gpu))
    with first.issuing():
        ops.copy_blocks(host, np.arange(8), ours, np.arange(8), unit_tokens=32)
    assert len(gpu.allocated) == 2 * link.SLOTS, "loads wait for saves"
    streams = {stream for pair in followed(gpu)[before:] for stream in pair}
    assert first.queue in streams
    assert len(streams - held) == 1, "the kernels of loads have a stream of their own"
    assert len(streams) == 2


def test_after_an_error_a_slot_is_used_when_its_work_has_ended(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel that would read the slot cannot be launched: what fills it is still queued."""
    monkeypatch.setattr(link, "SLOT_BYTES", (SHAPE.nbytes,))
    monkeypatch.setattr(link, "SLOTS", 1)
    ours, host = on_gpu(gpu, engine(SHAPE, 2, 32, "NHD")), on_host(gpu, arena(SHAPE, 2))
    ops, device = ops_of(Way.STAGED, gpu), device_of(GPU)

    def fails(copy: Copy) -> None:
        raise TransferError("no kernel")

    with monkeypatch.context() as patch, device.stream().issuing():
        patch.setattr(ops._on_device, "copy", fails)
        with pytest.raises(TransferError):
            ops.copy_blocks(host, np.array([0]), ours, np.array([0]), unit_tokens=32)
    with device.stream().issuing():
        ops.copy_blocks(host, np.array([1]), ours, np.array([1]), unit_tokens=32)
    gpu.check()


def test_a_new_staging_is_used_after_what_lay_at_its_place(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An allocator gives out memory in the order of one stream: where it was prepared."""
    monkeypatch.setattr(link, "SLOT_BYTES", (2 * SHAPE.nbytes,))
    ours, host = on_gpu(gpu, engine(SHAPE, 8, 32, "NHD")), on_host(gpu, arena(SHAPE, 8))
    ops, device, units = ops_of(Way.STAGED, gpu), device_of(GPU), np.arange(8)
    engines, copies = device.stream(), device.stream()
    with engines.issuing():
        ops.prepare(ours, host, 32)
    for source, target in ((ours, host), (host, ours)):
        before = len(followed(gpu))
        with copies.issuing():
            ops.copy_blocks(source, units, target, units, unit_tokens=32)
        assert engines.queue in {other for _, other in followed(gpu)[before:]}


def test_less_room_gives_a_smaller_staging_and_none_an_error(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "SLOT_BYTES", (1 << 30, 1 << 20))
    ours, host = on_gpu(gpu, engine(SHAPE, 4, 32, "NHD")), on_host(gpu, arena(SHAPE, 4))
    gpu.room = 2 * link.SLOTS * link.SLOT_BYTES[1]
    ops_of(Way.STAGED, gpu).prepare(ours, host, 32)
    assert gpu.allocated == [link.SLOT_BYTES[1]] * 2 * link.SLOTS
    with pytest.raises(torch.OutOfMemoryError):
        ops_of(Way.STAGED, gpu).prepare(ours, host, 32)


@pytest.mark.slow
def test_threads_share_the_stagings(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "SLOT_BYTES", (SHAPE.nbytes,))
    src, host = engine(SHAPE, 16, 32, "NHD"), arena(SHAPE, 16)
    fill(src, 3)
    expected = clone(host)
    units = np.arange(16)
    one_by_one(src, units, expected, units, list(range(4)), 32, ALL)
    ours, ops = on_gpu(gpu, src), ops_of(Way.STAGED, gpu)
    on_host(gpu, host)

    def save(part: Units) -> None:
        with device_of(GPU).stream().issuing():
            ops.copy_blocks(ours, part, host, part, unit_tokens=32)

    threads = [threading.Thread(target=save, args=(units[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gpu.check()
    assert contents(host) == contents(expected)


def test_what_views_are_made_of_is_computed_once_and_does_not_keep_them() -> None:
    src, dst = arena(SHAPE, 2), arena(SHAPE, 2)
    layers = list(range(4))
    assert unit_pieces(src, dst, layers, 32, ALL) is unit_pieces(src, dst, layers, 32, ALL)
    assert run_bytes(src, dst, layers, 32, ALL) == 32 * 64 * 2
    cache = ViewCache(most=2)
    assert cache.get((src,), 1, lambda: "a") == "a"
    assert cache.get((src,), 1, lambda: "b") == "a"
    assert cache.get((dst,), 1, lambda: "b") == "b"
    del src
    assert cache.get((dst,), 2, lambda: "c") == "c"
    assert len(cache) == 2, "the entry of a view that is gone goes first"
    cache.get((dst,), 3, lambda: "d")
    assert cache.get((dst,), 1, lambda: "e") == "e"
    assert len(cache) == 2


@pytest.mark.slow
@pytest.mark.parametrize("room", [2 * 32 * 64 * 2, 3 * 32 * 64 * 2 * 2, 1024])
@pytest.mark.parametrize("to_host", [True, False])
def test_a_block_beyond_the_staging_is_cut_by_layers_and_by_heads(
    room: int, to_host: bool, gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The staging holds one head of a layer, one layer and a half, or less than a head."""
    monkeypatch.setattr(link, "SLOT_BYTES", (room,))
    pages, blocks = engine(SHAPE, 3, 32, "NHD"), arena(SHAPE, 3)
    src, dst = (pages, blocks) if to_host else (blocks, pages)
    fill(src, 4)
    expected, units = clone(dst), np.array([2, 0])
    one_by_one(src, units, expected, units, list(range(4)), 32, ALL)
    on_host(gpu, blocks)
    ours = on_gpu(gpu, pages)
    ends = (ours, dst) if to_host else (src, ours)
    ops_of(Way.STAGED, gpu).copy_blocks(ends[0], units, ends[1], units)
    gpu.check()
    assert contents(dst) == contents(expected)
    assert set(gpu.allocated) == {room}
    pieces = [size for sizes in batches(gpu) for size in sizes]
    assert min(pieces) == (64 * 2 if room == 1024 else 2 * 32 * 64 * 2 * (1 + (room > 1 << 14)))
