"""Locks on files (flock) that a forked child does not keep, and the processes that hold a file.

A flock belongs to the open file, and a forked child shares it: the lock is held until the last of
them has closed it. A child that outlives its parent would keep the lock for nobody. Each `FileLock`
is therefore closed in every child that Python forks. That takes nothing from the parent: only
LOCK_UN, or the last close, ends a flock. A child that was started by `exec` has not got the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os

__all__ = ["FileLock", "holders"]

_OPEN: set[FileLock] = set()


class FileLock:
    """An exclusive lock on one or more open files, which are closed with it. Not thread-safe."""

    def __init__(self) -> None:
        self.files: list[int] = []

    def take(self, file: int, *, wait: bool = False) -> bool:
        """Lock one more open file. Return False if another process holds it.

        With ``wait`` this blocks until nobody does. The file is this object's from now on, locked
        or not. Raises OSError if the file system has no locks.
        """
        _OPEN.add(self)  # before it is locked: a thread may fork at any time
        self.files.append(file)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        """Give the lock up. Idempotent, and without effect in a forked child."""
        _OPEN.discard(self)
        files, self.files = self.files, []
        for file in files:
            os.close(file)


def _close_in_child() -> None:
    """Close what the parent has locked: in the child, which has this thread only."""
    for lock in list(_OPEN):
        with contextlib.suppress(OSError):
            lock.close()


os.register_at_fork(after_in_child=_close_in_child)


def holders(path: str | os.PathLike[str]) -> list[int]:
    """Return the processes of this user that have a file open, as far as /proc shows them.

    It does not show those of another container. Takes a millisecond for every few hundred files.
    """
    try:
        wanted = os.stat(path)
        processes = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []
    return sorted(pid for pid in processes if _has_open(pid, wanted))


def _has_open(pid: int, wanted: os.stat_result) -> bool:
    with contextlib.suppress(OSError):  # another user's, or it has ended
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                if os.path.samestat(os.stat(f"/proc/{pid}/fd/{name}"), wanted):
                    return True
    return False
