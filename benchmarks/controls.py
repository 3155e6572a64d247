"""Selectors that are controls of experiments, as a plugin of kvcore that a third party would write.

`benchmarks.fusion_quality` compares the selectors that kvcore ships with these. An entry point of
the group ``kvcore.plugins`` that names this module would make `fusion.selector` take them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvcore.fusion.select import Candidates, Measure, OfAnother, Selector
from kvcore.memory.device import device_of
from kvcore.plugins import SelectorPlugin, hookimpl


@hookimpl
def kvcore_selectors() -> list[SelectorPlugin]:
    """Offer the controls by name."""
    return [SelectorPlugin("heads", ChunkHeads), SelectorPlugin("random", RandomRows)]


class ChunkHeads(Selector):
    """The first tokens of every chunk, which were computed as if a text began there."""

    name = "heads"

    @property
    def measures(self) -> tuple[Measure, ...] | None:
        return ()

    def score(self, candidates: Candidates) -> Tensor:
        return -candidates.offsets.float()


@dataclass(frozen=True)
class RandomRows(Selector):
    """Random rows: the control that every other selector must beat."""

    name: ClassVar[str] = "random"
    seed: int = 0

    @property
    def measures(self) -> tuple[Measure, ...] | None:
        return ()

    def score(self, candidates: Candidates) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        everyone = torch.rand(candidates.last, generator=generator).numpy()
        there = device_of(candidates.rows.device).upload(everyone)
        return there.index_select(0, candidates.rows)


@dataclass(frozen=True)
class HeadsToo(OfAnother):
    """The first ``heads`` tokens of every chunk, and then the rows of another selector.

    The beginning of a text draws attention from everything after it (an attention sink). A chunk
    that was computed alone has such a beginning, but the middle of a prompt has none. This shows
    only at deeper layers than the one at which the deviation is measured.
    """

    name: ClassVar[str] = "heads, then another"
    heads: int = 1

    def score(self, candidates: Candidates) -> Tensor:
        return self.inner.score(candidates).masked_fill(candidates.offsets < self.heads, math.inf)
