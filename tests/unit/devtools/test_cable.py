"""One direction of the cable that is a process: which frames come through, and when."""

from __future__ import annotations

import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from kvcore_devtools.hosts.cable import MAX_FRAMES, Line

seconds = st.floats(0, 10)


def line(delay_s: float = 0.0, jitter_s: float = 0.0, loss: float = 0.0, seed: str = "") -> Line:
    made = Line()
    made.become(delay_s, jitter_s, loss, seed)
    return made


def frame(number: int) -> bytes:
    return number.to_bytes(4, "big")


def number(taken: bytes) -> int:
    return int.from_bytes(taken, "big")


@given(st.lists(seconds, min_size=1), seconds, st.floats(0, 1), st.lists(seconds))
def test_a_frame_comes_when_it_is_due_and_not_before(
    waits: list[float], delay_s: float, share: float, looks: list[float]
) -> None:
    jitter_s = delay_s * share
    one = line(delay_s, jitter_s)
    times = list(itertools.accumulate(waits))
    for n, at in enumerate(times):
        one.put(frame(n), at)
    came: list[int] = []
    for now in [*sorted(looks), times[-1] + delay_s + jitter_s + 1e-6]:
        early = now - 1e-6
        for n in map(number, one.take(now)):
            assert early < now
            assert times[n] + delay_s - jitter_s <= now + 1e-6
            came.append(n)
        waiting = set(range(len(times))) - set(came)
        assert all(times[n] + delay_s + jitter_s >= early for n in waiting), "it was due"
    assert sorted(came) == list(range(len(times))), "none is lost"
    assert one.due is None
    if not jitter_s:
        assert came == sorted(came), "none overtakes another"


def test_jitter_lets_frames_overtake_each_other() -> None:
    one = line(1.0, 0.5)
    for n in range(100):
        one.put(frame(n), 0.0)
    came = [number(taken) for taken in one.take(1.5)]
    assert sorted(came) == list(range(100)) != came


def through(one: Line, count: int) -> list[int]:
    for n in range(count):
        one.put(frame(n), 0.0)
    return [number(taken) for taken in one.take(0.0)]


def test_a_seed_says_which_frames_are_lost() -> None:
    first = through(line(loss=0.1, seed="1 out"), 10_000)
    assert first == through(line(loss=0.1, seed="1 out"), 10_000)
    assert 8_820 < len(first) < 9_180, "six standard deviations"
    others = [through(line(loss=0.1, seed=seed), 10_000) for seed in ("1 in", "2 out")]
    assert first not in others
    again = line(loss=0.1, seed="1 out")
    through(again, random.Random(0).randrange(100))
    again.become(0.0, 0.0, 0.1, "1 out")
    assert through(again, 10_000) == first, "from the moment it is said"
    assert through(line(loss=1.0), 100) == []


def test_what_is_on_its_way_keeps_its_time() -> None:
    one = line(1.0)
    one.put(frame(1), 0.0)
    one.become(0.0, 0.0, 1.0, "")
    one.put(frame(2), 0.5)
    assert [*one.take(0.9)] == []
    assert one.due == 1.0
    assert [*one.take(1.0)] == [frame(1)]


def test_a_full_line_loses_the_next() -> None:
    one = line(1.0)
    for n in range(MAX_FRAMES + 5):
        one.put(frame(n), 0.0)
    assert [number(taken) for taken in one.take(1.0)] == list(range(MAX_FRAMES))
