"""A circuit breaker: a tier that keeps failing is not used for a while, then tried once.

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
    """State of a circuit breaker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """Counts the failures of one tier. Used by one thread (the leader's); times in seconds."""

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
        """The current state; an open breaker becomes half open after its pause."""
        if self._opened_at is None:
            return BreakerState.CLOSED
        rested = self._clock() - self._opened_at >= self._pause
        return BreakerState.HALF_OPEN if rested else BreakerState.OPEN

    def allows(self) -> bool:
        """Return True if the tier may be used now.

        When half open, that is so until a probe has started.
        """
        state = self.state
        return state is BreakerState.CLOSED or (
            state is BreakerState.HALF_OPEN and not self._probing
        )

    def started(self) -> None:
        """Record that an operation on the tier has started; when half open, it is the probe."""
        self._probing = self.state is BreakerState.HALF_OPEN

    def succeeded(self) -> None:
        """Record a success, which closes the breaker."""
        if self._opened_at is not None:
            _log.warning("tier works again tier=%s", self.name)
        self._failures, self._opened_at, self._probing = 0, None, False
        self._pause = self._first_pause

    def undecided(self) -> None:
        """Record that an operation ended without telling whether the tier works.

        An example is an operation cancelled before it began. If it was the probe, the next
        operation becomes the probe.
        """
        self._probing = False

    def failed(self) -> None:
        """Record a failure of the tier as a whole, not of a single corrupt block."""
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
    """One breaker for the reads and one for the writes of each tier.

    They are separate because one direction can fail while the other works: a full disk can still be
    read, and a store whose reads hang may still answer lookups.
    """

    def __init__(
        self, tiers: Iterable[str], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        names = tuple(tiers)
        self.reads = {tier: Breaker(tier, clock=clock) for tier in names}
        self.writes = {tier: Breaker(f"{tier} writes", clock=clock) for tier in names}

    def of(self, tier: str, writes: bool) -> Breaker:
        """Return the breaker of a tier's writes or of its reads."""
        return (self.writes if writes else self.reads)[tier]
