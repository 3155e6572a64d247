"""One rank of an engine on a machine: its pages, its worker, and the launches of its forwards.

Blocks have names (numbers). The bytes of a block follow from its name, so a forward that reads a
page can tell whether the right KV is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from kvcore.errors import TierError
from kvcore.memory.arena import HostArena
from kvcore.memory.copy.base import DeviceOps
from kvcore.memory.copy.reference import ReferenceOps
from kvcore.memory.device import Event, device_of
from kvcore.memory.device_group import DeviceGroup
from kvcore.memory.layout import Arrangement, KVView, from_strides
from kvcore.model.shape import BlockShape
from kvcore.telemetry.metrics import Metrics
from kvcore.tiers.base import BlockRead, Tier
from kvcore.tiers.memory import MemoryTier
from kvcore.transfer.graph import UnitTable
from kvcore.worker import EnginePages, KVWorker, WorkerLimits
from kvcore.worker.lifecycle import RankParts, refuse_tier
from kvcore_devtools.gpu.device import on_device, plain
from kvcore_devtools.gpu.hosts import WatchedEngine, arena_spans
from kvcore_devtools.gpu.machine import Machine
from kvcore_devtools.gpu.memory import NOTHING, Region, Spans, spans_of
from kvcore_devtools.gpu.ops import RecordingOps

__all__ = ["SHAPE", "GpuRank"]

GPU = torch.device("cuda", 0)

SHAPE = BlockShape(layers=4, kv_heads=2, head_dim=4, block_tokens=8, dtype="float16")


class _Shelf(MemoryTier):
    """A tier that does not mind which block was before the one that is asked for."""

    def read(self, requests: Sequence[BlockRead]) -> list[TierError | None]:
        return super().read([one._replace(parent=b"") for one in requests])


class GpuRank:
    """A rank with pages and an arena of ``slots`` blocks, made inside `installed`.

    ``ops`` copies between them; its launches must be those of the machine. A page holds one block
    of ``shape``; each layer's pages are one tensor. ``tier`` is the name of a tier with as many
    slots: ``shelf`` makes it for slots of so many bytes, in memory if it is None. ``device`` is
    where the pages are said to be; code that makes torch's tensors there needs a CPU.
    """

    tier = "disk"

    def __init__(
        self,
        machine: Machine,
        *,
        pages: int = 12,
        slots: int = 8,
        shape: BlockShape = SHAPE,
        arrangement: Arrangement = Arrangement.BLOCKWISE,
        limits: WorkerLimits | None = None,
        ops: DeviceOps | None = None,
        device: torch.device = GPU,
        shelf: Callable[[int], Tier] | None = None,
    ) -> None:
        self.machine = machine
        self.shape = shape
        self._device = device_of(None)
        content = sum(shape.dims())
        dtype = getattr(torch, shape.dtype)
        size = pages, shape.kv_heads, shape.block_tokens, content
        self.caches = [torch.zeros(size, dtype=dtype) for _ in range(shape.layers)]
        self.view = KVView(from_strides(self.caches, shape), self.caches)
        self.regions = [self._know(layer, cache) for layer, cache in enumerate(self.caches)]
        self.arena = self._make_arena(slots, arrangement)
        named = on_device if device.type == GPU.type else plain
        view = KVView(self.view.layout, [named(cache) for cache in self.caches])
        flat = KVView(self.arena.layout(), [self.arena.tensor()])
        self._flat = flat
        self.worker = self._make_worker(
            arena=self.arena,
            arena_view=flat,
            ops=ops or RecordingOps(machine),
            pages=EnginePages([DeviceGroup(tuple(range(shape.layers)), view)], device=device),
            limits=limits or WorkerLimits(),
        )
        make = shelf or partial(_Shelf, slots)
        self.worker.open_tier(self.tier, make(self.arena.slot_nbytes))
        assert isinstance(self.worker.engine, WatchedEngine)
        self.worker.engine.arena = self.arena
        staging = self.worker._staging
        self.worker.engine.region = None if staging is None else staging.region
        self.parts = RankParts(self.worker, Metrics(), refuse_tier)

    def _make_worker(self, **parts: Any) -> KVWorker:
        return KVWorker(**parts)

    def _know(self, layer: int, cache: torch.Tensor) -> Region:
        size = cache[0].nbytes

        def place(offset: int) -> str:
            return f"page {offset // size} of layer {layer}"

        return self.machine.know_device(cache.data_ptr(), cache.nbytes, f"layer {layer}", place)

    def _make_arena(self, slots: int, arrangement: Arrangement) -> HostArena:
        arena = HostArena(
            self.shape,
            slots,
            arrangement=arrangement,
            huge_pages=False,
            pin=device_of(torch.device("cpu")),
        )
        self.know_arena(arena)
        return arena

    def know_arena(self, arena: HostArena) -> None:
        """Let the machine follow the accesses of an arena."""
        size, layer = arena.slot_nbytes, self.shape.layer_nbytes

        def place(offset: int) -> str:
            if arena.arrangement is Arrangement.BLOCKWISE:
                return f"slot {offset // size} of the arena"
            return f"slot {offset // layer % arena.num_slots} of the arena"

        address = arena.tensor().data_ptr()
        self.machine.know_host(address, arena.nbytes, "the arena", place)

    def units(self, pages: Sequence[int]) -> tuple[UnitTable, ...]:
        """Return the unit tables of a graph whose rows are in these pages."""
        table = np.asarray(pages, dtype=np.int64)[:, None]
        return (UnitTable.of(table, self.shape.block_tokens),)

    def bytes_of(self, block: int, layer: int) -> torch.Tensor:
        """Return the page of a block in a layer."""
        count = self.caches[0][0].numel()
        values = (np.arange(count) * 31 + block * 7919 + layer * 104729) % 30011 + 1
        raw = torch.from_numpy(values.astype(np.int16))
        return raw.view(self.caches[layer].dtype).view(self.caches[layer][0].shape)

    def fill(self, slot: int, block: int) -> None:
        """Put a block into a slot of the arena from outside, before the engine starts."""
        caches = [self.bytes_of(block, layer)[None] for layer in range(self.shape.layers)]
        alone = KVView(from_strides(caches, self.shape), caches)
        ReferenceOps().copy_blocks(alone, np.array([0]), self._flat, np.array([slot]))

    # -- what the engine does ---------------------------------------------------------------

    def places(self, pages: Iterable[int], layers: Iterable[int]) -> Spans:
        """Return the bytes of some pages in some layers."""
        units = np.array(sorted(set(pages)), dtype=np.int64)
        return spans_of(self.view, units, list(layers), self.shape.block_tokens)

    def layer(
        self, layer: int, reads: dict[int, int], writes: dict[int, int], what: str = "a forward"
    ) -> None:
        """Launch one layer of a forward. ``reads`` and ``writes`` map pages to their blocks."""
        self._launch(what, [layer], reads, writes)

    def replay(
        self, reads: dict[int, int], writes: dict[int, int], what: str = "a full graph"
    ) -> None:
        """Launch all layers of a forward at once, without a call between two of them."""
        self._launch(what, range(self.shape.layers), reads, writes)

    def zero(self, pages: Sequence[int]) -> None:
        """Launch the zeroing of pages."""

        def run() -> None:
            for cache in self.caches:
                cache[list(pages)] = 0

        every = range(self.shape.layers)
        self.machine.launch("zeroing", run, writes=self.places(pages, every))

    def copy_on_write(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Launch copies of whole pages, from the first to the second of each pair."""

        def run() -> None:
            for cache in self.caches:
                for source, target in pairs:
                    cache[target] = cache[source]

        every = range(self.shape.layers)
        self.machine.launch(
            "a copy on write",
            run,
            reads=self.places([source for source, _ in pairs], every),
            writes=self.places([target for _, target in pairs], every),
        )

    def output(self) -> Event:
        """Return the point at which the work that this thread has issued so far has ended."""
        return self._device.current_stream().record()

    def expect_slot(self, slot: int, block: int) -> None:
        """Read a slot of the arena on this thread: it must hold a block."""
        self.machine.touch("a check", arena_spans(self.worker.arena, [slot]), writes=False)
        caches = [torch.zeros_like(cache[:1]) for cache in self.caches]
        alone = KVView(from_strides(caches, self.shape), caches)
        ReferenceOps().copy_blocks(self._flat, np.array([slot]), alone, np.array([0]))
        for layer, found in enumerate(caches):
            if not torch.equal(_raw(found[0]), _raw(self.bytes_of(block, layer))):
                self.machine.fault("bytes", f"slot {slot} does not hold block {block}")
                return

    def _launch(
        self, what: str, layers: Sequence[int], reads: dict[int, int], writes: dict[int, int]
    ) -> None:
        reads, writes = dict(reads), dict(writes)

        def run() -> None:
            for layer in layers:
                for page, block in reads.items():
                    found = self.caches[layer][page]
                    if not torch.equal(_raw(found), _raw(self.bytes_of(block, layer))):
                        self.machine.fault(
                            "bytes",
                            f"{what} reads page {page} of layer {layer}, which does not hold "
                            f"block {block}",
                        )
                for page, block in writes.items():
                    self.caches[layer][page] = self.bytes_of(block, layer)

        self.machine.launch(
            what,
            run,
            reads=self.places(reads, layers) if reads else NOTHING,
            writes=self.places(writes, layers) if writes else NOTHING,
        )

    def close(self) -> None:
        """Close the worker, and raise AssertionError if the machine saw a fault."""
        self.machine.finish()
        assert self.worker.close()
        self.machine.check()


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
