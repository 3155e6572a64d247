"""Tombstones: the clears that must still hold when a store is next opened.

    <store>/cleared     {"<namespace>": stamp, "": stamp}     records up to a stamp are void

A clear makes the ranks erase records. The erasing may fail, or never happen: an engine that is
killed does not take the step that carries the order. The clear is therefore also recorded in the
store, and carried out before the store is next scanned. "" stands for all namespaces. A version of
kvcore that does not know this file does not use the store.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvcore.errors import TierUnavailable
from kvcore.index.slots import slot_runs
from kvcore.model.keys import KEY_BYTES
from kvcore.tiers.disk.files import IndexFile
from kvcore.tiers.disk.format import read_table, shard_files
from kvcore.tiers.geometry import Geometry

__all__ = ["Stamps", "Tombstones", "erase_cleared"]

_log = logging.getLogger("kvcore.tiers.disk")

FILE = "cleared"
EVERY = ""
MAX_NAMESPACES = 16
"""The most namespaces in one file. With more, the file says that all are cleared."""
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


class Tombstones:
    """The clears of the stores in ``folders``, whose records have stamps up to ``newest``.

    The leader keeps them. A thread writes them, because a disk may hang: `add` returns at once.
    """

    def __init__(self, folders: Iterable[Path], newest: int) -> None:
        self._folders = list(folders)
        self._newest = newest
        self.stamps = Stamps(newest)
        self._cleared: dict[str, int] = {}
        self._lock = threading.Lock()
        self._written = True
        self._thread: threading.Thread | None = None  # only while there is something to write

    def add(self, namespace: bytes | None) -> None:
        """Record that all blocks of a namespace (None: of all) written until now are cleared."""
        stamp = max(next(self.stamps), time.time_ns(), self._newest)
        with self._lock:
            self._cleared[EVERY if namespace is None else namespace.hex()] = stamp
            if namespace is None or len(self._cleared) > MAX_NAMESPACES:
                self._cleared = {EVERY: stamp}
            self._written = False
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="kvcore-tombstones", daemon=True
                )
                self._thread.start()

    def close(self, timeout: float = 5.0) -> None:
        """Wait up to ``timeout`` seconds until everything is recorded. Idempotent."""
        if (thread := self._thread) is not None:
            thread.join(timeout)

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._written:
                    self._thread = None
                    return
                cleared, self._written = dict(self._cleared), True
            for folder in self._folders:
                try:
                    _write(folder, cleared)
                except OSError as error:  # noqa: PERF203 - the others are written all the same
                    _log.error(
                        "a clear could not be recorded in %s, and a restart may undo it: %s",
                        folder,
                        error,
                    )


def _write(folder: Path, cleared: Mapping[str, int]) -> None:
    """Write the file whole or not at all, and flush it to the medium."""
    draft = folder / f"{FILE}.new"
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(cleared, file)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(folder / FILE)
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    """Flush the folder's entries, so that a rename or removal in it survives a loss of power."""
    entry = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(entry)
    finally:
        os.close(entry)


def erase_cleared(folder: Path, geometry: Geometry) -> None:
    """Erase the blocks that were cleared in a store that no engine uses. Blocks.

    Raises TierUnavailable if they cannot be erased. The store must not be read then.
    """
    try:
        cleared = _read(folder)
        if cleared is None:
            return
        for shard in range(len(geometry.heads)):
            _erase(shard_files(folder, shard)[1], cleared)
        (folder / FILE).unlink()
        _sync_folder(folder)
    except OSError as error:
        raise TierUnavailable(
            f"what was cleared cannot be erased in {folder}: {error}; remove that folder"
        ) from error


def _read(folder: Path) -> Mapping[str, int] | None:
    """Return the recorded clears, None if there are none. A damaged file clears everything."""
    try:
        text = (folder / FILE).read_bytes()
    except FileNotFoundError:
        return None
    try:
        cleared = json.loads(text)
        assert all(name == EVERY or len(bytes.fromhex(name)) == KEY_BYTES for name in cleared)
        return {name: int(stamp) for name, stamp in cleared.items()}
    except (ValueError, TypeError, AttributeError, AssertionError, RecursionError) as error:
        _log.warning("%s cannot be read, all of the store is cleared: %s", folder / FILE, error)
        return {EVERY: _NEVER}


def _erase(path: Path, cleared: Mapping[str, int]) -> None:
    """Erase the records of an index file that the clears cover."""
    if not path.exists():
        return
    table, _ = read_table(path, sealed=False)  # a forged record is erased, or dropped later
    void = table.rows["stamp"] <= cleared.get(EVERY, 0)
    for name, stamp in cleared.items():
        if name != EVERY:
            of_it = table.rows["namespace"] == np.void(bytes.fromhex(name))
            void |= of_it & (table.rows["stamp"] <= stamp)
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
