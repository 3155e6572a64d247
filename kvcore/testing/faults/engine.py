"""The reference engine with faults at every seam, and checks that it leaks nothing."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvcore.config import Config
from kvcore.manager import HOST, KVManager
from kvcore.testing.engine import EngineArgs, Llama, ReferenceEngine
from kvcore.testing.engine.transport import DirectTransport
from kvcore.testing.faults.plan import Faults
from kvcore.testing.faults.worker import FaultyMessages, into_worker
from kvcore.worker import KVWorker

__all__ = ["embedded", "faulty_engine", "files", "held", "leader_holds", "nothing_left", "threads"]

_SETTLE_S = 10.0


def faulty_engine(
    model: Llama, args: EngineArgs, config: Config, faults: Faults
) -> ReferenceEngine:
    """Return a `ReferenceEngine` whose workers and messages have ``faults``. Close it when done.

    Remote stores are wrapped where they are made (`FaultyStore`).
    """

    def transport(workers: Sequence[KVWorker]) -> Any:
        return FaultyMessages(DirectTransport(workers), faults)

    class Faulty(ReferenceEngine):
        transport_type = staticmethod(transport)  # type: ignore[assignment]

    engine = Faulty(model, args, config)
    for made in engine.workers:
        into_worker(made.worker, faults)
    return engine


@contextmanager
def nothing_left() -> Iterator[None]:
    """Assert that the block leaves no additional open files and no threads of kvcore behind.

    Threads get some seconds to end. Raises AssertionError otherwise.
    """
    opened, running = files(), threads()
    yield
    until = time.monotonic() + _SETTLE_S
    while (more := threads() - running) and time.monotonic() < until:
        time.sleep(0.01)
    assert not more, f"threads left: {dict(more)}"
    more = files() - opened
    assert not more, f"files left open: {dict(more)}"


def threads() -> Counter[str]:
    """Count the threads of kvcore in this process, by name."""
    return Counter(t.name for t in threading.enumerate() if t.name.startswith("kvcore"))


def files() -> Counter[str]:
    """Count the regular files that this process has open, by path."""
    found: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:  # the descriptor of the directory listing itself
            continue
        if path.startswith("/") and not path.startswith(("/dev", "/proc")):
            found[path] += 1
    return found


def embedded(engine: ReferenceEngine) -> KVManager:
    """Return the manager of an engine that does not use a server."""
    assert engine.leader is not None
    manager = engine.leader.manager
    assert isinstance(manager, KVManager), "the engine is a server's client"
    return manager


def held(engine: ReferenceEngine) -> dict[str, int]:
    """Return what an engine still holds though it is idle and settled, as counts by name.

    It is empty if nothing leaked.
    """
    manager = embedded(engine)
    arena = engine.workers[0].worker.arena
    staging = arena.num_slots - manager.index.num_slots(HOST)
    found = {**leader_holds(manager, staging), **_unanswered(engine)}
    return {what: count for what, count in found.items() if count}


def leader_holds(manager: KVManager, staging: int) -> dict[str, int]:
    """Return what a leader holds for transfers in flight, as counts by name.

    ``staging`` is the number of its staging slots.
    """
    found = {"staging slots": staging - len(manager.flights.staging), "flights": manager.in_flight}
    for table in manager.index._tables:
        parts = {
            "pins": table.pins,
            "reservations": table.open,
            "waiting reservations": table.dependents,
            "evictions": table.evicting,
            "retained slots": table.retained,
            "parked slots": table.parking,
        }
        found.update({f"{table.name} {what}": len(some) for what, some in parts.items()})
    return found


def _unanswered(engine: ReferenceEngine) -> dict[str, int]:
    """Count the workers' ops, and the reports that wait for other ranks."""
    transport: Any = engine.leader._copies if engine.leader is not None else None
    ops = sum(made.worker.engine.in_flight for made in engine.workers)
    return {"ops": ops, "partial reports": len(transport._quorum)}
