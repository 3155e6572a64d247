"""Answers of engines without kvcore, kept in files.

An engine without kvcore and without a prefix cache has no history: its greedy answer depends on the
version, the model, the arguments and the request only. Tests ask it for the right answers, so these
are recorded once and read afterwards, and no engine is started for them.

    tests/answers/vllm-0.32.0.jsonl
        {"engine": DIGEST, "of": {arguments, model, torch, ...}}     an engine, for people to read
        [DIGEST of the engine, DIGEST of the request, [tokens]]      an answer
        [DIGEST of the engine, DIGEST of the request, [tokens], [logprobs]]

`use` says where the files are and what is done with them (`Mode`); tests/conftest.py calls it.
`RecordedEngine` is used in place of an `EngineProcess`, and starts one at the first request that is
not on record. Another processor may round otherwise. `confirmed` therefore asks an engine before an
answer is called wrong because of a record, and warns if the record is what differs.
"""

from __future__ import annotations

import enum
import fcntl
import functools
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcore.errors import FormatError
from kvcore.harness.engine_process import CALL_TIMEOUT_S, EngineProcess, Generation

__all__ = [
    "Answers",
    "Book",
    "Mode",
    "RecordWarning",
    "RecordedEngine",
    "book_of",
    "confirmed",
    "request_of",
    "save",
    "use",
]

_NO_CACHE = {"enable_prefix_caching": False, "disable_radix_cache": True}
"""Arguments with which vLLM and SGLang keep no KV of earlier requests."""
_NO_MATTER = frozenset({"forked", "start_method"})
"""Arguments of `EngineProcess` that say how a process is made."""
_NO_MATTER_OF_ENV = frozenset({"PYTHONPATH"})
_OF_A_REQUEST = ("max_tokens", "ignore_eos", "logprobs")


class Mode(enum.Enum):
    """What is done with the record of an answer."""

    USE = "use"
    """It is the answer. An engine is asked for what is not on record, and nothing is written."""
    RECORD = "record"
    """It is the answer. `Answers.save` writes what an engine was asked because it was missing."""
    VERIFY = "verify"
    """An engine is asked for everything, and a record that differs is an error."""


class RecordWarning(UserWarning):
    """An engine without kvcore gives other answers on this machine than those on record."""


class Answers:
    """The files of a folder, one for each version of an engine. Safe from several threads."""

    def __init__(self, folder: Path, mode: Mode) -> None:
        self.mode = mode
        self._folder = folder
        self._lock = threading.Lock()
        self._files: dict[str, dict[str, Any]] = {}
        self._new: dict[str, dict[str, Any]] = {}

    def book(self, engine: str, version: str, of: Mapping[str, Any]) -> Book:
        """Return the answers of an engine that ``of`` describes, to read and to add to."""
        name = f"{engine}-{version}.jsonl"
        with self._lock:
            if name not in self._files:
                self._files[name] = _read(self._folder / name)
        return Book(self, name, _digest(of), dict(of))

    def found(self, file: str, place: str) -> list[Any] | None:
        """Return what is on record at ``place``: tokens, and log-probabilities if any."""
        line = self._files[file].get(place)
        return None if line is None else line[2:]

    def add(self, file: str, place: str, line: Any) -> None:
        """Put a line on record, to be written by `save`."""
        with self._lock:
            self._files[file][place] = line
            self._new.setdefault(file, {})[place] = line

    def save(self) -> None:
        """Write what was added into the files, which other processes may write to as well."""
        with self._lock:
            added, self._new = self._new, {}
        if added:
            self._folder.mkdir(parents=True, exist_ok=True)
        for name, lines in added.items():
            path = self._folder / name
            with (self._folder / ".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                _write(path, _read(path) | lines)


@dataclass(frozen=True)
class Book:
    """The recorded answers of one engine, which ``of`` describes."""

    answers: Answers
    file: str
    digest: str
    of: dict[str, Any]

    def get(self, request: Mapping[str, Any]) -> list[Any] | None:
        """Return what is on record for a request, or None."""
        return self.answers.found(self.file, f"{self.digest} {_digest(request)}")

    def put(self, request: Mapping[str, Any], answer: Sequence[Any]) -> None:
        """Note what an engine answered.

        Raises:
            AssertionError: the answers are verified, and the record has other tokens.
        """
        known = self.get(request)
        if known is not None and self.answers.mode is Mode.VERIFY and known[0] != answer[0]:
            raise AssertionError(
                f"{self.file} has the answer {known[0]}, and the engine itself gives {answer[0]} "
                f"({self.of}): if the engine or the model was meant to change, run `make answers`"
            )
        if known is None and self.answers.mode is Mode.RECORD:
            self.answers.add(self.file, self.digest, {"engine": self.digest, "of": self.of})
            place = _digest(request)
            self.answers.add(self.file, f"{self.digest} {place}", [self.digest, place, *answer])


@dataclass(frozen=True)
class _Recorded(Generation):
    """An answer from a file, and the engine to ask for it again."""

    engine: RecordedEngine | None = field(default=None, compare=False, repr=False)
    request: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    asked: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)


class RecordedEngine(EngineProcess):
    """An engine without kvcore, which starts at the first request that is not on record.

    The arguments are those of `EngineProcess`. What needs the engine itself starts it too.
    """

    def __init__(self, book: Book, model: str | Path, **args: Any) -> None:
        self._book = book
        self._model_and_args = (model, args)
        self._starting = threading.Lock()
        self._runs = False
        self._from_file: dict[str, _Recorded] = {}
        self._own: dict[str, Generation] = {}

    def __enter__(self) -> RecordedEngine:
        return self

    def wait_ready(self, *args: Any) -> dict[str, Any]:
        with self._starting:
            if not self._runs:
                model, given = self._model_and_args
                super().__init__(model, **given)
                self._runs = True
        return super().wait_ready(*args)

    def submit(
        self, prompt: str | Sequence[int], max_tokens: int = 16, **options: Any
    ) -> Future[Generation]:
        request = request_of(prompt, {"max_tokens": max_tokens, **options})
        asked = {"prompt": prompt, "max_tokens": max_tokens, **options}
        if request is None:
            return super().submit(**asked)
        known = self._book.get(request)
        if known is None or self._book.answers.mode is Mode.VERIFY:
            return _then_put(super().submit(**asked), self._book, request)
        found: Future[Generation] = Future()
        answer = self._from_file[_digest(request)] = _generation(known, self, request, asked)
        found.set_result(answer)
        return found

    def own(self, request: Mapping[str, Any]) -> Generation:
        """Return an engine's own answer to a request that was answered from the file.

        The first call starts an engine, even when this one is closed, and asks it for everything
        that was answered from the file: where one record differs, others often do. Warns if any do.
        """
        with self._starting:
            missing = {k: v for k, v in self._from_file.items() if k not in self._own}
            if _digest(request) in missing:
                self._ask_again(missing)
            return self._own[_digest(request)]

    def _ask_again(self, missing: Mapping[str, _Recorded]) -> None:
        model, given = self._model_and_args
        with EngineProcess(model, **given) as process:
            for place, answer in missing.items():
                self._own[place] = process.submit(**answer.asked).result(CALL_TIMEOUT_S)
        differ = sum(self._own[k].token_ids != v.token_ids for k, v in missing.items())
        if differ:
            warnings.warn(
                f"{differ} of {len(missing)} answers in {self._book.file} are not those that the "
                "engine itself gives here, which were taken instead: if it is so on other "
                "processors too, run `make answers`",
                RecordWarning,
                stacklevel=2,
            )

    def kill(self) -> None:
        if self._runs:
            super().kill()

    def close(self) -> None:
        if self._runs:
            super().close()


_current: Answers | None = None


def use(answers: Answers | None) -> None:
    """Take the answers of engines without kvcore from there from now on; None: from engines."""
    global _current
    _current = answers


def in_use() -> Answers | None:
    """Return what `use` was called with last."""
    return _current


def save() -> None:
    """Write what was recorded (`Answers.save`), if `use` was called."""
    if _current is not None:
        _current.save()


def confirmed(answer: Generation) -> Generation:
    """Return the engine's own answer for one that may be from a file (`RecordedEngine.own`)."""
    if isinstance(answer, _Recorded) and answer.engine is not None:
        return answer.engine.own(answer.request)
    return answer


def book_of(
    engine: str,
    model: str | Path,
    args: Mapping[str, Any],
    *,
    env: Mapping[str, str] | None = None,
    python: Path | None = None,
) -> Book | None:
    """Return the recorded answers of an engine without kvcore, or None if none can be recorded.

    That is so if `use` was not called, if the engine has a prefix cache, or if an argument is a
    path, whose content nobody compares.
    """
    cached = not any(args.get(name) is value for name, value in _NO_CACHE.items())
    if _current is None or cached or not Path(model).is_dir():
        return None
    version, torch = _versions(engine, str(python or sys.executable))
    of = {
        "model": _model_digest(Path(model)),
        "torch": torch,
        "args": {name: value for name, value in args.items() if name not in _NO_MATTER},
        "env": {k: v for k, v in (env or {}).items() if k not in _NO_MATTER_OF_ENV},
    }
    if os.sep in json.dumps(of, default=str):
        return None
    return _current.book(engine, version, of)


# --- what tells engines and requests apart ------------------------------------------------------


def request_of(prompt: str | Sequence[int], options: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what decides the answer to a request, or None if it is not a plain one."""
    if options.get("abort_after") is not None or options.get("promise") is not None:
        return None
    made: dict[str, Any] = {name: options.get(name) for name in _OF_A_REQUEST}
    made["prompt"] = prompt if isinstance(prompt, str) else [int(token) for token in prompt]
    for name in ("lora", "image"):
        if (path := options.get(name)) is not None:
            made[name] = _content_digest(Path(path))
    return made


def _generation(
    known: list[Any], engine: RecordedEngine, request: Mapping[str, Any], asked: dict[str, Any]
) -> _Recorded:
    prompt = asked["prompt"]
    return _Recorded(
        request_id="recorded",
        token_ids=list(known[0]),
        text="",
        prompt_tokens=0 if isinstance(prompt, str) else len(prompt),
        cached_tokens=0,
        ttft_s=0.0,
        total_s=0.0,
        finish_reason=None,
        logprobs=list(known[1]) if len(known) > 1 else [],
        engine=engine,
        request=request,
        asked=asked,
    )


def _then_put(
    call: Future[Generation], book: Book, request: Mapping[str, Any]
) -> Future[Generation]:
    """Return a future of the same answer, which is put on record first."""
    done: Future[Generation] = Future()

    def put(ended: Future[Generation]) -> None:
        try:
            answer = ended.result()
            if not answer.text:  # a text is not recorded
                given = [answer.token_ids, *([answer.logprobs] if answer.logprobs else [])]
                book.put(request, given)
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            done.set_exception(error)
        else:
            done.set_result(answer)

    call.add_done_callback(put)
    return done


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@functools.lru_cache(maxsize=64)
def _model_digest(folder: Path) -> str:
    """Return a digest of the files from which an engine makes its model."""
    return _content_digest(folder)


def _content_digest(path: Path) -> str:
    """Return a digest of a file, or of the configuration and weights in a folder."""
    files = [path]
    if path.is_dir():
        files = sorted([*path.glob("*.safetensors"), *path.glob("*config*.json")])
    content = hashlib.sha256()
    for file in files:
        content.update(f"{file.name if path.is_dir() else ''} {file.stat().st_size} ".encode())
        with file.open("rb") as opened:
            while part := opened.read(1 << 20):
                content.update(part)
    return content.hexdigest()[:16]


@functools.lru_cache(maxsize=8)
def _versions(engine: str, python: str) -> tuple[str, str]:
    """Return the versions of an engine and of torch in the environment of an interpreter."""
    if python == sys.executable:
        version = importlib.metadata.version
        return version(engine), version("torch")
    code = "import sys, importlib.metadata as m; print(*map(m.version, sys.argv[1:]))"
    told = subprocess.run(
        [python, "-c", code, engine, "torch"], capture_output=True, text=True, check=True
    )
    first, second = told.stdout.split()
    return first, second


# --- files --------------------------------------------------------------------------------------


def _read(path: Path) -> dict[str, Any]:
    """Return the lines of a file by place. Raises FormatError if it is damaged."""
    found: dict[str, Any] = {}
    try:
        text = path.read_text()
    except FileNotFoundError:
        return found
    for number, line in enumerate(text.splitlines(), 1):
        try:
            read = json.loads(line)
            place = read["engine"] if isinstance(read, dict) else f"{read[0]} {read[1]}"
        except (ValueError, LookupError, TypeError) as error:
            raise FormatError(
                f"line {number} of {path.name} is no recorded answer: make it anew with "
                "`make answers`"
            ) from error
        found[place] = read
    return found


def _write(path: Path, lines: Mapping[str, Any]) -> None:
    """Replace a file. Lines are sorted, so that a change of it can be read."""
    made = path.with_suffix(".new")
    made.write_text(
        "".join(f"{json.dumps(lines[place], separators=(',', ':'))}\n" for place in sorted(lines))
    )
    made.replace(path)
