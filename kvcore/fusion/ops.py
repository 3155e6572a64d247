"""Device operations of a blend, besides the engine's own layers.

    place      copy cached K and V to their positions in the prompt, and rotate K
    merge      write computed rows over the cached ones
    deviation  compute how far cached rows deviate
    keep_top   choose the rows with the highest scores
    attend     compute attention of the kept rows

`TorchFusion` defines the correct results and supports every device. Device operations may come with
a faster implementation (`kvcore.plugins.OpsPlugin.fusion`). `select_fusion` chooses one, as
`select_ops` does for copies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvcore.errors import ConfigError
from kvcore.fusion.attend import Attention, attend_rows
from kvcore.fusion.plan import LayerKV
from kvcore.fusion.rope import Rope
from kvcore.fusion.select import deviation, keep_top
from kvcore.memory.copy.base import DeviceOps

__all__ = ["FusionOps", "Place", "TorchFusion", "select_fusion"]


class Place(NamedTuple):
    """A run of staged tokens and its position in the prompt.

    Tokens [first, first + length) of the staging belong at ``position``. They were computed
    ``distance`` positions earlier (later if negative).
    """

    first: int
    length: int
    position: int
    distance: int


class FusionOps(ABC):
    """An implementation of a blend's device operations. Stateless and thread-safe.

    K and V of a layer are [tokens, kv_heads, dim] each, indexed by position, with any strides. On a
    GPU all work is enqueued on the current stream.
    """

    @abstractmethod
    def supports(self, device: torch.device) -> bool:
        """Return True if KV on this device is supported."""

    @abstractmethod
    def place(
        self, staged: LayerKV, into: LayerKV, places: Sequence[Place], rope: Rope | None
    ) -> None:
        """Copy ``staged`` rows to their ``places`` in ``into``, with K rotated by the distance.

        V keeps its bits, and so does K if the distance is 0 or ``rope`` is None. ``staged`` is not
        changed. Places do not overlap.
        """

    @abstractmethod
    def merge(self, into: LayerKV, rows: Tensor, fresh: LayerKV) -> None:
        """Write K and V computed for ``rows`` (int64, distinct) to their positions in ``into``."""

    @abstractmethod
    def deviation(self, fresh: Tensor, cached: Tensor) -> Tensor:
        """Compute `kvcore.fusion.select.deviation`."""

    @abstractmethod
    def keep_top(self, rows: Tensor, scores: Tensor, count: int) -> Tensor:
        """Compute `kvcore.fusion.select.keep_top`."""

    @abstractmethod
    def attend(
        self, queries: Tensor, positions: Tensor, kv: LayerKV, attention: Attention
    ) -> Tensor:
        """Compute `kvcore.fusion.attend.attend_rows` over ``kv``."""


class TorchFusion(FusionOps):
    """The reference implementation, in torch."""

    def supports(self, device: torch.device) -> bool:
        return True

    def place(
        self, staged: LayerKV, into: LayerKV, places: Sequence[Place], rope: Rope | None
    ) -> None:
        for place in places:
            here = slice(place.first, place.first + place.length)
            there = slice(place.position, place.position + place.length)
            keys = staged.keys[here]
            if rope is not None and place.distance:
                keys = rope.shift(keys.transpose(0, 1), place.distance).transpose(0, 1)
            into.keys[there], into.values[there] = keys, staged.values[here]

    def merge(self, into: LayerKV, rows: Tensor, fresh: LayerKV) -> None:
        into.keys[rows], into.values[rows] = fresh

    def deviation(self, fresh: Tensor, cached: Tensor) -> Tensor:
        return deviation(fresh, cached)

    def keep_top(self, rows: Tensor, scores: Tensor, count: int) -> Tensor:
        return keep_top(rows, scores, count)

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
