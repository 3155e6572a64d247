"""What the leader sends the other ranks, and what they send it.

    leader ──Order───────▶ every other rank
    leader ◀──StepReport── every other rank

A `now` order touches no page of the engine's and is carried out as it comes. The others belong to
a point of the schedule that every rank reaches, in the same order: an insert or a load.
"""

from __future__ import annotations

import msgspec

from kvcore.connector.messages import Codec, StepReport, WorkPlan
from kvcore.transfer.graph import TransferGraph

__all__ = ["ORDERS", "REPORTS", "Order"]


class Order(WorkPlan, msgspec.Struct, array_like=True):
    """Work for a rank at a point of the schedule.

    ``graphs`` are started last. With ``at_once`` they are loads, to be finished before anything
    else. ``blends`` belong to a load; their pages are filled in where they are carried out.
    ``hold`` answers whether a request stays in the queue.
    """

    now: bool = False
    graphs: list[TransferGraph] = []
    at_once: bool = False
    hold: bool = False

    @property
    def empty(self) -> bool:
        return not (self.open_tiers or self.forget or self.cancel or self.graphs or self.blends)


ORDERS = Codec(Order, "an order")
REPORTS = Codec(StepReport, "a rank's report")
