"""Faults at every seam of an engine in other processes, and what these hold, through files.

    folder/rules        ──▶ leader, worker        the faults from the next point on
    folder/asked        ──▶                       a number: each process answers it with its state
    folder/state-PID    ◀──                       what it holds, strikes, threads, open files

`write_injector` makes the folder a plugin. On the module search path of an engine, it injects
faults into each worker, outbox, tier and store there, without any setting of kvcore. An engine that
loads no third-party plugins does not see it.

Circuit breakers pause for only `REST_S` seconds, so that a failed tier is tried again within a
test.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

from kvcore._util.circuit_breaker import Breaker
from kvcore.connector.step_transport import Outbox
from kvcore.manager import KVManager
from kvcore.testing.faults.engine import files, leader_holds, threads
from kvcore.testing.faults.media import FaultyStore
from kvcore.testing.faults.plan import Faults, Rule, write_rules
from kvcore.testing.faults.worker import into_outbox, into_reports, into_worker
from kvcore.tiers.remote.lookup import StoreFinder
from kvcore.tiers.remote.tier import StoreTier
from kvcore.worker import KVWorker

__all__ = ["FaultControl", "State", "follow", "write_injector"]

REST_S = 0.2
_LOOK_S = 0.02
_PATIENCE_S = 200.0
_MODULE = "kvcore_planted_faults"


# -- in the engine's processes --------------------------------------------------------------------


def follow(folder: Path) -> None:
    """Inject faults into each part that kvcore creates in this process and its forks.

    The parts are managers, workers, outboxes, tiers, finders and breakers. Call exactly once.
    """
    reporter = _Reporter(folder, Faults(follow=folder / "rules"))
    faults = reporter.faults

    def manager(made: KVManager) -> None:
        staging = len(made.flights.staging)
        reporter.add(lambda: leader_holds(made, staging))

    def worker(made: KVWorker) -> None:
        into_worker(made, faults)
        into_reports(made, faults)
        reporter.add(lambda: {"ops": made.engine.in_flight})

    def outbox(made: Outbox) -> None:
        into_outbox(made, faults)
        reporter.add(lambda: {"partial reports": len(made._quorum)})

    def tier(made: StoreTier) -> None:
        made.store = FaultyStore(made.store, faults)

    def finder(made: StoreFinder) -> None:
        made._store = FaultyStore(made._store, faults)

    _after_made(KVManager, manager)
    _after_made(KVWorker, worker)
    _after_made(Outbox, outbox)
    _after_made(StoreTier, tier)
    _after_made(StoreFinder, finder)
    _after_made(Breaker, _hasten)


def _after_made(kind: type[Any], then: Callable[[Any], None]) -> None:
    make = kind.__init__

    @wraps(make)
    def made(self: Any, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        then(self)

    kind.__init__ = made


def _hasten(made: Breaker) -> None:
    made._first_pause = made._pause = made._max_pause = REST_S


class _Reporter:
    """Reports the state of this process on request, from a thread of its own.

    The thread starts with the first part to report. A fork starts its own, because it inherits
    none.
    """

    def __init__(self, folder: Path, faults: Faults) -> None:
        self.faults = faults
        self._folder = folder
        self._parts: list[Callable[[], dict[str, int]]] = []
        self._process = 0

    def add(self, part: Callable[[], dict[str, int]]) -> None:
        """Add a function that counts what a part of kvcore holds, by name."""
        if self._process == os.getpid():
            self._parts.append(part)
            return
        self._process, self._parts = os.getpid(), [part]
        self._report(-1)  # `FaultControl.state` waits only for processes that have a state file
        threading.Thread(target=self._serve, name="faults-reporter", daemon=True).start()

    def _serve(self) -> None:
        answered = -1
        while True:
            time.sleep(_LOOK_S)
            asked = _read_number(self._folder / "asked")
            if asked != answered:
                answered = asked
                self._report(asked)

    def _report(self, asked: int) -> None:
        held: Counter[str] = Counter()
        for part in list(self._parts):
            held.update(part())
        struck = {f"{seam.value} {kind.value}": n for (seam, kind), n in self.faults.struck.items()}
        said = {
            "asked": asked,
            "held": {what: count for what, count in held.items() if count},
            "struck": struck,
            "hanging": self.faults.hanging,
            "threads": threads(),
            "files": files(),
        }
        _write(self._folder / f"state-{self._process}", json.dumps(said))


def _write(path: Path, text: str) -> None:
    """Replace the file atomically."""
    made = path.with_name(f"new-{path.name}")
    made.write_text(text)
    made.replace(path)


def _read_number(path: Path) -> int:
    try:
        return int(path.read_text())
    except FileNotFoundError:
        return -1


# -- in the test's process ------------------------------------------------------------------------


class State(NamedTuple):
    """The state of all processes of an engine.

    ``held`` counts what transfers in flight hold, and is empty at rest. ``hanging`` is the number
    of calls that hang, ``struck`` counts strikes by "seam fault", and ``files`` counts the open
    regular files.
    """

    held: Counter[str]
    struck: Counter[str]
    hanging: int
    threads: Counter[str]
    files: Counter[str]

    def strikes(self, rule: Rule) -> int:
        """Return how often the rule's fault has struck at the rule's seam."""
        return self.struck[f"{rule.seam.value} {rule.fault.value}"]


class FaultControl:
    """The folder of a running engine: sets the faults of its processes and reads their state."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._asked = 0

    @contextmanager
    def inject(self, *rules: Rule) -> Iterator[None]:
        """Inject faults while the block runs. Calls that hang continue after it."""
        write_rules(self.folder / "rules", *rules)
        try:
            yield
        finally:
            write_rules(self.folder / "rules")

    def state(self) -> State:
        """Ask every process for its state. Blocks. Raises AssertionError if one does not answer."""
        self._asked += 1
        _write(self.folder / "asked", str(self._asked))
        until = time.monotonic() + _PATIENCE_S
        while True:
            said = [json.loads(path.read_text()) for path in self._places()]
            if said and all(one["asked"] == self._asked for one in said):
                return State(
                    held=_sum(said, "held"),
                    struck=_sum(said, "struck"),
                    hanging=sum(one["hanging"] for one in said),
                    threads=_sum(said, "threads"),
                    files=_sum(said, "files"),
                )
            assert time.monotonic() < until, f"not every process answers: {said}"
            time.sleep(_LOOK_S)

    def until(self, good: Callable[[State], bool]) -> State:
        """Ask for the state until ``good(state)`` is true, and return it.

        Raises AssertionError, with the last state, if that takes too long.
        """
        until = time.monotonic() + _PATIENCE_S
        while not good(state := self.state()):
            assert time.monotonic() < until, str(state)
        return state

    def rest(self, nudge: Callable[[], object] = lambda: None) -> State:
        """Return the state once nothing is held. Raises AssertionError if something stays held.

        ``nudge`` is called before each retry, because an idle engine notices completed transfers
        only when it is called.
        """

        def rests(state: State) -> bool:
            if state.held:
                nudge()
            return not state.held

        return self.until(rests)

    @property
    def processes(self) -> set[int]:
        """The ids of the living processes that have faults."""
        return {int(path.name.partition("-")[2]) for path in self._places()}

    def _places(self) -> list[Path]:
        return [path for path in self.folder.glob("state-*") if _lives(path.name.split("-")[1])]


def _lives(process: str) -> bool:
    """Return True if the process runs. A killed one is a zombie until its parent reaps it."""
    try:
        said = Path("/proc", process, "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return said.rpartition(")")[2].split()[0] not in "ZX"


def _sum(said: Sequence[dict[str, Any]], what: str) -> Counter[str]:
    return sum((Counter(one[what]) for one in said), Counter())


def write_injector(folder: Path) -> FaultControl:
    """Make ``folder`` a plugin that injects faults, none for now. Put it on PYTHONPATH."""
    info = folder / f"{_MODULE}-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {_MODULE}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[kvcore.plugins]\nplanted = {_MODULE}\n")
    (folder / f"{_MODULE}.py").write_text(
        "from pathlib import Path\n\nfrom kvcore.testing.faults.process import follow\n\n"
        "follow(Path(__file__).parent)\n"
    )
    write_rules(folder / "rules")
    return FaultControl(folder)
