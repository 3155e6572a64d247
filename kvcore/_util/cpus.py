"""Places the threads of kvcore on the cores that the operator allows.

Operators choose cores with taskset, numactl or a container's cpuset. Engines then bind their own
threads, one core each: vLLM and SGLang do so on a CPU. A thread inherits the binding of the thread
that starts it, so without `settle_thread` every copy would share the core of the engine's forward.
The kernel itself never gives more than the container's cpuset.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Set
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["allowed_cores", "node_cores", "running_on", "settle_thread"]

_log = logging.getLogger("kvcore.cpus")

_NODES = Path("/sys/devices/system/node")
_AT_IMPORT: Set[int] = os.sched_getaffinity(0)
"""Cores of this process when kvcore was imported. Its plugins for vLLM and SGLang are loaded before
the engine binds its threads. A forked child has those of its parent."""


def allowed_cores() -> Set[int]:
    """Return the cores that the operator gave to this process.

    They are those of the calling thread, if it has more than one. A single core is taken for an
    engine's binding: they then are the cores that this process had when kvcore was imported or, if
    that was after the binding, those of the process that started this one as a child.
    """
    own = os.sched_getaffinity(0)
    if len(own) > 1:
        return own
    if len(_AT_IMPORT) > 1:
        return _AT_IMPORT
    from multiprocessing import parent_process

    parent = parent_process()
    if parent is not None and parent.pid is not None:
        with suppress(OSError):  # it has ended
            return own | os.sched_getaffinity(parent.pid)
    return own


def node_cores(node: int | None) -> Set[int]:
    """Return the cores of a NUMA node; none if ``node`` is None or the system does not tell."""
    if node is None:
        return frozenset()
    try:
        return parse_list((_NODES / f"node{node}" / "cpulist").read_text())
    except (OSError, ValueError):
        return frozenset()


def parse_list(text: str) -> Set[int]:
    """Return the numbers in a list of the kernel, such as ``0-3,8``. Raises ValueError."""
    ends = [part.split("-") for part in text.strip().split(",") if part]
    return frozenset(n for end in ends for n in range(int(end[0]), int(end[-1]) + 1))


def settle_thread(*, background: bool = False, near: Set[int] = frozenset()) -> None:
    """Let this thread run on every core that the operator gave, or on those of them in ``near``.

    ``near`` is ignored if the operator gave none of it. A ``background`` thread gets low priority.
    """
    try:
        cores = allowed_cores()
        os.sched_setaffinity(0, cores & near or cores)
        if background:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
    except OSError as error:
        _log.debug("thread placement is unchanged: %s", error)


@contextmanager
def running_on(near: Set[int]) -> Iterator[None]:
    """Run this thread on cores of ``near`` in the block, if the operator gave any of them.

    Memory that the block touches first is then on the node of those cores, unless the operator
    chose another policy (numactl). The thread has its own cores again afterwards.
    """
    own = os.sched_getaffinity(0)
    chosen = allowed_cores() & near
    if not chosen or own <= chosen:
        yield
        return
    with suppress(OSError):
        os.sched_setaffinity(0, chosen)
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, own)
