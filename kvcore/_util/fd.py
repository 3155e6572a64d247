"""An open file's number, which is given back when nobody uses it any more.

The system gives a closed number to the next file, socket or pipe that is opened. Who still writes
to it then writes into another file, and nothing says so.
"""

from __future__ import annotations

import errno
import os
import threading

__all__ = ["Descriptor"]


class Descriptor:
    """Owns ``number``; ``with`` it, that is the file's. Thread-safe.

    After `close` every use raises OSError (EBADF), whatever has the number by then. Uses under way
    then go on, and the last of them gives the number back: `close` waits for nobody.
    """

    __slots__ = ("_closed", "_lock", "_number", "_users")

    def __init__(self, number: int) -> None:
        self._number = number
        self._lock = threading.Lock()
        self._users = 0
        self._closed = False

    def __enter__(self) -> int:
        with self._lock:
            if self._closed:
                raise OSError(errno.EBADF, "the file is closed")
            self._users += 1
        return self._number

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            last = self._closed and not self._users
        if last:
            os.close(self._number)

    def close(self) -> None:
        """Let nobody use it from now on. Idempotent."""
        with self._lock:
            last = not self._closed and not self._users
            self._closed = True
        if last:
            os.close(self._number)
