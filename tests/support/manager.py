"""A manager over simulated media, for tests of the leader.

The media are dictionaries from place to content, and the content of a block is its key. Three
mistakes show as wrong content on the device: a slot that is handed out too early, a block that is
published before its bytes are there, and a source that is evicted while it is read.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from kvcore.index import BlockIndex, TierSpec
from kvcore.index.policy.admission import OnNthUse
from kvcore.index.slots import SlotRun
from kvcore.manager import (
    HOST,
    Backing,
    Event,
    KVManager,
    Readiness,
    TransferOptions,
    WritePolicy,
)
from kvcore.model.points import PointShape
from kvcore.telemetry.metrics import Metrics
from kvcore.transfer.graph import (
    SKIP,
    OpReport,
    Path,
    RowError,
    TransferGraph,
    TransferOp,
    UnitTable,
)
from kvcore.transfer.plan import layer_steps
from support.transfers import load_blocks, save_blocks

NAMESPACE = b"n" * 16


def chain(*names: int) -> list[bytes]:
    """Return the prefix keys of a sequence of block names. Equal prefixes give equal keys."""
    keys, path = [], ()
    for name in names:
        path = (*path, name)
        keys.append(random.Random(repr(path)).randbytes(16))
    return keys


class Media:
    """A transport whose workers are dictionaries. Nothing runs until ``step`` is called."""

    def __init__(self) -> None:
        self.device: dict[int, bytes] = {}
        self.host: dict[int, bytes] = {}
        self.staging: dict[int, bytes] = {}
        self.tiers: dict[str, dict[int, tuple[bytes, bytes]]] = {"disk": {}, "far": {}}
        self.todo: list[tuple[TransferGraph, TransferOp]] = []
        self.done: set[tuple[int, int]] = set()
        self.failed: dict[int, set[int]] = {}
        self.reports: list[OpReport] = []
        self.fail_next: RowError | None = None
        self.dead: set[str] = set()
        self.invalidated: list[tuple[str, list[SlotRun]]] = []

    def submit(self, graph: TransferGraph, lane: object = None) -> None:
        assert lane is None, "no adapter sends messages here"
        graph.check()
        self.failed[graph.graph_id] = set()
        self.todo += [(graph, op) for op in graph.ops]

    def cancel(self, graph_id: int) -> None:
        for graph, op in [t for t in self.todo if t[0].graph_id == graph_id]:
            self.todo.remove((graph, op))
            self._end(graph, op, dict.fromkeys(range(*op.rows), RowError.CANCELLED))

    def invalidate(self, tier: str, slots: Sequence[SlotRun]) -> None:
        self.invalidated.append((tier, list(slots)))
        for run in slots:
            for slot in range(*run):
                self.tiers[tier].pop(slot, None)

    def wait_report(self, timeout: float) -> bool:
        self.step(0)
        return bool(self.reports)

    def poll(self) -> Sequence[OpReport]:
        reports, self.reports = self.reports, []
        return reports

    def step(self, pick: int) -> bool:
        """Run one runnable op. Return False if there is none."""
        ready = [
            (graph, op)
            for graph, op in self.todo
            if all((graph.graph_id, dep) in self.done for dep in op.deps)
        ]
        if not ready:
            return False
        graph, op = ready[pick % len(ready)]
        self.todo.remove((graph, op))
        failed = {r: RowError.UPSTREAM for r in range(*op.rows) if r in self.failed[graph.graph_id]}
        planted, self.fail_next = self.fail_next, None
        if op.tier in self.dead:
            planted = RowError.IO
        for row in range(*op.rows):
            if row not in failed:
                error = planted or self._move(graph, op, row)
                if error is not None:
                    failed[row] = error
        self._end(graph, op, failed)
        return True

    def drain(self, manager: KVManager, picks: random.Random) -> None:
        while self.step(picks.randrange(1 << 30)):
            if picks.random() < 0.5:
                manager.pump()
        manager.pump()
        if self.todo:
            self.drain(manager, picks)

    def _end(self, graph: TransferGraph, op: TransferOp, failed: dict[int, RowError]) -> None:
        self.failed[graph.graph_id] |= set(failed)
        self.done.add((graph.graph_id, op.op_id))
        self.reports.append(OpReport(graph.graph_id, op.op_id, failed))

    def _move(self, graph: TransferGraph, op: TransferOp, row: int) -> RowError | None:
        key, slot = graph.keys[row], graph.host_slots[row]
        memory = self.host
        if op.path.is_staged:
            memory, slot = self.staging, graph.staged[row]
        if op.path is Path.D2H:
            self.host[slot] = self.device[int(graph.units[0].array()[row, 0])]
        elif op.path in (Path.H2D, Path.D2D):
            unit = int(graph.units[0].array()[row, 0])
            if unit != SKIP and (op.layers is None or op.layers.start == 0):
                self.device[unit] = memory[slot]
                assert self.device[unit] == key, "wrong KV on the device"
        elif op.path.writes_tier:
            self.tiers[op.tier][graph.tier_slots[row]] = (key, self.host[slot])
            assert self.host[slot] == key, "wrong KV on the way to a tier"
        else:
            named, content = self.tiers[op.tier].get(graph.tier_slots[row], (b"", b""))
            if named != key or content != key:
                return RowError.CORRUPT
            memory[slot] = content
        return None


class ManagerRig:
    """A manager over small tiers, and an engine that computes and forgets blocks."""

    def __init__(
        self,
        host: int = 8,
        disk: int = 16,
        *,
        write: WritePolicy = WritePolicy.WRITE_THROUGH,
        far: int = 0,
        staging: int = 3,
        batch: int = 3,
        admit: int = 1,
        device: int = 0,
        copy: int | None = 2,
        points: PointShape | None = None,
    ) -> None:
        self.now = 0.0
        self.media = Media()
        self.metrics = Metrics()
        self.events: list[Event] = []
        specs = [TierSpec(HOST, host)]
        backing = []
        if disk:
            specs.append(TierSpec("disk", disk))
            admission = OnNthUse(admit, width=256)
            to_device = device > 0
            backing.append(Backing("disk", write=write, admission=admission, to_device=to_device))
        if far:
            specs.append(TierSpec("far", far))
            backing.append(Backing("far", Path.REMOTE2H, Path.H2REMOTE, WritePolicy.WRITE_THROUGH))
        index = BlockIndex(specs)
        index.watch(self.events.append)
        self.manager = KVManager(
            index,
            self.media,
            backing=backing,
            options=TransferOptions(
                range(host, host + staging),
                device_slots=device,
                batch_blocks=batch,
                copy_blocks=copy,
            ),
            metrics=self.metrics,
            points=points,
            clock=lambda: self.now,
        )
        self._unit = 0

    def units(self, rows: int) -> list[UnitTable]:
        table = np.arange(self._unit, self._unit + rows, dtype=np.int64)[:, None]
        self._unit += rows
        return [UnitTable.of(table, 16)]

    def computed(self, keys: Sequence[bytes], start: int, stop: int) -> list[UnitTable]:
        """Return the places of blocks [start, stop), which the engine has just computed."""
        tables = self.units(stop - start)
        for key, unit in zip(keys[start:stop], tables[0].array()[:, 0].tolist(), strict=True):
            self.media.device[unit] = key
        return tables

    def save(self, keys: list[bytes]) -> TransferGraph | None:
        computed = partial(self.computed, keys)
        return save_blocks(self.manager, keys, NAMESPACE, len(keys), computed)

    def save_point(self, keys: list[bytes], blocks: int) -> TransferGraph | None:
        """Save the first blocks of a chain, and the resume point behind them."""
        planned = self.manager.plan_save(keys, NAMESPACE, blocks, point=True)
        if planned is None:
            return None
        return self.manager.launch(planned, self.computed(planned.keys, *planned.blocks))

    def fetch(self, keys: list[bytes], on_end: Callable[[], object]) -> int | None:
        hit = self.manager.get_match(keys, NAMESPACE)
        planned = self.manager.plan_fetch(hit)
        return None if planned is None else self.manager.launch(planned, on_end=on_end).graph_id

    def load(self, keys: list[bytes], start: int = 0) -> TransferGraph | None:
        hit = self.manager.get_match(keys, NAMESPACE)
        ready = self.manager.can_load(hit, start, hit.depth) is Readiness.READY
        if hit.depth <= start or not ready:
            return None
        tables = self.units(hit.depth - start)
        return load_blocks(self.manager, hit, start, hit.depth, tables, layers=layer_steps(4))

    def load_point(
        self, keys: list[bytes], start: int = 0, limit: int | None = None
    ) -> TransferGraph | None:
        """Load what a prompt can go on from, behind ``start`` blocks that the engine has."""
        hit = self.manager.get_match(keys, NAMESPACE, limit)
        ready = self.manager.can_load(hit, start, hit.depth) is Readiness.READY
        if hit.blocks <= start or not ready:
            return None
        return load_blocks(self.manager, hit, start, hit.depth, self.units(hit.depth - start))

    def drain(self, seed: int = 0) -> None:
        self.media.drain(self.manager, random.Random(seed))

    def loaded(self, graph: TransferGraph) -> list[bytes | None]:
        return [self.media.device.get(unit) for unit in graph.units[0].array()[:, 0].tolist()]
