"""Keeps a host's network namespace, as a process of its own: ``python keeper.py NUMBER``.

NUMBER is that of its maker's namespace, in which it refuses to run.

It says "ready" and reads its standard input until whoever started it closes that, or dies. Then it
kills what still runs in the namespace and ends; the kernel takes away a namespace that no process
is in, with its interfaces. Uses nothing but Python: it must start fast, and end whatever happened.
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
    """Number of a process's network namespace; None for one that has ended, or is another's."""
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return None


def running(namespace: int, but: Collection[int] = ()) -> list[int]:
    """Processes in ``namespace``, without those of ``but``."""
    found = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in found if pid not in but and namespace_of(pid) == namespace]


def end_all(namespace: int, but: Collection[int] = ()) -> list[int]:
    """Kill the processes in ``namespace``, and what they start meanwhile, until there are none.
    Blocks; returns those that the kernel does not let go of in half a minute."""
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
        sys.exit(f"the keeper is in its maker's namespace, {makers}: it must have one of its own")
    os.write(1, b"ready\n")
    while os.read(0, 4096):
        pass
    end_all(own, (os.getpid(),))


if __name__ == "__main__":
    main()
