"""Device operations of a blend, besides the engine's own layers.

    placing    puts cached K and V at their positions in the prompt, and rotates K
    merge      writes computed rows over the cached ones
    deviation  computes how far cached rows deviate
    smooth     averages scores over neighbouring rows
    balance    adds two kinds of scores
    keep       chooses the rows with the highest scores
    attend     computes attention of the kept rows

`TorchFusion` defines the correct results and supports every device. Device operations may come with
a faster implementation (`kvcore.plugins.OpsPlugin.fusion`). `select_fusion` chooses one, as
`select_ops` does for copies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvcore.errors import ConfigError
from kvcore.fusion.attend import Attention, attend_rows
from kvcore.fusion.plan import LayerKV
from kvcore.fusion.rope import Rope
from kvcore.fusion.rows import Rows
from kvcore.fusion.select import balanced, deviation, keep_top, smoothed
from kvcore.memory.copy.base import DeviceOps, Units
from kvcore.memory.layout import KVView, sglang_layout

__all__ = [
    "FusionOps",
    "Kept",
    "Place",
    "Placing",
    "Sample",
    "TorchFusion",
    "select_fusion",
    "token_tables",
]


class Place(NamedTuple):
    """A run of tokens in a source and its position in the prompt.

    Tokens [first, first + length) of the source, counted over its pages, belong at ``position``.
    They were computed ``distance`` positions earlier (later if negative).
    """

    first: int
    length: int
    position: int
    distance: int


class Kept(NamedTuple):
    """The rows that go on, and their indices among the rows they were chosen from, int64."""

    rows: Rows
    going: Tensor


class Sample(NamedTuple):
    """What a model's blends are like, for `FusionOps.prepare`.

    Args:
        queries: queries of one layer, [rows, heads, dim].
        fresh: K and V of one layer as the engine's layer gives them.
        attention: the attention of every layer.
        ropes: the rope of every layer.
        pages: the engine's pages.
    """

    queries: Tensor
    fresh: LayerKV
    attention: Sequence[Attention]
    ropes: Sequence[Rope | None]
    pages: KVView


class Placing(ABC):
    """The places of one source in one prompt. What does not depend on the layer is done before."""

    @abstractmethod
    def place(self, layer: int) -> None:
        """Copy one layer to its places, with K rotated by the distance.

        V keeps its bits, and so does K if the distance is 0 or the layer does not rotate.
        """


class FusionOps(ABC):
    """An implementation of a blend's device operations. Stateless and thread-safe.

    K and V of a layer are [tokens, kv_heads, dim] each, indexed by position, with any strides. On a
    GPU all work is enqueued on the current stream.
    """

    compiles = False
    """True if operations are compiled for a model when they are first used."""

    @abstractmethod
    def supports(self, device: torch.device) -> bool:
        """Return True if KV on this device is supported."""

    def prepare(self, sample: Sample, copies: DeviceOps) -> None:  # noqa: B027 - optional
        """Compile what blends of a model use, so that none of them waits for it. Blocks.

        Writes to no memory of the sample.
        """

    @abstractmethod
    def placing(
        self,
        source: KVView,
        into: LayerKV,
        places: Sequence[Place],
        ropes: Sequence[Rope | None],
        copies: DeviceOps,
        *,
        again: bool = False,
    ) -> Placing:
        """Prepare to copy layers of ``source`` to their ``places`` in ``into``.

        ``ropes`` has one rope for each layer of the source. Places do not overlap. ``copies`` may
        be used to copy. If layers are placed ``again``, the first time may write the rotated K back
        to the source; nothing else of the source is changed.
        """

    @abstractmethod
    def merge(self, into: LayerKV, rows: Tensor, fresh: LayerKV) -> None:
        """Write K and V computed for ``rows`` (int64, distinct) to their positions in ``into``."""

    @abstractmethod
    def deviation(
        self, fresh: Sequence[Tensor], which: Tensor, cached: Sequence[Tensor], rows: Tensor
    ) -> Tensor:
        """Compute `kvcore.fusion.select.deviation` of ``fresh[which]`` from ``cached[rows]``.

        ``fresh`` and ``cached`` are K, or V, or both in this order; the result is [parts, rows]
        float32. ``which`` and ``rows`` are int64, and equally long.
        """

    @abstractmethod
    def smooth(self, rows: Tensor, scores: Tensor, reach: int, end: int) -> Tensor:
        """Compute `kvcore.fusion.select.smoothed`."""

    @abstractmethod
    def balance(self, one: Tensor, other: Tensor) -> Tensor:
        """Compute `kvcore.fusion.select.balanced`, up to the rounding of the means."""

    @abstractmethod
    def keep(self, rows: Rows, offset_of: Tensor, scores: Tensor, count: int) -> Kept:
        """Keep the ``count`` chunk rows that `kvcore.fusion.select.keep_top` does, and all others.

        ``scores`` has one score for each chunk row, at least ``count``. ``offset_of`` is below 0
        at positions without cached KV. The host does not wait for the device.
        """

    @abstractmethod
    def attend(
        self, queries: Tensor, positions: Tensor, kv: LayerKV, attention: Attention
    ) -> Tensor:
        """Compute `kvcore.fusion.attend.attend_rows` over ``kv``."""


def token_tables(places: Sequence[Place]) -> tuple[Units, Units, Units]:
    """Return each token's index in the source, its position and its distance."""
    table = np.array(places, dtype=np.int64).reshape(-1, len(Place._fields))
    first, length, position, distance = table.T
    index = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
    return (
        np.repeat(first, length) + index,
        np.repeat(position, length) + index,
        np.repeat(distance, length),
    )


def _joined(places: Iterable[Place]) -> list[Place]:
    """Join runs of the prompt that follow one another and move alike, wherever they come from."""
    runs: list[Place] = []
    for place in places:
        last = runs[-1] if runs else place
        if (last.position + last.length, last.distance) == (place.position, place.distance):
            runs[-1] = last._replace(length=last.length + place.length)
        else:
            runs.append(place)
    return runs


class _TorchPlacing(Placing):
    def __init__(
        self,
        source: KVView,
        into: LayerKV,
        places: Sequence[Place],
        ropes: Sequence[Rope | None],
        copies: DeviceOps,
        again: bool,
    ) -> None:
        self._source = source
        self._into = into
        self._moved = _joined(place for place in places if place.length and place.distance)
        self._ropes = ropes
        self._copies = copies
        self._again = again
        self._turned: set[int] = set()
        self._src, self._dst, distances = token_tables(places)
        self._away = distances != 0
        layout = sglang_layout([into.keys], [into.values], 1, source.layout.dtype)
        self._target = KVView(layout, list(into))

    def place(self, layer: int) -> None:
        if not len(self._src):
            return
        source = self._source.select_layers([layer])
        self._copies.copy_blocks(source, self._src, self._target, self._dst, unit_tokens=1)
        rope = None if layer in self._turned else self._ropes[layer]
        if rope is None or not self._moved:
            return
        for place in self._moved:
            there = slice(place.position, place.position + place.length)
            keys = self._into.keys[there].transpose(0, 1)
            self._into.keys[there] = rope.shift(keys, place.distance).transpose(0, 1)
        if self._again:
            here, there = self._src[self._away], self._dst[self._away]
            self._copies.copy_blocks(self._target, there, source, here, unit_tokens=1)
            self._turned.add(layer)


class TorchFusion(FusionOps):
    """The reference implementation, in torch."""

    def supports(self, device: torch.device) -> bool:
        return True

    def placing(
        self,
        source: KVView,
        into: LayerKV,
        places: Sequence[Place],
        ropes: Sequence[Rope | None],
        copies: DeviceOps,
        *,
        again: bool = False,
    ) -> Placing:
        return _TorchPlacing(source, into, places, ropes, copies, again)

    def merge(self, into: LayerKV, rows: Tensor, fresh: LayerKV) -> None:
        into.keys[rows], into.values[rows] = fresh

    def deviation(
        self, fresh: Sequence[Tensor], which: Tensor, cached: Sequence[Tensor], rows: Tensor
    ) -> Tensor:
        pairs = zip(fresh, cached, strict=True)
        parts = [deviation(a.index_select(0, which), b.index_select(0, rows)) for a, b in pairs]
        return torch.stack(parts)

    def smooth(self, rows: Tensor, scores: Tensor, reach: int, end: int) -> Tensor:
        return smoothed(rows, scores, reach, end)

    def balance(self, one: Tensor, other: Tensor) -> Tensor:
        return balanced(one, other)

    def keep(self, rows: Rows, offset_of: Tensor, scores: Tensor, count: int) -> Kept:
        kept = keep_top(rows.chunk, scores, count)
        stays = torch.ones(len(rows), dtype=torch.uint8, device=kept.device)
        stays.index_fill_(0, rows.chunk, 0).index_fill_(0, kept, 1)
        order = torch.sort(stays, descending=True, stable=True).indices
        going = order[: len(rows) - len(rows.chunk) + len(kept)]
        positions = rows.positions.index_select(0, going)
        chunk = torch.searchsorted(going, kept)
        return Kept(Rows(positions, chunk, rows.positions.index_select(0, kept)), going)

    def attend(
        self, queries: Tensor, positions: Tensor, kv: LayerKV, attention: Attention
    ) -> Tensor:
        return attend_rows(queries, positions, kv.keys, kv.values, attention)


def select_fusion(
    device: torch.device,
    candidates: Iterable[DeviceOps],
    brought: Mapping[str, FusionOps],
    backend: str = "auto",
) -> FusionOps:
    """Return the fusion operations of ``backend``, or the fastest that support ``device``.

    ``brought`` maps names of candidates to the fusion operations that come with them
    (`kvcore.plugins.PluginManager.fusion_ops`). If the named candidate has none, or if none
    supports the device, torch's are returned.

    Raises ConfigError if ``backend`` names no candidate, or one whose fusion operations do not
    support the device.
    """
    by_name = {ops.name: ops for ops in candidates}
    if backend != "auto":
        if backend not in by_name:
            raise ConfigError(
                f"ops.backend = {backend!r}; available here are auto, {', '.join(sorted(by_name))}"
            )
        chosen = brought.get(backend) or TorchFusion()
        if not chosen.supports(device):
            raise ConfigError(
                f"ops.backend = {backend!r} cannot blend on {device}; set auto to use one that can"
            )
        return chosen
    for ops in sorted(by_name.values(), key=lambda ops: ops.priority, reverse=True):
        found = brought.get(ops.name)
        if found is not None and found.supports(device):
            return found
    return TorchFusion()
