"""The machine that a test steps: nothing runs by itself, and host threads wait for it."""

from __future__ import annotations

import threading

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcore.testing.waiting import PATIENCE_S, until
from kvcore_devtools.gpu import ManualMachine, RecordingDevice
from kvcore_devtools.gpu.device import RecordedStream

CPU = torch.device("cpu")


@given(st.data())
def test_streams_go_forward_only_by_steps_and_in_their_order(data: st.DataObject) -> None:
    machine = ManualMachine()
    device, ran = RecordingDevice(machine, CPU), list[int]()
    streams = [device.stream() for _ in range(3)]
    issued: list[set[int]] = [set(), set(), set()]  # by stream: launches that come before the next
    before: list[tuple[int, set[int]]] = []  # for each launch, its stream and what comes before it

    def launch(at: int) -> None:
        number = len(before)
        before.append((at, set(issued[at])))
        issued[at].add(number)
        with streams[at].issuing():
            machine.launch("work", lambda: ran.append(number))

    which = st.integers(0, 2)
    for at, other in data.draw(st.lists(st.tuples(which, st.none() | which), max_size=12)):
        if other is not None:
            streams[at].follow(streams[other].record())
            issued[at] |= issued[other]
        launch(at)
    assert ran == []
    while len(ran) < len(before):
        # A stream that has work, which may have to wait. Of any stream, most steps do nothing.
        queued = [work.stream for work in machine._queued]
        left = [at for at, stream in enumerate(streams) if stream.queue in queued]
        at, known = data.draw(st.sampled_from(left)), len(ran)
        machine.step(streams[at].queue)
        for number in ran[known:]:
            stream, needed = before[number]
            assert stream == at
            assert needed <= set(ran[:known])
        assert len(ran) <= known + 1
    machine.check()


def test_a_host_thread_waits_until_others_let_the_work_run() -> None:
    machine = ManualMachine()
    device, ran = RecordingDevice(machine, CPU), list[str]()
    machine.launch("work", lambda: ran.append("work"))
    event = device.current_stream().record()
    assert not any(event.passed() for _ in range(100)), "a query runs nothing"
    thread = threading.Thread(target=lambda: (event.wait(), ran.append("host")))
    thread.start()
    until(lambda: machine.counts["host_waits"])
    assert machine.step(machine.default)
    assert ran == ["work"]
    assert not event.passed()
    assert machine.step(machine.default)
    thread.join(PATIENCE_S)
    assert ran == ["work", "host"]
    assert event.passed()


def test_a_device_that_works_by_itself_serves_who_waits_already() -> None:
    machine = ManualMachine()
    device, ran = RecordingDevice(machine, CPU), list[str]()
    stream: RecordedStream = device.stream()
    with stream.issuing():
        machine.launch("work", lambda: ran.append("work"))
    event = stream.record()
    thread = threading.Thread(target=event.wait)
    thread.start()
    until(lambda: machine.counts["host_waits"])
    assert ran == []
    with machine.working():
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        later = stream.record()
        until(later.passed)
    machine.launch("more", lambda: ran.append("more"))
    assert not any(device.current_stream().record().passed() for _ in range(100))
    assert ran == ["work"]
