"""The threads that carry ops out, and what they tell an observer.

An executor may return before its work has ended, with what to wait for: the op is then *issued*.
Its thread goes on to the next op, and a second thread waits for the ends in order.

If copies that were joined cannot be issued, each is issued alone, and only those fail that fail
alone.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from functools import partial
from typing import NamedTuple, Protocol

from kvcore._util.cpus import settle_thread
from kvcore._util.threads import GuardedThread, InOrder
from kvcore.transfer.active import OpState, TakenOp
from kvcore.transfer.executor import Executor, Issued, JoiningExecutor, OpPart
from kvcore.transfer.graph import Path, RowError, TransferOp

__all__ = ["OpBooks", "OpThread", "OpTiming", "Timings"]

_log = logging.getLogger("kvcore.transfer")


class OpTiming(NamedTuple):
    """What the observer of an engine receives when an op ends; ``started`` is a clock time."""

    op: TransferOp
    rows: int
    failed: int
    seconds: float
    graph_id: int
    started: float


class Timings:
    """Tells an observer of each op that ran. What the observer raises is logged once."""

    def __init__(self, observer: Callable[[OpTiming], object] | None) -> None:
        self._observer = observer
        self._failed = False

    def tell(
        self,
        joined: Sequence[TakenOp],
        failed: Sequence[dict[int, RowError]],
        started: float,
        seconds: float,
    ) -> None:
        """Tell of ops that took ``seconds`` together: each has its share, by its rows."""
        if self._observer is None:
            return
        each = seconds / max(1, sum(len(taken.rows) for taken in joined))
        for taken, errors in zip(joined, failed, strict=True):
            rows = len(taken.rows)
            share = each * rows if len(joined) > 1 else seconds
            graph_id = taken.run.graph.graph_id
            try:
                self._observer(OpTiming(taken.op, rows, len(errors), share, graph_id, started))
            except Exception:  # noqa: BLE001 - who looks on ends nothing
                if not self._failed:
                    self._failed = True
                    _log.exception("what observes transfers has failed, and is called again")
            started += share


class OpBooks(Protocol):
    """The engine, as its threads see it: which op is next, and what has become of it."""

    def now(self) -> float:
        """Return the time, in seconds."""
        ...

    def take(self, path: Path) -> list[TakenOp]:
        """Block until ops of ``path`` may start, and take them; none when the engine closes."""
        ...

    def note_issued(self, joined: Sequence[TakenOp], copies: Issued) -> None:
        """Record that the device has the work of these ops in a queue."""

    def end(self, joined: Sequence[TakenOp], failed: Sequence[dict[int, RowError]]) -> None:
        """End ops; ``failed`` has the failed rows of each."""

    def give_up(self, joined: Sequence[TakenOp]) -> None:
        """End those of the ops as failed that have not ended. Does not raise."""

    def stop(self, name: str, error: BaseException) -> None:
        """Take no more ops, because the thread ``name`` has ended by an error."""


class OpThread:
    """Carries out the ops of one path, one after another, on a thread that prefers cores ``near``.

    An error of the engine's own ends the thread, after all ops that it had taken have ended as
    failed. `OpBooks.stop` is told then, and also if the thread cannot be started.
    """

    def __init__(
        self,
        name: str,
        path: Path,
        executors: Mapping[Path, Executor],
        books: OpBooks,
        timings: Timings,
        near: Set[int],
    ) -> None:
        self._path = path
        self._executors = executors
        self._books = books
        self._timings = timings
        self._settle = partial(settle_thread, near=near)
        self._thread = GuardedThread(name, self._serve, partial(books.stop, name))
        second = f"{name}-ends"  # started for the first op that is issued
        self._ends = InOrder(second, self._see_end, partial(books.stop, second), self._settle)

    def start(self) -> bool:
        """Start the thread; return False if that is not possible."""
        return self._thread.start()

    def join(self, timeout: float) -> bool:
        """Wait until it has ended, at most ``timeout`` seconds; return True if it does not run."""
        until = time.monotonic() + timeout
        ended = self._thread.join(timeout)
        return self._ends.join(until - time.monotonic()) and ended

    def _serve(self) -> None:
        self._settle(background=self._path.writes_tier)
        try:
            while joined := self._books.take(self._path):
                self._carry_out(joined)
        finally:
            self._ends.close()

    def _carry_out(self, joined: list[TakenOp]) -> None:
        """Carry ops out until they have ended, or until their copies are issued."""
        left = deque(joined)
        try:
            started = self._books.now()
            outcome = self._execute_joined(joined) if len(joined) > 1 else None
            if outcome is not None:
                left.clear()
                self._take_outcome(joined, outcome, started)
            while left:
                started, taken = self._books.now(), left.popleft()
                self._take_outcome([taken], self._execute(taken), started)
        except BaseException:
            state_of = ((taken, taken.run.states[taken.position]) for taken in joined)
            self._books.give_up([taken for taken, state in state_of if state is OpState.RUNNING])
            raise

    def _execute(self, taken: TakenOp) -> dict[int, RowError] | Issued:
        if not taken.rows:
            return {}
        try:
            return self._executors[self._path].run(taken.run.graph, taken.op, taken.rows)
        except Exception:  # noqa: BLE001 - thread boundary: the op fails, its queue continues
            _log_failure(taken)
            why = RowError.IO if taken.op.tier else RowError.INTERNAL
            return dict.fromkeys(taken.rows, why)

    def _execute_joined(self, joined: list[TakenOp]) -> dict[int, RowError] | Issued | None:
        """Carry ops out at once; return None if they must be carried out one by one."""
        executor = self._executors[self._path]
        assert isinstance(executor, JoiningExecutor)
        parts = [OpPart(taken.run.graph, taken.op, taken.rows) for taken in joined if taken.rows]
        try:
            return (executor.run_joined(parts) if parts else None) or {}
        except Exception:  # noqa: BLE001 - one of them may be at fault: each is tried alone
            _log.debug("%d ops failed together and are tried one by one", len(parts), exc_info=True)
            return None

    def _take_outcome(
        self, joined: list[TakenOp], outcome: dict[int, RowError] | Issued, started: float
    ) -> None:
        """End ops that were carried out, or see their end later."""
        if isinstance(outcome, dict):
            failed = [outcome] if len(joined) == 1 else [{} for _ in joined]
            self._end(joined, failed, started, self._books.now() - started)
            return
        try:
            self._books.note_issued(joined, outcome)
            self._ends.put((joined, outcome))
        except BaseException:
            self._drop(joined, outcome)
            raise

    def _see_end(self, issued: tuple[list[TakenOp], Issued]) -> None:
        """Wait until copies have ended."""
        joined, copies = issued
        failed: list[dict[int, RowError]] = [{} for _ in joined]
        seconds = 0.0
        try:
            try:
                copies.wait()
                seconds = copies.seconds()
            except Exception:  # noqa: BLE001 - thread boundary: the device has failed
                _log_failure(joined[0])
                failed = [dict.fromkeys(taken.rows, RowError.INTERNAL) for taken in joined]
            self._end(joined, failed, self._books.now() - seconds, seconds)
        except BaseException:
            self._drop(joined, copies)
            raise

    def _drop(self, joined: list[TakenOp], copies: Issued) -> None:
        """Give ops up, after what was issued of them: it may touch pages till then."""
        with suppress(Exception):  # the device has failed
            copies.wait()
        self._books.give_up(joined)

    def _end(
        self,
        joined: list[TakenOp],
        failed: list[dict[int, RowError]],
        started: float,
        seconds: float,
    ) -> None:
        self._books.end(joined, failed)
        self._timings.tell(joined, failed, started, seconds)


def _log_failure(taken: TakenOp) -> None:
    what = taken.run.graph.graph_id, taken.op.path.value
    _log.exception("transfer op failed graph=%d path=%s", *what)
