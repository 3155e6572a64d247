"""What the leader tells the other ranks, and what they tell it.

    leader ──Order──▶ every other rank
    leader ◀──News─── every other rank

A `now` order touches no page of the engine's and is carried out as it comes. The others belong to
a point of the schedule that every rank reaches, in the same order: an insert or a load.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvcore._util.msgpack import decoder
from kvcore.connector.fusion_messages import BlendOrder
from kvcore.index.slots import SlotRun
from kvcore.telemetry.metrics import Data
from kvcore.transfer.graph import OpReport, TransferGraph


class Order(msgspec.Struct, array_like=True):
    """Work for a rank, taken in the order of the fields.

    ``open_tiers`` comes once, before any graph that names those tiers; ``forget`` are slots of
    tiers to make unreadable. ``at_once``: the graphs are loads to finish before anything else.
    ``blends`` belong to a load, and their pages are filled in where they are carried out. ``hold``
    answers whether a request stays in the queue.
    """

    now: bool = False
    open_tiers: dict[str, dict[str, Any]] = {}
    forget: list[tuple[str, list[SlotRun]]] = []
    cancel: list[int] = []
    graphs: list[TransferGraph] = []
    at_once: bool = False
    blends: list[BlendOrder] = []
    hold: bool = False

    @property
    def empty(self) -> bool:
        return not (self.open_tiers or self.forget or self.cancel or self.graphs or self.blends)


class News(msgspec.Struct, array_like=True):
    """Ops that ended on a rank, and what it counted."""

    reports: list[OpReport] = []
    counted: Data = {}


_encoder = msgspec.msgpack.Encoder()
decode_order = decoder(Order, "an order")
decode_news = decoder(News, "a rank's news")


def encode(message: Order | News) -> bytes:
    return _encoder.encode(message)
