"""Faults in a serving engine: the cells of a matrix, run one after another on one engine.

    plain ──answers──▶ expected answers
    engine with kvcore, one document in host memory, the others below it:
        during the cell's faults   answers are right, and nobody waits for calls that hang
        afterwards                 nothing leaked, answers are right, every tier gives KV again

`Bench` has the engine (`kvcore.testing.faults.process`). `DISK`, `STORE` and `BLENDS` are the
cells, and `together` merges those that one run can strike.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from kvcore.harness.compare import SETTLE_S, Reference, answers, assert_same_answers, counted
from kvcore.harness.engine_process import EngineProcess, Generation
from kvcore.harness.prompts import windows
from kvcore.testing.faults.plan import FITS, Fault, Rule, Seam
from kvcore.testing.faults.process import FaultControl, State

__all__ = ["BLENDS", "DISK", "EXACT", "STORE", "Bench", "Cell", "cell_id", "settings", "together"]

EXACT: dict[str, Any] = {"enabled": False}
ALL: dict[str, Any] = {"ratio": 1.0}
ROUNDS = 12
"""Most attempts to make a rule strike. The engine decides how soon it reads what it wrote."""
FOR_EVER = 1000.0
STORE_THREADS = 4


class Cell(NamedTuple):
    """Faults that are injected together.

    ``by`` names the requests that lead to their seams. ``family`` is what the faults of a merged
    cell have in common (`together`), and empty for others.
    """

    rules: tuple[Rule, ...]
    by: str = "asking"
    family: str = ""

    @property
    def hangs(self) -> int:
        """Number of calls at the seams that hang until the rules change."""
        return sum(_lasts(rule) for rule in self.rules)

    @property
    def spoils(self) -> bool:
        """True if reads return other bytes than were written.

        An answer may be right all the same, because most bits of a number matter little.
        """
        return any(
            rule.fault is Fault.BIT_FLIP and rule.seam in (Seam.FILE_READ, Seam.STORE_GET)
            for rule in self.rules
        )


def cell_id(cell: Cell) -> str:
    """Return the pytest id of a cell."""
    rule = cell.rules[0]
    if cell.family:
        what = f"every-{cell.family}"
    elif len(cell.rules) == 1 or cell.by != "asking":
        what = f"{rule.seam.value}-{rule.fault.value}"
    else:
        what = f"every-{rule.fault.value}"
    return f"{cell.by}-{what}"


def _one(seam: Seam, *faults: Fault) -> list[Cell]:
    return [Cell((_rule(seam, fault),)) for fault in faults]


def _rule(seam: Seam, fault: Fault) -> Rule:
    """Return a rule that strikes at half of the points.

    A hang lasts until the rules change, if the engine can survive that. At the seams of copies to
    and from the engine's pages it lasts one second, because the engine always waits for these.
    """
    if fault is Fault.HANG:
        waited_for = seam in (Seam.LOAD, Seam.SAVE, Seam.DEVICE)
        return Rule(fault, seam, limit=1, seconds=1.0 if waited_for else FOR_EVER)
    seconds = {Fault.LATENCY: 0.02, Fault.CLOCK_JUMP: 5.0}.get(fault, 0.0)
    return Rule(fault, seam, rate=0.5, seconds=seconds)


def _lasts(rule: Rule) -> bool:
    return rule.fault is Fault.HANG and rule.seconds == FOR_EVER


def _every(fault: Fault, *seams: Seam) -> Cell:
    assert all(fault in FITS[seam] for seam in seams)
    return Cell(tuple(_rule(seam, fault) for seam in seams))


_COPIES = (Seam.LOAD, Seam.SAVE, Seam.DEVICE)
_TIER = (Seam.TIER_READ, Seam.TIER_WRITE)
_FILES = (Seam.FILE_READ, Seam.FILE_WRITE, Seam.RECORD, Seam.SYNC)
_READS = {Seam.LOAD, Seam.FILE_READ, Seam.TIER_READ, Seam.STORE_GET, Seam.STORE_EXISTS}
_SLOW_READ = Rule(Fault.LATENCY, Seam.TIER_READ, seconds=0.3)

DISK = [
    _every(Fault.LATENCY, *_COPIES, *_TIER, *_FILES, Seam.SUBMIT, Seam.REPORT),
    _every(Fault.REORDER, Seam.FILE_READ, Seam.FILE_WRITE, Seam.REPORT),
    *_one(Seam.CLOCK, Fault.CLOCK_JUMP),
    *(cell for seam in _COPIES for cell in _one(seam, Fault.ERROR, Fault.HANG)),
    *_one(Seam.FILE_READ, Fault.BIT_FLIP, Fault.SHORT_READ, Fault.ERROR, Fault.HANG),
    *_one(Seam.FILE_WRITE, Fault.BIT_FLIP, Fault.TORN_WRITE, Fault.FULL, Fault.ERROR, Fault.HANG),
    *_one(Seam.RECORD, Fault.BIT_FLIP, Fault.TORN_WRITE, Fault.FULL, Fault.ERROR, Fault.HANG),
    *_one(Seam.SYNC, Fault.ERROR, Fault.HANG),
    *_one(Seam.TIER_READ, Fault.ERROR, Fault.HANG),
    *_one(Seam.TIER_WRITE, Fault.FULL, Fault.ERROR, Fault.HANG),
    Cell((_SLOW_READ,), "aborting"),
    Cell((_rule(Seam.CANCEL, Fault.LOST), _SLOW_READ), "aborting"),
    Cell((_rule(Seam.CANCEL, Fault.LATENCY), _SLOW_READ), "aborting"),
    Cell((Rule(Fault.LOST, Seam.INVALIDATE),), "clearing"),
    Cell((Rule(Fault.LATENCY, Seam.INVALIDATE, seconds=0.02),), "clearing"),
]
"""Cells for loads, saves and messages, with a disk tier below host memory.
"""

STORE = [
    _every(Fault.LATENCY, Seam.STORE_GET, Seam.STORE_PUT, Seam.STORE_EXISTS),
    *_one(Seam.STORE_GET, Fault.BIT_FLIP, Fault.SHORT_READ, Fault.ERROR, Fault.HANG),
    *_one(Seam.STORE_PUT, Fault.BIT_FLIP, Fault.TORN_WRITE, Fault.LOST, Fault.FULL, Fault.ERROR),
    *_one(Seam.STORE_PUT, Fault.HANG),
    *_one(Seam.STORE_EXISTS, Fault.ERROR, Fault.HANG),
]
"""Cells for lookups, loads and saves, with a remote store below host memory."""

BLENDS = [
    Cell(cell.rules, "blending")
    for cell in (
        _every(Fault.LATENCY, Seam.LOAD, Seam.DEVICE, Seam.TIER_READ, Seam.FILE_READ, Seam.REPORT),
        _every(Fault.REORDER, Seam.FILE_READ, Seam.REPORT),
        *_one(Seam.CLOCK, Fault.CLOCK_JUMP),
        *_one(Seam.FILE_READ, Fault.BIT_FLIP, Fault.SHORT_READ),
        *(
            cell
            for seam in (Seam.LOAD, Seam.DEVICE)
            for cell in _one(seam, Fault.ERROR, Fault.HANG)
        ),
        *_one(Seam.TIER_READ, Fault.ERROR, Fault.HANG),
    )
]
"""Cells for blends, whose chunks are fetched to host memory and then to the staging area.
"""


_KINDS = {
    Fault.LATENCY: "late",
    Fault.REORDER: "late",
    Fault.CLOCK_JUMP: "late",
    Fault.HANG: "late",
    Fault.ERROR: "failed",
    Fault.FULL: "failed",
    Fault.LOST: "failed",
    Fault.BIT_FLIP: "spoilt",
    Fault.SHORT_READ: "spoilt",
    Fault.TORN_WRITE: "spoilt",
}
_OFTEN, _SELDOM = 0.5, 0.25
"""Most often that a rule of a merged cell strikes: at messages, and at seams that many points pass.
The points that are left are for the other rules, some of which are at the same seam or behind it.
"""


def together(cells: Sequence[Cell]) -> list[Cell]:
    """Merge cells by what their faults do to the requests that lead to their seams.

    late        calls take longer, or end in another order; nothing is lost
    failed      calls fail and say so, or do nothing
    spoilt      other bytes are read, or written
    hanging     calls never return

    A run of a merged cell ends when each of its rules has struck. Calls hang together, or in turn
    if one hides another. What fails, spoils or hangs in reads is apart from what does so in writes,
    because nothing reads what no write has stored. Cells of requests that are aborted or cleared
    become one for each.
    """
    merged: dict[tuple[str, str], list[Rule]] = {}
    for cell in cells:
        merged.setdefault((cell.by, _family(cell)), []).extend(cell.rules)
    return [
        Cell(tuple(dict.fromkeys(_with_room(rule, family) for rule in rules)), by, family)
        for (by, family), rules in merged.items()
    ]


def _family(cell: Cell) -> str:
    if cell.by in ("aborting", "clearing"):
        return "message"
    rule = cell.rules[0]
    kind = "hanging" if _lasts(rule) else _KINDS[rule.fault]
    if kind == "late":
        return kind
    reads = cell.by == "blending" or rule.seam in _READS
    return f"{kind}-{'read' if reads else 'write'}"


def _with_room(rule: Rule, family: str) -> Rule:
    """Return the rule with a rate that lets others strike too. One with a limit keeps its own."""
    if rule.limit is not None or rule == _SLOW_READ:
        return rule
    return replace(rule, rate=min(rule.rate, _OFTEN if family == "message" else _SELDOM))


def settings(below: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return settings of kvcore with little host memory and the tier ``below`` it."""
    return {
        "host": {"capacity": "3MiB", "huge_pages": False},
        "transfer": {"load_deadline_s": 0.5, "batch_blocks": 4},
        **below,
        **more,
    }


PATIENT_LOOKS = 10
"""Looks at an engine that still holds something, before it is made to take a step."""


class Bench:
    """An engine with kvcore whose faults are set through ``control``.

    ``right`` returns the expected answers. ``tier`` is the name of the tier below host memory.
    ``fuses`` says that requests may ask for fusion.
    """

    def __init__(
        self,
        process: EngineProcess,
        control: FaultControl,
        model: Path,
        right: Reference,
        tier: str,
        *,
        fuses: bool = False,
    ) -> None:
        self.process = process
        self.control = control
        self._right = right
        self._tier = tier
        self._options: dict[str, Any] = {"fusion": EXACT} if fuses else {}
        self._number = 0
        self._turn = 0
        self._documents = _documents(model)
        self._chunks = windows(model, 4, 150, 200, seed=97)
        self._blends = _of_chunks(self._chunks)
        self.heal()
        self._before = self._rest()

    def run(self, cell: Cell) -> None:
        """Run one cell. Blocks. Raises AssertionError if a check fails.

        All cells use the same prompts, but each under a salt of its own. Therefore no tier holds
        any of their KV when a cell begins.
        """
        self._begin()
        ways: dict[str, Callable[[Cell], object]] = {
            "asking": self._ask,
            "aborting": self._abort,
            "clearing": self._clear,
            "blending": self._blend,
        }
        come = ways[cell.by]
        if cell.by == "blending":
            answers(self.process, self._chunks, batch=4, **self._options)
            self._rest()
        rotten = self._rotten
        strike = self._until_hung if cell.hangs else self._until_struck
        strike(cell, lambda: come(cell))
        self.heal()
        assert not cell.spoils or self._rotten > rotten, "corrupt blocks were not noticed"
        self._compare(self._rest())

    def _begin(self) -> None:
        """Give the requests from now on a salt under which no tier holds any KV."""
        self._number += 1
        self._options["cache_salt"] = f"cell {self._number}"

    @property
    def _rotten(self) -> float:
        """Number of corrupt blocks that kvcore has noticed."""
        return counted(self.process, "kvcore_corrupt_blocks_total")

    def heal(self) -> None:
        """Send requests until KV comes from host memory and from the tier below it again."""
        found: Counter[str] = Counter()
        for _ in range(ROUNDS):
            found.update(self._ask())
            if found["host"] and found[self._tier]:
                return
        raise AssertionError(f"KV is not reused from every tier again: {dict(found)}")

    def _rest(self) -> State:
        """Wait until no transfer is in flight.

        An idle engine does not wait for a read that hangs, and hears of its end in its next step.
        The request that makes it take one is too short to be stored.
        """
        looks = itertools.count()

        def nudge() -> None:
            if next(looks) < PATIENT_LOOKS:
                self.process.metrics()
            else:
                self.process.generate([self._documents[-1][:1]], max_tokens=1)

        return self.control.rest(nudge)

    def _until_struck(self, cell: Cell, come: Callable[[], object]) -> None:
        """Inject the cell's faults, and call ``come()`` until each of its rules has struck."""
        before, missing = self.control.state(), cell.rules
        with self.control.inject(*cell.rules):
            for _ in range(ROUNDS):
                come()
                missing = _silent(cell.rules, before, self.control.state())
                if not missing:
                    return
        raise AssertionError(f"these rules never struck: {missing}")

    def _until_hung(self, cell: Cell, come: Callable[[], object]) -> None:
        """Call ``come()`` until each of the cell's calls has hung, and while it hangs.

        A call that hangs can keep the engine from the seams behind it. Calls that were seen to hang
        are therefore released, and the others have their turn.
        """
        missing = cell.rules
        for _ in range(ROUNDS):
            if not any(rule.seam in _READS for rule in missing):
                self._begin()  # what has been written is not written again
            before = self.control.state()
            with self.control.inject(*missing):
                come()
                left = _silent(missing, before, self.control.state())
                hung = len(missing) - len(left)
                if hung:
                    come()
                    hanging = self.control.state().hanging
                    assert hanging >= hung, "the engine waited for a call that hangs"
            self._rest()
            missing = left
            if not missing:
                return
        raise AssertionError(f"these calls never hung: {missing}")

    def _compare(self, state: State) -> None:
        """Assert that no more files and threads are open than when the engine was new."""
        more = +(state.files - self._before.files)
        assert not more, f"files left open: {dict(more)}"
        more = state.threads - self._before.threads
        pooled = sum(c for name, c in more.items() if name.startswith("kvcore-store_"))
        assert pooled == more.total(), f"threads left: {dict(more)}"
        assert pooled <= STORE_THREADS, f"a thread pool grows: {dict(more)}"

    # -- requests that make the engine reach the seams --------------------------------------------

    def _ask(self, cell: Cell | None = None) -> Counter[str]:
        """Ask for the long documents, the short one, and some again. Return reused tokens by tier.

        The order changes from call to call, so that the pages of a document hold another one's KV
        when it comes again. A copy that did not happen then gives wrong answers.
        """
        *long, short = self._documents
        self._turn += 1
        turn = self._turn % len(long)
        long = [*long[turn:], *long[:turn]]
        found: Counter[str] = Counter()
        for asked in (long, [short], long[:1], [short]):
            found.update(_tiers(self._right_answers(asked, cell)))
        return found

    def _right_answers(self, asked: Sequence[list[int]], cell: Cell | None) -> list[Generation]:
        self._forget(cell)
        got = answers(self.process, asked, batch=len(asked), **self._options)
        assert_same_answers(got, self._right(asked))
        return got

    def _forget(self, cell: Cell | None) -> None:
        """Empty the engine's own prefix cache. Saves are awaited unless the cell hangs."""
        if cell is None or not cell.hangs:
            self._rest()
        self.process.reset_prefix_cache(timeout_s=SETTLE_S)

    def _abort(self, cell: Cell) -> None:
        """Abort requests while their load is in flight."""
        self._ask(cell)
        self._forget(cell)
        names = [f"gone {self._number}.{number}" for number in range(len(self._documents))]
        futures = [
            self.process.submit(document, request_id=name, **self._options)
            for name, document in zip(names, self._documents, strict=True)
        ]
        self.control.until(lambda state: state.held["flights"] > 0)
        for name in names:
            self.process.abort(name)
        for future in futures:
            future.result()
        self._ask(cell)

    def _clear(self, cell: Cell) -> None:
        """Clear the engine's cache and every tier."""
        self._ask(cell)
        self._forget(cell)
        self.process.reset_prefix_cache(connector=True, timeout_s=SETTLE_S)
        self._ask(cell)

    def _blend(self, cell: Cell) -> None:
        """Blend chunks that other documents have evicted from host memory.

        Every token is recomputed, so that the answers equal those of a full prefill.
        """
        self._ask(cell)
        self._forget(cell)
        options = {**self._options, "fusion": ALL}
        got = answers(self.process, self._blends, batch=len(self._blends), **options)
        assert_same_answers(got, self._right(self._blends))


def _silent(rules: Sequence[Rule], before: State, now: State) -> tuple[Rule, ...]:
    """Return the rules that have not struck since ``before``."""
    return tuple(rule for rule in rules if now.strikes(rule) == before.strikes(rule))


def _documents(model: Path) -> list[list[int]]:
    """Return three long documents, which exceed host memory, and a short one, which fits."""
    picks = random.Random(1)
    return [*windows(model, 3, 230, 300, seed=1), [picks.randrange(5, 400) for _ in range(90)]]


def _of_chunks(chunks: Sequence[list[int]]) -> list[list[int]]:
    """Return prompts of several chunks in another order, with other tokens between them."""
    picks = random.Random(2)
    made = []
    for _ in range(3):
        prompt: list[int] = []
        for chunk in picks.sample(chunks, 3):
            prompt += [picks.randrange(5, 400) for _ in range(picks.randrange(5, 20))]
            prompt += chunk
        made.append(prompt)
    return made


def _tiers(got: Sequence[Generation]) -> Counter[str]:
    return sum((Counter(one.tiers) for one in got), Counter())
