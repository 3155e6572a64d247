"""Vector clocks: which accesses happened before which, whatever the timing.

A stream or a host thread is an actor. Every actor counts its own steps, and keeps the highest step
that it knows of every other actor. An access happened before another one if the actor of the second
knew of the first one's step.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

__all__ = ["Access", "Actor", "Clock", "Spans", "call_site"]

Clock = dict[int, int]
"""The highest known step by the number of the actor."""

Spans = npt.NDArray[np.int64]
"""Byte ranges [n, 2], half-open, ascending, that neither overlap nor touch."""

_HERE = str(Path(__file__).parent)
_FRAMES = 4
_DULL = (
    "/contextlib.py", "/threading.py", "/functools.py", "/torch/_compile.py", "/eval_frame.py",
)  # fmt: skip


def join(into: Clock, other: Clock) -> None:
    """Let ``into`` know all that ``other`` knows."""
    for actor, step in other.items():
        if into.get(actor, 0) < step:
            into[actor] = step


class Actor:
    """A stream or a host thread, with what it knows."""

    _count = 0

    def __init__(self, name: str) -> None:
        Actor._count += 1
        self.number = Actor._count
        self.name = name
        self.clock: Clock = {}

    def step(self) -> Clock:
        """Begin a new step, and return the clock at it."""
        self.clock[self.number] = self.clock.get(self.number, 0) + 1
        return dict(self.clock)

    def learn(self, other: Clock) -> None:
        """Order all that follows here after all that ``other`` knows."""
        join(self.clock, other)


@dataclass(frozen=True, eq=False)
class Access:
    """One operation's reads or writes of memory.

    ``what`` is the operation, and ``where`` the place in the code that issued it.
    """

    actor: int
    step: int
    who: str
    what: str
    where: str
    writes: bool
    spans: Spans

    def before(self, clock: Clock) -> bool:
        """Return True if this access happened before everything at ``clock``."""
        return clock.get(self.actor, 0) >= self.step

    def __str__(self) -> str:
        verb = "written" if self.writes else "read"
        return f"{verb} by {self.what}, on {self.who}, at {self.where}"


def call_site() -> str:
    """Return the innermost callers outside of this package, innermost first."""
    found: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and len(found) < _FRAMES:
        code = frame.f_code
        name = _shown(code.co_filename)
        if name:
            found.append(f"{name}:{frame.f_lineno} ({code.co_name})")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(found)


@cache
def _shown(file: str) -> str:
    """Return the short name of a file; an empty one if its lines tell nothing."""
    if file.startswith(_HERE) or file.endswith(_DULL):
        return ""
    return "/".join(Path(file).parts[-2:])
