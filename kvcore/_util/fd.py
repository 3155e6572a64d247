"""A file descriptor that is closed once its last user is done.

The system reuses a closed descriptor's number for the next file, socket or pipe. A thread that
still writes to that number would silently write into another file.
"""

from __future__ import annotations

import errno
import os
import threading

__all__ = ["Descriptor", "is_removed", "leads_to"]


class Descriptor:
    """Owns the descriptor ``number``; a ``with`` block borrows it. Thread-safe.

    After `close`, every new use raises OSError (EBADF), even if the number belongs to another file
    by then. Uses in progress continue, and the last one closes the descriptor. `close` does not
    wait for them.
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
        """Refuse every further use. Idempotent; does not wait for uses in progress."""
        with self._lock:
            last = not self._closed and not self._users
            self._closed = True
        if last:
            os.close(self._number)


def is_removed(number: int) -> bool:
    """Return True if an open file has no name any more: what is written to it is lost."""
    return not os.fstat(number).st_nlink


def leads_to(path: str | os.PathLike[str], number: int) -> bool:
    """Return True if a path is still that of an open file, which was neither removed nor moved.

    Blocks as `os.stat` does. Raises OSError if the medium fails.
    """
    try:
        return os.path.samestat(os.stat(path), os.fstat(number))
    except (FileNotFoundError, NotADirectoryError):
        return False
