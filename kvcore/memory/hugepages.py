"""Host memory for fast direct I/O: aligned to 2 MiB, on huge pages if allowed.

A block device accepts few segments per request, so that 4 KiB pages cost half of its throughput or
more. An engine's own memory is private, and huge pages for it are usually allowed. Memory shared
with a server is a file in memory (tmpfs), which has huge pages only if its mount allows them.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvcore.errors import TierUnavailable

_log = logging.getLogger("kvcore.memory.arena")

PAGE = 4096
HUGE_PAGE = 2 << 20
_THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MOUNTS = Path("/proc/self/mountinfo")
_HUGE_MOUNT = re.compile(r"\bhuge=(always|advise|within_size)\b")
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, since Linux 5.14: fault pages in as a write would, without writing."""
_AT_ONCE = HUGE_PAGE
_TAKERS = 8
"""Threads that fault in memory. One took 2.1 s for 4 GiB beside an H200, and eight took 0.7 s."""
_LEAST_OF_A_THREAD = 64 << 20
_RESERVE = 8
"""One part in this many of all memory is left free."""


class Pages:
    """``nbytes`` of zeroed memory, provided by the kernel at first touch.

    ``view`` is the memory, ``address`` its start, and ``huge`` tells whether huge pages were
    requested and are available. A forked child does not inherit it, because with copy-on-write
    direct I/O would give the device the wrong pages.
    """

    def __init__(self, nbytes: int, *, huge: bool = True) -> None:
        """Reserve the addresses. Raises TierUnavailable if the system refuses."""
        try:
            mapped = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError) as error:
            raise TierUnavailable(
                f"cannot reserve {nbytes} bytes of host memory ({error}): lower host.capacity"
            ) from error
        mapped.madvise(mmap.MADV_DONTFORK)
        self._take(mapped, nbytes, HUGE_PAGE)
        self.huge = huge and self._advise_huge()

    def prefault(self, start: int, stop: int, wanted: Callable[[], bool]) -> bool:
        """Fault in bytes [start, stop) from front to back, as long as ``wanted`` returns True.

        A first touch costs zeroing a page, and in a virtual machine fetching it: a fast disk read
        into untouched memory mostly waits for that. Nothing is written, so the memory may be in
        use. Blocks, without the GIL. Returns False if it ended early: when little memory is left
        (logged), and at once on Linux before 5.14.
        """
        for at in range(start // PAGE * PAGE, stop, _AT_ONCE):
            size = min(_AT_ONCE, stop - at)
            if not wanted():
                return False
            if scarce(size):
                _log.warning(
                    "little memory is left on this machine: host memory of %d bytes is taken only "
                    "when blocks come; lower host.capacity",
                    self.view.nbytes,
                )
                return False
            if error := _populate(self.address + at, size):
                _log.debug("memory is not faulted in ahead: %s", os.strerror(error))
                return False
        return True

    def take(self, wanted: Callable[[], bool] = lambda: True) -> None:
        """Fault in all of the memory by several threads, on huge pages if possible. Blocks.

        It ends early if ``wanted`` returns False, and at once on Linux before 5.14. The calling
        thread does the work of threads that cannot be started.
        """
        size = max(_LEAST_OF_A_THREAD, -(-self.view.nbytes // _TAKERS))
        size = -(-size // HUGE_PAGE) * HUGE_PAGE

        def part(start: int) -> None:
            stop = min(start + size, self.view.nbytes)
            for at in range(start, stop, _AT_ONCE):
                if not wanted() or _populate(self.address + at, min(_AT_ONCE, stop - at)):
                    return

        starts = range(0, self.view.nbytes, size)
        try:
            with ThreadPoolExecutor(_TAKERS, "kvcore-take") as threads:
                list(threads.map(part, starts))
        except RuntimeError:  # a limit of threads; what is there already costs little
            for start in starts:
                part(start)

    def close(self) -> None:
        """Free the memory, or if views of it are in use, when the last view is gone."""
        try:
            self.view.release()
            self._map.close()
        except BufferError:
            _log.debug("memory is still in use; it is freed with its last view")

    def _take(self, mapped: mmap.mmap, nbytes: int, boundary: int) -> None:
        """Use ``nbytes`` of a mapping from its first multiple of ``boundary`` on."""
        self._map = mapped
        base = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        skip = -base % boundary
        self.address = base + skip
        self.view = memoryview(mapped)[skip : skip + nbytes]

    def _advise_huge(self) -> bool:
        try:
            refused = "the machine says never" if "[never]" in _THP.read_text() else ""
            self._map.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            refused = str(error)
        if refused:
            _log.warning(
                "huge pages are not available (%s): disk reads into host memory are slower; "
                "write madvise or always to %s",
                refused,
                _THP,
            )
        return not refused


def scarce(nbytes: int) -> bool:
    """Return True if taking ``nbytes`` leaves less than an eighth of all memory.

    The limit of the container counts if there is one. Cached files count as free. Returns False if
    the system does not report memory.
    """
    try:
        said = dict(line.split(":") for line in _MEMINFO.read_text().splitlines())
        total, free = (int(said[key].split()[0]) << 10 for key in ("MemTotal", "MemAvailable"))
    except (OSError, ValueError, KeyError):
        return False
    try:  # cgroup version 2, as in containers
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        kinds = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        used -= int(kinds["active_file"]) + int(kinds["inactive_file"])
        total, free = min(total, limit), min(free, limit - used)
    except (OSError, ValueError, KeyError):  # none, or "max"
        pass
    return free - nbytes < total // _RESERVE


class SharedPages(Pages):
    """``nbytes`` of a file in memory (tmpfs), mapped by several processes.

    It is on huge pages if the mount allows them (`gives_huge_pages`) and ``huge`` requests them. A
    forked child does not inherit the mapping, so only the process that opened it can touch it.
    """

    def __init__(self, file: int, nbytes: int, *, huge: bool = True) -> None:
        """Map the descriptor ``file``, which may be closed afterwards.

        Raises TierUnavailable if it cannot be mapped.
        """
        try:
            mapped = mmap.mmap(file, nbytes)
        except (OSError, OverflowError, ValueError) as error:
            raise TierUnavailable(f"cannot map {nbytes} bytes of shared memory: {error}") from error
        mapped.madvise(mmap.MADV_DONTFORK)
        self.huge = huge and gives_huge_pages(file)
        if self.huge:
            mapped.madvise(mmap.MADV_HUGEPAGE)
        self._take(mapped, nbytes, PAGE)


def gives_huge_pages(file: int | Path) -> bool:
    """Return True if the mount of a file in memory (tmpfs) provides huge pages."""
    device = os.stat(file).st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = [line.split() for line in _MOUNTS.read_text().splitlines()]
    except OSError:
        return False
    return any(mount[2] == name and _HUGE_MOUNT.search(mount[-1]) for mount in mounts)


def _populate(address: int, nbytes: int) -> int:
    """Call MADV_POPULATE_WRITE; returns the error number, or 0. Releases the GIL."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return ctypes.get_errno() if madvise(address, nbytes, _POPULATE_WRITE) else 0
