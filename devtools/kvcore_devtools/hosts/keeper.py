"""Keeps a host's network namespace alive, as a child process: ``python keeper.py NUMBER``.

NUMBER is the namespace of its parent, in which it refuses to run.

It prints "ready" and waits until its standard input closes, which also happens when the parent
dies. Then it kills what still runs in the namespace, and ends. The kernel removes a namespace
without processes, with its interfaces. It uses only Python's standard library, so that it starts
fast and always ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Collection

_PAUSE_S = 0.01
_END_S = 30.0


def namespace_of(pid: int | str) -> int | None:
    """Return the number of a process's network namespace, or None if the process cannot be read."""
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return None


def running(namespace: int, but: Collection[int] = ()) -> list[int]:
    """Return the processes in ``namespace``, without those in ``but``."""
    found = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in found if pid not in but and namespace_of(pid) == namespace]


def end_all(namespace: int, but: Collection[int] = ()) -> list[int]:
    """Kill the processes in ``namespace``, including new ones, until none are left. Blocks.

    Returns those that have not ended after half a minute.
    """
    limit = time.monotonic() + _END_S
    while (left := running(namespace, but)) and time.monotonic() < limit:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_PAUSE_S)
    return left


def main() -> None:
    own, makers = namespace_of("self"), int(sys.argv[1])
    if own is None or own == makers:
        sys.exit(f"the keeper runs in its parent's namespace {makers}; start it in one of its own")
    os.write(1, b"ready\n")
    while os.read(0, 4096):
        pass
    end_all(own, (os.getpid(),))


if __name__ == "__main__":
    main()
