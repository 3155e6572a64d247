"""Recorded answers of engines, with a child that is no engine: it answers by its own version."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcore.errors import FormatError
from kvcore.harness import recorded
from kvcore.harness.compare import answers, assert_same_answers
from kvcore.harness.engine_process import EngineProcess, Generation
from kvcore.harness.recorded import Answers, Mode, RecordedEngine, RecordWarning, book_of

pytestmark = pytest.mark.slow  # most tests start a process

CHILD = """
import asyncio, os, sys
from pathlib import Path
from kvcore.harness.engine_process import serve

def note(what):
    with open(os.environ["NOTES"], "a") as file:
        print(what, file=file)

async def start(model, kvcore, **args):
    note("start")
    return {"version": "1.0"}

async def generate(prompt, max_tokens, request_id, **options):
    note("answer")
    tokens = [sum(prompt) + int(os.environ["ADDS"]) + i for i in range(max_tokens)]
    return {
        "request_id": request_id or "made-up", "token_ids": tokens, "text": "",
        "prompt_tokens": len(prompt), "cached_tokens": 0, "ttft_s": 0.0, "total_s": 0.0,
        "finish_reason": "abort" if options["abort_after"] is not None else "length",
        "kvcore": {}, "logprobs": [0.5] * max_tokens if options["logprobs"] else [],
    }

asyncio.run(serve(int(sys.argv[1]), {"start": start, "generate": generate}))
"""

NO_CACHE = {"enable_prefix_caching": False}


class Bench:
    """A folder of answers, and engines whose answers the tests choose."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers = folder / "answers"
        self.model = folder / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text("{}")
        (self.model / "model.safetensors").write_text("weights")
        self._notes = folder / "notes"
        self._monkeypatch = monkeypatch
        package = folder / "kvcore_child" / "testing"
        package.mkdir(parents=True)
        (package / "driver.py").write_text(CHILD)
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")
        monkeypatch.setenv("NOTES", str(self._notes))
        monkeypatch.setattr(recorded, "_versions", lambda engine, python: ("1.0", "2.0"))
        self.engine_adds(0)

    def engine_adds(self, number: int) -> None:
        self._monkeypatch.setenv("ADDS", str(number))

    def use(self, mode: Mode) -> None:
        recorded.use(Answers(self.answers, mode))

    def open(self, **args: Any) -> EngineProcess:
        book = book_of("child", self.model, NO_CACHE | args)
        assert book is not None
        return RecordedEngine(book, self.model, engine="child", **NO_CACHE, **args)

    def ask(self, *prompts: list[int], mode: Mode = Mode.USE, **options: Any) -> list[Generation]:
        self.use(mode)
        with self.open() as process:
            got = answers(process, prompts, **options)
        recorded.save()
        return got

    @property
    def notes(self) -> list[str]:
        """What engines did since this was asked last."""
        found = self._notes.read_text().split() if self._notes.exists() else []
        self._notes.unlink(missing_ok=True)
        return found


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    before = recorded.in_use()
    yield Bench(tmp_path, monkeypatch)
    recorded.use(before)


def tokens(got: list[Generation]) -> list[list[int]]:
    return [answer.token_ids for answer in got]


def test_what_was_recorded_starts_no_engine(bench: Bench) -> None:
    first = bench.ask([1, 2], [3], mode=Mode.RECORD)
    assert bench.notes == ["start", "answer", "answer"]
    again = bench.ask([3], [1, 2])
    assert bench.notes == []
    assert tokens(again) == tokens(first)[::-1]
    assert [answer.prompt_tokens for answer in again] == [1, 2]


def test_what_is_not_on_record_is_asked_of_an_engine_and_not_written(bench: Bench) -> None:
    for _ in range(2):
        assert tokens(bench.ask([7])) == [[7, 8, 9, 10, 11, 12, 13, 14]]
        assert bench.notes == ["start", "answer"]
    assert not bench.answers.exists()


def test_other_options_are_other_requests(bench: Bench) -> None:
    bench.ask([1], mode=Mode.RECORD, max_tokens=4)
    bench.notes  # noqa: B018 - forgets them
    assert len(tokens(bench.ask([1], max_tokens=5))[0]) == 5
    [with_logprobs] = bench.ask([1], max_tokens=4, logprobs=True)
    assert with_logprobs.logprobs == [0.5] * 4
    assert bench.notes.count("answer") == 2
    [salted] = bench.ask([1], max_tokens=4, cache_salt="a", fusion={"enabled": False})
    assert (salted.token_ids, bench.notes) == ([1, 2, 3, 4], []), "neither changes an answer"


def test_logprobs_are_recorded(bench: Bench) -> None:
    bench.ask([1], mode=Mode.RECORD, logprobs=True, max_tokens=2)
    [read] = bench.ask([1], logprobs=True, max_tokens=2)
    assert read.logprobs == [0.5, 0.5]


def test_an_abort_is_never_recorded(bench: Bench) -> None:
    bench.use(Mode.RECORD)
    with bench.open() as process:
        for _ in range(2):
            process.submit([1], 4, abort_after=1).result(60)
    assert bench.notes == ["start", "answer", "answer"]
    recorded.save()
    assert not bench.answers.exists()


def test_other_weights_versions_and_arguments_are_other_engines(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.ask([1], mode=Mode.RECORD)
    bench.use(Mode.USE)
    asked = {"of": book_of("child", bench.model, NO_CACHE).digest}  # type: ignore[union-attr]
    for name, found in {
        "argument": book_of("child", bench.model, NO_CACHE | {"dtype": "bfloat16"}),
        "environment": book_of("child", bench.model, NO_CACHE, env={"A": "1"}),
    }.items():
        assert found is not None
        asked[name] = found.digest
    (bench.model / "model.safetensors").write_text("others")
    recorded._model_digest.cache_clear()
    other = book_of("child", bench.model, NO_CACHE)
    assert other is not None
    asked["weights"] = other.digest
    monkeypatch.setattr(recorded, "_versions", lambda engine, python: ("1.1", "2.0"))
    newer = book_of("child", bench.model, NO_CACHE)
    assert newer is not None
    assert newer.file != other.file
    assert len(set(asked.values())) == len(asked)


@pytest.mark.parametrize(
    "args", [{}, {"enable_prefix_caching": True}, NO_CACHE | {"lora": "/a/path"}]
)
def test_engines_with_a_history_or_with_files_are_not_recorded(
    bench: Bench, args: dict[str, Any]
) -> None:
    bench.use(Mode.RECORD)
    assert book_of("child", bench.model, args) is None


def test_verifying_asks_the_engine_and_tells_a_record_that_is_wrong(bench: Bench) -> None:
    bench.ask([1], mode=Mode.RECORD)
    assert bench.notes
    bench.ask([1], mode=Mode.VERIFY)
    assert bench.notes == ["start", "answer"]
    bench.engine_adds(5)
    with pytest.raises(AssertionError, match="make answers"):
        bench.ask([1], mode=Mode.VERIFY)


def test_an_answer_is_called_wrong_only_if_the_engine_itself_differs(bench: Bench) -> None:
    """The machine that recorded an answer may round otherwise."""
    bench.ask([1], [2], mode=Mode.RECORD)
    bench.engine_adds(1)
    engines = bench.ask([10], max_tokens=8)
    bench.notes  # noqa: B018 - forgets them
    recorded_answers = bench.ask([1], [2])
    here = [Generation("a", list(range(s, s + 8)), "", 1, 0, 0.0, 0.0, None) for s in (2, 3)]
    with pytest.warns(RecordWarning, match="2 of 2 answers in child-1.0.jsonl"):
        assert_same_answers(here, recorded_answers)
    with pytest.raises(AssertionError, match="answers differ"):
        assert_same_answers([engines[0], here[1]], recorded_answers)
    assert bench.notes.count("start") == 1, "one engine is asked for both, and once"


def test_a_wrong_answer_is_told_without_a_warning_where_the_record_is_right(bench: Bench) -> None:
    bench.ask([1], [2], mode=Mode.RECORD)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        right, other = bench.ask([1], [2])
        with pytest.raises(AssertionError, match="1 of 1 answers differ"):
            assert_same_answers([other], [right])


def test_two_processes_write_into_one_file(bench: Bench) -> None:
    one, two = (Answers(bench.answers, Mode.RECORD) for _ in range(2))
    for place, folder in enumerate((one, two)):
        book = folder.book("child", "1.0", {"model": "m"})
        book.put({"prompt": [place]}, [[place]])
    one.save()
    two.save()
    read = Answers(bench.answers, Mode.USE).book("child", "1.0", {"model": "m"})
    assert [read.get({"prompt": [place]}) for place in (0, 1)] == [[[0]], [[1]]]
    lines = (bench.answers / "child-1.0.jsonl").read_text().splitlines()
    assert [json.loads(line)["of"] for line in lines if line.startswith("{")] == [{"model": "m"}]


@pytest.mark.parametrize("line", ["{", "[1]", "{}", "3"])
def test_a_damaged_file_is_told(bench: Bench, line: str) -> None:
    bench.answers.mkdir()
    (bench.answers / "child-1.0.jsonl").write_text(f"{line}\n")
    with pytest.raises(FormatError, match=r"line 1 of child-1\.0\.jsonl"):
        Answers(bench.answers, Mode.USE).book("child", "1.0", {})
