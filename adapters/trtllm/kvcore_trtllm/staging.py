"""Loads into host memory that are waited for while TensorRT-LLM waits for an answer.

    match ──▶ bring: plan_fetch, launch ──▶ wait up to trtllm.stage_wait_s ──▶ match again

What has arrived by then is promised. The rest serves the next request with the same prompt.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence

from kvcore.connector.page_table import Paging
from kvcore.errors import KVCoreError
from kvcore.manager import Hit, Manager, Readiness
from kvcore.manager.base import Lane
from kvcore.transfer.graph import Span, UnitTable

__all__ = ["Staging"]

_log = logging.getLogger("kvcore.trtllm.scheduler")


class Staging:
    """Brings blocks of lower tiers into host memory, for ``groups`` groups of pages.

    If there is only one rank, ``lane`` hands a graph to it at once. Otherwise ``lane`` is None, and
    graphs go with the next step's plan, for which nobody waits. ``left_s`` returns the longest
    wait, and ``deadline_s`` is that of a load, in seconds.
    """

    def __init__(
        self,
        manager: Manager,
        paging: Paging,
        groups: int,
        lane: Lane | None,
        *,
        left_s: Callable[[], float],
        deadline_s: float,
    ) -> None:
        self._manager = manager
        self._paging = paging
        self._groups = groups
        self._lane = lane
        self._left_s = left_s
        self._deadline_s = deadline_s

    def bring(self, wanted: Iterable[tuple[Hit, int]], later: Lane) -> bool:
        """Load each hit's blocks up to the given one into host memory.

        Waits for them for at most ``left_s`` in all. Returns True if there was a load to wait for.
        ``later`` takes the graphs if there are several ranks.
        """
        lane = self._lane or later
        staged = [self._stage(hit, last, lane) for hit, last in wanted]
        graphs = [graph_id for graph_id in staged if graph_id is not None]
        if self._lane is None:
            return False
        limit = time.monotonic() + self._left_s()
        for graph_id in graphs:
            self._manager.wait(graph_id, max(limit - time.monotonic(), 0.0))
        return bool(graphs)

    def _stage(self, hit: Hit, last: int, lane: Lane) -> int | None:
        """Launch a load of blocks up to ``last`` into host memory only; returns its graph's id.

        Returns None if there is no room. If all blocks are there, the last is loaded into no page:
        that makes the workers map a server's memory.
        """
        first = min(hit.in_host, last - 1)
        if self._manager.can_load(hit, first, last) is not Readiness.READY:
            return None
        units: Sequence[UnitTable] = ()
        try:
            if hit.in_host < last:
                planned = self._manager.plan_fetch(hit, last, deadline_s=self._deadline_s)
            else:
                units = self._paging.units([()] * self._groups, first, last)
                planned = self._manager.plan_load(hit, Span(first, last))
        except KVCoreError as error:  # an earlier load evicted its blocks
            _log.debug("nothing staged: %s", error)
            return None
        if planned is None:
            return None
        return self._manager.launch(planned, units, lane=lane).graph_id
