"""What TensorRT-LLM counts on, apart from the leader's books, which an error may leave half done.

    offer ──▶ planned ──▶ hand ──▶ kept at once (a load in the step, a blend)
                            └────▶ take: every copy has arrived on all ranks (a parked request)

TensorRT-LLM cannot be told that KV did not come. So a step fails unless all that its requests were
promised is known to have come. That kvcore knows of no error is not enough.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvcore.transfer.graph import OpReport, RowError
from kvcore_trtllm.messages import StepPlan

__all__ = ["Promises"]


@dataclass
class _Promise:
    parks: bool
    lost: bool = False


class Promises:
    """The promises of which it is not known that they are kept. Executor's thread of rank 0 only.

    A promise is kept by a plan that was handed over, if the workers fail the step themselves where
    it does not come. The promise of a parked request is kept by reports of its load's copies.
    """

    def __init__(self) -> None:
        self._owed: dict[int, _Promise] = {}
        self._loads: dict[int, tuple[int, set[int]]] = {}  # graph -> request, copies to come
        self._planned: list[int] = []
        self._handed: tuple[StepPlan, list[int]] | None = None

    def offer(self, request_id: int, *, parks: bool) -> None:
        """Record that a request was promised KV, in place of an earlier promise to it."""
        self.forget(request_id)
        self._owed[request_id] = _Promise(parks)

    def owes(self, request_id: int) -> bool:
        """Return True if a promise to a request was not handed over yet, or is lost."""
        self._settle()
        return request_id in self._owed

    def parks(self, request_id: int) -> bool:
        """Return True if a request was promised KV and waits for it outside of the batch."""
        self._settle()
        found = self._owed.get(request_id)
        return found is not None and found.parks

    def planned(self, request_id: int) -> None:
        """Record that the plan that is being made keeps the promise to a request."""
        self._planned.append(request_id)

    def hand(self, plan: StepPlan) -> None:
        """Record that the workers will get ``plan``. It counts from the next call on."""
        self._settle()
        self._handed, self._planned = (plan, self._planned), []

    def recall(self) -> None:
        """Record that the workers do not get the plan that was handed over last, or any other."""
        self._handed, self._planned = None, []

    def take(self, reports: Iterable[OpReport]) -> None:
        """Take in ops that have ended on all ranks."""
        self._settle()
        for report in reports:
            if report.graph_id not in self._loads:
                continue
            request_id, copies = self._loads[report.graph_id]
            copies.discard(report.op_id)
            if report.failed:
                del self._loads[report.graph_id]
                if set(report.failed.values()) == {RowError.CANCELLED}:  # it was aborted
                    self._owed.pop(request_id, None)
                else:
                    self.lose(request_id)
            elif not copies:
                del self._loads[report.graph_id]
                self._owed.pop(request_id, None)

    def lose(self, request_id: int) -> None:
        """Record that what a request was promised has not come, or will not."""
        self._settle()
        self._owed.setdefault(request_id, _Promise(parks=False)).lost = True

    def lost(self, request_id: int) -> bool:
        """Return True if a promise to a request will not be kept."""
        found = self._owed.get(request_id)
        return found is not None and found.lost

    def forget(self, request_id: int) -> None:
        """Forget the promise to a request that is gone, or begins anew."""
        self._settle()
        if self._owed.pop(request_id, None) is not None:
            self._loads = {g: load for g, load in self._loads.items() if load[0] != request_id}

    def unkept(self, request_ids: Iterable[int]) -> list[int]:
        """Return those of a step's requests that must not answer. Call when the step is planned."""
        self._settle()
        return sorted(
            request_id
            for request_id in request_ids
            if request_id in self._owed and request_id not in self._planned
        )

    def _settle(self) -> None:
        """Let the plan that was handed over count."""
        handed, self._handed = self._handed, None
        if handed is None:
            return
        plan, planned = handed
        for request_id in planned:
            self._owed.pop(request_id, None)
        for request_id, graph in plan.async_loads:
            copies = {op.op_id for op in graph.ops if op.path.touches_device}
            self._loads[graph.graph_id] = (request_id, copies)
