"""The messages between the leader and the other ranks.

    leader ──Order───────▶ every other rank
    leader ◀──StepReport── every other rank

A `now` order touches none of the engine's pages, and is carried out as soon as it arrives. Every
other order belongs to an insert or a load. Every rank reaches these in the same sequence.
"""

from __future__ import annotations

import msgspec

from kvcore.connector.messages import Codec, StepReport, WorkPlan
from kvcore.transfer.graph import TransferGraph

__all__ = ["ORDERS", "REPORTS", "Order"]


class Order(WorkPlan, msgspec.Struct, array_like=True):
    """Work for a rank at one point of the schedule.

    ``graphs`` are started last. With ``at_once`` they are loads that must end before anything else
    happens. ``blends`` belong to a load; each rank fills in their pages itself. ``hold`` is True if
    the request that was asked about stays in the queue.
    """

    now: bool = False
    graphs: list[TransferGraph] = []
    at_once: bool = False
    hold: bool = False

    @property
    def empty(self) -> bool:
        """True if there is no work. ``now``, ``at_once`` and ``hold`` do not count."""
        return not (self.open_tiers or self.invalidate or self.cancel or self.graphs or self.blends)


ORDERS = Codec(Order, "an order")
REPORTS = Codec(StepReport, "a rank's report")
