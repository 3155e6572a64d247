"""When which fault happens: rules at seams, decided by a seed and a count, not by the clock.

    point      one passing of a seam: a block read, a record written, a report delivered
    rule       at this seam, this fault, so often
    strike     a fault that is due at a point

Whether a rule strikes at its n-th point depends on the seed, the rule's place and n alone. Threads
may come in any order: the points that they pass get the same strikes.
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
"""What hangs goes on after this, whatever was told: no test hangs with it."""
HISTORY_KEPT = 4096
_LOOK_S = 0.005
_DRAWS = 2**64


class Fault(str, Enum):
    """What goes wrong."""

    LATENCY = "latency"
    """It takes ``seconds`` longer."""
    HANG = "hang"
    """It does not come back until the rules change, or ``seconds`` have passed."""
    ERROR = "error"
    """It fails, and says so."""
    SHORT_READ = "short_read"
    """Fewer bytes come than were asked for; the rest of the memory holds anything."""
    TORN_WRITE = "torn_write"
    """A part is written, and all of it is said to be."""
    BIT_FLIP = "bit_flip"
    """One bit is another, and nothing is said."""
    REORDER = "reorder"
    """What ended comes back in another order."""
    FULL = "full"
    """There is no space left."""
    CLOCK_JUMP = "clock_jump"
    """The clock is ``seconds`` ahead from now on (behind, where negative)."""
    LOST = "lost"
    """It is said to be done, and is not."""
    KILL = "kill"
    """kill -9 of this process, a write cut in the middle."""


class Seam(str, Enum):
    """Where it goes wrong."""

    TIER_READ = "tier_read"
    TIER_WRITE = "tier_write"
    """A tier's batch; errors are drawn block by block."""
    FILE_READ = "file_read"
    FILE_WRITE = "file_write"
    """A block's bytes in the disk tier's data file."""
    RECORD = "record"
    """A record of the disk tier's index file, written or erased."""
    SYNC = "sync"
    """A flush of one of these files."""
    LOAD = "load"
    SAVE = "save"
    """An op of the transfer engine, to the engine's pages and from them."""
    DEVICE = "device"
    """A copy of the device operations."""
    SUBMIT = "submit"
    CANCEL = "cancel"
    FORGET = "forget"
    """A message of the leader to the workers."""
    REPORT = "report"
    """A message of the workers to the leader."""
    STORE_GET = "store_get"
    STORE_PUT = "store_put"
    """A value of a remote store."""
    STORE_EXISTS = "store_exists"
    """A question to a remote store."""
    CLOCK = "clock"
    """A look at the clock."""


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
    Seam.FORGET: _TIME | {Fault.LOST},
    Seam.REPORT: _TIME | {Fault.REORDER, Fault.LOST},
    Seam.STORE_GET: _CALL | {Fault.SHORT_READ, Fault.BIT_FLIP},
    Seam.STORE_PUT: _CALL | {Fault.TORN_WRITE, Fault.BIT_FLIP, Fault.FULL, Fault.LOST},
    Seam.STORE_EXISTS: _CALL,
    Seam.CLOCK: frozenset({Fault.CLOCK_JUMP}),
}
"""Which faults a seam can have. A flipped bit above the tiers' checksums (host memory, device
copies) is not among them: nothing can tell it from what was computed."""


@dataclass(frozen=True)
class Rule:
    """``fault`` at ``seam``: after ``skip`` points, at each with probability ``rate``, ``limit``
    times at most. ``seconds`` is how long, where the fault takes time.

    Raises ConfigError where the seam cannot have the fault.
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
            raise ConfigError(f"no {self.fault.value} at {self.seam.value}; it can have {fits}")


class Strike(NamedTuple):
    """A fault that is due. ``draw`` is 64 random bits: which bit flips, how much is written."""

    rule: Rule
    point: int
    draw: int

    @property
    def fault(self) -> Fault:
        return self.rule.fault


class Faults:
    """The faults of one process. Thread-safe.

    ``follow`` names a file that other processes write rules to (`write_rules`): they hold from the
    next point on, and what hangs under the old ones goes on. While the file is missing, nothing is
    wrong. ``struck`` counts what happened, by seam and fault; ``history`` has the last strikes.
    ``hanging`` points are in a hang now.
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
        """These rules from now on, their points counted from 0; what hangs goes on."""
        with self._changed:
            self._put(rules)

    def clear(self) -> None:
        """Nothing is wrong any more."""
        self.set()

    def at(self, seam: Seam, among: Collection[Fault] = tuple(Fault)) -> Strike | None:
        """Pass a point of ``seam`` for the rules of faults ``among``; what is due, the first rule
        first. The caller does it."""
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
        """`at`, and those that take time or end the process are done here. Blocks."""
        strike = self.at(seam, among)
        if strike is None or strike.fault not in _TIME:
            return strike
        self.endure(strike)
        return None

    def endure(self, strike: Strike) -> None:
        """Do a fault that takes time, or that ends the process. Blocks; others are let be."""
        if strike.fault is Fault.LATENCY:
            time.sleep(strike.rule.seconds)
        elif strike.fault is Fault.HANG:
            self._hang(strike.rule)
        elif strike.fault is Fault.KILL:
            die()

    # -- inside -----------------------------------------------------------------------------

    def _put(self, rules: Sequence[Rule]) -> None:
        self._rules = tuple(rules)
        self._points = [0] * len(rules)
        self._done = [0] * len(rules)
        self._turn += 1
        self._changed.notify_all()

    def _pass(self, i: int, rule: Rule, free: bool) -> Strike | None:
        """A point of rule ``i``: its strike, if it is due and no other is (``free``)."""
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
        """Take in the file's rules when it is another one."""
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
    """kill -9 of this process. Does not return."""
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def write_rules(path: Path, *rules: Rule) -> None:
    """Tell the processes that follow ``path`` what is wrong from now on. Atomic."""
    made = path.with_suffix(".new")
    made.write_text(json.dumps([asdict(rule) for rule in rules]))
    made.replace(path)


def _read_rules(path: Path) -> list[Rule]:
    return [_rule(**fields) for fields in json.loads(path.read_text())]


def _rule(fault: str, seam: str, **fields: Any) -> Rule:
    return Rule(Fault(fault), Seam(seam), **fields)
