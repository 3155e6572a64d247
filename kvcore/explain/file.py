"""Records of requests for people to read: lines of JSON in a folder, bounded in size.

    <explain.path>/requests-<process>.jsonl        one line for each request, as they ended
                   requests-<process>.jsonl.old    the lines before those

The folder is made with mode 0700 and the files have 0600, because a record shows that a text was
seen under another salt. Symbolic links are not followed. All files together stay below the
capacity, including those of engines that are gone.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import queue
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvcore._util.fd import is_removed
from kvcore._util.outside import decode_json, open_regular
from kvcore._util.private import make_guarded, open_file
from kvcore._util.threads import GuardedThread
from kvcore.errors import FormatError

__all__ = ["RecordFile", "read_records"]

_log = logging.getLogger("kvcore.explain")

_PATTERN = "requests-*.jsonl*"
_WAITING = 1024
_END = None
CLOSE_S = 5.0
"""Seconds that `RecordFile.close` waits: a disk may hang."""
MAX_LINE = 1 << 20
MAX_FILE = 4 << 30
"""Bytes of a line and of a file that are read."""


class RecordFile:
    """Writes records in a background thread.

    `put` never blocks. It drops the record if the queue is full, or if nobody writes any more. The
    constructor raises OSError if the folder cannot be written, or if there is no thread to do it.
    ``capacity`` is in bytes.
    """

    def __init__(self, folder: Path, capacity: int) -> None:
        os.close(make_guarded(folder))
        self.dropped = 0
        self._half = capacity // 4  # two files of this process, and as much for the others'
        self.path = folder / f"requests-{os.getpid()}.jsonl"
        self._old = self.path.with_name(self.path.name + ".old")
        _prune(folder, capacity - 2 * self._half)
        self._file = _open(self.path)
        self._size = os.fstat(self._file).st_size
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(_WAITING)
        self._failing = False
        self._thread = GuardedThread("kvcore-explain", self._run, self._drop_queued)
        if not self._thread.start():
            os.close(self._file)
            raise OSError(errno.EAGAIN, str(self._thread.error))

    def put(self, record: dict[str, Any]) -> None:
        """Queue a record of plain values. The caller must not change it afterwards."""
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1
        if self._thread.error is not None:
            self._drop_queued(self._thread.error)

    def close(self) -> None:
        """Write the queued records. Blocks up to `CLOSE_S` seconds. Idempotent."""
        limit = time.monotonic() + CLOSE_S
        if self._thread.is_alive():
            with contextlib.suppress(queue.Full):  # the disk hangs
                self._queue.put(_END, timeout=CLOSE_S)
        self._thread.join(limit - time.monotonic())

    def _run(self) -> None:
        try:
            while (record := self._queue.get()) is not _END:
                self._write_record(record)
        except OSError as error:
            _log.warning("records of requests are not written any more: %s", error)
            while self._queue.get() is not _END:
                self.dropped += 1
        finally:
            os.close(self._file)

    def _drop_queued(self, error: BaseException) -> None:
        """Count what nobody will write."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._queue.get_nowait()
                self.dropped += 1

    def _write_record(self, record: dict[str, Any]) -> None:
        """Write a record, or drop it if it is no JSON. Raises OSError."""
        try:
            text = json.dumps(record, separators=(",", ":"))
        except (TypeError, ValueError, RecursionError) as error:
            self.dropped += 1
            if not self._failing:
                self._failing = True
                _log.warning("a record of a request is left out: %s", error)
            return
        self._write((text + "\n").encode())

    def _write(self, line: bytes) -> None:
        if is_removed(self._file):
            self._open_anew()
        if self._size + len(line) > self._half and self._size:
            os.replace(self.path, self._old)
            self._open_anew()
        if len(line) <= min(self._half, MAX_LINE):
            self._size += os.write(self._file, line)
        else:
            self.dropped += 1

    def _open_anew(self) -> None:
        before, self._file = self._file, _open(self.path)  # if that fails, `_run` closes it
        self._size = 0
        os.close(before)


def _open(path: Path) -> int:
    return open_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, adopt=True)


def _prune(folder: Path, most: int) -> None:
    """Remove the oldest files until the rest has at most ``most`` bytes."""
    files = sorted(folder.glob(_PATTERN), key=lambda file: file.lstat().st_mtime)
    total = sum(file.lstat().st_size for file in files)
    for file in files:
        if total <= most:
            return
        total -= file.lstat().st_size
        file.unlink()


def read_records(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield every record of the folder, the latest first. Skips malformed lines.

    Skips what is not a regular file, and files of more than `MAX_FILE` bytes, with a warning.
    Raises OSError if the folder cannot be read.
    """
    found = []
    for file in folder.glob(_PATTERN):
        try:
            opened = open_regular(file)
        except OSError as error:
            _log.warning("%s is left out: %s", file, error.strerror)
            continue
        with open(opened, "rb") as lines:
            if os.fstat(opened).st_size > MAX_FILE:
                _log.warning("%s is left out: it has more than %d bytes", file, MAX_FILE)
                continue
            while line := lines.readline(MAX_LINE):
                record = _parse(line)
                if record is not None:
                    found.append(record)
    yield from sorted(found, key=lambda record: record["at"], reverse=True)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = decode_json(line)
    except FormatError:
        return None
    good = isinstance(record, dict) and isinstance(record.get("request"), str)
    return record if good and isinstance(record.get("at"), (int, float)) else None
