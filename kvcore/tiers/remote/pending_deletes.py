"""Deletes that a store has not confirmed yet, in a file that the next leader takes over.

    <folder>/owed-<store and model>-<random>     keys of 16 bytes, concatenated

A file exists while deletes are pending, and its leader holds a lock on it. The kernel releases the
lock when the process ends, for whatever reason. An incomplete key at the end of a file is ignored:
the write that left it was never confirmed.

A file for a store that nobody has used for `KEPT_S` seconds is removed by any leader that finds it.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import secrets
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from kvcore._util.fd import is_removed
from kvcore._util.private import guarded_folder, open_file
from kvcore.model.keys import KEY_BYTES

__all__ = ["PendingDeletes"]

_log = logging.getLogger("kvcore.tiers.remote")

KEPT_S = 30 * 24 * 3600
"""Seconds after which an unused store is not expected to come back."""
_ANY = "owed-"


class PendingDeletes:
    """One leader's record of the pending deletes of one store. Used by one thread at a time.

    A write that fails is logged. The deletes themselves are attempted anyway.
    """

    def __init__(self, folders: Iterable[Path], *what: str) -> None:
        """Take over the records that earlier leaders left in any of the ``folders``. Does I/O.

        ``what`` identifies the store and the model. A new record goes to the first folder that can
        be written.
        """
        digest = hashlib.blake2b("\0".join(what).encode(), digest_size=8).hexdigest()
        self._folders = list(folders)
        self._stem = f"{_ANY}{digest}-"
        self._held: list[tuple[Path, int]] = []
        self._size = 0
        for folder in self._folders:
            self._adopt(folder)
            self._tidy(folder)

    def read(self) -> list[bytes]:
        """Return the keys whose deletion is pending, the oldest first."""
        found: dict[bytes, None] = {}
        for path, file in self._held:
            try:
                data = os.pread(file, os.fstat(file).st_size, 0)
            except OSError as error:
                _log.error("the pending deletes in %s cannot be read: %s", path, error)
                continue
            for at in range(0, len(data) - KEY_BYTES + 1, KEY_BYTES):
                found[data[at : at + KEY_BYTES]] = None
        self._size = len(found)
        return list(found)

    def __len__(self) -> int:
        """Return the number of keys written; a key may count more than once."""
        return self._size

    def add(self, keys: Sequence[bytes]) -> None:
        """Record more keys. Blocks until they are on disk."""
        if not keys:
            return
        try:
            _, file = self._held[-1] if self._held else self._make()
            if is_removed(file):
                _, file = self._make()
            os.lseek(file, os.fstat(file).st_size // KEY_BYTES * KEY_BYTES, os.SEEK_SET)
            _write(file, b"".join(keys))
            self._size += len(keys)
        except OSError as error:
            _log.error(
                "%d pending deletes cannot be recorded; if this engine ends first, their blocks "
                "stay in the store: %s",
                len(keys),
                error,
            )

    def replace(self, keys: Sequence[bytes]) -> None:
        """Record exactly these keys, in a new file, and remove the old files."""
        before, self._held, self._size = self._held, [], 0
        self.add(keys)
        for path, file in before:
            path.unlink(missing_ok=True)
            os.close(file)

    def close(self) -> None:
        """Release the files, and leave them to the next leader. Idempotent."""
        held, self._held = self._held, []
        for _, file in held:
            os.close(file)

    def _adopt(self, folder: Path) -> None:
        """Lock the files that ended leaders have left."""
        for path in sorted(folder.glob(f"{self._stem}*")):
            try:
                file = open_file(path, os.O_RDWR)
            except OSError as error:
                _log.error("the pending deletes in %s cannot be read: %s", path, error)
                continue
            if _locked(file) and os.fstat(file).st_nlink:
                self._held.append((path, file))
                os.utime(file)  # marks the store as used
            else:
                os.close(file)

    def _tidy(self, folder: Path) -> None:
        """Remove the files of other stores that have been unused for too long."""
        for path in folder.glob(f"{_ANY}*"):
            try:
                if path.name.startswith(self._stem) or time.time() - path.lstat().st_mtime < KEPT_S:
                    continue
                file = open_file(path, os.O_RDWR)
                try:
                    if _locked(file):
                        path.unlink()
                        _log.warning("%s is removed: nobody has used its store for long", path)
                finally:
                    os.close(file)
            except OSError as error:
                _log.debug("%s could not be removed: %s", path, error)

    def _make(self) -> tuple[Path, int]:
        """Create a file of this leader. Raises the OSError of the last folder if none works."""
        failed = OSError("there is no folder for the record: set disk.path or server.folder")
        for folder in self._folders:
            try:
                folder.mkdir(mode=0o700, exist_ok=True)
                os.close(guarded_folder(folder, shared=True))
                path = folder / f"{self._stem}{secrets.token_hex(8)}"
                draft = folder / f"draft-{path.name}"
                file = open_file(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL)
                _locked(file)  # before it has the name by which others take it over
                draft.rename(path)
            except OSError as error:  # noqa: PERF203 - the next folder may work
                failed = error
            else:
                self._held.append((path, file))
                return path, file
        raise failed


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]
    os.fsync(file)
