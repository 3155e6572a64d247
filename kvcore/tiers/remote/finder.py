"""Asks a store, in the background, how much of a prompt it holds.

    leader's thread     ask ──▶ Question ······ found so far, ended?
                                   ▲
    the finder's thread            └── exists, in batches that grow ──▶ store

The leader never waits: it looks at the question when the request is looked up again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from kvcore.errors import TierError
from kvcore.tiers.remote.base import BlockStore

_log = logging.getLogger("kvcore.tiers.remote")

MAX_OPEN = 256
_FIRST_WINDOW = 16
_MAX_WINDOW = 512
_ROUND = 32
"""Questions in one round: many short ones must not wait behind each other's round trips."""


class Question:
    """How many of ``keys``, from the first on, does the store hold?

    ``found`` of them are known to be there. ``ended``: no more will become known, and with
    ``failed`` that is because the store did not answer.
    """

    __slots__ = ("asked_at", "ended", "failed", "found", "keys", "window")

    def __init__(self, keys: Sequence[bytes]) -> None:
        self.keys = tuple(keys)
        self.found = 0
        self.ended = False
        self.failed = False
        self.asked_at = time.monotonic()
        self.window = _FIRST_WINDOW

    def due(self) -> tuple[bytes, ...]:
        """The keys of its next batch."""
        return self.keys[self.found : self.found + self.window]

    def take(self, held: int) -> None:
        """Of the batch that was due, the first ``held`` are there."""
        self.ended = held < self.window or self.found + held == len(self.keys)
        self.found += held
        self.window = min(2 * self.window, _MAX_WINDOW)


class Finder:
    """Questions to ``store``, which is closed with it; ``names_of`` gives the values of a block,
    all of which must be there. ``lookup_s`` and ``absent_s`` are for the leader, who keeps time.

    Any thread may call; only `wait` and `close` block.
    """

    def __init__(
        self,
        store: BlockStore,
        names_of: Callable[[bytes], Sequence[str]],
        *,
        name: str,
        lookup_s: float = 0.5,
        absent_s: float = 2.0,
    ) -> None:
        self.lookup_s = lookup_s
        self.absent_s = absent_s
        self._store = store
        self._names_of = names_of
        self._name = name
        self._changed = threading.Condition()
        self._open: list[Question] = []
        self._unwanted: list[str] = []
        self._answered = 0
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name=f"kvcore-find-{name}", daemon=True)
        self._thread.start()

    def ask(self, keys: Sequence[bytes]) -> Question | None:
        """Begin to ask; None when too many questions are open, or it is closed."""
        question = Question(keys)
        with self._changed:
            if self._closed or len(self._open) >= MAX_OPEN:
                return None
            self._open.append(question)
            self._changed.notify_all()
        return question

    def drop(self, question: Question) -> None:
        """Nobody waits for this answer any more. What it found stays."""
        with self._changed:
            question.ended = True
            if question in self._open:
                self._open.remove(question)

    def delete(self, keys: Sequence[bytes]) -> None:
        """Begin to remove blocks from the store, for everyone. What fails is named in the log."""
        names = [name for key in keys for name in self._names_of(key)]
        with self._changed:
            self._unwanted += names
            self._changed.notify_all()

    def wait(self, timeout: float) -> bool:
        """Block until a question ends, at most ``timeout`` seconds; False when none is open."""
        with self._changed:
            if not self._open:
                return False
            answered = self._answered
            return self._changed.wait_for(lambda: self._answered != answered, timeout)

    def close(self, timeout: float = 5.0) -> None:
        """Stop asking. What was to be removed is removed first. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout)
        if self._thread.is_alive():
            _log.warning(
                "store %s still answers nothing at shutdown: it is left behind", self._name
            )
        else:
            self._store.close()

    # -- the thread -------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._open or self._unwanted or self._closed)
                if self._closed and not self._unwanted:
                    return
                round_, unwanted = self._open[:_ROUND], self._unwanted
                self._unwanted = []
            if unwanted:
                self._remove(unwanted)
            if round_:
                self._ask(round_)

    def _ask(self, round_: Sequence[Question]) -> None:
        batches = [question.due() for question in round_]
        names = {key: self._names_of(key) for batch in batches for key in batch}
        flat = [name for each in names.values() for name in each]
        held: dict[str, bool] | None = None
        try:
            held = dict(zip(flat, self._store.exists(flat), strict=True))
        except TierError as error:
            _log.warning("store %s does not tell what it holds: %s", self._name, error)
        except Exception:  # noqa: BLE001 - thread boundary: the questions fail, the thread lives on
            _log.exception("asking store %s failed", self._name)
        with self._changed:
            for question, batch in zip(round_, batches, strict=True):
                if held is None:
                    question.ended = question.failed = True
                elif not question.ended:
                    there = [all(held[name] for name in names[key]) for key in batch]
                    question.take([*there, False].index(False))
            ended = [question for question in round_ if question.ended]
            self._open = [question for question in self._open if not question.ended]
            self._answered += len(ended)
            self._changed.notify_all()

    def _remove(self, names: Sequence[str]) -> None:
        try:
            self._store.delete(names)
        except TierError as error:
            _log.warning("store %s keeps %d values: %s", self._name, len(names), error)
        except Exception:  # noqa: BLE001 - thread boundary
            _log.exception("removing from store %s failed", self._name)
