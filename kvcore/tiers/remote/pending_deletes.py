"""Blocks that a store is still to remove, in a file: what a leader owes at its end, the next pays.

    <folder>/owed-<store and model>-<random>     keys of 16 bytes, one behind the other

A file is there while something is owed, and locked by whoever owes it: the kernel drops the lock of
a process that is gone, however it went. A piece of a key at its end was never told to be owed.

What is owed to a store that nobody has used for `KEPT_S` seconds is let go, whoever comes by.
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

from kvcore.model.keys import KEY_BYTES

__all__ = ["PendingDeletes"]

_log = logging.getLogger("kvcore.tiers.remote")

KEPT_S = 30 * 24 * 3600
"""Seconds after which a store that has not been used is not believed to come back."""
_ANY = "owed-"


class PendingDeletes:
    """The note of one leader about one store. One thread at a time.

    What cannot be written is named in the log: the store is asked to remove it all the same.
    """

    def __init__(self, folders: Iterable[Path], *what: str) -> None:
        """``what`` names the store and the model. The note lies in the first of the ``folders``
        that can be used; what was left in any of them is taken over. Does I/O."""
        digest = hashlib.blake2b("\0".join(what).encode(), digest_size=8).hexdigest()
        self._folders = list(folders)
        self._stem = f"{_ANY}{digest}-"
        self._held: list[tuple[Path, int]] = []
        self._size = 0
        for folder in self._folders:
            self._adopt(folder)
            self._tidy(folder)

    def read(self) -> list[bytes]:
        """What is owed, the oldest first."""
        found: dict[bytes, None] = {}
        for path, file in self._held:
            try:
                data = os.pread(file, os.fstat(file).st_size, 0)
            except OSError as error:
                _log.error("what a store is still to remove cannot be read in %s: %s", path, error)
                continue
            for at in range(0, len(data) - KEY_BYTES + 1, KEY_BYTES):
                found[data[at : at + KEY_BYTES]] = None
        self._size = len(found)
        return list(found)

    def __len__(self) -> int:
        """Keys that were written, some of them more than once."""
        return self._size

    def add(self, keys: Sequence[bytes]) -> None:
        """These are owed too. Blocks until they are down."""
        if not keys:
            return
        try:
            _, file = self._held[-1] if self._held else self._make()
            os.lseek(file, os.fstat(file).st_size // KEY_BYTES * KEY_BYTES, os.SEEK_SET)
            _write(file, b"".join(keys))
            self._size += len(keys)
        except OSError as error:
            _log.error(
                "%d blocks to be removed from a store are not written down, and stay there if this "
                "engine ends before it is done: %s",
                len(keys),
                error,
            )

    def replace(self, keys: Sequence[bytes]) -> None:
        """These alone are owed."""
        before, self._held, self._size = self._held, [], 0
        self.add(keys)
        for path, file in before:
            path.unlink(missing_ok=True)
            os.close(file)

    def close(self) -> None:
        """Leave what is owed to the next leader. Idempotent."""
        held, self._held = self._held, []
        for _, file in held:
            os.close(file)

    def _adopt(self, folder: Path) -> None:
        """Hold what leaders that are gone have left."""
        for path in sorted(folder.glob(f"{self._stem}*")):
            try:
                file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            except OSError as error:
                _log.error("what a store is still to remove cannot be read in %s: %s", path, error)
                continue
            if _locked(file) and os.fstat(file).st_nlink:
                self._held.append((path, file))
                os.utime(file)  # this store is used
            else:
                os.close(file)

    def _tidy(self, folder: Path) -> None:
        """Remove what has been owed to other stores for too long, by leaders that are gone."""
        for path in folder.glob(f"{_ANY}*"):
            try:
                if path.name.startswith(self._stem) or time.time() - path.stat().st_mtime < KEPT_S:
                    continue
                file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    if _locked(file):
                        path.unlink()
                        _log.warning("%s is let go: nobody has used its store for long", path)
                finally:
                    os.close(file)
            except OSError as error:
                _log.debug("%s stays: %s", path, error)

    def _make(self) -> tuple[Path, int]:
        """A file of one's own. Raises OSError, that of the last folder."""
        failed = OSError("there is no folder for it: set disk.path, or server.folder")
        for folder in self._folders:
            try:
                folder.mkdir(mode=0o700, exist_ok=True)
                if folder.stat().st_uid != os.getuid():
                    raise PermissionError(f"{folder} is another user's")
                path = folder / f"{self._stem}{secrets.token_hex(8)}"
                draft = folder / f"draft-{path.name}"
                file = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                _locked(file)  # before it has a name by which others take it over
                draft.rename(path)
            except OSError as error:  # noqa: PERF203 - the next folder may do
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
