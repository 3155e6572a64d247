"""What a blend does to KV on its device, beside the engine's own layers.

    place      cached K and V to where they stand in the prompt, K rotated on the way
    merge      computed rows over the cached ones
    deviation  how far cached rows are off
    keep_top   the rows that score highest
    attend     attention of the rows that go on

`TorchFusion` is the definition of right and serves every device. Device operations may bring a
faster one along (`kvcore.plugins.OpsPlugin.fusion`); `select_fusion` chooses as `select_ops` does
for copies.
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
    """Tokens [first, first + length) of the staging stand at ``position`` of the prompt, and were
    computed ``distance`` positions earlier (later where negative)."""

    first: int
    length: int
    position: int
    distance: int


class FusionOps(ABC):
    """One way to do a blend's work. Stateless, and safe to use from several threads at once.

    K and V of a layer are [tokens, kv_heads, dim] each, the index being the position, in strides of
    any kind. On a GPU everything is enqueued on the current stream.
    """

    @abstractmethod
    def supports(self, device: torch.device) -> bool:
        """Whether this can work on KV that lies there."""

    @abstractmethod
    def place(
        self, staged: LayerKV, into: LayerKV, places: Sequence[Place], rope: Rope | None
    ) -> None:
        """Write what is ``staged`` to its ``places`` in ``into``, each one's K rotated by its
        distance.

        Where the distance is 0, or ``rope`` None, bits are kept; V always is. ``staged`` is not
        written to. Places do not overlap.
        """

    @abstractmethod
    def merge(self, into: LayerKV, rows: Tensor, fresh: LayerKV) -> None:
        """Write K and V computed for ``rows`` (int64, distinct) to their positions in ``into``."""

    @abstractmethod
    def deviation(self, fresh: Tensor, cached: Tensor) -> Tensor:
        """`kvcore.fusion.select.deviation`."""

    @abstractmethod
    def keep_top(self, rows: Tensor, scores: Tensor, count: int) -> Tensor:
        """`kvcore.fusion.select.keep_top`."""

    @abstractmethod
    def attend(
        self, queries: Tensor, positions: Tensor, kv: LayerKV, attention: Attention
    ) -> Tensor:
        """`kvcore.fusion.attend.attend_rows` over ``kv``."""


class TorchFusion(FusionOps):
    """The naive twin of every operation, in torch."""

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
    """Return the fusion of the device operations called ``backend``, else of the fastest of
    ``candidates`` that brings one for ``device``. Torch's serves where they only copy.

    ``brought`` are the fusions that the candidates bring, by the name of their operations
    (`kvcore.plugins.PluginManager.fusion_ops`).

    Raises ConfigError when ``backend`` names none, or one whose fusion does not serve the device.
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
                f"ops.backend = {backend!r} cannot blend on {device}; auto takes what can"
            )
        return chosen
    for ops in sorted(by_name.values(), key=lambda ops: ops.priority, reverse=True):
        found = brought.get(ops.name)
        if found is not None and found.supports(device):
            return found
    return TorchFusion()
