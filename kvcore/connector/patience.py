"""How long a request waits in kvcore: one deadline for everything that it waits for.

    a lookup       end     what the request has waited since the last lookup counts
    look up again  begin   a store is asked, there are no slots, or another loads the same blocks
    a load begins  begin   ``left_s`` is the deadline of the load
    it failed      end     the next lookup has the rest; `spend` if the load was late
    it came        renew   a later lookup, after a preemption, has all of the deadline
    it is computed renew

What was waited for in vain is followed by what host memory has: a request that has waited for most
of its deadline begins nothing from below host memory any more (`may_begin`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["MOST_WAITED", "Patience"]

MOST_WAITED = 0.9
"""The part of the deadline for which a request waits and then still begins something from below
host memory. A load from host memory has the rest, however long the request has waited."""


@dataclass
class Patience:
    """The time that one request has waited, and still may. All times are in seconds.

    Its methods take the monotonic time ``now``, which a lookup reads once. So no moment counts
    twice, and none is lost between two lookups.

    Attributes:
        deadline_s: the time for everything that the request waits for.
        waited_s: the time that it has waited.
        since: the monotonic time since which it waits; None if it does not.
        free_until: the monotonic time up to which waiting does not count.
    """

    deadline_s: float
    waited_s: float = 0.0
    since: float | None = None
    free_until: float = -math.inf

    def begin(self, now: float) -> None:
        """Note that the request waits from now on."""
        self.end(now)
        self.since = now

    def end(self, now: float) -> None:
        """Count what it has waited until now. Does nothing if it does not wait."""
        if self.since is not None:
            self.waited_s += max(now - max(self.since, self.free_until), 0.0)
        self.since = None

    def spend(self) -> None:
        """Use up the deadline: what the request waited for was too late."""
        self.waited_s = max(self.waited_s, self.deadline_s)

    def renew(self) -> None:
        """Start afresh: the request has what it waited for, or is computed."""
        self.waited_s, self.since, self.free_until = 0.0, None, -math.inf

    @property
    def may_begin(self) -> bool:
        """True if something from below host memory may begin, which takes time."""
        return self.waited_s <= MOST_WAITED * self.deadline_s

    @property
    def is_over(self) -> bool:
        """True if the request waits for nothing any more but a load from host memory."""
        return self.waited_s >= self.deadline_s

    @property
    def left_s(self) -> float:
        """The deadline of a load that begins now. Always more than 0."""
        return self.deadline_s - min(self.waited_s, MOST_WAITED * self.deadline_s)
