"""What a part finds, written to a file as soon as it is there.

The file has a JSON object a line. What a part has found is kept if the part then crashes or hangs.

    {"kind": "figure", "what": "blend at 15%, 16384 tokens", "value": 4.2, "unit": "x cold",
     "bar": "at least 4", "met": true}
    {"kind": "passed", "what": "tests/gpu", "detail": "31 passed"}
    {"kind": "failed", "what": "tests/gpu", "detail": "..."}
    {"kind": "left out", "what": "tests/gpu", "detail": "torch sees no GPU"}
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["FAILED", "FIGURE", "LEFT_OUT", "PASSED", "Record", "read"]

FIGURE, PASSED, FAILED, LEFT_OUT = "figure", "passed", "failed", "left out"


class Record:
    """The findings of one part, appended to ``path``. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.failures = 0

    def figure(
        self,
        what: str,
        value: float,
        unit: str,
        *,
        at_least: float | None = None,
        at_most: float | None = None,
    ) -> None:
        """Write a measured value, and whether it meets its bar. A missed bar is no failure."""
        bar, met = None, None
        if at_least is not None:
            bar, met = f"at least {at_least:g}", value >= at_least
        if at_most is not None:
            bar, met = f"at most {at_most:g}", value <= at_most
        self._write(kind=FIGURE, what=what, value=float(value), unit=unit, bar=bar, met=met)

    def passed(self, what: str, detail: str = "") -> None:
        """Write that a check ran and found nothing wrong."""
        self._write(kind=PASSED, what=what, detail=detail)

    def failed(self, what: str, detail: str) -> None:
        """Write that a check ran and found something wrong. The part has then failed."""
        self.failures += 1
        self._write(kind=FAILED, what=what, detail=detail)

    def left_out(self, what: str, why: str) -> None:
        """Write that something did not run."""
        self._write(kind=LEFT_OUT, what=what, detail=why)

    def _write(self, **line: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(_shown(line), flush=True)


def read(path: Path) -> list[dict[str, Any]]:
    """Return all whole lines of a part's file; none if the part wrote none."""
    written = path.read_text() if path.exists() else ""
    whole = written[: written.rfind("\n") + 1]  # the part may have ended while it wrote a line
    return [json.loads(line) for line in whole.splitlines()]


def _shown(line: dict[str, Any]) -> str:
    if line["kind"] != FIGURE:
        return f"  {line['kind']}: {line['what']}: {line['detail']}"
    bar = f", bar: {line['bar']}, {'met' if line['met'] else 'MISSED'}" if line["bar"] else ""
    return f"  {line['what']}: {line['value']:.4g} {line['unit']}{bar}"
