"""Messages between a leader and its workers about blends.

    leader ──BlendOrder──▶ every rank       one prompt, with the graphs that load its chunks
    leader ◀──BlendReport─ one rank         the result

Adapters embed these in the messages that they exchange at every step anyway.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvcore.fusion.segments import Reusable
from kvcore.transfer.graph import SKIP, TransferGraph, UnitTable

__all__ = [
    "FULL_LAYERS",
    "BlendOrder",
    "BlendPlan",
    "BlendReport",
    "ChunkLoad",
    "blend_summary",
    "pages_made",
]

FULL_LAYERS = 2
"""The number of first layers at which every row is computed (`kvcore.fusion.select.Ratio`)."""


@dataclass(frozen=True)
class BlendPlan:
    """A blend of one request: KV for positions [exact, stop). Stays in the leader.

    ``chunks`` are in ascending order. ``ratio`` is the share of their rows to recompute.
    """

    exact: int
    stop: int
    ratio: float
    chunks: tuple[Reusable, ...]

    @property
    def reused(self) -> int:
        """The number of tokens in the chunks."""
        return sum(chunk.length for chunk in self.chunks)


class ChunkLoad(msgspec.Struct, array_like=True):
    """A chunk of a blend: tokens [first, first + length) of the blocks that ``graph`` copies.

    They belong at ``position`` of the prompt, and were computed ``distance`` positions earlier. The
    graph of the order names no page: see `into`.
    """

    graph: TransferGraph
    first: int
    length: int
    position: int
    distance: int

    def into(self, slots: npt.NDArray[np.int64]) -> TransferGraph:
        """Return the graph, bound so that it copies each token of the chunk to its own slot.

        ``slots`` has the engine's slot of each position of the prompt. Other tokens of the blocks
        are not copied.
        """
        [blocks] = self.graph.units
        units = np.full((self.graph.num_rows, blocks.unit_tokens), SKIP, dtype=np.int64)
        there = slots[self.position : self.position + self.length]
        units.ravel()[self.first : self.first + self.length] = there
        return self.graph.bind([UnitTable.of(units, 1)])


class BlendOrder(msgspec.Struct, array_like=True):
    """One prompt to blend in this step, before the forward.

    ``tokens`` are the prompt's (`kvcore.model.keys.pack_tokens`) and ``pages`` the request's pages
    in the engine. KV is made for positions [exact, stop). Positions [0, readable) can be read from
    the pages. Positions [readable, exact) are computed by another request in this very step, so the
    blend computes them too. ``lora`` is the engine's number of the LoRA adapter, 0 for none.
    """

    request_id: str
    tokens: bytes
    exact: int
    readable: int
    stop: int
    pages: list[int]
    ratio: float
    chunks: list[ChunkLoad]
    lora: int = 0


class BlendReport(msgspec.Struct, array_like=True):
    """The result of a blend.

    ``share`` is rows x layers computed, as a share of those KV was made for. ``rows`` counts the
    rows KV was made for, and ``kept`` is the mean number of rows computed at the layers after
    `FULL_LAYERS`. ``verdicts`` are the quality gate's, and ``reason`` is its last one. Times are in
    seconds of the engine's thread, which on a GPU does not wait for the blend (see `BlendTime`).

    If ``ok`` is False and ``arrived`` True, the blend itself failed. If ``arrived`` is False, its
    chunks did not arrive, for example because a server exited. That says nothing about blends.
    """

    request_id: str
    ok: bool = True
    share: float = 0.0
    rows: int = 0
    kept: int = 0
    ratio: float = 0.0
    verdicts: list[str] = []
    reason: str = ""
    wait_s: float = 0.0
    compute_s: float = 0.0
    look_s: float = 0.0
    arrived: bool = True


class BlendTime(msgspec.Struct, array_like=True):
    """How long a blend took on the device, without the waits for its chunks.

    ``rows`` are computed at the full layers and ``kept`` (a mean) at the others, behind ``exact``
    tokens of exact KV. ``looked`` are the rows of the question's look.
    """

    request_id: str
    rows: int
    kept: int
    exact: int
    seconds: float
    looked: int = 0


def slots_of(order: BlendOrder, page_tokens: int) -> npt.NDArray[np.int64]:
    """Return the engine's slot of each position [0, stop) of an order: [stop] int64."""
    positions = np.arange(order.stop, dtype=np.int64)
    pages = np.asarray(order.pages, dtype=np.int64)
    return pages[positions // page_tokens] * page_tokens + positions % page_tokens


def pages_made(order: BlendOrder, page_tokens: int) -> list[int]:
    """Return the pages that a blend fills."""
    return order.pages[order.exact // page_tokens : -(-order.stop // page_tokens)]


def blend_summary(plan: BlendPlan, report: BlendReport | None) -> dict[str, Any]:
    """Return what a client is shown of an ordered blend; ``report`` is None until it arrives."""
    if report is None:
        return {"blended_tokens": plan.reused, "ratio": plan.ratio}
    if not report.ok:
        return {"error": "the blend failed: the engine computed the prompt"}
    found: dict[str, Any] = {
        "blended_tokens": plan.reused,
        "ratio": report.ratio,
        "recomputed_share": round(report.share, 4),
    }
    if report.verdicts:
        found["gate"] = report.verdicts
    return found
