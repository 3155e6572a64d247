"""Clears that a store owes: what must not be found when it is next opened, whatever became of it.

    <store>/cleared     {"<namespace>": stamp, "": stamp}     records up to a stamp are void

A clear has the ranks erase records. That may fail, or never come: the order goes with a step that
an engine which is killed does not take. So it is written down here, and paid before a store is
scanned. "" stands for every namespace. A kvcore that knows no such file leaves the store alone.
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

__all__ = ["Debts", "Stamps", "pay"]

_log = logging.getLogger("kvcore.tiers.disk")

FILE = "cleared"
EVERY = ""
MAX_NAMESPACES = 16
"""In one file; more of them are every one."""
_NEVER = (1 << 63) - 1


class Stamps:
    """Times of writes, nanoseconds: no step of the clock takes them back. Thread-safe.

    A leader's begin ``after`` those of all records that are there. Its ranks go on from the same
    start, whatever the wall clock did before theirs; ranks on another machine have its clock.
    """

    def __init__(self, after: int = 0) -> None:
        self._ahead = max(time.time_ns(), after) - time.monotonic_ns()

    @classmethod
    def of(cls, told: Mapping[str, Any] | None) -> Stamps:
        """Those of the leader that ``told`` so; of one's own clock without."""
        made = cls()
        if told is not None and told["boot"] == _boot():
            made._ahead = told["ahead"]
        return made

    @property
    def told(self) -> dict[str, Any]:
        """What the ranks need to go on from the same start, as plain data."""
        return {"boot": _boot(), "ahead": self._ahead}

    def __iter__(self) -> Stamps:
        return self

    def __next__(self) -> int:
        return self._ahead + time.monotonic_ns()


def _boot() -> str:
    """Which monotonic clock this is: processes of one boot of a machine share it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"process {os.getpid()}"


class Debts:
    """Of the stores in ``folders``, whose records have stamps up to ``newest``. The leader's: `add`
    returns at once, since a disk may hang, and a thread writes."""

    def __init__(self, folders: Iterable[Path], newest: int) -> None:
        self._folders = list(folders)
        self._newest = newest
        self.stamps = Stamps(newest)
        self._owed: dict[str, int] = {}
        self._lock = threading.Lock()
        self._written = True
        self._thread: threading.Thread | None = None  # while there is something to write

    def add(self, namespace: bytes | None) -> None:
        """What was written until now, of a namespace or of all, is void."""
        stamp = max(next(self.stamps), time.time_ns(), self._newest)
        with self._lock:
            self._owed[EVERY if namespace is None else namespace.hex()] = stamp
            if namespace is None or len(self._owed) > MAX_NAMESPACES:
                self._owed = {EVERY: stamp}
            self._written = False
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvcore-debts", daemon=True)
                self._thread.start()

    def close(self, timeout: float = 5.0) -> None:
        """Wait until all is written down. Blocks. Idempotent."""
        if (thread := self._thread) is not None:
            thread.join(timeout)

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._written:
                    self._thread = None
                    return
                owed, self._written = dict(self._owed), True
            for folder in self._folders:
                try:
                    _write(folder, owed)
                except OSError as error:  # noqa: PERF203 - the others are written all the same
                    _log.error(
                        "a clear is not written down in %s, and may come undone with a restart: %s",
                        folder,
                        error,
                    )


def _write(folder: Path, owed: Mapping[str, int]) -> None:
    """Whole or not at all, and for good."""
    draft = folder / f"{FILE}.new"
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(owed, file)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(folder / FILE)
    _settle(folder)


def _settle(folder: Path) -> None:
    entry = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(entry)
    finally:
        os.close(entry)


def pay(folder: Path, geometry: Geometry) -> None:
    """Erase what was cleared of a store that nobody else uses. Blocks. Raises TierUnavailable where
    that cannot be: the store must not be read then."""
    try:
        owed = _read(folder)
        if owed is None:
            return
        for shard in range(len(geometry.heads)):
            _erase(shard_files(folder, shard)[1], owed)
        (folder / FILE).unlink()
        _settle(folder)
    except OSError as error:
        raise TierUnavailable(
            f"what was cleared cannot be erased in {folder}: {error}; remove that folder"
        ) from error


def _read(folder: Path) -> Mapping[str, int] | None:
    """What is owed; None for nothing. A file that says nothing sensible means everything."""
    try:
        text = (folder / FILE).read_bytes()
    except FileNotFoundError:
        return None
    try:
        owed = json.loads(text)
        assert all(name == EVERY or len(bytes.fromhex(name)) == KEY_BYTES for name in owed)
        return {name: int(stamp) for name, stamp in owed.items()}
    except (ValueError, TypeError, AttributeError, AssertionError, RecursionError) as error:
        _log.warning("%s cannot be read, all of the store is cleared: %s", folder / FILE, error)
        return {EVERY: _NEVER}


def _erase(path: Path, owed: Mapping[str, int]) -> None:
    if not path.exists():
        return
    table, _ = read_table(path)
    void = table.rows["stamp"] <= owed.get(EVERY, 0)
    for name, stamp in owed.items():
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
