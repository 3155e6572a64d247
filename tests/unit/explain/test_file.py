"""Records of requests from vLLM's scheduler to `kvcore explain`, bounded, and as spans."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from kvcore.cli.app import app
from kvcore.config import load_config
from kvcore.explain import file as explain_file
from kvcore.explain.file import RecordFile, read_records
from kvcore.explain.recorder import RequestRecorder
from kvcore.explain.request_log import Cause, Miss, RequestLog, RequestRecord
from kvcore.manager.base import Event, Hit, Source
from kvcore.manager.load_policy import Action
from kvcore.model.keys import Namespace

SPACE = Namespace(b"model")
KEYS = [bytes([n]) * 16 for n in range(1, 5)]
runner = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})


def watched(folder: Path, **more: Any) -> RequestRecorder:
    tables = {"explain": {"path": str(folder)} | more}
    return RequestRecorder.of(load_config(overrides=tables, env={}))


def look(recorder: RequestRecorder, name: str, depth: int, space: Namespace = SPACE) -> None:
    hit = Hit(KEYS, space.digest, (Source("host", 0, depth),) if depth else ())
    recorder.looked_up(name, list(range(64)), 0, hit, space, 16)


# -- the file -----------------------------------------------------------------------------------


def test_records_come_back_newest_first_and_only_the_owner_reads_them(tmp_path: Path) -> None:
    folder = tmp_path / "records"
    file = RecordFile(folder, 1 << 20)
    for number in range(5):
        file.put({"request": f"r{number}", "at": number})
    file.close()
    file.close()
    assert [record["request"] for record in read_records(folder)] == ["r4", "r3", "r2", "r1", "r0"]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {f.stat().st_mode & 0o777 for f in folder.iterdir()} == {0o600}


def test_a_file_that_is_removed_is_made_anew(tmp_path: Path) -> None:
    file = RecordFile(tmp_path, 1 << 20)
    file.path.unlink()
    file.put({"request": "later", "at": 1})
    file.close()
    assert [record["request"] for record in read_records(tmp_path)] == ["later"]


def test_the_folder_stays_below_its_capacity(tmp_path: Path) -> None:
    """Also with what engines before left, and the newest are kept."""
    capacity = 1 << 16
    for number in range(3):
        left = tmp_path / f"requests-{number}.jsonl"
        left.write_bytes(b"x" * capacity)
        os.utime(left, (number, number))
    (tmp_path / "notes.txt").write_text("somebody's own")
    file = RecordFile(tmp_path, capacity)
    for number in range(1000):
        file.put({"request": f"r{number}", "at": number, "about": "x" * 500})
        if number % 100 == 0:
            while file._queue.qsize():
                threading.Event().wait(0.001)
    file.close()
    sizes = [f.stat().st_size for f in tmp_path.glob("requests-*")]
    assert sum(sizes) <= capacity
    assert next(read_records(tmp_path))["request"] == "r999"
    assert (tmp_path / "notes.txt").exists()
    assert not file.dropped


def test_put_never_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = threading.Event()
    write = RecordFile._write

    def slow(self: RecordFile, line: bytes) -> None:
        stuck.wait(60)
        write(self, line)

    monkeypatch.setattr(RecordFile, "_write", slow)
    file = RecordFile(tmp_path, 1 << 20)
    for number in range(3000):
        file.put({"request": str(number), "at": number})
    assert file.dropped > 1000
    stuck.set()
    file.close()


def test_a_new_file_that_cannot_be_had_closes_nobody_elses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The full one is closed once: its number is another file's the moment after."""
    file = RecordFile(tmp_path, 1 << 16)
    number = file._file
    closed: list[int] = []
    close = os.close

    def watched(wanted: int) -> None:
        closed.append(wanted)
        close(wanted)

    def refuse(path: Path) -> int:
        raise OSError(24, "too many open files")

    monkeypatch.setattr(explain_file, "_open", refuse)
    monkeypatch.setattr(explain_file.os, "close", watched)
    for at in range(100):
        file.put({"request": "r", "at": at, "about": "x" * 500})
    file.close()
    assert closed.count(number) == 1


def test_lines_that_are_no_records_are_skipped(tmp_path: Path) -> None:
    lines = [b"", b"{", b"[1]", b'{"request": 3, "at": 1}', b"\xff\xfe", b"[" * 100_000]
    good = json.dumps({"request": "r", "at": 1}).encode()
    (tmp_path / "requests-1.jsonl").write_bytes(b"\n".join([*lines, good]) + b'\n{"request"')
    assert [record["request"] for record in read_records(tmp_path)] == ["r"]


# -- the adapter's side -------------------------------------------------------------------------


def test_what_is_no_file_of_records_holds_up_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "requests-0.jsonl").write_text(
        '{"request": "good", "at": 1}\n' + "[" * 200_000 + '\n{"request": "\\ud800", "at": 1}\n'
    )
    os.mkfifo(tmp_path / "requests-1.jsonl")
    (tmp_path / "requests-2.jsonl").touch()
    os.truncate(tmp_path / "requests-2.jsonl", 1 << 40)
    assert [record["request"] for record in read_records(tmp_path)] == ["good"]
    assert "requests-1.jsonl is left out: it is not a regular file" in caplog.text
    assert "requests-2.jsonl is left out: it has more than" in caplog.text


def test_a_recorder_of_nothing_does_nothing() -> None:
    recorder = RequestRecorder.of(load_config(env={}))
    assert recorder.journal is None
    assert recorder.listener(None) is None
    look(recorder, "r", 0)
    assert recorder.ended("r", "done") is None
    recorder.close()


def test_a_request_is_told_of_in_words(tmp_path: Path) -> None:
    recorder = watched(tmp_path)
    heard: list[Event] = []
    listener = recorder.listener(heard.append)
    assert listener is not None
    gone = Event(False, "disk", (KEYS[2],), b"")
    listener(gone)
    assert heard == [gone]
    look(recorder, "chat-1", 2)
    recorder.loaded("chat-1", {"host": 32}, 32)
    recorder.arrived("chat-1")
    recorder.ended("chat-1", "done")
    look(recorder, "chat-2", 0)
    recorder.ended("chat-2", "abort")
    recorder.close()
    told = runner.invoke(app, ["explain", "chat-1", "--path", str(tmp_path)]).stdout
    for words in (
        "request chat-1: 64 tokens, done",
        "host: tokens 0 to 32",
        "evicted from disk",
        "32 tokens from host",
    ):
        assert words in told
    listed = runner.invoke(app, ["explain", "--path", str(tmp_path)]).stdout
    assert "chat-1" in listed
    assert "never seen" in listed
    (record,) = json.loads(
        runner.invoke(app, ["explain", "2", "--json", "--set", f"explain.path={tmp_path}"]).stdout
    )
    assert (record["request"], record["outcome"]) == ("chat-2", "abort")
    none = runner.invoke(app, ["explain", "other", "--path", str(tmp_path)])
    assert (none.exit_code, none.stdout) == (2, "")
    assert "no record of 'other' among the 2" in none.stderr


def test_a_client_does_not_learn_of_other_tenants(tmp_path: Path) -> None:
    """What a tenant asks for itself is the same, whether another one sent the text before."""
    one, two = Namespace(b"model", cache_salt="one"), Namespace(b"model", cache_salt="two")
    seen: list[Any] = []
    for others in ((), (one,)):
        recorder = RequestRecorder(RequestLog(clock=lambda: 0.0))
        for space in others:
            look(recorder, "theirs", 0, space)
        look(recorder, "mine", 0, two)
        record = recorder.journal.get("mine") if recorder.journal is not None else None
        assert record is not None
        causes = [miss.cause for miss in record.misses]
        assert causes == [Cause.OTHER_NAMESPACE if others else Cause.NEVER_SEEN]
        seen.append(recorder.ended("mine", "done"))
    assert seen[0] == seen[1]


# -- spans --------------------------------------------------------------------------------------


@pytest.fixture
def spans() -> Iterator[Any]:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from kvcore.explain.otel import Spans

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield SimpleNamespace(spans=Spans(provider), finished=exporter.get_finished_spans)
    provider.shutdown()


def test_spans_join_the_engines_trace(spans: Any) -> None:
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    record = RequestRecord("r", 100, misses=[Miss(Cause.TOO_SHORT)], loaded={"host": 64})
    record.steps = {"lookup": 0.25, "load": 0.5, "rest": 1.0}
    spans.spans.emit(record, {"traceparent": f"00-{trace}-{parent}-01"})
    *steps, whole = spans.finished()
    assert [step.name for step in steps] == ["kvcore.lookup", "kvcore.load", "kvcore.rest"]
    assert {f"{span.context.trace_id:032x}" for span in (*steps, whole)} == {trace}
    assert f"{whole.parent.span_id:016x}" == parent
    assert {step.parent.span_id for step in steps} == {whole.context.span_id}
    assert steps[1].end_time - steps[1].start_time == 500_000_000
    assert whole.end_time - whole.start_time == 1_750_000_000
    assert (steps[0].start_time, steps[-1].end_time) == (whole.start_time, whole.end_time)
    assert whole.attributes["kvcore.misses"] == ("too short",)
    assert whole.attributes["kvcore.loaded.host"] == 64


def test_a_request_without_a_trace_begins_one(spans: Any) -> None:
    spans.spans.emit(RequestRecord("r", 1, steps={"rest": 0.1}))
    *_, whole = spans.finished()
    assert whole.parent is None


def test_actions_have_names() -> None:
    """They are attributes of spans, and words of the command."""
    assert all(action.value.isidentifier() for action in Action)
