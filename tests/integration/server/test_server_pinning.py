"""Pinning a server's memory takes seconds: no step of an engine waits for it.

The recording device registers memory when the test lets it.
"""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcore.config import Config
from kvcore.errors import TierUnavailable
from kvcore.memory import pinned
from kvcore.server import client as client_module
from kvcore.server import worker as worker_module
from kvcore.server.worker import ServedWorker
from kvcore.testing.waiting import PATIENCE_S, until
from kvcore.transfer.graph import RowError
from kvcore_devtools.gpu import Machine, installed
from kvcore_devtools.gpu.machine import Call
from kvcore_devtools.server_fixture import RunningServer, serve, settings, words

Start = Callable[[Config], RunningServer]
PROMPT = words(1, 100)
CHUNK = 4 << 20


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "CHUNK_NBYTES", CHUNK)
    monkeypatch.setattr(worker_module, "TEND_S", 0.01)
    monkeypatch.setattr(client_module, "NOT_READY_S", 0.0)


@pytest.fixture
def machine() -> Iterator[Machine]:
    """The rank of GPU 1: a thread that does not say so has GPU 0 as its current device."""
    with installed(Machine(index=1, eager=1.0)) as machine:
        yield machine
        machine.on_register = lambda count: None
    machine.check()


class Gate:
    """Holds each registration, by the thread that makes it, until `open` is called."""

    def __init__(self, machine: Machine, after: int = 0) -> None:
        self._open, self.waiting = threading.Event(), threading.Event()
        machine.on_register = lambda count: self._pass() if count >= after else None

    def _pass(self) -> None:
        self.waiting.set()
        assert self._open.wait(PATIENCE_S), "the test has ended"

    def open(self) -> None:
        self._open.set()


def registrations(machine: Machine) -> list[Call]:
    """Return the calls that register memory or end that."""
    return [call for call in machine.calls if call.kind in ("register", "unregister")]


def locked(machine: Machine) -> int:
    """Return the bytes that are registered now."""
    return sum(machine.registered.values())


def worker_of(engine: Any) -> ServedWorker:
    [one] = engine.workers
    assert isinstance(one.worker, ServedWorker)
    return one.worker


def noting_refusals(worker: ServedWorker) -> list[set[RowError]]:
    """Return a list that collects why each graph is refused; an empty set if it is not."""
    found: list[set[RowError]] = []
    submit = worker.submit

    def noting(*given: Any, **options: Any) -> Any:
        reports = submit(*given, **options)
        found.append({why for report in reports for why in report.failed.values()})
        return reports

    worker.submit = noting  # type: ignore[method-assign]
    return found


def serve_until_reused(engine: Any, plain: Any, tokens: int = 96) -> None:
    """Ask again until the answer comes from host memory; every answer is right."""

    def reused() -> bool:
        answer, found = serve(engine, PROMPT)
        assert answer == plain(PROMPT)
        return found == {"host": tokens}

    until(reused)


def test_graphs_are_refused_and_nobody_waits_while_memory_is_pinned(
    start: Start, engine: Any, plain: Any, folder: Path, machine: Machine
) -> None:
    config = settings(folder)
    start(config)
    gate = Gate(machine, after=1)  # the first of four chunks is there, and then it takes its time
    serving = engine(config, prefix_cache=False)
    refusals = noting_refusals(worker_of(serving))
    assert gate.waiting.wait(PATIENCE_S), "it begins before any graph"
    for _ in range(2):
        assert serve(serving, PROMPT) == (plain(PROMPT), {})
    assert refusals
    assert all(why == {RowError.NOT_READY} for why in refusals)
    assert not worker_of(serving)._session
    gate.open()
    serve_until_reused(serving, plain)
    assert worker_of(serving).arena.pinned
    assert locked(machine) == worker_of(serving).arena.nbytes
    assert {call.thread for call in registrations(machine)} == {"kvcore-tender"}


def test_the_leader_does_not_flood_workers_that_are_not_ready(
    start: Start, engine: Any, plain: Any, folder: Path, machine: Machine, monkeypatch: Any
) -> None:
    monkeypatch.setattr(client_module, "NOT_READY_S", 1e9)
    config = settings(folder)
    start(config)
    gate = Gate(machine)
    serving = engine(config, prefix_cache=False)
    refusals = noting_refusals(worker_of(serving))
    for seed in range(3):
        prompt = words(seed, 100)
        assert serve(serving, prompt) == (plain(prompt), {})
    assert refusals == [{RowError.NOT_READY}], "one save, and then none for a time"
    gate.open()


def test_memory_that_is_not_pinned_serves_all_the_same(
    start: Start, engine: Any, plain: Any, folder: Path, machine: Machine, caplog: Any
) -> None:
    machine.lockable = 2 * CHUNK
    config = settings(folder)
    start(config)
    serving = engine(config, prefix_cache=False)
    serve_until_reused(serving, plain)
    assert not machine.registered
    assert not worker_of(serving).arena.pinned
    assert caplog.text.count("is not pinned") == 1


def test_a_server_that_comes_back_is_pinned_beside_the_steps(
    start: Start, engine: Any, plain: Any, folder: Path, machine: Machine
) -> None:
    config = settings(folder)
    server = start(config)
    serving = engine(config, prefix_cache=False)
    serve_until_reused(serving, plain)
    until(lambda: server.idle)
    gate = Gate(machine)
    server.close()
    start(config)
    manager = serving.leader.manager
    before = worker_of(serving)._session
    until(lambda: manager.keeper.member is not None and manager.keeper.member.number != before)
    assert gate.waiting.wait(PATIENCE_S)
    refusals = noting_refusals(worker_of(serving))
    for _ in range(2):
        assert serve(serving, PROMPT) == (plain(PROMPT), {})
    assert refusals
    assert all(why == {RowError.NOT_READY} for why in refusals)
    gate.open()
    serve_until_reused(serving, plain)
    until(lambda: locked(machine) == worker_of(serving).arena.nbytes)  # the old memory is released


def test_a_new_session_of_the_same_server_needs_no_pinning(
    start: Start, engine: Any, plain: Any, folder: Path, machine: Machine
) -> None:
    config = settings(folder)
    start(config)
    serving = engine(config, prefix_cache=False)
    serve_until_reused(serving, plain)
    count, keeper = len(registrations(machine)), serving.leader.manager.keeper
    before = worker_of(serving)._session
    keeper._leave()
    until(lambda: keeper.member is not None and keeper.member.number != before)
    assert serve(serving, PROMPT) == (plain(PROMPT), {"host": 96}), "at once"
    assert worker_of(serving)._session not in (0, before)
    assert len(registrations(machine)) == count


def test_a_worker_that_closes_stops_pinning_and_leaves_nothing(
    start: Start, engine: Any, folder: Path, machine: Machine
) -> None:
    config = settings(folder)
    start(config)
    gate = Gate(machine, after=2)
    serving = engine(config)
    worker = worker_of(serving)
    assert gate.waiting.wait(PATIENCE_S)
    closing = threading.Thread(target=worker.close)
    closing.start()
    until(worker._ended.is_set)
    gate.open()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert not machine.registered
    assert len(registrations(machine)) < 2 * 4, "it stopped before the end, and undid it all"


def test_whoever_registers_has_the_device_for_its_current_one(
    start: Start, engine: Any, plain: Any, folder: Path, machine: Machine
) -> None:
    config = settings(folder)
    start(config)
    serving = engine(config, prefix_cache=False)
    serve_until_reused(serving, plain)
    entered = {call.thread for call in machine.calls if call.kind == "enter"}
    assert "kvcore-tender" in entered
    worker_of(serving).close()
    assert {call.kind for call in registrations(machine)} == {"register", "unregister"}
    assert all(call.current for call in registrations(machine))
    assert not machine.registered


def test_no_rank_waits_for_a_read_that_another_has_refused(
    start: Start, engine: Any, plain: Any, folder: Path, tmp_path: Path, machine: Machine
) -> None:
    """One rank has its memory pinned, the other has not."""
    disk = {"path": str(tmp_path / "disk"), "capacity": "1MiB"}
    config = settings(folder, disk=disk, transfer={"load_deadline_s": 3600.0})
    server = start(config)
    before = engine(config, prefix_cache=False)
    serve_until_reused(before, plain)
    until(lambda: server.idle)
    server.close()
    start(config)
    opened, let_in = threading.Event(), threading.Lock()
    others = [worker_of(before)._tender.ident]
    first: list[int] = []

    def only_one(count: int) -> None:
        me = threading.get_ident()
        with let_in:
            if me not in others:
                first.append(me)
        if first and first[0] != me and me not in others:
            assert opened.wait(PATIENCE_S), "the test has ended"

    machine.on_register = only_one
    serving = engine(config, ranks=2, prefix_cache=False)
    ready, late = (one.worker for one in serving.workers)
    refusals = noting_refusals(ready), noting_refusals(late)
    until(
        lambda: any(one._arenas._mapped and one._arenas._mapped[0].ready for one in (ready, late))
    )
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(serve(serving, PROMPT)), daemon=True)
    asking.start()
    asking.join(PATIENCE_S)
    assert answers == [(plain(PROMPT), {})]
    assert sorted(len(set().union(*why)) for why in refusals) == [0, 1], "one rank was ready"
    opened.set()

    def reused() -> bool:
        answer, found = serve(serving, PROMPT)
        assert answer == plain(PROMPT)
        return sum(found.values()) == 96

    until(reused)


@pytest.mark.parametrize("why", ["its queue is full", "it cannot join", "it joins nobody any more"])
def test_no_rank_waits_for_a_read_that_another_cannot_take(
    start: Start, engine: Any, plain: Any, folder: Path, tmp_path: Path, why: str
) -> None:
    disk = {"path": str(tmp_path / "disk"), "capacity": "1MiB"}
    config = settings(folder, disk=disk, transfer={"load_deadline_s": 3600.0})
    server = start(config)
    serving = engine(config, ranks=2, prefix_cache=False)
    serve_until_reused(serving, plain)
    until(lambda: server.idle)
    keeper, worker = serving.leader.manager.keeper, serving.workers[1].worker
    before = keeper.member.number
    server.close()
    start(config)
    until(lambda: keeper.member is not None and keeper.member.number != before)

    def cannot(graph: Any) -> bool:
        raise TierUnavailable("copies of the previous session are still in flight")

    with pytest.MonkeyPatch.context() as patch:
        if why == "its queue is full":
            patch.setattr(worker.engine, "_depth", 0)
        elif why == "it cannot join":
            patch.setattr(worker, "_join", cannot)
        else:
            patch.setattr(worker._tender, "error", RuntimeError("no thread"))
        refusals, answers = noting_refusals(worker), list[Any]()
        asking = threading.Thread(
            target=lambda: answers.append(serve(serving, PROMPT)), daemon=True
        )
        asking.start()
        asking.join(PATIENCE_S)
        assert answers == [(plain(PROMPT), {})]
        assert refusals
        assert all(refusals)
