"""A model as kvcore sees it: the same description in the leader and in every worker.

Both derive it from the engine's own settings. They therefore agree on the order of layers, the
shape of blocks and the number of slots without a handshake.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

from kvcore.errors import LayoutError
from kvcore.model.packed import PackedPages
from kvcore.model.parts import Part, evenly
from kvcore.model.points import PageWindow, PointShape, RowHeads, StateGroup, WindowGroup
from kvcore.model.shape import BlockShape

__all__ = ["LayerGroup", "ModelDescription", "even_stages", "head_range"]


def head_range(kv_heads: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return the KV heads [start, stop) that tensor-parallel ``rank`` holds of ``kv_heads``.

    With more ranks than heads, consecutive ranks hold the same head.
    """
    start = rank * kv_heads // ranks
    if kv_heads < ranks:
        return start, start + 1
    return start, (rank + 1) * kv_heads // ranks


def even_stages(layers: int, stages: int) -> tuple[tuple[int, int], ...]:
    """Return the layers [start, stop) of each of ``stages`` pipeline stages, split evenly."""
    return evenly(layers, stages)


@dataclass(frozen=True)
class LayerGroup:
    """Layers that share one page table in the engine.

    ``layers`` are canonical layer indices in memory order. ``names`` are the engine's names in the
    same order, if it has any. ``page_tokens`` is the size of a page of the table, in tokens. A
    group whose pages belong to resume points, of states or windows, has no layers of blocks: see
    `kvcore.model.points`.
    """

    index: int
    page_tokens: int
    layers: tuple[int, ...]
    names: tuple[str, ...] = ()
    of: Literal["blocks", "states", "windows"] = "blocks"

    def only(self, layers: range) -> LayerGroup:
        """Return the group restricted to ``layers``."""
        kept = [i for i, layer in enumerate(self.layers) if layer in layers]
        return replace(
            self,
            layers=tuple(self.layers[i] for i in kept),
            names=tuple(self.names[i] for i in kept) if self.names else (),
        )


def _states(point: PointShape) -> Sequence[StateGroup]:
    return point.states


def _seen(point: PointShape) -> Sequence[WindowGroup | PageWindow]:
    return point.seen


@dataclass(frozen=True)
class ModelDescription:
    """One model. ``shape`` is its whole canonical block; a rank holds ``part(rank)`` of it.

    ``fingerprint`` and ``alone`` come from `kvcore.model.ingredients.ModelIdentity`;
    ``world_size`` is the number of ranks. ``stages`` are the layers [start, stop) of each pipeline
    stage, by default one stage with all layers. The tensor-parallel ranks of a stage are
    consecutive. ``point`` is what a resume point has; None if blocks are all that the model keeps.
    ``stage_points`` are the parts of it that each stage keeps, by default all on one stage.
    ``packed`` are the pages of a format that only the engine knows; ``shape`` is then nominal.
    ``machines`` hold equally many ranks each, in order; the leader is on the first one.
    """

    shape: BlockShape
    groups: tuple[LayerGroup, ...]
    fingerprint: bytes
    world_size: int
    stages: tuple[tuple[int, int], ...] = field(default=(), kw_only=True)
    alone: tuple[str, ...] = field(default=(), kw_only=True)
    point: PointShape | None = field(default=None, kw_only=True)
    stage_points: tuple[PointShape, ...] = field(default=(), kw_only=True)
    packed: PackedPages | None = field(default=None, kw_only=True)
    machines: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        if self.machines < 1 or self.world_size % self.machines:
            raise LayoutError(
                f"given {self.world_size} ranks on {self.machines} machines: each machine must "
                "have equally many"
            )
        if not self.stages:
            object.__setattr__(self, "stages", ((0, self.shape.layers),))
        borders = [0, *(stop for _, stop in self.stages)]
        adjacent = [start for start, _ in self.stages] == borders[:-1]
        rising = all(a < b for a, b in pairwise(borders)) and borders[-1] == self.shape.layers
        if not adjacent or not rising or self.world_size % len(self.stages):
            raise LayoutError(
                f"given {self.world_size} ranks in pipeline stages of layers {self.stages}: stages "
                f"must split {self.shape.layers} layers in order and have equally many ranks"
            )
        if self.point is not None:
            if not self.stage_points:
                object.__setattr__(self, "stage_points", (self.point,))
            self._check_point(self.point)
        if self.packed is not None:
            self._check_packed(self.packed)

    def _check_packed(self, packed: PackedPages) -> None:
        shape, point = self.shape, self.point
        nominal = packed.shape(shape.block_tokens, shape.kv_heads, self.stages) == shape
        sizes = {group.page_tokens for group in self.groups if group.of == "blocks"}
        paged = (group.page_tokens for group in self.groups if group.of != "states")
        whole = all(shape.block_tokens % tokens == 0 for tokens in paged)
        others = point is not None and bool(point.windows)
        fits = nominal and whole and sizes == {packed.page_tokens}
        if not fits or others:
            raise LayoutError(
                f"{packed} for blocks of {shape} in pages of {sorted(sizes)} tokens: kvcore serves "
                "pages of the engine's own format in one size, and beside states, and windows of "
                "the same format, only"
            )

    def _check_point(self, point: PointShape) -> None:
        parts = self.stage_points
        if len(parts) != len(self.stages):
            raise LayoutError(f"resume points of {len(parts)} of {len(self.stages)} stages")
        for rank in range(self.world_size):
            given, row = self.rank_shape(rank).nbytes, parts[rank // self.tensor_ranks].row_nbytes
            if given != row:
                raise LayoutError(
                    f"resume points in rows of {row} bytes, and blocks of {given} bytes on rank "
                    f"{rank}: kvcore serves them on ranks with equal parts of a block"
                )
        self._check_shared(point)
        if any(part.counts != point.counts or part.every != point.every for part in parts):
            raise LayoutError("the stages of a pipeline keep resume points in unlike rows")
        for name, of_kind in (("states", _states), ("windows", _seen)):
            told = {i for i, group in enumerate(self.groups) if group.of == name}
            found = {part.group: sorted(part.names) for part in of_kind(point)}
            split: dict[int, list[str]] = {group: [] for group in found}
            for part in parts:
                for own in of_kind(part):
                    split.setdefault(own.group, []).extend(own.names)
            kept = {group: sorted(names) for group, names in split.items()}
            if found.keys() != told or kept != found or not all(found.values()):
                raise LayoutError(f"resume points of {name} {kept} of {found} in {self.groups}")

    def _check_shared(self, point: PointShape) -> None:
        """Raise LayoutError if a store could not tell the rows of one rank from another's."""
        layer = self.rank_shape(0).with_layers(1)
        for window in point.windows:
            if window.by_heads and window.shape != layer:
                raise LayoutError(
                    f"windows of {window.shape}, whose heads are not those of {self.shape} on "
                    f"{self.tensor_ranks} ranks: their rows cannot be cut as blocks are"
                )
        told = RowHeads(layer.kv_heads, layer.head_nbytes)
        if point.heads not in (None, told):
            raise LayoutError(
                f"states cut as {point.heads}, and layers of blocks as {told}: their rows cannot "
                "be cut as blocks are"
            )
        apart = bool(point.states) or (bool(point.windows) and not point.by_heads)
        if apart and len(set(map(self.part, range(self.world_size)))) < self.world_size:
            raise LayoutError(
                f"resume points of {self.world_size} ranks, some of which have the same part of a "
                "block: each has states or windows of its own, and stores tell ranks apart by it"
            )

    @property
    def single_group(self) -> bool:
        """True if all layers share one page table."""
        return len(self.groups) == 1

    @property
    def tensor_ranks(self) -> int:
        """Number of ranks that share the heads of a layer."""
        return self.world_size // len(self.stages)

    @property
    def firsts(self) -> range:
        """The first rank of each machine, in order."""
        return range(0, self.world_size, self.world_size // self.machines)

    def beside(self, rank: int) -> range:
        """Return the ranks on the machine of ``rank``."""
        first = rank // self.firsts.step * self.firsts.step
        return range(first, first + self.firsts.step)

    def head_range(self, rank: int) -> tuple[int, int]:
        """Return the KV heads [start, stop) of ``rank``."""
        return head_range(self.shape.kv_heads, self.tensor_ranks, rank % self.tensor_ranks)

    def layer_range(self, rank: int) -> tuple[int, int]:
        """Return the layers [start, stop) of ``rank``."""
        return self.stages[rank // self.tensor_ranks]

    def part(self, rank: int) -> Part:
        """Return the part of a block that ``rank`` holds."""
        return Part(self.head_range(rank), self.layer_range(rank))

    def rank_shape(self, rank: int) -> BlockShape:
        """Return the canonical block of one rank's heads and layers."""
        return self.part(rank).shape(self.shape)

    def by_machine(self) -> ModelDescription:
        """Return the model as servers share it out: one rank on each machine, with all parts there.

        It has neither resume points nor the engine's page tables. Raises LayoutError if the parts
        of a machine's ranks are no part of a block.
        """
        step, tensor_ranks, stages = self.firsts.step, self.tensor_ranks, self.stages
        if step % tensor_ranks == 0:
            firsts, more = stages[:: step // tensor_ranks], step // tensor_ranks - 1
            lasts = stages[more :: more + 1]
            stages = tuple((a, b) for (a, _), (_, b) in zip(firsts, lasts, strict=True))
        elif tensor_ranks % step:
            raise LayoutError(
                f"{step} ranks on each machine, of stages with {tensor_ranks} ranks each: "
                "supported are whole stages on a machine, or a stage on several machines"
            )
        layers = LayerGroup(0, self.shape.block_tokens, tuple(range(self.shape.layers)))
        count = self.machines
        made = ModelDescription(
            self.shape, (layers,), self.fingerprint, count, stages=stages, machines=count
        )
        for machine, first in enumerate(self.firsts):
            heads = [self.head_range(rank) for rank in self.beside(first)]
            if (min(heads)[0], max(heads)[1]) != made.head_range(machine):
                raise LayoutError(
                    f"{self.shape.kv_heads} KV heads for {tensor_ranks} ranks, {step} ranks on "
                    f"each of {count} machines: supported are machines with equally many heads"
                )
        return made

    def part_on_machine(self, rank: int) -> tuple[Part, int]:
        """Return the part of ``rank`` within the part that its machine holds.

        With it comes the byte at which it begins where the parts of a machine lie one by one.
        """
        machine = self.by_machine().part(rank // self.firsts.step)
        heads, layers = part = self.part(rank).seen_from(machine)
        width = machine.heads[1] - machine.heads[0]
        before = layers[0] * width + (layers[1] - layers[0]) * heads[0]
        return part, before * self.shape.with_heads(1).with_layers(1).nbytes

    def behind(self, server: str | None) -> ModelDescription:
        """Return the model as an engine has it that is a client of ``server``, if there is one.

        A server holds whole blocks. Those that are not cut by heads are the parts of all ranks, one
        by one. Where each rank's part is stored for itself, such a block would be read as heads of
        each layer. Therefore the two have fingerprints of their own, and never find each other's.
        """
        if server is None:
            return self
        cut = self.packed is None and (self.point is None or self.point.by_heads)
        if cut or len({self.head_range(rank) for rank in range(self.tensor_ranks)}) == 1:
            return self
        where = "" if self.machines == 1 else f" on {self.machines} machines"
        told = hashlib.sha256(self.fingerprint + f"/parts one by one{where}".encode()).digest()
        return replace(self, fingerprint=told[: len(self.fingerprint)])

    def rank_point(self, rank: int) -> PointShape | None:
        """Return what ``rank`` keeps of a resume point; None if the model keeps blocks only."""
        return self.stage_points[rank // self.tensor_ranks] if self.stage_points else None

    def rank_groups(self, rank: int) -> tuple[LayerGroup, ...]:
        """Return the groups restricted to one rank's layers; a group may be empty there."""
        start, stop = self.layer_range(rank)
        return tuple(group.only(range(start, stop)) for group in self.groups)
