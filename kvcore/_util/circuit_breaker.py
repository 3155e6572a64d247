"""A circuit breaker: a tier that keeps failing is left alone for a while, then tried once.

closed ──N failures in a row──▶ open ──after the pause──▶ half open ──success──▶ closed
                                  ▲                            │
                                  └──────────failure───────────┘
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from enum import Enum

_log = logging.getLogger("kvcore._util.circuit_breaker")


class BreakerState(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """Counts the failures of one tier. One thread (the leader's); times in seconds."""

    def __init__(
        self,
        name: str,
        *,
        threshold: int = 3,
        pause: float = 5.0,
        max_pause: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._threshold = threshold
        self._first_pause = self._pause = pause
        self._max_pause = max_pause
        self._clock = clock
        self._failures = 0
        self._opened_at: float | None = None
        self._probing = False

    @property
    def state(self) -> BreakerState:
        if self._opened_at is None:
            return BreakerState.CLOSED
        rested = self._clock() - self._opened_at >= self._pause
        return BreakerState.HALF_OPEN if rested else BreakerState.OPEN

    def allows(self) -> bool:
        """Whether the tier may be used now. Half open, it is true until a probe is on its way."""
        state = self.state
        return state is BreakerState.CLOSED or (
            state is BreakerState.HALF_OPEN and not self._probing
        )

    def started(self) -> None:
        """An operation on the tier is on its way; half open, it is the probe."""
        self._probing = self.state is BreakerState.HALF_OPEN

    def succeeded(self) -> None:
        if self._opened_at is not None:
            _log.warning("tier works again tier=%s", self.name)
        self._failures, self._opened_at, self._probing = 0, None, False
        self._pause = self._first_pause

    def undecided(self) -> None:
        """An operation ended that tells nothing of the tier, such as one that was cancelled before
        it began. If it was the probe, the next one is."""
        self._probing = False

    def failed(self) -> None:
        """The tier failed as a whole (not: one block was corrupt)."""
        self._failures += 1
        if self._opened_at is None:
            if self._failures < self._threshold:
                return
        elif self._probing:
            self._pause = min(self._pause * 2, self._max_pause)
        else:
            return  # an operation from before the breaker opened
        self._opened_at, self._probing = self._clock(), False
        _log.warning(
            "tier left alone tier=%s failures=%d pause_s=%g", self.name, self._failures, self._pause
        )


class TierBreakers:
    """A breaker for the reads of each tier, and one for its writes: what a medium does well says
    nothing of the rest. A full disk reads, and a store whose reads hang may answer questions."""

    def __init__(
        self, tiers: Iterable[str], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        names = tuple(tiers)
        self.reads = {tier: Breaker(tier, clock=clock) for tier in names}
        self.writes = {tier: Breaker(f"{tier} writes", clock=clock) for tier in names}

    def of(self, tier: str, writes: bool) -> Breaker:
        """That of a tier's reads or writes."""
        return (self.writes if writes else self.reads)[tier]
