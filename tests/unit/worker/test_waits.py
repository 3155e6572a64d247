"""A worker over a device that queues its work: what the host waits for, and what streams do."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.testing.waiting import until
from kvcore.transfer.graph import RowError
from kvcore.transfer.path_queue import SAVES_ISSUED
from kvcore_devtools.gpu.machine import STEP_S
from support.manual_worker import PAGES, SHAPE, SLOTS, ManualRig, manual_rig


@pytest.fixture
def rig() -> Iterator[ManualRig]:
    with manual_rig() as made:
        yield made


def test_a_forward_is_launched_before_its_load_has_begun(rig: ManualRig) -> None:
    """The step before it still runs on the device, and the load waits for that."""
    seen: list[set[float]] = []
    rig.compute(lambda: rig.write(3, 7.0))  # the step before still writes to the page
    graph = rig.load(1, page=3, slot=0)
    rig.submit(graph)
    for layer in range(SHAPE.layers):
        rig.worker.wait_layer(1, layer)
        rig.compute(
            lambda layer=layer: seen.append({float(x) for x in rig.caches[layer][3].unique()})
        )
    assert not rig.worker.poll(), "nothing has run, and the forward is launched"
    rig.end()
    assert seen == [{1.0}] * SHAPE.layers
    assert not rig.host_waited


def test_a_page_is_written_after_the_save_that_reads_it(rig: ManualRig) -> None:
    rig.compute(lambda: rig.write(2, 5.0))
    rig.submit(rig.save(1, page=2, slot=4))
    rig.worker.follow(1)
    rig.compute(lambda: rig.write(2, 9.0))  # the page belongs to another request
    assert not rig.host_waited
    rig.end()
    assert rig.kept(4) == {5.0}
    assert rig.read(2) == {9.0}


def test_threads_that_issue_copies_or_wait_for_them_have_entered_the_device(rig: ManualRig) -> None:
    """Or an engine that captures a graph meanwhile would forbid it to them."""
    rig.submit(rig.save(1, page=2, slot=4), rig.load(2, page=3, slot=0))
    rig.end()
    entered = {call.thread for call in rig.machine.calls if call.kind == "enter"}
    assert rig.machine.waited
    assert rig.machine.waited < entered


def test_a_load_into_a_page_that_a_save_reads_comes_after_it(rig: ManualRig) -> None:
    rig.compute(lambda: rig.write(2, 5.0))
    rig.submit(rig.save(1, page=2, slot=4))
    rig.worker.follow(1)
    rig.submit(rig.load(2, page=2, slot=0))
    rig.until_issued(rig.load(2, page=2, slot=0))
    loading = rig.others()[-1]
    rig.run(rig.stream, loading)
    assert rig.read(2) == {5.0}, "the save has not read the page"
    rig.end()
    assert rig.kept(4) == {5.0}
    assert rig.read(2) == {1.0}


def test_few_saves_are_issued_unless_one_is_waited_for(rig: ManualRig) -> None:
    graphs = [rig.save(i, page=i, slot=i) for i in range(6)]
    rig.submit(*graphs)
    for graph in graphs[:SAVES_ISSUED]:
        until(lambda graph=graph: rig.issued(graph))
    assert not any(map(rig.issued, graphs[SAVES_ISSUED:]))
    rig.worker.follow(5)
    assert rig.issued(graphs[5]), "the fence waits for its issue only"
    assert not any(map(rig.issued, graphs[SAVES_ISSUED:5]))
    loads = [rig.load(10 + i, page=7, slot=7) for i in range(5)]
    rig.submit(*loads)
    for load in loads:
        until(lambda load=load: rig.issued(load))
    assert not any(map(rig.issued, graphs[SAVES_ISSUED:5])), "loads do not make room for saves"
    assert len(rig.end()) == 6 + 5 * SHAPE.layers
    rig.worker.engine.check_integrity()


def test_an_op_that_was_issued_counts_until_it_has_ended(rig: ManualRig) -> None:
    """Before vLLM sleeps, or SGLang flushes its cache, no copy may be left on any stream."""
    saves = [rig.save(i, page=i, slot=i) for i in range(SAVES_ISSUED + 1)]
    rig.submit(*saves)
    rig.until_issued(saves[0])
    assert not rig.worker.wait_idle(0.01)
    while rig.machine.step(rig.others()[0].queue):
        pass  # those that were issued end, and the last one is issued or waits
    rig.end()
    assert rig.worker.wait_idle(0)


def test_an_issued_op_is_not_cancelled_and_one_that_waits_is(rig: ManualRig) -> None:
    graphs = [rig.save(i, page=i, slot=i) for i in range(SAVES_ISSUED + 1)]
    rig.submit(*graphs)
    for graph in graphs[:SAVES_ISSUED]:
        rig.until_issued(graph)
    for graph in graphs:
        rig.worker.cancel(graph.graph_id)
    assert [(r.graph_id, r.failed) for r in rig.worker.poll()] == [
        (SAVES_ISSUED, {0: RowError.CANCELLED})
    ]
    assert sorted(r.graph_id for r in rig.end() if not r.failed) == list(range(SAVES_ISSUED))


def test_a_copy_that_cannot_be_issued_has_failed_when_the_wait_returns(rig: ManualRig) -> None:
    rig.ops.refuse = 1
    rig.submit(rig.load(1, page=1, slot=0, by_layer=False))
    with rig.machine.working():
        rig.worker.follow(1)
    assert [report.failed for report in rig.worker.poll()] == [{0: RowError.INTERNAL}]


def test_a_device_that_fails_fails_the_op(rig: ManualRig) -> None:
    rig.ops.breaks = True
    rig.submit(rig.load(1, page=1, slot=0, by_layer=False))
    rig.worker.follow(1)
    assert rig.worker.poll() == []
    assert [report.failed for report in rig.end()] == [{0: RowError.INTERNAL}]
    assert [fault.kind for fault in rig.machine.faults] == ["work"]
    rig.machine.faults.clear()


def test_what_a_failed_op_has_issued_has_ended_with_it(rig: ManualRig) -> None:
    """Its pages are given to others as soon as it is reported."""
    plain, copies = rig.ops.copy, []

    def second_fails(*args: object) -> None:
        plain(*args)
        copies.append(args)
        raise RuntimeError("planted")

    rig.ops.copy = second_fails  # type: ignore[method-assign, assignment]
    rig.submit(rig.load(1, page=1, slot=0, by_layer=False))
    until(lambda: rig.machine.waited)
    assert rig.worker.poll() == [], "a copy to the page is under way"
    assert [r.failed for r in rig.end()] == [{0: RowError.INTERNAL}]


def test_the_time_of_a_copy_leaves_out_what_it_waited_for(rig: ManualRig) -> None:
    timings: list[float] = []
    rig.worker.engine._threads[0]._timings._observer = lambda timing: timings.append(timing.seconds)
    for _ in range(50):
        rig.compute(lambda: None)
    loads = [rig.load(1, page=1, slot=0), rig.load(2, page=2, slot=0)]
    rig.submit(*loads)
    for load in loads:
        rig.until_issued(load)
    rig.run(*rig.others())
    rig.run()
    rig.end()
    assert timings == pytest.approx([2 * STEP_S] * (2 * SHAPE.layers)), "the copy, and its event"


def test_a_second_attempt_waits_for_what_the_first_would_have(rig: ManualRig) -> None:
    """Any thread may submit it, one whose current stream is not the engine's too."""
    rig.compute(lambda: rig.write(1, 7.0))
    after = rig.worker.mark()
    elsewhere = rig.device.stream()

    def submit() -> None:
        with elsewhere.issuing():
            assert rig.worker.submit(rig.load(1, page=1, slot=0), after=after) == []

    with ThreadPoolExecutor(1) as pool:
        pool.submit(submit).result()
    rig.until_issued(rig.load(1, page=1, slot=0))
    rig.run(*rig.others())
    assert rig.read(1) == {0.0}
    rig.end()
    assert rig.read(1) == {1.0}


def test_a_mark_can_span_streams(rig: ManualRig) -> None:
    forward = rig.device.stream()
    rig.compute(lambda: rig.write(1, 7.0), forward)
    after = rig.worker.mark(forward)
    assert rig.worker.submit(rig.load(1, page=1, slot=0), after=after) == []
    rig.until_issued(rig.load(1, page=1, slot=0))
    rig.run(*rig.others(forward), rig.stream)
    assert rig.read(1) == {0.0}
    rig.end()
    assert rig.read(1) == {1.0}


# -- any order ------------------------------------------------------------------------------


@pytest.mark.slow
@given(st.data())
@settings(max_examples=25, deadline=None)
def test_pages_change_hands_without_the_host_and_nobody_sees_the_difference(
    data: st.DataObject,
) -> None:
    """Random steps over few pages, device work in a random order, against values kept in order."""
    with manual_rig() as rig:
        pages = [0.0] * PAGES
        slots = [1.0] * SLOTS
        readers: dict[int, list[int]] = {}
        loaded: list[tuple[int, float]] = []
        seen: list[tuple[int, set[float]]] = []
        expected: list[tuple[int, set[float]]] = []
        saved: dict[int, float] = {}
        free = list(range(SLOTS - 1, 0, -1))
        for number in range(data.draw(st.integers(1, 12))):
            page = data.draw(st.integers(0, 2))
            action = data.draw(st.sampled_from(["write", "save", "load", "read"]))
            if action in ("write", "load"):  # the page is given away
                for graph_id in readers.pop(page, []):
                    rig.worker.follow(graph_id)
            if action == "write":
                pages[page] = float(number + 10)
                rig.compute(lambda page=page, value=pages[page]: rig.write(page, value))
            elif action == "save" and free:
                slot = free.pop()
                saved[slot] = pages[page]
                rig.submit(rig.save(number, page, slot))
                readers.setdefault(page, []).append(number)
            elif action == "load":
                pages[page] = slots[0]
                rig.submit(rig.load(number, page, 0))
                for layer in range(SHAPE.layers):
                    rig.worker.wait_layer(number, layer)
                loaded.append((page, slots[0]))
            elif action == "read":
                expected.append((page, {pages[page]}))
                rig.compute(lambda page=page: seen.append((page, rig.read(page))))
            for _ in range(data.draw(st.integers(0, 3))):
                streams = list(rig.machine.streams)  # threads make theirs when they get to it
                rig.machine.step(streams[data.draw(st.integers(0, 3)) % len(streams)])
        rig.end()
        assert seen == expected
        assert all(rig.kept(slot) == {value} for slot, value in saved.items())
        assert [rig.read(page) for page in range(PAGES)] == [{value} for value in pages]
        assert not rig.host_waited
        rig.worker.engine.check_integrity()


def joined_saves(rig: ManualRig) -> None:
    """Submit saves of a step whose pages are written one after the other, then let them wait."""
    rig.compute(lambda: rig.write(0, 3.0))
    rig.submit(rig.save(90, page=0, slot=0), rig.save(91, page=0, slot=1))
    for graph_id in (90, 91):
        until(lambda graph_id=graph_id: rig.issued(rig.save(graph_id, page=0, slot=0)))
    wave = rig.worker.wave()
    for page in range(2, 7):
        rig.compute(lambda page=page: rig.write(page, 10.0 + page))
        assert rig.worker.submit(rig.save(page, page=page, slot=page), wave=wave) == []


def test_saves_that_are_joined_come_after_all_that_each_waits_for(rig: ManualRig) -> None:
    joined_saves(rig)
    rig.worker.follow(*range(2, 7))
    assert len({id(rig.worker.engine.issued(graph_id)[0]) for graph_id in range(2, 7)}) == 1
    rig.compute(lambda: [rig.write(page, 99.0) for page in range(2, 7)])  # type: ignore[func-returns-value]
    assert not rig.host_waited
    reports = rig.end()
    assert sorted(r.graph_id for r in reports) == [*range(2, 7), 90, 91]
    assert not any(r.failed for r in reports)
    assert [rig.kept(page) for page in range(2, 7)] == [{10.0 + page} for page in range(2, 7)]


def test_one_that_cannot_be_copied_lets_the_others_be(rig: ManualRig) -> None:
    joined_saves(rig)
    rig.ops.refuse = 2  # of all at once, then of the first alone
    with rig.machine.working():
        rig.worker.follow(*range(2, 7))
    failed = {r.graph_id: r.failed for r in rig.end()}
    assert {graph_id for graph_id, rows in failed.items() if rows} == {2}
    assert [rig.kept(page) for page in range(3, 7)] == [{10.0 + page} for page in range(3, 7)]
