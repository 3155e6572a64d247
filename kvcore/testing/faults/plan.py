"""When each fault happens: rules at seams, decided by a seed and a count and not by the clock.

    point      one pass of a seam: a block read, a record written, a report delivered
    rule       a fault, the seam where it strikes, and how often
    strike     a fault that is due at a point

Whether a rule strikes at its n-th point depends only on the seed, the rule's position and n.
Threads may come in any order: the n-th point has the same strike.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from kvcore.errors import ConfigError

__all__ = ["FITS", "Fault", "Faults", "Rule", "Seam", "Strike", "write_rules"]

HANG_LIMIT_S = 300.0
"""Longest hang in seconds, whatever the rule says, so that no test hangs for ever."""
HISTORY_KEPT = 4096
_LOOK_S = 0.005
_DRAWS = 2**64


class Fault(str, Enum):
    """A kind of fault."""

    LATENCY = "latency"
    """The call takes ``seconds`` longer."""
    HANG = "hang"
    """The call does not return until the rules change, or ``seconds`` have passed."""
    ERROR = "error"
    """The call fails with an error."""
    SHORT_READ = "short_read"
    """Fewer bytes arrive than requested; the rest of the buffer is undefined."""
    TORN_WRITE = "torn_write"
    """Only part of the bytes are written, but the write reports success."""
    BIT_FLIP = "bit_flip"
    """One bit is flipped, without an error."""
    REORDER = "reorder"
    """Completions are delivered in another order."""
    FULL = "full"
    """The write fails because no space is left."""
    CLOCK_JUMP = "clock_jump"
    """The clock jumps forward by ``seconds`` (backward if negative)."""
    LOST = "lost"
    """The call reports success but does nothing."""
    KILL = "kill"
    """The process is killed with SIGKILL in the middle of a write."""


class Seam(str, Enum):
    """A place where faults can be injected."""

    TIER_READ = "tier_read"
    TIER_WRITE = "tier_write"
    """A tier's batch of reads or writes. Errors are drawn for each block."""
    FILE_READ = "file_read"
    FILE_WRITE = "file_write"
    """A block's bytes in the disk tier's data file."""
    RECORD = "record"
    """A record of the disk tier's index file, written or erased."""
    SYNC = "sync"
    """A flush of one of these two files."""
    LOAD = "load"
    SAVE = "save"
    """An op of the transfer engine that copies from or to the engine's pages."""
    DEVICE = "device"
    """A copy by the device operations."""
    SUBMIT = "submit"
    CANCEL = "cancel"
    INVALIDATE = "invalidate"
    """A message from the leader to the workers."""
    REPORT = "report"
    """A message from the workers to the leader."""
    STORE_GET = "store_get"
    STORE_PUT = "store_put"
    """A value of a remote store."""
    STORE_EXISTS = "store_exists"
    """A lookup in a remote store."""
    CLOCK = "clock"
    """A reading of the clock."""


_TIME = frozenset({Fault.LATENCY, Fault.HANG, Fault.KILL})
_CALL = _TIME | {Fault.ERROR}

FITS: dict[Seam, frozenset[Fault]] = {
    Seam.TIER_READ: _CALL,
    Seam.TIER_WRITE: _CALL | {Fault.FULL},
    Seam.FILE_READ: _CALL | {Fault.SHORT_READ, Fault.BIT_FLIP, Fault.REORDER},
    Seam.FILE_WRITE: _CALL | {Fault.TORN_WRITE, Fault.BIT_FLIP, Fault.REORDER, Fault.FULL},
    Seam.RECORD: _CALL | {Fault.TORN_WRITE, Fault.BIT_FLIP, Fault.FULL},
    Seam.SYNC: _CALL,
    Seam.LOAD: _CALL,
    Seam.SAVE: _CALL,
    Seam.DEVICE: _CALL,
    Seam.SUBMIT: _TIME | {Fault.LOST},
    Seam.CANCEL: _TIME | {Fault.LOST},
    Seam.INVALIDATE: _TIME | {Fault.LOST},
    Seam.REPORT: _TIME | {Fault.REORDER, Fault.LOST},
    Seam.STORE_GET: _CALL | {Fault.SHORT_READ, Fault.BIT_FLIP},
    Seam.STORE_PUT: _CALL | {Fault.TORN_WRITE, Fault.BIT_FLIP, Fault.FULL, Fault.LOST},
    Seam.STORE_EXISTS: _CALL,
    Seam.CLOCK: frozenset({Fault.CLOCK_JUMP}),
}
"""The faults that each seam can have.

A bit flipped above the tiers' checksums (in host memory or in device copies) is not among them,
because nothing can tell it from what was computed.
"""


@dataclass(frozen=True)
class Rule:
    """A fault that strikes at a seam.

    It skips the first ``skip`` points, then strikes at each with probability ``rate``, at most
    ``limit`` times. ``seconds`` is the duration, if the fault takes time. Raises ConfigError if the
    seam cannot have the fault.
    """

    fault: Fault
    seam: Seam
    rate: float = 1.0
    skip: int = 0
    limit: int | None = None
    seconds: float = 0.05

    def __post_init__(self) -> None:
        if self.fault not in FITS[self.seam]:
            fits = ", ".join(sorted(fault.value for fault in FITS[self.seam]))
            raise ConfigError(
                f"given the fault {self.fault.value} at {self.seam.value}; this seam takes {fits}"
            )


class Strike(NamedTuple):
    """A fault that is due. ``draw`` has 64 random bits for details, such as which bit flips."""

    rule: Rule
    point: int
    draw: int

    @property
    def fault(self) -> Fault:
        return self.rule.fault


class Faults:
    """The faults of one process. Thread-safe.

    ``follow`` is a file to which other processes write rules with `write_rules`. New rules apply
    from the next point on, and calls that hang under the old rules continue. No fault happens while
    the file is missing. ``struck`` counts the strikes by seam and fault, ``history`` has the latest
    strikes, and ``hanging`` is the number of calls that hang now.
    """

    def __init__(self, *rules: Rule, seed: int = 0, follow: Path | None = None) -> None:
        self.struck: Counter[tuple[Seam, Fault]] = Counter()
        self.history: deque[Strike] = deque(maxlen=HISTORY_KEPT)
        self.hanging = 0
        self._seed = seed
        self._follow = follow
        self._seen: tuple[int, int] | None = None
        self._changed = threading.Condition()
        self._rules: tuple[Rule, ...] = ()
        self._turn = 0
        self.set(*rules)

    @property
    def rules(self) -> tuple[Rule, ...]:
        with self._changed:
            return self._rules

    def set(self, *rules: Rule) -> None:
        """Replace the rules and count their points from 0. Calls that hang continue."""
        with self._changed:
            self._put(rules)

    def clear(self) -> None:
        """Remove all rules."""
        self.set()

    def at(self, seam: Seam, among: Collection[Fault] = tuple(Fault)) -> Strike | None:
        """Pass a point of ``seam``, and return the strike that the caller must carry out, if any.

        Only rules with a fault in ``among`` see the point. If several are due, the first one
        counts.
        """
        if self._follow is not None:
            self._look(self._follow)
        with self._changed:
            due = None
            for i, rule in enumerate(self._rules):
                if rule.seam is seam and rule.fault in among:
                    struck = self._pass(i, rule, due is None)
                    due = due or struck
            if due is not None:
                self.struck[seam, due.fault] += 1
                self.history.append(due)
            return due

    def meet(self, seam: Seam, among: Collection[Fault] = tuple(Fault)) -> Strike | None:
        """Pass a point like `at`, but carry out a fault that takes time or kills. Blocks."""
        strike = self.at(seam, among)
        if strike is None or strike.fault not in _TIME:
            return strike
        self.endure(strike)
        return None

    def endure(self, strike: Strike) -> None:
        """Carry out a fault that takes time or ends the process; ignore any other. Blocks."""
        if strike.fault is Fault.LATENCY:
            time.sleep(strike.rule.seconds)
        elif strike.fault is Fault.HANG:
            self._hang(strike.rule)
        elif strike.fault is Fault.KILL:
            die()

    # -- internals --------------------------------------------------------------------------

    def _put(self, rules: Sequence[Rule]) -> None:
        self._rules = tuple(rules)
        self._points = [0] * len(rules)
        self._done = [0] * len(rules)
        self._turn += 1
        self._changed.notify_all()

    def _pass(self, i: int, rule: Rule, free: bool) -> Strike | None:
        """Count a point of rule ``i``. Return its strike if it is due and ``free`` is true."""
        point = self._points[i]
        self._points[i] += 1
        if point < rule.skip or (rule.limit is not None and self._done[i] >= rule.limit):
            return None
        drawn = xxhash.xxh3_64_intdigest(b"%d.%d.%d" % (self._seed, i, point))
        if drawn >= rule.rate * _DRAWS or not free:
            return None
        self._done[i] += 1
        return Strike(rule, point, xxhash.xxh3_64_intdigest(drawn.to_bytes(8, "little")))

    def _hang(self, rule: Rule) -> None:
        until = time.monotonic() + min(rule.seconds, HANG_LIMIT_S)
        with self._changed:
            turn = self._turn
            self.hanging += 1
        while time.monotonic() < until and self._turn == turn:
            if self._follow is not None:
                self._look(self._follow)
            with self._changed:
                if self._turn == turn:
                    self._changed.wait(_LOOK_S)
        with self._changed:
            self.hanging -= 1

    def _look(self, path: Path) -> None:
        """Load the rules in the file if it has changed."""
        try:
            found = path.stat()
        except FileNotFoundError:
            seen, text = None, None
        else:
            seen, text = (found.st_mtime_ns, found.st_ino), path
        with self._changed:
            if seen == self._seen:
                return
            self._seen = seen
            self._put(() if text is None else _read_rules(text))


def die() -> None:
    """Kill this process with SIGKILL. Does not return."""
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def write_rules(path: Path, *rules: Rule) -> None:
    """Set the rules of all processes that follow ``path``. Atomic."""
    made = path.with_suffix(".new")
    made.write_text(json.dumps([asdict(rule) for rule in rules]))
    made.replace(path)


def _read_rules(path: Path) -> list[Rule]:
    return [_rule(**fields) for fields in json.loads(path.read_text())]


def _rule(fault: str, seam: str, **fields: Any) -> Rule:
    return Rule(Fault(fault), Seam(seam), **fields)
