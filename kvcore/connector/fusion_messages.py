"""What a leader tells its workers of blends, and what they tell it.

    leader ──BlendOrder──▶ every rank       one prompt, with the graphs that bring its chunks
    leader ◀──BlendReport─ a rank           what became of it

Adapters put these into the messages that they send anyway.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from kvcore.transfer.graph import TransferGraph

if TYPE_CHECKING:
    from kvcore.connector.fusion_scheduler import BlendPlan

__all__ = ["FULL_LAYERS", "BlendOrder", "BlendReport", "ChunkLoad", "pages_made", "told"]

FULL_LAYERS = 2
"""The first layers compute every row (`kvcore.fusion.select.Ratio`)."""


class ChunkLoad(msgspec.Struct, array_like=True):
    """A chunk of a blend: ``graph`` copies its blocks to rows of the staging.

    Tokens [first, first + length) of the staging stand at ``position`` of the prompt; they were
    computed ``distance`` positions before that.
    """

    graph: TransferGraph
    first: int
    length: int
    position: int
    distance: int


class BlendOrder(msgspec.Struct, array_like=True):
    """One prompt to be blended in this step, before the forward.

    ``tokens`` are the prompt's (`kvcore.model.keys.pack_tokens`) and ``pages`` the request's pages
    in
    the engine. KV is made for positions [exact, stop). Of what stands before, [0, readable) can be
    read from the pages; the rest is being computed in this very step, and is computed here too.
    ``blocks`` is the size of the staging. ``lora`` is the adapter's number in the engine, 0 for
    none.
    """

    request_id: str
    tokens: bytes
    exact: int
    readable: int
    stop: int
    pages: list[int]
    ratio: float
    chunks: list[ChunkLoad]
    blocks: int
    lora: int = 0


class BlendReport(msgspec.Struct, array_like=True):
    """What a blend did.

    ``share`` are the rows x layers it computed, ``rows`` those it made KV for and ``kept`` the mean
    of those computed behind the full layers. ``verdicts`` are the quality gate's, and ``reason``
    what it said last. One that is not ``ok`` though its chunks ``arrived`` failed in itself; of the
    others nothing is learnt, as when a server has ended.
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


def pages_made(order: BlendOrder, page_tokens: int) -> list[int]:
    """The pages that a blend is to fill."""
    return order.pages[order.exact // page_tokens : -(-order.stop // page_tokens)]


def told(plan: BlendPlan, report: BlendReport | None) -> dict[str, Any]:
    """What a client is told of a blend that was ordered; ``report`` is None until it has come."""
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
