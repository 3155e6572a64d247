"""A seeded scheduler: the threads that pass seams go on one at a time, in an order of a seed.

    turns = Turns(Seam.SAVE, Seam.TIER_WRITE, Seam.RECORD, seed=7)
    into_worker(worker, turns)
    turns.run(script)                    the script runs in a thread of its own
        turns.take("step")               a turn of the script itself

While `run` runs, a thread that comes to one of the seams waits there. As soon as no other thread
comes, the seed picks the one that goes on. Each run also prefers some seams over others by up to
`BIAS`, so that a thread may be late by hundreds of turns. Races of life cycles (a clear beside a
save, a pause beside a load) become orders that a seed repeats.

Threads that do not pass a seam are not ordered. A busy machine may bring a thread to its seam later
than before, so a seed gives nearly, but not always, the same order. ``taken`` has the order.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import NamedTuple

from kvcore.testing.faults.plan import Faults, Rule, Seam, Strike

__all__ = ["Turns"]

BIAS = 30.0
QUIET_S = 0.001
"""Seconds without a new thread at a seam before the seed picks one."""
_LIMIT_S = 120.0


class _Ticket(NamedTuple):
    """A thread that waits for its turn."""

    name: str
    number: int
    granted: threading.Event


class Turns(Faults):
    """`Faults` whose ``seams`` threads pass one at a time, in an order of ``seed``.

    ``taken`` has the names of the turns so far. Thread-safe.
    """

    def __init__(self, *seams: Seam, seed: int = 0, rules: tuple[Rule, ...] = ()) -> None:
        super().__init__(*rules, seed=seed)
        self.taken: list[str] = []
        self._seams = frozenset(seams)
        self._picks = random.Random(seed)
        self._weights: dict[str, float] = {}
        self._orders = False
        self._arrived = threading.Condition()
        self._waiting: list[_Ticket] = []
        self._count = 0

    def at(self, seam: Seam, *among: object, **more: object) -> Strike | None:
        """Wait for a turn, and pass a point of ``seam`` like `Faults.at`. Blocks."""
        if seam in self._seams:
            self.take(seam.value)
        return super().at(seam, *among, **more)  # type: ignore[arg-type]

    def take(self, name: str) -> None:
        """Wait for a turn of this name. Return at once while `run` does not run. Blocks."""
        with self._arrived:
            if not self._orders:
                return
            self._count += 1
            ticket = _Ticket(name, self._count, threading.Event())
            self._waiting.append(ticket)
            self._arrived.notify()
        ticket.granted.wait()

    def run(self, script: Callable[[], None]) -> None:
        """Run ``script`` in a thread, and grant turns until it ends. Then nobody waits any more.

        Blocks. Raises what the script raises, and AssertionError if no thread comes to a seam for
        two minutes although the script has not ended.
        """
        raised: list[BaseException] = []

        def guarded() -> None:
            try:
                script()
            except BaseException as error:  # noqa: BLE001  # raised below
                raised.append(error)

        self._orders = True
        thread = threading.Thread(target=guarded, name="script", daemon=True)
        thread.start()
        try:
            while thread.is_alive():
                self._grant(thread)
        finally:
            with self._arrived:
                self._orders = False
                for ticket in self._waiting:
                    ticket.granted.set()
                self._waiting.clear()
        if raised:
            raise raised[0]

    def _grant(self, thread: threading.Thread) -> None:
        """Let one of the waiting threads go on, once no other thread comes."""
        with self._arrived:
            here = lambda: self._waiting or not thread.is_alive()  # noqa: E731
            for _ in range(int(_LIMIT_S / 0.05)):
                if self._arrived.wait_for(here, 0.05):
                    break
            else:
                raise AssertionError(f"no thread comes to a seam; turns so far: {self.taken[-20:]}")
            while self._arrived.wait(QUIET_S):
                pass
            if not self._waiting:
                return
            waiting = sorted(self._waiting, key=lambda ticket: (ticket.name, ticket.number))
            weights = [self._weight(ticket.name) for ticket in waiting]
            [chosen] = self._picks.choices(waiting, weights)
            self._waiting.remove(chosen)
            self.taken.append(chosen.name)
            chosen.granted.set()

    def _weight(self, name: str) -> float:
        """Return how much this run prefers turns of a name."""
        if name not in self._weights:
            self._weights[name] = BIAS ** random.Random(f"{self._seed} {name}").random()
        return self._weights[name]
