"""Blends on a rank of TensorRT-LLM, which takes a promised prefix for granted.

Nobody can tell it that a blend failed. So every rank first says whether its chunks have come, and a
blend that cannot be made is computed instead, whole and exact, by the same layers.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from kvcore.connector.fusion_messages import BlendOrder, BlendReport
from kvcore.connector.fusion_worker import Blends
from kvcore.errors import TransferError
from kvcore.fusion.staging import Staging


class SureBlends(Blends):
    """One per rank. Called from the executor's thread only."""

    def carry_out(self, arrived: Callable[[BlendOrder], bool]) -> None:
        """Make the KV of every order. Blocks; ``arrived`` waits for an order's chunks and says
        whether all are there.

        Raises TransferError where the layers cannot be run at all.
        """
        orders, self._orders = self._orders, []
        try:
            for order, staging in orders:
                self._carry_out(order, staging if arrived(order) else None)
        finally:
            for order, _ in orders:
                for chunk in order.chunks:
                    self._worker.release(chunk.graph.graph_id)

    def _carry_out(self, order: BlendOrder, staging: Staging | None) -> None:
        able = self._layers.agree(staging is not None)
        if able and self._done(order, staging, _landed):
            return
        bare = replace(order, chunks=[], blocks=1, ratio=0.0)
        room = self._stage(bare)
        if not self._layers.agree(room is not None) or not self._done(bare, room, _landed):
            raise TransferError(
                f"tokens {order.exact}..{order.stop} of request {order.request_id} were promised "
                "and could be neither blended nor computed; the step's requests fail, for a wrong "
                "answer would be worse"
            )
        self._reports[-1] = BlendReport(order.request_id, ok=False, arrived=able)


def _landed(layer: int) -> None:
    """All loads were waited for."""
