"""Faults at every seam of an engine that runs in other processes, and what those hold: by files.

    folder/rules        ──▶ leader, worker        which faults, from the next point on
    folder/asked        ──▶                       a number: say how it is
    folder/state-PID    ◀──                       what it holds, what struck, threads, open files

`plant` makes the folder; on the module search path of an engine it is a plugin that puts faults
into each worker, outbox, tier and store there, with no word of it in kvcore's settings. An engine
that loads no plugins of others does not see it.

Breakers rest for `REST_S` only there, so that a tier is tried again while a test looks on.
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
from kvcore.tiers.remote.lookup import Finder
from kvcore.tiers.remote.tier import StoreTier
from kvcore.worker import KVWorker

__all__ = ["Planted", "State", "follow", "plant"]

REST_S = 0.2
_LOOK_S = 0.02
_PATIENCE_S = 200.0
_MODULE = "kvcore_planted_faults"


# -- in the engine's processes --------------------------------------------------------------------


def follow(folder: Path) -> None:
    """Put faults into what kvcore makes in this process and its forks from now on. Once."""
    teller = _Teller(folder, Faults(follow=folder / "rules"))
    faults = teller.faults

    def manager(made: KVManager) -> None:
        staging = len(made.flights.staging)
        teller.tells(lambda: leader_holds(made, staging))

    def worker(made: KVWorker) -> None:
        into_worker(made, faults)
        into_reports(made, faults)
        teller.tells(
            lambda: {"ops": made.engine.in_flight, "blends' staging": len(made._elsewhere)}
        )

    def outbox(made: Outbox) -> None:
        into_outbox(made, faults)
        teller.tells(lambda: {"partial reports": len(made._quorum)})

    def tier(made: StoreTier) -> None:
        made.store = FaultyStore(made.store, faults)

    def finder(made: Finder) -> None:
        made._store = FaultyStore(made._store, faults)

    _after_made(KVManager, manager)
    _after_made(KVWorker, worker)
    _after_made(Outbox, outbox)
    _after_made(StoreTier, tier)
    _after_made(Finder, finder)
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


class _Teller:
    """Says how this process is when it is asked. A thread of its own, from the first thing that
    there is to tell of: a fork has none of its parent's."""

    def __init__(self, folder: Path, faults: Faults) -> None:
        self.faults = faults
        self._folder = folder
        self._parts: list[Callable[[], dict[str, int]]] = []
        self._process = 0

    def tells(self, part: Callable[[], dict[str, int]]) -> None:
        """``part`` is what it holds too."""
        if self._process == os.getpid():
            self._parts.append(part)
            return
        self._process, self._parts = os.getpid(), [part]
        self._tell(-1)  # who asks waits for those alone who have said something
        threading.Thread(target=self._serve, name="faults-teller", daemon=True).start()

    def _serve(self) -> None:
        told = -1
        while True:
            time.sleep(_LOOK_S)
            asked = _read_number(self._folder / "asked")
            if asked != told:
                told = asked
                self._tell(asked)

    def _tell(self, asked: int) -> None:
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
    """Whole or not at all."""
    made = path.with_name(f"new-{path.name}")
    made.write_text(text)
    made.replace(path)


def _read_number(path: Path) -> int:
    try:
        return int(path.read_text())
    except FileNotFoundError:
        return -1


# -- from outside ---------------------------------------------------------------------------------


class State(NamedTuple):
    """What the processes of an engine say together. ``held`` is empty where nothing is under way,
    ``hanging`` are points that wait in a hang, ``struck`` counts by "seam fault". ``files`` are
    those of the machine's that are open."""

    held: Counter[str]
    struck: Counter[str]
    hanging: int
    threads: Counter[str]
    files: Counter[str]

    def strikes(self, rule: Rule) -> int:
        """How often faults of this kind have struck there."""
        return self.struck[f"{rule.seam.value} {rule.fault.value}"]


class Planted:
    """The folder from outside: sets the faults of the engine that follows it, asks how it is."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._asked = 0

    @contextmanager
    def wrong(self, *rules: Rule) -> Iterator[None]:
        """These faults while the block runs; what hangs goes on behind it."""
        write_rules(self.folder / "rules", *rules)
        try:
            yield
        finally:
            write_rules(self.folder / "rules")

    def state(self) -> State:
        """Ask every process. Blocks. AssertionError where one does not answer."""
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
            assert time.monotonic() < until, f"not all answer: {said}"
            time.sleep(_LOOK_S)

    def until(self, good: Callable[[State], bool]) -> State:
        """Ask until it is so. AssertionError, with what was said last, where it does not become."""
        until = time.monotonic() + _PATIENCE_S
        while not good(state := self.state()):
            assert time.monotonic() < until, str(state)
        return state

    def rest(self, nudge: Callable[[], object] = lambda: None) -> State:
        """The state when nothing is held any more. AssertionError where something stays.

        ``nudge`` is called between looks: an engine that sleeps takes in what ended when it is
        spoken to.
        """

        def rests(state: State) -> bool:
            if state.held:
                nudge()
            return not state.held

        return self.until(rests)

    @property
    def processes(self) -> set[int]:
        """Those that live and have faults."""
        return {int(path.name.partition("-")[2]) for path in self._places()}

    def _places(self) -> list[Path]:
        return [path for path in self.folder.glob("state-*") if _lives(path.name.split("-")[1])]


def _lives(process: str) -> bool:
    """A process that was killed is there until its parent asks for it."""
    try:
        said = Path("/proc", process, "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return said.rpartition(")")[2].split()[0] not in "ZX"


def _sum(said: Sequence[dict[str, Any]], what: str) -> Counter[str]:
    return sum((Counter(one[what]) for one in said), Counter())


def plant(folder: Path) -> Planted:
    """Make ``folder`` the plugin, without faults for now. Put it on PYTHONPATH."""
    info = folder / f"{_MODULE}-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {_MODULE}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[kvcore.plugins]\nplanted = {_MODULE}\n")
    (folder / f"{_MODULE}.py").write_text(
        "from pathlib import Path\n\nfrom kvcore.testing.faults.process import follow\n\n"
        "follow(Path(__file__).parent)\n"
    )
    write_rules(folder / "rules")
    return Planted(folder)
