"""What the files of LoRA adapters are, read on threads: a disk that hangs holds up no scheduler.

    number = files.ask(name, path)              a look at the files begins, after this call
    files.told(name, path, number)              what it found; None while it is under way

An engine reads an adapter's files when it needs them, and does not say when. A digest is therefore
as good as the moment at which the files were looked at, and whoever asks names that moment: the
look has begun after `ask`. Looks of one adapter that nobody has begun are one look.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from kvcore._util.outside import printable
from kvcore._util.threads import GuardedThread
from kvcore.errors import UnsupportedError
from kvcore.model.identity import lora_identity

__all__ = ["AdapterFiles"]

_THREADS = 4
"""Adapters that are looked at at once. A folder whose medium hangs takes one of them."""

_KEPT = 4096
"""Adapters that are remembered. An engine serves a few at a time."""

_GRACE_S = 0.001
"""The longest time that `ask` waits for a look. Usual ones take a tenth of it."""

_Key = tuple[str, str]


@dataclass
class _Looks:
    """The looks at one adapter: the last one asked for, begun and ended, and what that found."""

    asked: int = 0
    begun: int = 0
    ended: int = 0
    found: str | UnsupportedError = ""

    @property
    def waits(self) -> bool:
        return self.asked > self.begun

    @property
    def runs(self) -> bool:
        return self.begun > self.ended


class AdapterFiles:
    """Looks at adapters with ``look``, which is `lora_identity`. Thread-safe.

    It starts a thread when there is something to look at, and ends it when there is not.
    """

    def __init__(self, look: Callable[[str, str], str] = lora_identity) -> None:
        self._look = look
        self._adapters: OrderedDict[_Key, _Looks] = OrderedDict()
        self._changed = threading.Condition()
        self._threads = 0

    def ask(self, name: str, path: str) -> int:
        """Have an adapter's files looked at, and return the number of the look.

        If nothing else is looked at, this waits up to a millisecond: then it has usually ended.
        """
        with self._changed:
            looks = self._adapters.setdefault((name, path), _Looks())
            self._adapters.move_to_end((name, path))
            idle = not self._threads
            if not looks.waits:
                looks.asked += 1
            number = looks.asked
            self._forget()
            start = self._threads < _THREADS and not looks.runs
            self._threads += start
        if start:
            GuardedThread("kvcore-adapters", self._run, self._lose).start()
        if idle:
            self.wait(name, path, number, _GRACE_S)
        return number

    def told(self, name: str, path: str, number: int) -> str | UnsupportedError | None:
        """Return the adapter's identity as that look, or a later one, has found it.

        Returns the reason if there is none, and None while that look has not ended.
        """
        with self._changed:
            looks = self._adapters.get((name, path))
            return looks.found if looks is not None and looks.ended >= number else None

    def wait(
        self, name: str, path: str, number: int, timeout_s: float
    ) -> str | UnsupportedError | None:
        """Return the same as `told`, after at most ``timeout_s`` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self.told(name, path, number) is not None, timeout_s)
            return self.told(name, path, number)

    def _forget(self) -> None:
        """Forget the adapters that were asked for longest ago. The caller holds the lock."""
        for key in list(self._adapters)[: max(len(self._adapters) - _KEPT, 0)]:
            if not (self._adapters[key].waits or self._adapters[key].runs):
                del self._adapters[key]

    def _next(self) -> _Key | None:
        """Return an adapter to look at; None if this thread is needed no more."""
        for key, looks in self._adapters.items():
            if looks.waits and not looks.runs:
                looks.begun = looks.asked
                return key
        self._threads -= 1
        return None

    def _run(self) -> None:
        while True:
            with self._changed:
                if (key := self._next()) is None:
                    return
            try:
                found: str | UnsupportedError = self._look(*key)
            except UnsupportedError as error:
                found = error
            except Exception as error:  # noqa: BLE001 - of any file, whatever its reader makes of it
                why = f"cannot read the LoRA adapter {key[1]}: {printable(error)}"
                found = UnsupportedError(why)
            with self._changed:
                looks = self._adapters[key]
                looks.found, looks.ended = found, looks.begun
                self._changed.notify_all()

    def _lose(self, error: BaseException) -> None:
        """End every look, because a thread has died or could not be started."""
        with self._changed:
            self._threads -= 1
            for (_, path), looks in self._adapters.items():
                if looks.waits or looks.runs:
                    looks.begun = looks.ended = looks.asked
                    why = f"cannot read the LoRA adapter {path}: {printable(error)}"
                    looks.found = UnsupportedError(why)
            self._changed.notify_all()
