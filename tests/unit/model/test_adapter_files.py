"""Looks at adapters on threads: what they find, and what a disk that hangs costs."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kvcore.errors import UnsupportedError
from kvcore.model import adapter_files
from kvcore.model.adapter_files import AdapterFiles
from kvcore.testing.waiting import PATIENCE_S


class Disk:
    """Folders of adapters. Those in ``hanging`` answer after `answer`, with ``content`` of then."""

    def __init__(self, *hanging: str) -> None:
        self.content = "1"
        self.looks: list[str] = []
        self._hanging = set(hanging)
        self._answers = threading.Event()
        self.files = AdapterFiles(self._look)

    def _look(self, name: str, path: str) -> str:
        content = self.content
        self.looks.append(path)
        if path in self._hanging:
            assert self._answers.wait(PATIENCE_S)
        if content == "none":
            raise UnsupportedError("no weights")
        if content == "odd":
            raise RecursionError
        return f"{name}:{content}"

    def answer(self) -> None:
        self._answers.set()

    def found(self, path: str, number: int | None = None) -> Any:
        number = self.files.ask("a", path) if number is None else number
        return self.files.wait("a", path, number, PATIENCE_S)


def test_each_look_begins_after_it_was_asked_for() -> None:
    disk = Disk()
    assert disk.found("x") == "a:1"
    disk.content = "2"
    assert disk.found("x") == "a:2"


def test_a_look_that_has_begun_does_not_answer_for_one_that_was_asked_for_later() -> None:
    disk = Disk("x")
    first = disk.files.ask("a", "x")
    while not disk.looks:
        pass
    disk.content = "2"
    second = disk.files.ask("a", "x")
    assert disk.files.ask("a", "x") == second, "neither has begun: they are one"
    assert disk.files.told("a", "x", first) is None
    disk.answer()
    assert disk.found("x", second) == "a:2"
    assert disk.found("x", first) == "a:2", "a later look is as good"
    assert disk.looks == ["x", "x"]


def test_a_folder_that_hangs_holds_up_no_other() -> None:
    disk = Disk("x")
    waiting = disk.files.ask("a", "x")
    assert disk.found("y") == "a:1"
    assert disk.files.told("a", "x", waiting) is None
    disk.answer()
    assert disk.found("x", waiting) == "a:1"


def test_folders_that_hang_take_a_few_threads() -> None:
    disk = Disk(*map(str, range(9)))
    numbers = [disk.files.ask("a", str(path)) for path in range(9)]
    assert len(disk.looks) <= adapter_files._THREADS
    disk.answer()
    assert [disk.found(str(path), numbers[path]) for path in range(9)] == ["a:1"] * 9


@pytest.mark.parametrize(("content", "why"), [("none", "no weights"), ("odd", "nested too deeply")])
def test_whatever_is_wrong_with_the_files_is_a_reason(content: str, why: str) -> None:
    disk = Disk()
    disk.content = content
    found = disk.found("x")
    assert isinstance(found, UnsupportedError)
    assert why in str(found)
    disk.content = "1"
    assert disk.found("x") == "a:1", "they may be mended"


def test_without_a_thread_there_is_a_reason_too(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk()
    with monkeypatch.context() as patch:

        def refuses(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        patch.setattr(threading.Thread, "start", refuses)
        number = disk.files.ask("a", "x")
        assert "can't start new thread" in str(disk.files.told("a", "x", number))
    assert disk.found("x") == "a:1"


def test_adapters_without_end_take_no_memory_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_files, "_KEPT", 3)
    disk = Disk()
    for number in range(9):
        disk.found(str(number))
    assert len(disk.files._adapters) <= 4
