"""The recording device by itself: what is an order, what is a fault, and which orders may run."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import UnsupportedError
from kvcore.memory.device import CpuDevice, device_of
from kvcore.memory.hugepages import PAGE
from kvcore_devtools.gpu import Machine, RecordingDevice, installed
from kvcore_devtools.gpu.memory import NOTHING, Spans, common, span, together, within

SEEDS = range(12)


class Board:
    """Numbered cells of device memory on a machine with a device."""

    def __init__(self, machine: Machine, cells: int = 4) -> None:
        self.machine = machine
        self.cells = torch.zeros(cells, dtype=torch.int64)
        self.device = RecordingDevice(machine, torch.device("cpu"))
        machine.know_device(
            self.cells.data_ptr(), self.cells.nbytes, "the board", lambda at: f"cell {at // 8}"
        )

    def at(self, cell: int) -> Spans:
        return span(self.cells.data_ptr() + 8 * cell, 8)

    def put(self, cell: int, value: int) -> None:
        def run() -> None:
            self.cells[cell] = value

        self.machine.launch(f"put {value}", run, writes=self.at(cell))

    def take(self, cell: int, into: list[int]) -> None:
        self.machine.launch("take", lambda: into.append(int(self.cells[cell])), reads=self.at(cell))


def pages(count: int = 1) -> npt.NDArray[np.uint8]:
    """Return whole pages of host memory."""
    return np.frombuffer(mmap.mmap(-1, count * PAGE), dtype=np.uint8)


def kinds(machine: Machine) -> list[str]:
    machine.finish()
    return [fault.kind for fault in machine.faults]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_stream_keeps_its_order(seed: int) -> None:
    board, found = Board(Machine(seed)), list[int]()
    for value in range(5):
        board.put(0, value)
        board.take(0, found)
    assert kinds(board.machine) == []
    assert found == [0, 1, 2, 3, 4]


def test_streams_without_an_event_race_and_run_in_either_order() -> None:
    outcomes = set()
    for seed in SEEDS:
        board, found = Board(Machine(seed)), list[int]()
        side = board.device.stream()
        board.put(0, 7)
        with side.issuing():
            board.take(0, found)
        assert kinds(board.machine) == ["race"]
        outcomes.add(found[0])
    assert outcomes == {0, 7}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_stream_that_follows_an_event_is_ordered_after_it(seed: int) -> None:
    board, found = Board(Machine(seed)), list[int]()
    side = board.device.stream()
    board.put(0, 7)
    side.follow(board.device.current_stream().record())
    with side.issuing():
        board.take(0, found)
    assert kinds(board.machine) == []
    assert found == [7]


def test_an_event_covers_only_what_was_issued_before_it() -> None:
    board, found = Board(Machine(0)), list[int]()
    side = board.device.stream()
    event = board.device.current_stream().record()
    board.put(0, 7)
    side.follow(event)
    with side.issuing():
        board.take(0, found)
    assert kinds(board.machine) == ["race"]


def test_a_message_names_both_accesses() -> None:
    board = Board(Machine(0))
    side = board.device.stream()
    board.put(2, 7)
    with side.issuing(), board.machine.doing("graph 5"):
        board.take(2, [])
    board.machine.finish()
    (fault,) = board.machine.faults
    text = str(fault)
    assert "cell 2" in text
    assert "written by put 7, on the default stream, at gpu/test_machine.py" in text
    assert "read by take of graph 5, on stream" in text
    with pytest.raises(AssertionError, match="no order between"):
        board.machine.check()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_host_wait_orders_the_host_and_all_that_it_issues(seed: int) -> None:
    board, found = Board(Machine(seed)), list[int]()
    side = board.device.stream()
    board.put(0, 7)
    board.device.current_stream().record().wait()
    board.machine.touch("a look", board.at(0), writes=False)
    assert int(board.cells[0]) == 7
    with side.issuing():
        board.take(0, found)
        board.put(0, 8)
    side.record().wait()
    assert kinds(board.machine) == []
    assert found == [7]


def test_a_query_that_says_true_orders_the_host_and_one_says_so_at_last() -> None:
    for seed in SEEDS:
        board = Board(Machine(seed, eager=0.0))
        board.put(0, 7)
        event = board.device.current_stream().record()
        assert sum(1 for _ in iter(event.passed, True)) < 50
        board.machine.touch("a look", board.at(0), writes=False)
        assert kinds(board.machine) == []


def test_a_host_that_reads_too_early_races() -> None:
    board = Board(Machine(0))
    board.put(0, 7)
    board.machine.touch("a look", board.at(0), writes=False)
    assert kinds(board.machine) == ["race"]


def test_a_host_that_rewrites_what_a_copy_still_reads_races() -> None:
    board = Board(Machine(0))
    board.take(0, [])
    board.machine.touch("new bytes", board.at(0), writes=True)
    assert kinds(board.machine) == ["race"]


def test_reads_do_not_race() -> None:
    board = Board(Machine(0))
    side = board.device.stream()
    board.take(0, [])
    with side.issuing():
        board.take(0, [])
    board.machine.touch("a look", board.at(0), writes=False)
    assert kinds(board.machine) == []


def test_neighbours_do_not_race() -> None:
    board = Board(Machine(0))
    side = board.device.stream()
    board.put(0, 7)
    with side.issuing():
        board.put(1, 7)
    assert kinds(board.machine) == []


def test_a_wait_raises_if_work_before_the_event_has_failed() -> None:
    board = Board(Machine(0))
    side, other = board.device.stream(), board.device.stream()

    def fails() -> None:
        raise ValueError("an illegal address")

    board.machine.launch("a kernel", fails)
    side.follow(board.device.current_stream().record())
    for stream in (side, board.device.current_stream()):
        with pytest.raises(RuntimeError):
            stream.record().wait()
    other.record().wait()
    assert kinds(board.machine) == ["work"]


@pytest.mark.parametrize("joined", [False, True])
def test_threads_are_ordered_by_start_and_join_only(joined: bool) -> None:
    with installed(Machine(0)) as machine:
        board = Board(machine)
        machine.touch("before", board.at(0), writes=True)
        touch: Callable[[], None] = lambda: machine.touch("in it", board.at(0), writes=True)  # noqa: E731
        thread = threading.Thread(target=touch)
        thread.start()
        if joined:
            thread.join()
        else:
            while thread.is_alive():
                pass
        machine.touch("after", board.at(0), writes=True)
        assert kinds(machine) == ([] if joined else ["race"])


def test_what_one_thread_knows_can_be_passed_on() -> None:
    machine, told = Machine(0), list[dict[int, int]]()
    board = Board(machine)

    def tell() -> None:
        machine.touch("in it", board.at(0), writes=True)
        told.append(machine.now())

    thread = threading.Thread(target=tell)
    thread.start()
    thread.join()
    machine.learn(told[0])
    machine.touch("after", board.at(0), writes=True)
    assert kinds(machine) == []


# -- memory ---------------------------------------------------------------------------------


def test_only_memory_that_the_device_reaches_is_touched_by_launches() -> None:
    machine = Machine(0)
    board, array = Board(machine), pages()
    address = array.ctypes.data

    def launch() -> None:
        machine.launch("a copy", lambda: None, reads=span(address, 64))

    launch()
    assert kinds(machine) == ["memory"]
    machine.know_host(address, PAGE, "host memory")
    launch()
    assert kinds(machine) == ["memory"] * 2
    board.device.register(address, PAGE)
    launch()
    assert kinds(machine) == ["memory"] * 2
    assert board.device.reaches(torch.from_numpy(array))
    machine.synchronize()
    board.device.unregister(address)
    assert not board.device.reaches(torch.from_numpy(array))
    assert kinds(machine) == ["memory"] * 2
    launch()
    assert kinds(machine) == ["memory"] * 3


@pytest.mark.parametrize("ended", [False, True])
def test_memory_is_unregistered_and_unmapped_after_its_last_use(ended: bool) -> None:
    machine = Machine(0)
    board, array = Board(machine), pages()
    region = machine.memory.at(board.cells.data_ptr())
    assert region is not None
    board.device.register(array.ctypes.data, 64)
    machine.launch("a copy", lambda: None, reads=span(array.ctypes.data, 64), writes=board.at(1))
    if ended:
        machine.synchronize()
    board.device.unregister(array.ctypes.data)
    machine.unmap(region)
    assert kinds(machine) == ([] if ended else ["in use", "in use"])


def test_a_registration_that_fails_leaves_no_error_but_a_raw_one_does() -> None:
    machine = Machine(0, lockable=64)
    board, array = Board(machine), np.zeros(16, dtype=np.int64)
    with pytest.raises(UnsupportedError, match="no room"):
        board.device.register(array.ctypes.data, 128)
    board.put(0, 1)
    with pytest.raises(UnsupportedError, match="no room"):
        machine.register(array.ctypes.data, 128)
    with pytest.raises(RuntimeError, match="cudaHostRegister of 128 bytes"):
        board.put(0, 1)
    board.put(0, 1)
    assert kinds(machine) == ["pending error"]


def test_a_registration_in_a_step_stalls_the_engine() -> None:
    machine = Machine(0)
    board, array = Board(machine), pages(2)
    board.device.register(array.ctypes.data, PAGE)
    with machine.in_step():
        board.device.register(array.ctypes.data + PAGE, PAGE)
    assert kinds(machine) == ["stall"]


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 4)), min_size=1, max_size=4))
def test_two_registrations_that_share_a_page_are_a_fault(parts: list[tuple[int, int]]) -> None:
    """The parts are half pages; some begin in the middle of one."""
    machine, taken, faults = Machine(0), set[int](), 0
    device = RecordingDevice(machine, torch.device("cpu"))
    for start, size in parts:
        mine = set(range(start, start + size))
        if start * PAGE // 2 in machine.registered:
            continue
        faults += bool(start % 2 or taken & mine)
        taken |= mine
        device.register(start * PAGE // 2, size * PAGE // 2)
    assert kinds(machine) == ["memory"] * faults


def test_the_device_has_room_for_so_much_and_the_start_is_aligned() -> None:
    machine = Machine(0)
    device = RecordingDevice(machine, torch.device("cpu"))
    machine.room = 1000
    memory = device.allocate(600)
    assert memory.data_ptr() % 256 == 0
    with pytest.raises(torch.OutOfMemoryError):
        device.allocate(401)
    device.allocate(400)
    assert machine.allocated == [600, 400]


def test_calls_are_noted_in_their_order_with_the_thread_and_its_device() -> None:
    machine, array = Machine(0, index=1), pages()
    device = RecordingDevice(machine, torch.device("cpu"))
    side, start = device.stream(), array.ctypes.data
    device.register(start, PAGE)
    with device.current():
        device.unregister(start)
    thread = threading.Thread(target=device.enter, name="other")
    thread.start()
    thread.join()
    event = device.current_stream().record()
    side.follow(event)
    with side.issuing():
        device.upload(np.zeros(3))
    side.hold(torch.from_numpy(array))
    default, this = machine.default, threading.current_thread().name
    assert machine.calls == [
        ("register", start, default, this, False),
        ("unregister", start, default, this, True),
        ("enter", None, default, "other", True),
        ("record", event.point, default, this, False),
        ("follow", event.point, side.queue, this, False),
        ("upload", 24, side.queue, this, True),
        ("hold", start, side.queue, this, False),
    ]


# -- the current device ---------------------------------------------------------------------


@pytest.mark.parametrize("entered", [False, True])
def test_a_thread_issues_only_with_its_ranks_device(entered: bool) -> None:
    machine = Machine(0, index=1)
    board = Board(machine)
    if entered:
        board.device.enter()
    stream = board.device.stream()
    with stream.issuing():  # as torch.cuda.stream, it makes the stream's device current
        board.put(1, 1)
    event = stream.record()
    assert kinds(machine) == []
    board.put(0, 1)
    board.device.upload(np.zeros(3))
    event.wait()
    assert event.passed()
    assert kinds(machine) == ([] if entered else ["device"] * 4)


def test_registration_makes_the_device_current_by_itself_and_current_undoes_it() -> None:
    machine = Machine(0, index=1)
    board, array = Board(machine), pages()
    board.device.register(array.ctypes.data, PAGE)
    board.device.unregister(array.ctypes.data)
    with board.device.current():
        board.put(0, 1)
    assert kinds(machine) == []
    board.put(0, 1)
    assert kinds(machine) == ["device"]


# -- counts and times -----------------------------------------------------------------------


def test_launches_waits_and_uploads_are_counted_by_what_is_done() -> None:
    machine = Machine(0)
    board = Board(machine)
    board.put(0, 1)
    with machine.doing("op 1"):
        board.put(0, 1)
        board.device.upload(np.zeros(3))
        board.device.current_stream().record().wait()
    assert machine.counts == {
        "launches": 2, "uploads": 1, "upload_nbytes": 24, "host_waits": 1
    }  # fmt: skip
    assert machine.by_op["op 1"] == {
        "launches": 1, "uploads": 1, "upload_nbytes": 24, "host_waits": 1
    }  # fmt: skip


def test_timed_events_are_apart_by_the_work_between_them() -> None:
    board = Board(Machine(0))
    stream = board.device.current_stream()
    first = stream.record(timed=True)
    board.put(0, 1)
    last = stream.record(timed=True)
    last.wait()
    assert last.since(first) > 0


def test_installed_serves_the_cpu_and_undoes_it() -> None:
    with installed(Machine(0)):
        assert isinstance(device_of(None), RecordingDevice)
    assert isinstance(device_of(None), CpuDevice)


# -- ranges ---------------------------------------------------------------------------------

RANGES = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 6)), max_size=6)


def cells(ranges: list[tuple[int, int]]) -> set[int]:
    return {i for start, size in ranges for i in range(start, start + size)}


def of(ranges: list[tuple[int, int]]) -> Spans:
    return together(span(start, size) for start, size in ranges)


@given(RANGES, RANGES)
def test_ranges_are_sets(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    one, other, both = of(a), of(b), cells(a) & cells(b)
    assert cells([(int(s), int(e - s)) for s, e in one]) == cells(a)
    assert (one[1:, 0] > one[:-1, 1]).all()
    assert common(one, other) == (min(both) if both else None)
    assert within(one, other) == (cells(a) <= cells(b))
    assert len(together([NOTHING])) == 0
