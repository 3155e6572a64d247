"""A worker's loads past host memory: the same pages as by host memory, none that were given up."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path as Folder

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.errors import TierError
from kvcore.memory.arena import HostArena, slot_bytes
from kvcore.memory.copy import builtin_ops, select_ops
from kvcore.memory.device_group import DeviceGroup
from kvcore.memory.hugepages import Pages
from kvcore.memory.layout import KVView, from_strides
from kvcore.memory.nixl import FileAgent, FileSpan
from kvcore.model.shape import BlockShape
from kvcore.tiers.base import BlockRead, BlockWrite
from kvcore.tiers.disk import DiskAccess, DiskTier, Geometry, prepare_store
from kvcore.tiers.memory import MemoryTier
from kvcore.transfer import graph as transfer
from kvcore.transfer.graph import SKIP, OpReport, Path, RowError, TransferGraph, UnitTable
from kvcore.transfer.plan import Chain, TierRows, build_load
from kvcore.worker import EnginePages, KVWorker, WorkerLimits
from kvcore_devtools.servers import need_client
from support.budget import examples

need_client("nixl_cu13")

SHAPE = BlockShape(3, 2, 8, 16, "float32")
SLOT = slot_bytes(SHAPE)
BLOCKS, PAGES, PAGE = 6, 16, 8
WAIT = 60.0


def key(i: int) -> bytes:
    return bytes([i]) * 16


def content(i: int) -> bytes:
    return np.random.default_rng(i).random(SLOT // 4, dtype=np.float32).tobytes()


def pages_of(order: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(tensors to look at, views as [pages, heads, tokens, content])"""
    width = 2 * SHAPE.head_dim
    size = {"LBNHC": (PAGES, PAGE, 2, width), "LBHNC": (PAGES, 2, PAGE, width)}[order]
    tensors = [torch.zeros(size) for _ in range(SHAPE.layers)]
    return tensors, [t.transpose(1, 2) if order == "LBNHC" else t for t in tensors]


class StagingRig:
    """A worker over two groups of layers, its disk tier filled."""

    def __init__(self, folder: Folder, order: str, *, places: int = 3, sums: bool = True) -> None:
        self.tensors, views = pages_of(order)
        cut = [(0, 2), (2, 3)]
        groups = []
        for a, b in cut:
            part = SHAPE.with_layers(b - a)
            groups.append(
                DeviceGroup(tuple(range(a, b)), KVView(from_strides(views[a:b], part), views[a:b]))
            )
        arena = HostArena(SHAPE, BLOCKS, huge_pages=False)
        flat = KVView(arena.layout(), [arena.tensor()])
        self.worker = KVWorker(
            arena=arena,
            arena_view=flat,
            ops=select_ops(groups[0].view, flat, builtin_ops()),
            pages=EnginePages(groups),
            limits=WorkerLimits(device_slots=places),
        )
        self.places = places
        geometry = Geometry(SHAPE, b"m" * 16, ((0, 2),))
        self.store = prepare_store(folder, geometry, 1 << 20, wait_s=0)
        self.tier = DiskTier(
            self.store.mounted,
            geometry,
            shard=0,
            slot_nbytes=SLOT,
            access=DiskAccess(device_sums=sums),
        )
        self.fill(self.tier)
        self.worker.open_tier("disk", self.tier)
        self.reports: list[OpReport] = []

    def fill(self, tier: DiskTier | MemoryTier) -> None:
        writes = []
        for i in range(BLOCKS):
            memory = Pages(SLOT).view
            memory[:] = content(i)
            parent = key(i - 1) if i else bytes(16)
            writes.append(BlockWrite(i, key(i), parent, b"n" * 16, [memory]))
        assert tier.write(writes) == [None] * BLOCKS

    def graph(
        self,
        units: npt.NDArray[np.int64],
        *,
        direct: bool = True,
        graph_id: int = 1,
        deadline_s: float | None = None,
        tier: str = "disk",
    ) -> TransferGraph:
        """All blocks to ``units``, ``[blocks, units]``, of both groups."""
        rows = transfer.Span(0, BLOCKS)
        path = Path.DISK2D if direct else Path.DISK2H
        return build_load(
            graph_id,
            Chain(b"n" * 16, bytes(16), tuple(key(i) for i in range(BLOCKS))),
            [-1] * BLOCKS if direct else range(BLOCKS),
            [TierRows(tier, path, rows, range(BLOCKS))],
            batch_rows=max(1, self.places // 2),
            deadline_s=deadline_s,
            staged=[i % self.places for i in range(BLOCKS)] if direct else (),
        ).bind([UnitTable.of(units, PAGE)] * 2)

    def load(self, graph: TransferGraph) -> dict[int, RowError]:
        """What failed."""
        assert self.worker.submit(graph) == []
        failed: dict[int, RowError] = {}
        for report in self.until_ended(graph):
            failed.update({r: e for r, e in report.failed.items() if e is not RowError.UPSTREAM})
        return failed

    def until_ended(self, graph: TransferGraph) -> list[OpReport]:
        while len([r for r in self.reports if r.graph_id == graph.graph_id]) < len(graph.ops):
            assert self.worker.wait_report(WAIT), "it did not end"
            self.reports += self.worker.poll()
        return [r for r in self.reports if r.graph_id == graph.graph_id]

    def seen(self) -> list[torch.Tensor]:
        return [t.clone() for t in self.tensors]

    def paint(self, value: float) -> None:
        for tensor in self.tensors:
            tensor.fill_(value)

    def close(self) -> None:
        assert self.worker.close()
        self.store.close()


@pytest.fixture(params=["LBNHC", "LBHNC"])
def rig(request: pytest.FixtureRequest, tmp_path: Folder) -> Iterator[StagingRig]:
    made = StagingRig(tmp_path, request.param)
    yield made
    made.close()


def test_a_worker_with_staging_can_be_closed_again(rig: StagingRig) -> None:
    assert rig.worker.close()
    assert rig.worker.close()


def all_units() -> npt.NDArray[np.int64]:
    return np.arange(BLOCKS * 2, dtype=np.int64).reshape(BLOCKS, 2)


@pytest.mark.parametrize("order", ["LBNHC", "LBHNC"])
@pytest.mark.parametrize("sums", [True, False])
def test_the_pages_are_those_that_come_by_host_memory(
    tmp_path: Folder, order: str, sums: bool
) -> None:
    rig = StagingRig(tmp_path, order, places=3, sums=sums)
    ids = iter(range(1, 10_000))

    @settings(max_examples=examples(25), deadline=None)
    @given(
        places=st.permutations(range(PAGES)),
        left_out=st.sets(st.integers(0, BLOCKS * 2 - 1)),
    )
    def check(places: list[int], left_out: set[int]) -> None:
        units = np.array(places[: BLOCKS * 2], dtype=np.int64)
        units[sorted(left_out)] = SKIP
        found = []
        for direct in (False, True):
            rig.paint(-1.0)
            graph = rig.graph(units.reshape(BLOCKS, 2), direct=direct, graph_id=next(ids))
            assert rig.load(graph) == {}
            found.append(rig.seen())
        for one, other in zip(*found, strict=True):
            assert torch.equal(one, other)

    check()
    rig.close()


def test_a_damaged_block_reaches_no_page(rig: StagingRig) -> None:
    data = next(rig.store.folder.glob("*.data"))
    with data.open("r+b") as file:
        file.seek(4 * SLOT + 8)
        file.write(b"\xff\xff")
    rig.paint(-1.0)
    assert rig.load(rig.graph(all_units())) == {4: RowError.CORRUPT}
    for tensor in rig.tensors:
        assert bool((tensor[8:10] == -1).all())
        assert not bool((tensor[:8] == -1).any())
        assert not bool((tensor[10:12] == -1).any())
    assert rig.load(rig.graph(all_units(), graph_id=2)) == {4: RowError.CORRUPT}, "it is erased"


class Gate:
    """Where a read hangs."""

    def __init__(self) -> None:
        self.entered, self.open = threading.Event(), threading.Event()

    def pass_through(self) -> None:
        self.entered.set()
        assert self.open.wait(WAIT)


class HungTier(MemoryTier):
    gate: Gate

    def read(self, requests: Sequence[BlockRead]) -> list[TierError | None]:
        self.gate.pass_through()
        return super().read(requests)


@pytest.mark.parametrize("way", ["direct", "host memory"])
@pytest.mark.parametrize("given_up", ["deadline", "cancel"])
def test_a_disk_that_comes_back_writes_to_no_page_that_was_given_away(
    rig: StagingRig, way: str, given_up: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, name = Gate(), "disk"
    if way == "direct":
        move = FileAgent.move

        def hang(self: FileAgent, operation: str, spans: Sequence[FileSpan]) -> str:
            gate.pass_through()
            return move(self, operation, spans)

        monkeypatch.setattr(FileAgent, "move", hang)
    else:
        name, hung = "memory", HungTier(BLOCKS, SLOT)
        hung.gate = gate
        rig.fill(hung)
        rig.worker.open_tier(name, hung)
    deadline_s = 0.01 if given_up == "deadline" else None
    graph = rig.graph(all_units(), deadline_s=deadline_s, tier=name)
    assert rig.worker.submit(graph) == []
    if given_up == "cancel":
        assert gate.entered.wait(WAIT)
        rig.worker.cancel(graph.graph_id)
    rig.worker.wait_device(graph.graph_id)  # the engine has its pages again, and uses them
    rig.paint(7.0)
    gate.open.set()
    rig.until_ended(graph)
    assert all(bool((tensor == 7).all()) for tensor in rig.tensors), "old bytes in new pages"
    monkeypatch.undo()
    assert rig.load(rig.graph(all_units(), graph_id=2)) == {}
    assert not any(bool((tensor[:12] == 7).any()) for tensor in rig.tensors)


def test_a_worker_without_a_staging_refuses_such_graphs(tmp_path: Folder) -> None:
    made = StagingRig(tmp_path, "LBHNC", places=3)
    bare = StagingRig(tmp_path / "bare", "LBHNC", places=0)
    graph = made.graph(all_units())
    refused = bare.worker.submit(graph)
    assert {r.op_id for r in refused} == {op.op_id for op in graph.ops}
    assert all(set(r.failed.values()) == {RowError.INTERNAL} for r in refused)
    for one in (made, bare):
        one.close()
