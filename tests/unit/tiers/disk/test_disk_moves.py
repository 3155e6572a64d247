"""The kernel's queue against its naive twin, blocking calls from threads."""

from __future__ import annotations

import errno
import os
import random
import resource
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.memory.hugepages import PAGE, Pages
from kvcore.tiers.disk import aio, files
from kvcore.tiers.disk.aio import DEPTH, AioMover
from kvcore.tiers.disk.io import Move, Mover, Outcome, ThreadMover
from support.budget import examples

FILE_PAGES = 24


@pytest.fixture(scope="module")
def threads() -> Iterator[ThreadMover]:
    mover = ThreadMover(3, direct=True, most=8 * PAGE)
    yield mover
    mover.close()


@pytest.fixture(scope="module")
def queue(threads: ThreadMover) -> Iterator[AioMover]:
    try:
        mover = AioMover(threads)
    except OSError as error:
        pytest.skip(f"no asynchronous I/O here: {error}")
    yield mover
    mover.close()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "data").write_bytes(random.Random(0).randbytes(FILE_PAGES * PAGE))
    file = os.open(tmp_path / "data", os.O_RDWR | os.O_DIRECT)
    yield file
    os.close(file)


def all_outcomes(mover: Mover, file: int, moves: Sequence[Move], write: bool) -> dict[int, Outcome]:
    with closing(mover.move(file, iter(moves), write=write)) as ended:
        outcomes = list(ended)
    assert len(dict(outcomes)) == len(outcomes) == len(moves)
    return dict(outcomes)


def cut(memory: memoryview, lengths: Sequence[int]) -> list[memoryview]:
    """Cut memory into consecutive pieces of the given numbers of pages."""
    parts, start = [], 0
    for length in lengths:
        parts.append(memory[start : start + length * PAGE])
        start += length * PAGE
    return parts


lengths = st.lists(st.integers(1, 3), min_size=1, max_size=4)


@settings(max_examples=examples(30, 1))
@given(data=st.data(), write=st.booleans(), size=st.integers(0, FILE_PAGES * PAGE))
def test_the_queue_does_what_threads_do(
    data: st.DataObject,
    write: bool,
    size: int,
    queue: AioMover,
    threads: ThreadMover,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Pieces of any number of pages at distinct offsets give equal outcomes, memory and files.

    Some lie beyond the file's end, which may be at any byte.
    """
    shapes = data.draw(st.lists(lengths, max_size=6))
    content = random.Random(size).randbytes(size)
    results = []
    for mover in (threads, queue):
        path = tmp_path_factory.getbasetemp() / "twin"
        path.write_bytes(content)
        memory = [Pages(12 * PAGE, huge=False).view for _ in shapes]
        for i, view in enumerate(memory):
            view[:] = random.Random(i).randbytes(len(view))
        moves = [
            Move(100 + i, cut(view, shape), 12 * PAGE * (len(shapes) - 1 - i))
            for i, (view, shape) in enumerate(zip(memory, shapes, strict=True))
        ]
        file = os.open(path, os.O_RDWR | os.O_DIRECT)
        try:
            outcomes = all_outcomes(mover, file, moves, write)
        finally:
            os.close(file)
        moved = []
        for i, view in enumerate(memory):
            got = outcomes[100 + i]
            assert isinstance(got, int)
            moved.append(bytes(view[:got]))
        results.append((outcomes, moved, path.read_bytes()))
    assert results[0] == results[1]


def test_more_moves_than_the_queue_is_deep(queue: AioMover, file: int) -> None:
    memory = Pages(PAGE).view
    moves = [Move(i, [memory], i % FILE_PAGES * PAGE) for i in range(2 * DEPTH + 5)]
    assert set(all_outcomes(queue, file, moves, False).values()) == {PAGE}


def test_an_empty_batch(queue: AioMover, threads: ThreadMover, file: int) -> None:
    for mover in (queue, threads):
        assert all_outcomes(mover, file, [], True) == {}


def test_what_the_queue_cannot_take_goes_to_its_fallback(queue: AioMover, file: int) -> None:
    """Memory at an odd address, between moves of whole pages, in one batch."""
    expected = random.Random(0).randbytes(FILE_PAGES * PAGE)
    memory = [Pages(2 * PAGE).view[i % 2 * 3 :][:PAGE] for i in range(8)]
    moves = [Move(i, [view], i * PAGE) for i, view in enumerate(memory)]
    assert set(all_outcomes(queue, file, moves, False).values()) == {PAGE}
    assert b"".join(memory) == expected[: 8 * PAGE]


def test_one_bad_move_does_not_fail_the_others(
    queue: AioMover, threads: ThreadMover, file: int
) -> None:
    """A negative offset is refused at the start, one beyond the limit while it is under way."""
    for mover in (queue, threads):
        memory = Pages(PAGE).view
        places = [0, -PAGE, PAGE, 40 * PAGE, 2 * PAGE]
        moves = [Move(i, [memory], place) for i, place in enumerate(places)]
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (32 * PAGE, hard))
        try:
            outcomes = all_outcomes(mover, file, moves, True)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        errors = {i: o.errno for i, o in outcomes.items() if isinstance(o, OSError)}
        assert errors == {1: errno.EINVAL, 3: errno.EFBIG}
        assert [outcomes[i] for i in (0, 2, 4)] == [PAGE] * 3


def test_a_write_stopped_in_the_middle_is_an_error(
    queue: AioMover, threads: ThreadMover, file: int
) -> None:
    for mover in (queue, threads):
        memory = Pages(4 * PAGE).view
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (32 * PAGE, hard))
        try:
            outcomes = all_outcomes(mover, file, [Move(0, [memory], 30 * PAGE)], True)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert isinstance(outcomes[0], OSError)
        assert outcomes[0].errno == errno.EFBIG


def test_leaving_early_waits_for_what_is_under_way(
    queue: AioMover, file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After that nothing writes to the caller's memory, and the queue can be used again."""
    started, ended = 0, 0
    submit, wait = aio._Context.submit, aio._Context.wait

    def count_started(context: aio._Context, iocbs: Sequence[bytes]) -> int:
        nonlocal started
        count = submit(context, iocbs)
        started += count
        return count

    def count_ended(context: aio._Context) -> list[tuple[int, int]]:
        nonlocal ended
        some = wait(context)
        ended += len(some)
        return some

    monkeypatch.setattr(aio._Context, "submit", count_started)
    monkeypatch.setattr(aio._Context, "wait", count_ended)
    memory = Pages(PAGE).view
    moves = [Move(i, [memory], 0) for i in range(50)]
    with closing(queue.move(file, moves, write=False)) as outcomes:
        next(outcomes)
    assert started == ended > 1
    assert len(all_outcomes(queue, file, moves, False)) == 50


def test_callers_at_once_do_not_see_each_others_moves(queue: AioMover, file: int) -> None:
    expected = random.Random(0).randbytes(FILE_PAGES * PAGE)

    def work(place: int) -> None:
        for _ in range(20):
            memory = Pages(PAGE, huge=False).view
            assert all_outcomes(queue, file, [Move(7, [memory], place * PAGE)], False) == {7: PAGE}
            assert bytes(memory) == expected[place * PAGE : (place + 1) * PAGE]

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work, place) for place in range(4)]:
            done.result()


def test_where_the_kernel_refuses_threads_do_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel may refuse at the start, which is logged, or later for one more caller."""
    real = aio._Context

    def refused() -> aio._Context:
        raise OSError(errno.EAGAIN, "aio-max-nr reached")

    def round_trip(data: files.DataFile) -> None:
        memory = Pages(PAGE).view
        memory[:] = os.urandom(PAGE)
        assert list(data.write([files.Piece(3, 0, [memory])])) == [(3, PAGE)]
        again = Pages(PAGE).view
        assert list(data.read([files.Piece(4, 0, [again])])) == [(4, PAGE)]
        assert again == memory

    with monkeypatch.context() as patch:
        patch.setattr(aio, "_Context", refused)
        data = files.DataFile(tmp_path / "a", PAGE, num_slots=2)
        assert "aio-max-nr reached" in caplog.text
        round_trip(data)
        data.close()
    assert aio._Context is real
    data = files.DataFile(tmp_path / "b", PAGE, num_slots=2)
    with monkeypatch.context() as patch:
        patch.setattr(aio, "_Context", refused)
        held = data._mover._take() if isinstance(data._mover, AioMover) else None
        round_trip(data)
    if held is not None:
        held.close()
    data.close()


def test_a_machine_whose_calls_are_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aio.platform, "machine", lambda: "sparc")  # type: ignore[attr-defined]
    with pytest.raises(OSError, match="sparc"):
        aio._Context()
