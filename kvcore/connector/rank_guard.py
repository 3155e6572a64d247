"""The guard of a rank's worker: after an error of kvcore the rank stays in step with the others.

    expect(orders) ──▶ run(call) ... ──▶ meet()            once a step
                         │ an error
                         ▼
    no copy touches the engine's pages any more ──▶ stopped: `run` calls nothing, and `meet` tells
                                                    the other ranks that this one makes no blend

Tensor-parallel ranks ask each other before each blend, and would wait for ever for a rank that did
not answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from kvcore.connector.fusion_messages import BlendOrder
from kvcore.connector.guard import Guard, attempt
from kvcore.connector.worker import StepWorker
from kvcore.errors import PagesInUse, RankLostError

__all__ = ["LAND_S", "RankGuard"]

_log = logging.getLogger("kvcore.connector.rank_guard")
_T = TypeVar("_T")

LAND_S = 30.0
"""Longest wait for copies from and to the engine's pages after an error, in seconds."""


class RankGuard:
    """Runs one rank's part of an engine's calls until one of them raises.

    ``stopped`` says why calls are not made any more, and is empty before. ``open_graphs`` returns
    the graphs that are cancelled then. Several threads may call ``run``, and only the model
    runner's the rest.
    """

    def __init__(self, worker: StepWorker[Any], open_graphs: Callable[[], Iterable[int]]) -> None:
        self._worker = worker
        self._open_graphs = open_graphs
        self._guard = Guard(self.halt)
        self._orders: Sequence[BlendOrder] = ()
        self.stopped = ""

    def run(self, name: str, call: Callable[[], _T], neutral: _T, *, always: bool = False) -> _T:
        """Return what ``call`` returns, or ``neutral`` if it raises or the rank has stopped.

        ``name`` is the engine's call, for the log. A stopped rank makes the call too if ``always``,
        because the engine or other ranks need what it does. Raises RankLostError if ranks are out
        of step, and PagesInUse if a copy may still touch the engine's pages after an error.
        """
        if self.stopped and not always:
            return neutral
        return self._guard.run(name, call, neutral)

    def expect(self, orders: Iterable[BlendOrder]) -> None:
        """Record the blends that the other ranks make in this step. Call before all else."""
        self._orders = tuple(orders)

    def meet(self) -> None:
        """Decline those blends of the step that are left if the rank has stopped.

        Call on every rank at the point of the step at which blends have been made. A collective on
        a rank that has stopped.
        """
        orders, self._orders = self._orders, ()
        if not self.stopped or not orders:
            return
        try:
            self._worker.decline_blends(orders)
        except Exception as error:
            if self._worker.meets_others:
                raise RankLostError("this rank could not decline the others' blends") from error
            _log.exception("blends could not be declined; there is no other rank")

    def halt(self, why: str, error: BaseException | None = None) -> None:
        """Stop the rank for a reason. Raises PagesInUse as `run` does. Idempotent."""
        if not self.stopped:
            self.stopped = why
            _log.error("%s: kvcore stands aside on this rank", why, exc_info=error)
        worker = self._worker
        ended = attempt(
            "the cancelling of transfers", lambda: worker.abandon(self._open_graphs(), LAND_S), None
        )
        if ended is None:  # nothing was cancelled: all ends by itself
            ended = attempt("the wait for copies", lambda: worker.quiesce(LAND_S), otherwise=False)
        if not ended:
            raise PagesInUse(f"copies of KV did not end in {LAND_S} s after {why}") from error
