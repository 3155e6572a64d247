"""No thread of kvcore dies silently, and what waits for one never waits for ever."""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable, Iterator
from pathlib import Path as File

import numpy as np
import pytest

from kvcore._util.threads import GuardedThread, InOrder, nobody_waits
from kvcore.errors import CapacityError, TransferError
from kvcore.testing.waiting import until
from kvcore.transfer.engine import TransferEngine
from kvcore.transfer.executor import Issued
from kvcore.transfer.graph import OpReport, Path, RowError, TransferGraph, TransferOp, UnitTable
from kvcore.transfer.op_thread import OpThread
from kvcore.transfer.path_queue import PathQueue
from kvcore.transfer.plan import Chain, build_load

ROOT = File(__file__).parents[3]
WAIT_S = 20.0


def boom(*_: object, **__: object) -> None:
    raise ValueError("planted")


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return what lets the system refuse threads with these words in their names."""

    def refuse(words: str) -> None:
        start = threading.Thread.start

        def starts(thread: threading.Thread) -> None:
            if words in thread.name:
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", starts)

    return refuse


def test_product_code_makes_threads_in_one_place() -> None:
    """So a new thread has its boundary, and says what becomes of those that wait for it."""
    found = []
    for folder in ("kvcore", "adapters"):
        for file in (ROOT / folder).rglob("*.py"):
            if "testing" in file.parts or file == ROOT / "kvcore" / "_util" / "threads.py":
                continue
            text = file.read_text(encoding="utf-8")
            names = [
                node
                for node in (ast.walk(ast.parse(text)) if "Thread" in text else ())
                if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "Thread"
            ]
            found += [f"{file.relative_to(ROOT)}:{node.lineno}" for node in names]
    assert found == []


def test_a_thread_that_raises_is_told_and_named(caplog: pytest.LogCaptureFixture) -> None:
    told: list[BaseException] = []
    thread = GuardedThread("kvcore-example", boom, told.append)
    assert thread.start()
    assert thread.join(WAIT_S)
    assert [str(error) for error in told] == ["planted"]
    assert "kvcore-example" in caplog.text


def test_a_thread_that_cannot_start_has_died_at_once(no_threads: Callable[[str], None]) -> None:
    no_threads("kvcore-example")
    told: list[BaseException] = []
    thread = GuardedThread("kvcore-example", boom, told.append)
    assert not thread.start()
    assert [str(error) for error in told] == ["can't start new thread"]
    assert thread.join(0.0)


@pytest.mark.parametrize("threads", [True, False])
def test_what_is_put_is_done_in_order_with_a_thread_or_without(
    no_threads: Callable[[str], None], threads: bool
) -> None:
    if not threads:
        no_threads("kvcore-example")
    done: list[int] = []
    ends = InOrder("kvcore-example", done.append, nobody_waits, lambda: None)
    for number in range(20):
        ends.put(number)
    ends.close()
    assert ends.join(WAIT_S)
    assert done == list(range(20))


# -- the transfer engine: where an error is planted, and what becomes of two graphs ---------------


class Copies(Issued):
    """Copies that a device has in its queue, until ``landed`` is set."""

    def __init__(self) -> None:
        self.landed = threading.Event()

    def wait(self) -> None:
        assert self.landed.wait(WAIT_S)

    def seconds(self) -> float:
        return 0.0


class Device:
    def __init__(self) -> None:
        self.copies: list[Copies] = []

    def run(self, graph: TransferGraph, op: TransferOp, rows: list[int]) -> Issued:
        self.copies.append(Copies())
        return self.copies[-1]


class Host:
    def run(self, graph: TransferGraph, op: TransferOp, rows: list[int]) -> dict[int, RowError]:
        return {}


def graph(number: int) -> TransferGraph:
    units = (UnitTable.of(np.zeros((1, 1), dtype=np.int64), 16),)
    return build_load(number, Chain(b"n", b"", (b"k",)), [0], [], batch_rows=1).bind(units)


@pytest.fixture
def engines() -> Iterator[list[TransferEngine]]:
    made: list[TransferEngine] = []
    yield made
    for engine in made:
        engine.close(drain=False, timeout=WAIT_S)


def ended(engine: TransferEngine, number: int) -> OpReport:
    assert engine.wait(number, WAIT_S), "who waits would wait for ever"
    reports: list[OpReport] = []
    until(lambda: reports.extend(engine.poll()) or any(r.graph_id == number for r in reports))
    [report] = [one for one in reports if one.graph_id == number]
    return report


def test_an_observer_that_raises_ends_no_transfer(engines: list[TransferEngine]) -> None:
    engines.append(engine := TransferEngine({Path.H2D: Host()}, observer=boom))
    for number in (1, 2):
        engine.submit(graph(number))
        assert not ended(engine, number).failed
    assert not engine.stopped


def test_without_a_second_thread_copies_are_waited_for_by_the_first(
    engines: list[TransferEngine], no_threads: Callable[[str], None]
) -> None:
    no_threads("-ends")
    device = Device()
    engines.append(engine := TransferEngine({Path.H2D: device}))
    for number in (1, 2):
        engine.submit(graph(number))
        until(lambda: len(device.copies) == number)  # noqa: B023
        device.copies[-1].landed.set()
        assert not ended(engine, number).failed


@pytest.mark.parametrize(
    ("part", "inside"),
    [
        (TransferEngine, "end"),
        (TransferEngine, "_finish"),
        (TransferEngine, "_advance"),
        (OpThread, "_execute"),
        (PathQueue, "_taken"),
    ],
)
def test_an_error_of_the_engine_fails_what_it_has_and_names_the_thread(
    engines: list[TransferEngine], monkeypatch: pytest.MonkeyPatch, part: type, inside: str
) -> None:
    engines.append(engine := TransferEngine({Path.H2D: Host()}))
    engine.submit(graph(1))
    assert not ended(engine, 1).failed
    real, raised = getattr(part, inside), list[bool]()

    def once(*given: object, **named: object) -> object:
        if not raised and threading.current_thread() is not threading.main_thread():
            raised.append(True)
            raise ValueError("planted")
        return real(*given, **named)

    monkeypatch.setattr(part, inside, once)
    engine.submit(graph(2))
    assert engine.wait(2, WAIT_S), "who waits would wait for ever"
    until(lambda: engine.stopped)
    assert "kvcore-h2d-0" in engine.stopped
    with pytest.raises(TransferError, match="kvcore-h2d-0 has stopped after an error"):
        engine.submit(graph(3))
    assert engine.wait_idle(WAIT_S)
    assert engine.close(timeout=WAIT_S)


def test_an_op_ends_only_when_its_copies_have(
    engines: list[TransferEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may still write to pages that the engine would give to others."""
    device = Device()
    engines.append(engine := TransferEngine({Path.H2D: device}))
    monkeypatch.setattr(engine, "end", boom)
    engine.submit(graph(1))
    until(lambda: device.copies)
    assert not engine.wait(1, 0.05)
    device.copies[0].landed.set()
    assert ended(engine, 1).failed == {0: RowError.INTERNAL}
    until(lambda: engine.stopped)


def test_an_engine_without_all_of_its_threads_is_none(no_threads: Callable[[str], None]) -> None:
    no_threads("kvcore-disk2h-0")
    before = set(threading.enumerate())
    with pytest.raises(CapacityError, match="raise the limit"):
        TransferEngine({Path.H2D: Host(), Path.DISK2H: Host()})
    until(lambda: not set(threading.enumerate()) - before)
