"""Timelines: what is written can be read back, and a trace that cannot go on ends quietly."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from kvcore.telemetry import timeline as trace
from kvcore.telemetry.timeline import FileTracer, Tracer, read_trace


def test_spans_come_back_with_their_tracks(tmp_path: Path) -> None:
    tracer = FileTracer(tmp_path / "deep" / "folder", "rank0")
    tracer.span("h2d", "layers 0..2", 1.5, 1.75, nbytes=7)
    tracer.span("look", "layer 0", 2.0, 2.0)
    tracer.span("h2d", "layers 2..4", 3.0, 3.5, nbytes=9)
    found = list(read_trace(tracer.path))
    assert [(e["track"], e["name"]) for e in found] == [
        ("h2d", "layers 0..2"),
        ("look", "layer 0"),
        ("h2d", "layers 2..4"),
    ]
    assert [(e["ts"], e["dur"]) for e in found] == [(1.5e6, 2.5e5), (2e6, 0), (3e6, 5e5)]
    assert [e["args"] for e in found] == [{"nbytes": 7}, {}, {"nbytes": 9}]
    tracer.close()
    json.loads(tracer.path.read_text().rstrip().rstrip(",") + "]")  # as the format asks for
    tracer.span("h2d", "late", 4.0, 5.0)
    assert len(list(read_trace(tracer.path))) == 3


def test_a_trace_that_is_removed_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracer = FileTracer(tmp_path, "rank0")
    tracer.path.unlink()
    for _ in range(3):
        tracer.span("h2d", "late", 4.0, 5.0)
    tracer.close()
    [line] = [record.message for record in caplog.records]
    assert "the file was removed" in line


def test_threads_write_whole_lines(tmp_path: Path) -> None:
    tracer = FileTracer(tmp_path, "rank0")

    def write(number: int) -> None:
        for i in range(200):
            tracer.span(f"track {number}", "x" * 50, i, i + 1, number=number)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = list(read_trace(tracer.path))
    assert len(found) == 800
    assert all(e["track"] == f"track {e['args']['number']}" for e in found)


def test_a_full_trace_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trace, "MAX_BYTES", 2000)
    tracer = FileTracer(tmp_path, "rank0")
    with caplog.at_level(logging.WARNING, "kvcore.telemetry.timeline"):
        for _ in range(100):
            tracer.span("h2d", "layers", 0.0, 1.0)
    assert tracer.path.stat().st_size <= 2000
    assert len(list(read_trace(tracer.path))) > 5
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_disk_that_fails_ends_the_trace(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracer = FileTracer(tmp_path, "rank0")

    class Full:
        closed = False

        def fileno(self) -> int:
            return whole.fileno()

        def write(self, line: str) -> None:
            raise OSError("no space left")

        def close(self) -> None:
            self.closed = True

    broken: Any = Full()
    tracer._file, whole = broken, tracer._file
    with caplog.at_level(logging.WARNING, "kvcore.telemetry.timeline"):
        for _ in range(3):
            tracer.span("h2d", "layers", 0.0, 1.0)
    whole.close()
    assert broken.closed
    assert len(caplog.records) == 1


def test_nobody_asked() -> None:
    Tracer().span("h2d", "layers", 0.0, 1.0)
    Tracer().close()
