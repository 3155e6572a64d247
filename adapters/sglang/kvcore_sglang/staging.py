"""Loads into host memory whose requests wait in the scheduler's queue.

    a request comes         lookup: starts the loads from disk or a remote store
    its turn comes          lookup: if blocks are missing, `Staging.waits` and others go first
    the blocks are there,   lookup: the arrived blocks are loaded, the rest is computed
    or the limit is over

Nothing here blocks, because a step that waited for a disk would stop every running request.

If host memory is too small for the blocks of several requests, the requests take turns in their
order of arrival. In parallel they would evict each other's blocks again and again.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvcore.config import Config
from kvcore.connector.fusion_chunks import ChunkPlanner, worth_fetching
from kvcore.connector.fusion_messages import BlendPlan
from kvcore.connector.page_table import Paging
from kvcore.errors import KVCoreError
from kvcore.manager import HOST, Hit, Manager, Readiness

__all__ = ["Staging", "Wait", "Way"]

_log = logging.getLogger("kvcore.sglang.staging")


class Way(NamedTuple):
    """A chain up to the last of its blocks that are being loaded into host memory."""

    keys: Sequence[bytes]
    digest: bytes


@dataclass
class Wait:
    """The blocks that one request waits for.

    Attributes:
        ways: the chains being loaded, by the last key of each.
        prefix: the number of blocks of the prompt that the request needs in host memory.
        chunks: the number of blocks that each chunk needs there, by the chunk's last key.
        unsettled: a store has not answered yet, or there is no room to load more blocks now.
        since: the clock when the request first had to wait, in seconds.
        most_s: the seconds that the request waits at most, if that is less than others wait.
    """

    ways: dict[bytes, Way] = field(default_factory=dict)
    prefix: int = 0
    chunks: dict[bytes, int] = field(default_factory=dict)
    unsettled: bool = False
    since: float | None = None
    most_s: float = math.inf

    @property
    def blocks(self) -> int:
        """The number of blocks of host memory that the request needs."""
        return self.prefix + sum(self.chunks.values())


class Staging:
    """The waiting requests of one leader. Scheduler's thread only.

    ``send`` lets the ranks carry out the launched graphs.
    """

    def __init__(
        self,
        config: Config,
        manager: Manager,
        paging: Paging,
        send: Callable[[], None],
    ) -> None:
        self._settings = config.sglang
        self._deadline_s = config.transfer.load_deadline_s
        self._block = config.block.tokens
        self._manager = manager
        self._paging = paging
        self._send = send
        self._clock = time.monotonic
        self._waiting: dict[int, Wait] = {}  # by identity, in order of arrival

    @property
    def limit_s(self) -> float:
        """The seconds that a request waits at most, over all its lookups."""
        most = {"best_effort": 0.0, "timeout": self._settings.prefetch_timeout_s}
        return most.get(self._settings.prefetch, self._deadline_s)

    def waits(self, wait: Wait) -> bool:
        """Return True if the request should wait for missing blocks, and start its waiting time."""
        wait.ways = {key: way for key, way in wait.ways.items() if self._is_coming(way)}
        if not wait.ways and not wait.unsettled:
            return False
        if wait.since is None:
            wait.since = self._clock()
        return self.in_time(wait)

    def in_time(self, wait: Wait) -> bool:
        """Return True if a waiting request has not reached `limit_s`, or its own limit."""
        limit_s = min(self.limit_s, wait.most_s)
        return wait.since is not None and self._clock() - wait.since < limit_s

    def leave(self, wait: Wait) -> None:
        """Remove a request that was loaded, computed or dropped. Idempotent."""
        self._waiting.pop(id(wait), None)

    def clear(self) -> None:
        """Remove all waiting requests."""
        self._waiting.clear()

    def _has_turn(self, wait: Wait) -> bool:
        """Return True if host memory has room for the request beside those that wait longer.

        Visits no more of them than fit into host memory.
        """
        self._waiting.setdefault(id(wait), wait)
        room = self._manager.index.num_slots(HOST) - wait.blocks
        ahead = 0
        for other in self._waiting.values():
            if other is wait:
                return True
            ahead += other.blocks if self.in_time(other) else 0
            if ahead and ahead > room:
                break
        wait.unsettled = True
        return False

    def _is_coming(self, way: Way) -> bool:
        hit = self._manager.get_match(way.keys, way.digest)
        return self._manager.coming(hit, len(way.keys))

    def bring(self, wait: Wait, hit: Hit, first: int, stop: int) -> None:
        """Start to load blocks [first, stop) of a prompt into host memory.

        Remote stores are asked for the blocks after ``hit``. The load is given up after
        ``wait.most_s``, if that is less than the deadline of loads.
        """
        wait.prefix = stop if first < stop else 0
        wait.unsettled = self._manager.ask_stores(hit, first)
        below = any(tier != HOST for tier in hit.blocks_by_tier(first, stop)) if first < stop else 0
        if below and (stop - first) * self._block >= self._settings.min_load_tokens:
            self._stage(wait, hit, stop)

    def fetch(self, wait: Wait, chunks: ChunkPlanner, plan: BlendPlan) -> bool:
        """Start to load the chunks of a plan into host memory, each with the blocks before it.

        `worth_fetching` decides which chunks are loaded. Returns False if it is not the request's
        turn; call again then.
        """
        found = []
        for _, (hit, start, stop) in chunks.sources(plan):
            if worth_fetching(hit, start, stop):
                wait.chunks[hit.keys[stop - 1]] = stop
                found.append((hit, stop))
        if found and not self._has_turn(wait):
            return False
        for hit, stop in found:
            self._stage(wait, hit, stop)
        return True

    def _stage(self, wait: Wait, hit: Hit, stop: int) -> None:
        start = hit.in_host
        if not self._manager.coming(hit, stop):
            if not self._has_turn(wait):
                return
            ready = self._manager.can_load(hit, start, stop)
            if ready is not Readiness.READY:
                wait.unsettled |= ready is Readiness.LATER
                return
            try:
                deadline_s = min(self._deadline_s, wait.most_s)
                planned = self._manager.plan_fetch(hit, stop, deadline_s=deadline_s)
            except KVCoreError as error:  # an earlier load evicted its blocks
                _log.debug("nothing staged: %s", error)
                return
            if planned is None:
                return
            self._manager.launch(planned)
            self._send()
        wait.ways[hit.keys[stop - 1]] = Way(hit.keys[:stop], hit.namespace)
