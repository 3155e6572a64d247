"""KV on its way into host memory while its request waits in the scheduler's queue.

    a request comes     lookup: starts what has to come from disk or a remote store
    its turn comes      lookup: what is there now; `Staging.waits`: held back, others go first
    it is there, or late    lookup: what is there is loaded, the rest is computed

Nothing here blocks: a step that waited for a disk would hold up every request that is running.

Requests that host memory cannot hold together have theirs brought up one after the other, in the
order in which they came: side by side each would push out what came for the other, again and again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvcore.config import Config
from kvcore.connector.fusion_chunks import ChunkPlanner, worth_fetching
from kvcore.connector.fusion_messages import BlendPlan
from kvcore.connector.page_table import Paging
from kvcore.errors import CapacityError
from kvcore.manager import HOST, Hit, Manager, Readiness

__all__ = ["Staging", "Wait", "Way"]

_log = logging.getLogger("kvcore.sglang.staging")


class Way(NamedTuple):
    """Blocks that are being brought into host memory: a chain up to the last of them."""

    keys: Sequence[bytes]
    digest: bytes


@dataclass
class Wait:
    """What one request waits for.

    ``ways`` are by the last key of each; ``since`` is when it first had to. ``prefix`` blocks of
    the prompt, and those of ``chunks``, by their last key, are wanted in host memory together.
    ``unsettled``: a store has not answered yet, or there is no room to bring more up now.
    """

    ways: dict[bytes, Way] = field(default_factory=dict)
    prefix: int = 0
    chunks: dict[bytes, int] = field(default_factory=dict)
    unsettled: bool = False
    since: float | None = None

    @property
    def blocks(self) -> int:
        """Of host memory, that it wants."""
        return self.prefix + sum(self.chunks.values())


class Staging:
    """Of one leader; scheduler's thread only. ``send`` has the ranks carry out what was launched.

    ``clock`` gives seconds.
    """

    def __init__(
        self,
        config: Config,
        manager: Manager,
        paging: Paging,
        send: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = config.sglang
        self._deadline_s = config.transfer.load_deadline_s
        self._block = config.block.tokens
        self._manager = manager
        self._paging = paging
        self._send = send
        self._clock = clock
        self._waiting: dict[int, Wait] = {}  # by identity, the first that came first

    @property
    def limit_s(self) -> float:
        """How long a request is held back, in all."""
        most = {"best_effort": 0.0, "timeout": self._settings.prefetch_timeout_s}
        return most.get(self._settings.prefetch, self._deadline_s)

    def waits(self, wait: Wait) -> bool:
        """Whether the request is better held back than computed with what is there now."""
        wait.ways = {key: way for key, way in wait.ways.items() if self._is_coming(way)}
        if not wait.ways and not wait.unsettled:
            return False
        if wait.since is None:
            wait.since = self._clock()
        return self.in_time(wait)

    def in_time(self, wait: Wait) -> bool:
        """Whether a request that waits may still be held back."""
        return wait.since is not None and self._clock() - wait.since < self.limit_s

    def leave(self, wait: Wait) -> None:
        """The request waits no more: it is loaded, computed or gone. Idempotent."""
        self._waiting.pop(id(wait), None)

    def clear(self) -> None:
        """Nobody waits."""
        self._waiting.clear()

    def _has_turn(self, wait: Wait) -> bool:
        """Whether host memory has room for it beside those that wait longer. Looks at no more of
        them than fit."""
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
        """Start what brings blocks [first, stop) of a prompt up, of which ``hit`` is held; stores
        are asked for what nobody here knows."""
        wait.prefix = stop if first < stop else 0
        wait.unsettled = self._manager.ask_stores(hit, first)
        below = any(tier != HOST for tier in hit.blocks_by_tier(first, stop)) if first < stop else 0
        if below and (stop - first) * self._block >= self._settings.min_load_tokens:
            self._stage(wait, hit, stop)

    def fetch(self, wait: Wait, chunks: ChunkPlanner, plan: BlendPlan) -> bool:
        """Start bringing the chunks of a plan up, each with the blocks before it, as
        `worth_fetching` says. False where it is not the request's turn: to be asked again."""
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
                self._manager.launch_load(
                    hit,
                    start,
                    stop,
                    self._paging.no_units(start, stop),
                    deadline_s=self._deadline_s,
                )
            except CapacityError as error:
                _log.debug("nothing staged: %s", error)
                return
            self._send()
        wait.ways[hit.keys[stop - 1]] = Way(hit.keys[:stop], hit.namespace)
