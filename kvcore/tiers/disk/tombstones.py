"""Tombstones: the clears that must still hold when a store is next opened.

    <store>/cleared     {"<namespace>": stamp, "": stamp,     records up to a stamp are void
                         "slots": [[start, stop, stamp]]}     so are those in these slots

A clear makes the ranks erase records. The erasing may fail, or never happen: an engine that is
killed does not take the step that carries the order. The clear is therefore also recorded in the
store, and carried out before the store is next scanned. "" stands for all namespaces. A version of
kvcore that does not know this file does not use the store.

A write that is under way lands after the clear's stamp. Its slots are therefore recorded one by
one, with no limit until it has ended: what others wrote since the clear stays.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvcore._util.fd import is_removed
from kvcore._util.outside import decode_json, printable, read_bounded
from kvcore._util.private import open_file, open_folder, write_whole
from kvcore._util.threads import GuardedThread
from kvcore.errors import FormatError, TierUnavailable
from kvcore.index.slots import slot_runs
from kvcore.model.keys import KEY_BYTES
from kvcore.tiers.disk.files import IndexFile
from kvcore.tiers.disk.format import read_table, shard_files
from kvcore.tiers.geometry import Geometry

__all__ = ["Stamps", "Tombstones", "erase_cleared"]

_log = logging.getLogger("kvcore.tiers.disk")

FILE = "cleared"
EVERY = ""
SLOTS = "slots"
MAX_ENTRIES = 1 << 14
_MAX_NBYTES = MAX_ENTRIES * 256
"""The most namespaces, and the most slots, in one file. With more, it says that all are cleared."""
_NEVER = (1 << 63) - 1


class Stamps:
    """Write times in nanoseconds, which no step of the wall clock takes back. Thread-safe.

    A leader's stamps begin after those of all records in the store (``after``). Its ranks continue
    from the leader's origin, whatever the wall clock did in between. A rank on another machine
    takes its own clock.
    """

    def __init__(self, after: int = 0) -> None:
        self._ahead = max(time.time_ns(), after) - time.monotonic_ns()

    @classmethod
    def of(cls, origin: Mapping[str, Any] | None) -> Stamps:
        """Return stamps from a leader's ``origin``; from this process's own clock if None."""
        made = cls()
        if origin is not None and origin["boot"] == _boot():
            made._ahead = origin["ahead"]
        return made

    @property
    def origin(self) -> dict[str, Any]:
        """What the ranks need to continue from the same start, as plain data."""
        return {"boot": _boot(), "ahead": self._ahead}

    def __iter__(self) -> Stamps:
        return self

    def __next__(self) -> int:
        return self._ahead + time.monotonic_ns()


def _boot() -> str:
    """Identify the monotonic clock. All processes share it until the machine reboots."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"process {os.getpid()}"


class _Folder(NamedTuple):
    """The folder of a store, which is open: ``path`` led there at the start."""

    path: Path
    number: int

    def is_removed(self) -> bool:
        """Return True if it was removed. On a network, a removed folder cannot be asked."""
        try:
            return is_removed(self.number)
        except OSError as error:
            return error.errno == errno.ESTALE


class Tombstones:
    """The clears of the stores in ``folders``, whose records have stamps up to ``newest``.

    The leader keeps them. A thread writes them, because a disk may hang: only `close` waits. They
    follow a store that is moved, and end with one that is removed: nothing is found there again.
    """

    def __init__(self, folders: Iterable[Path], newest: int) -> None:
        self._folders = [_Folder(path, open_folder(path, adopt=True)) for path in folders]
        self._newest = newest
        self.stamps = Stamps(newest)
        self._cleared: dict[str, int] = {}
        self._slots: dict[int, int] = {}  # slots of the first folder: stamps
        self._lock = threading.RLock()
        self._written = True
        self._thread: GuardedThread | None = None  # only while there is something to write

    def cleared(self, namespace: bytes | None, writing: Iterable[int] = ()) -> None:
        """Record a clear, as `kvcore.tiers.spec.ClearRecord` says."""
        stamp = self._now()
        with self._lock:
            self._cleared[EVERY if namespace is None else namespace.hex()] = stamp
            if namespace is None:
                self._cleared = {EVERY: stamp}
            self._slots.update(dict.fromkeys(writing, _NEVER))
            self._note(stamp)

    def landed(self, slots: Iterable[int]) -> None:
        """Record that writes of removed blocks to ``slots`` have ended."""
        stamp = self._now()
        with self._lock:
            self._slots.update(dict.fromkeys(slots, stamp))
            self._note(stamp)

    def _now(self) -> int:
        return max(next(self.stamps), time.time_ns(), self._newest)

    def _note(self, stamp: int) -> None:
        """Have the thread write the file. The caller holds the lock."""
        if max(len(self._cleared), len(self._slots)) > MAX_ENTRIES:
            writing = {slot: limit for slot, limit in self._slots.items() if limit == _NEVER}
            self._cleared, self._slots = {EVERY: stamp}, writing
        self._written = False
        if self._thread is None:
            self._start()

    def _start(self) -> None:
        """Start the thread. The caller holds the lock."""
        self._thread = GuardedThread("kvcore-tombstones", self._run, self._lose)
        self._thread.start()

    def close(self, timeout: float = 5.0) -> None:
        """Wait up to ``timeout`` seconds until everything is recorded. Idempotent.

        What could not be recorded is tried once more.
        """
        with self._lock:
            if not self._written and self._thread is None:
                self._start()
        if (thread := self._thread) is None or thread.join(timeout):
            folders, self._folders = self._folders, []
            for folder in folders:
                os.close(folder.number)

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._written:
                    self._thread = None
                    return
                cleared, self._written = dict(self._cleared), True
                slots = _by_stamp(self._slots)
            if self._record(cleared, slots):
                continue
            with self._lock:
                if self._written:  # nothing new: the next clear tries again, or `close`
                    self._written, self._thread = False, None
                    return

    def _record(self, cleared: Mapping[str, int], slots: Sequence[tuple[int, int, int]]) -> bool:
        """Write the files of all stores. Return False if one could not be written."""
        recorded = True
        for folder in self._folders:
            own = folder == self._folders[0]
            try:
                _write(folder.number, cleared, slots if own else [])
            except Exception as error:  # noqa: BLE001 - thread boundary: it is one folder's
                _unrecorded(folder, error)
                recorded = False
        return recorded

    def _lose(self, error: BaseException) -> None:
        """Note that the thread has died: the next clear, or `close`, starts another."""
        with self._lock:
            self._written, self._thread = False, None
        for folder in self._folders:
            _unrecorded(folder, error)


def _unrecorded(folder: _Folder, error: BaseException) -> None:
    if folder.is_removed():
        _log.debug("the store %s was removed, and what was cleared with it", folder.path)
        return
    _log.error(
        "a clear could not be recorded in %s, and a restart may undo it: %s", folder.path, error
    )


def _by_stamp(slots: Mapping[int, int]) -> list[tuple[int, int, int]]:
    """Return slots and their stamps as [start, stop) and stamp."""
    of_stamp: dict[int, list[int]] = {}
    for slot, stamp in slots.items():
        of_stamp.setdefault(stamp, []).append(slot)
    return [(*run, stamp) for stamp, some in of_stamp.items() for run in slot_runs(some)]


def _write(folder: int, cleared: Mapping[str, int], slots: Sequence[tuple[int, int, int]]) -> None:
    """Write the file, and flush its entry in the folder too: it must survive a loss of power."""
    content = {**cleared, SLOTS: slots} if slots else cleared
    write_whole(folder, FILE, json.dumps(content).encode())
    os.fsync(folder)


class _Clears(NamedTuple):
    """The content of a file: stamps of namespaces, and runs of slots as (start, stop, stamp)."""

    cleared: Mapping[str, int]
    runs: Sequence[tuple[int, int, int]]


def erase_cleared(folder: Path, geometry: Geometry) -> None:
    """Erase the blocks that were cleared in a store that no engine uses. Blocks.

    Raises TierUnavailable if they cannot be erased. The store must not be read then.
    """
    try:
        cleared = _read(folder)
        if cleared is None:
            return
        for shard in geometry.shards:
            _erase(shard_files(folder, shard)[1], *cleared)
        within = open_folder(folder, adopt=True)
        try:
            os.unlink(FILE, dir_fd=within)
            os.fsync(within)
        finally:
            os.close(within)
    except OSError as error:
        raise TierUnavailable(
            f"what was cleared cannot be erased in {folder}: {error}; remove that folder"
        ) from error


def _read(folder: Path) -> _Clears | None:
    """Return the recorded clears, None if there are none. A damaged file clears everything."""
    try:
        with open(open_file(folder / FILE, os.O_RDONLY, adopt=True), "rb") as file:
            text = read_bounded(file.fileno(), _MAX_NBYTES, FILE)
    except FileNotFoundError:
        return None
    except FormatError as error:
        return _all_cleared(folder, error)
    try:
        cleared = decode_json(text, dict[str, Any])
        runs = [(int(a), int(b), int(stamp)) for a, b, stamp in cleared.pop(SLOTS, ())]
        assert all(name == EVERY or len(bytes.fromhex(name)) == KEY_BYTES for name in cleared)
        return _Clears({name: int(stamp) for name, stamp in cleared.items()}, runs)
    except Exception as error:  # noqa: BLE001 - whatever is in the file
        return _all_cleared(folder, error)


def _all_cleared(folder: Path, error: Exception) -> _Clears:
    why = printable(error)
    _log.warning("%s cannot be read, all of the store is cleared: %s", folder / FILE, why)
    return _Clears({EVERY: _NEVER}, [])


def _erase(path: Path, cleared: Mapping[str, int], runs: Sequence[tuple[int, int, int]]) -> None:
    """Erase the records of an index file that the clears cover."""
    if not path.exists():
        return
    table, _ = read_table(path, sealed=False)  # a forged record is erased, or dropped later
    void = table.rows["stamp"] <= cleared.get(EVERY, 0)
    for name, stamp in cleared.items():
        if name != EVERY:
            of_it = table.rows["namespace"] == np.void(bytes.fromhex(name))
            void |= of_it & (table.rows["stamp"] <= stamp)
    for start, stop, stamp in runs:
        inside = (table.slots >= start) & (table.slots < stop)
        void |= inside & (table.rows["stamp"] <= stamp)
    slots = table.slots[void].tolist()
    if not slots:
        return
    index = IndexFile(path)
    try:
        for first, stop in slot_runs(slots):
            index.erase(first, stop - first)
        index.sync()
    finally:
        index.close()
    _log.info("erased what was cleared file=%s blocks=%d", path, len(slots))
