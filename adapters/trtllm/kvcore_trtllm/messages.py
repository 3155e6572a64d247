"""What the leader tells the workers, and what they tell it.

    leader ──StepPlan──▶ every worker     in the connector's metadata, broadcast with each step
    leader ◀──StepNews── every worker     gathered inside get_finished, while there is any to come

The payload is msgpack inside one picklable class, so nothing else of kvcore's is pickled.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvcore._util.msgpack import decoder
from kvcore.connector.fusion_messages import BlendOrder
from kvcore.index.slots import SlotRun
from kvcore.transfer.graph import OpReport, TransferGraph


class StepPlan(msgspec.Struct, array_like=True):
    """One step's work for a worker, in the order in which it is taken.

    ``open_tiers`` comes once, before any graph that names those tiers; ``forget`` are slots of
    tiers to make unreadable. ``early_saves`` read pages that may be given away in this very step.
    ``cancel`` and then ``fence`` name graphs that use pages which this step gives to others: they
    must have let go of them before it writes. ``sync_loads`` must have landed when the forward uses
    them, ``async_loads`` belong to parked requests. ``blends`` are carried out before the forward.
    ``late_saves`` read what this step's forward computes. Saves come with the request they are of.
    ``lost_loads`` are parked requests whose load could not be planned, to be reported all the same.
    ``broken`` says, where it is not empty, why what this step computes must not reach anyone.
    """

    open_tiers: dict[str, dict[str, Any]] = {}
    forget: list[tuple[str, list[SlotRun]]] = []
    early_saves: list[tuple[int, TransferGraph]] = []
    cancel: list[int] = []
    fence: list[int] = []
    sync_loads: list[TransferGraph] = []
    async_loads: list[tuple[int, TransferGraph]] = []
    lost_loads: list[int] = []
    blends: list[BlendOrder] = []
    late_saves: list[tuple[int, TransferGraph]] = []
    spills: list[TransferGraph] = []
    broken: str = ""


class StepNews(msgspec.Struct, array_like=True):
    """What ended on one rank since its last news, and what it counted."""

    reports: list[OpReport] = []
    counted: dict[str, dict[str, Any]] = {}


_encode = msgspec.msgpack.Encoder().encode
_decode_plan = decoder(StepPlan, "a step plan")
decode_news = decoder(StepNews, "step news")
_IDLE = _encode(StepPlan())


class KVCoreMetadata:
    """A StepPlan on its way to the workers."""

    def __init__(self, payload: bytes = b"") -> None:
        self.payload = payload

    @classmethod
    def of(cls, plan: StepPlan) -> KVCoreMetadata:
        payload = _encode(plan)
        return cls(b"" if payload == _IDLE else payload)

    def plan(self) -> StepPlan:
        """Raises FormatError when the payload is not a step plan."""
        if not self.payload:
            return StepPlan()
        return _decode_plan(self.payload)
