"""A timeline of transfers and blends, in the format that Chrome and Perfetto open.

Each process writes one file: a JSON array of complete events, one per line. The file can be read
while it grows, because the viewers do not need the closing bracket. Times are microseconds of the
machine's monotonic clock, so that the files of several processes on one machine line up. A file has
mode 0600 and is never opened through a symbolic link.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvcore._util.fd import is_removed
from kvcore._util.private import make_guarded, open_file

__all__ = ["FileTracer", "Tracer", "read_trace"]

_log = logging.getLogger("kvcore.telemetry.timeline")

MAX_BYTES = 1 << 28
"""Largest size of one file, so that a trace does not fill the disk."""


class Tracer:
    """A tracer that discards everything, for use without a trace folder."""

    def span(self, track: str, name: str, start: float, stop: float, **about: Any) -> None:
        """Record an activity from ``start`` to ``stop``, in seconds of `time.monotonic`.

        May be called from any thread. The viewer shows ``about``, plain values, with the span.
        """

    def close(self) -> None:
        """End the trace; later spans are discarded."""


class FileTracer(Tracer):
    """Writes to ``folder/name-<process>.json``. Thread-safe; an I/O error ends the trace.

    The constructor raises OSError if the file cannot be created.
    """

    def __init__(self, folder: Path, name: str) -> None:
        os.close(make_guarded(folder))
        self.path = folder / f"{name}-{os.getpid()}.json"
        self._lock = threading.Lock()
        self._tracks: dict[str, int] = {}
        self._left = MAX_BYTES
        file = open_file(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, adopt=True)
        self._file = open(file, "w", encoding="utf-8")  # noqa: SIM115 - open until `close`
        self._file.write("[\n")
        self._put({"ph": "M", "name": "process_name", "pid": os.getpid(), "args": {"name": name}})

    def span(self, track: str, name: str, start: float, stop: float, **about: Any) -> None:
        with self._lock:
            self._put(
                {
                    "ph": "X",
                    "name": name,
                    "pid": os.getpid(),
                    "tid": self._track(track),
                    "ts": round(start * 1e6, 1),
                    "dur": round((stop - start) * 1e6, 1),
                    "args": about,
                }
            )

    def close(self) -> None:
        with self._lock:
            self._end()

    def _track(self, track: str) -> int:
        number = self._tracks.get(track)
        if number is None:
            number = self._tracks[track] = len(self._tracks) + 1
            about = {"name": track}
            where = {"pid": os.getpid(), "tid": number}
            self._put({"ph": "M", "name": "thread_name", **where, "args": about})
        return number

    def _put(self, event: dict[str, Any]) -> None:
        if self._file.closed:
            return
        line = json.dumps(event, separators=(",", ":")) + ",\n"
        self._left -= len(line)
        try:
            if is_removed(self._file.fileno()):
                raise FileNotFoundError(errno.ENOENT, "the file was removed")
            if self._left < 0:
                _log.warning("trace %s is full and ends here", self.path)
                self._end()
            else:
                self._file.write(line)
                self._file.flush()
        except OSError as error:
            _log.warning("trace %s ends here: %s", self.path, error)
            self._end()

    def _end(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            _log.warning("trace %s: %s", self.path, error)


def read_trace(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the spans of a trace, each with its ``track``; ValueError on a malformed line."""
    tracks: dict[int, str] = {}
    for line in path.read_text(encoding="utf-8").splitlines()[1:]:
        event = json.loads(line.rstrip(","))
        if event["ph"] == "X":
            yield {**event, "track": tracks[event["tid"]]}
        elif event["name"] == "thread_name":
            tracks[event["tid"]] = event["args"]["name"]
