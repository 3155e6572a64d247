"""The segment finder: against its naive twin, on text made to hurt it, and within its bounds."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.errors import ConfigError
from kvcore.fusion import find as find_module
from kvcore.fusion._anchors import AnchorTable, window_tags
from kvcore.fusion.find import NaiveSegmentIndex, SegmentIndex, SegmentMatch
from support.budget import examples

NO_BOUNDS = {"max_twins": 1 << 30, "max_checks": 1 << 30}
VOCABULARY = 150_000


def text(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(count)]


def name(number: int) -> bytes:
    return number.to_bytes(2, "big")


def check(prompt: list[int], segments: dict[bytes, list[int]], found: list[SegmentMatch]) -> None:
    """Every match is one, in order, without overlap."""
    done = 0
    for segment_id, start, segment_start, length in found:
        assert start >= done
        done = start + length
        segment = segments[segment_id]
        assert segment_start + length <= len(segment)
        assert prompt[start:done] == segment[segment_start : segment_start + length]
    assert done <= len(prompt)


@st.composite
def scenes(draw: st.DrawFn) -> tuple[int, dict[bytes, list[int]], list[int]]:
    """min_tokens, segments over few symbols, and a prompt made of their pieces and of noise."""
    symbols = st.integers(0, draw(st.integers(0, 3)))
    min_tokens = draw(st.integers(1, 9))
    texts: list[list[int]] = draw(st.lists(st.lists(symbols, max_size=40), max_size=4))
    prompt: list[int] = []
    for _ in range(draw(st.integers(0, 5))):
        piece: list[int] = draw(st.lists(symbols, max_size=12))
        if draw(st.booleans()) and texts:
            whole = draw(st.sampled_from(texts))
            start = draw(st.integers(0, len(whole)))
            piece = whole[start : draw(st.integers(start, len(whole)))]
        prompt += piece
    return min_tokens, {name(i): segment for i, segment in enumerate(texts)}, prompt


@pytest.mark.slow
@settings(max_examples=600)  # 100 have missed a mistake that one scene in 300 shows
@given(scenes(), st.sampled_from([32, 4, 1]))
def test_agrees_with_the_naive_twin(
    scene: tuple[int, dict[bytes, list[int]], list[int]], tag_bits: int
) -> None:
    min_tokens, segments, prompt = scene
    index = SegmentIndex(min_tokens, tag_bits=tag_bits, **NO_BOUNDS)
    naive = NaiveSegmentIndex(min_tokens)
    for segment_id, segment in segments.items():
        assert index.add(segment_id, segment) == naive.add(segment_id, segment)
    index.check_integrity()
    found = index.find(prompt)
    assert found == naive.find(prompt)
    check(prompt, segments, found)


@settings(max_examples=examples(300))
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.lists(st.integers(0, 1), min_size=2, max_size=30)),
        max_size=25,
    ),
    st.lists(st.integers(0, 1), max_size=40),
    st.sampled_from([32, 2]),
)
def test_adding_and_removing_in_any_order(
    steps: list[tuple[int, list[int]]], prompt: list[int], tag_bits: int
) -> None:
    """A step adds its segment, or removes the id where it is held."""
    index, naive = SegmentIndex(3, tag_bits=tag_bits, **NO_BOUNDS), NaiveSegmentIndex(3)
    for number, segment in steps:
        if name(number) in index:
            assert index.remove(name(number))
            assert naive.remove(name(number))
        else:
            assert index.add(name(number), segment) == naive.add(name(number), segment)
        index.check_integrity()
    assert index.find(prompt) == naive.find(prompt)


@settings(max_examples=examples(300))
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.lists(st.integers(0, 1), max_size=25), st.integers(0, 40)),
        max_size=25,
    ),
    st.lists(st.integers(0, 1), max_size=40),
    st.sampled_from([32, 2]),
    st.integers(1, 6),
)
def test_extending_and_cutting_in_any_order(
    steps: list[tuple[int, list[int], int]], prompt: list[int], tag_bits: int, min_tokens: int
) -> None:
    """A step adds its segment; where the id is held, it extends it, or cuts it to a length."""
    index = SegmentIndex(min_tokens, tag_bits=tag_bits, **NO_BOUNDS)
    naive = NaiveSegmentIndex(min_tokens)
    for number, tokens, length in steps:
        if name(number) not in index:
            assert index.add(name(number), tokens) == naive.add(name(number), tokens)
        elif length > 20:
            index.extend(name(number), tokens)
            naive.extend(name(number), tokens)
        else:
            assert index.cut(name(number), length) == naive.cut(name(number), length)
        index.check_integrity()
    assert index.find(prompt) == naive.find(prompt)
    for number in range(4):
        index.remove(name(number))
    assert index._table.count == 0


@pytest.mark.parametrize("min_tokens", [1, 2, 5, 8, 64])
def test_anchors_are_the_same_however_a_segment_came_to_be(min_tokens: int) -> None:
    rng = random.Random(12)
    whole = text(rng, 300)
    index = SegmentIndex(min_tokens)
    index.add(b"whole", whole)
    wanted = index._table.count
    index.remove(b"whole")
    index.add(b"parts", whole[:70])
    for start in range(70, 300, 10):
        index.extend(b"parts", whole[start : start + 10])
    assert index._table.count == wanted
    index.extend(b"parts", text(rng, 100))
    assert index.cut(b"parts", 300)
    assert index._table.count == wanted
    assert index.tokens(b"parts").tolist() == whole


def test_what_is_cut_after_the_search_began_is_not_found() -> None:
    rng = random.Random(13)
    document = text(rng, 300)
    index = SegmentIndex()
    for segment_id in (b"a", b"b", b"c"):
        index.add(segment_id, document)
    index.add(b"other", text(rng, 300))
    search = index.search([1, *document])
    assert search.candidates == [b"a", b"b", b"c"]
    index.remove(b"a")
    index.cut(b"b", 100)
    assert search.cover() == [SegmentMatch(b"c", 1, 0, 300)]


@given(scenes())
def test_bounded_answers_are_still_matches(
    scene: tuple[int, dict[bytes, list[int]], list[int]],
) -> None:
    min_tokens, segments, prompt = scene
    index = SegmentIndex(min_tokens, max_twins=1, max_checks=3)
    for segment_id, segment in segments.items():
        index.add(segment_id, segment)
    found = index.find(prompt)
    check(prompt, segments, found)
    assert all(match.length >= min_tokens for match in found)


# ---------------------------------------------------------------------------------------------
# what a prompt may hold


@pytest.fixture
def stored() -> tuple[SegmentIndex, dict[bytes, list[int]], random.Random]:
    rng = random.Random(3)
    index = SegmentIndex()
    segments = {name(i): text(rng, rng.randrange(64, 700)) for i in range(300)}
    for segment_id, segment in segments.items():
        assert index.add(segment_id, segment)
    return index, segments, rng


def test_whole_partial_repeated_and_overlapping(
    stored: tuple[SegmentIndex, dict[bytes, list[int]], random.Random],
) -> None:
    index, segments, rng = stored
    long = [key for key, segment in segments.items() if len(segment) >= 400]
    first, second, third = long[:3]
    pieces = [
        (None, text(rng, 41)),
        (SegmentMatch(first, 0, 0, len(segments[first])), segments[first]),
        (SegmentMatch(second, 0, 0, 100), segments[second][:100]),
        (None, text(rng, 7)),
        (SegmentMatch(second, 0, 150, 64), segments[second][150:214]),
        (SegmentMatch(third, 0, len(segments[third]) - 90, 90), segments[third][-90:]),
        (None, segments[third][:63]),
        (SegmentMatch(first, 0, 0, len(segments[first])), segments[first]),
    ]
    prompt: list[int] = []
    wanted = []
    for match, piece in pieces:
        if match is not None:
            wanted.append(match._replace(prompt_start=len(prompt)))
        prompt += piece
    found = index.find(prompt)
    assert found == wanted
    check(prompt, segments, found)


def test_segments_that_overlap_in_the_prompt_share_it_from_the_left() -> None:
    rng = random.Random(4)
    document = text(rng, 900)
    index = SegmentIndex()
    index.add(b"a", document[:500])
    index.add(b"b", document[400:])
    assert index.find(document) == [
        SegmentMatch(b"a", 0, 0, 500),
        SegmentMatch(b"b", 500, 100, 400),
    ]
    index.remove(b"a")
    assert index.find(document) == [SegmentMatch(b"b", 400, 0, 500)]


@pytest.mark.parametrize("cut", range(0, 140, 7))
def test_no_cut_hides_a_match_of_the_shortest_length(cut: int) -> None:
    rng = random.Random(5)
    segment = text(rng, 204)
    index = SegmentIndex()
    index.add(b"s", segment)
    prompt = [*text(rng, 11), *segment[cut : cut + 64], *text(rng, 5)]
    assert index.find(prompt) == [SegmentMatch(b"s", 11, cut, 64)]
    assert index.find(prompt[:74]) == []


def test_a_heading_shared_by_many_is_found_with_each() -> None:
    """No more than ``max_twins`` of its windows are kept: what differs leads to the rest."""
    rng = random.Random(6)
    heading = text(rng, 80)
    segments = {name(i): [*heading, *text(rng, 200)] for i in range(60)}
    index = SegmentIndex()
    for segment_id, segment in segments.items():
        index.add(segment_id, segment)
    index.check_integrity()
    prompt = [*text(rng, 20), *segments[name(57)], *segments[name(3)]]
    assert index.find(prompt) == [
        SegmentMatch(name(57), 20, 0, 280),
        SegmentMatch(name(3), 300, 0, 280),
    ]


# ---------------------------------------------------------------------------------------------
# bounds


@pytest.mark.parametrize("period", [1, 2, 31, 33, 100])
def test_repetitive_text_costs_no_more_than_the_bounds(
    period: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    segments = {name(i): [j % period for j in range(600)] for i in range(50)}
    index = SegmentIndex(max_checks=500)
    for segment_id, segment in segments.items():
        index.add(segment_id, segment)
    index.check_integrity()
    calls = Counter[str]()
    common = find_module.common

    def counted(left: np.ndarray, right: np.ndarray) -> int:
        calls["common"] += 1
        return common(left, right)

    monkeypatch.setattr(find_module, "common", counted)
    prompt = [j % period for j in range(20_000)]
    found = index.find(prompt)
    check(prompt, segments, found)
    assert found[0][1:] == (0, 0, 600)
    assert calls["common"] <= 2 * 500


def test_cut_short_is_counted_and_what_was_found_is_kept() -> None:
    """Stretches one token too short to count hash as their anchors do, at every offset."""
    segment = [7] * 500
    prompt = [*segment[:100], *([8, *segment[:63]] * 40), 8, *segment]
    index = SegmentIndex(max_checks=150)
    index.add(b"s", segment)
    assert index.find(prompt) == [SegmentMatch(b"s", 0, 0, 100)]
    assert index.cut_short == 1
    ample = SegmentIndex(max_checks=1 << 30)
    ample.add(b"s", segment)
    assert ample.find(prompt) == [
        SegmentMatch(b"s", 0, 0, 100),
        SegmentMatch(b"s", len(prompt) - 500, 0, 500),
    ]
    assert ample.cut_short == 0


def test_hashes_that_collide_decide_nothing() -> None:
    rng = random.Random(8)
    index = SegmentIndex(tag_bits=1, **NO_BOUNDS)
    segments = {name(i): text(rng, 200) for i in range(20)}
    for segment_id, segment in segments.items():
        index.add(segment_id, segment)
    assert index.find(text(rng, 500)) == []
    assert index.find(segments[name(9)]) == [SegmentMatch(name(9), 0, 0, 200)]


@pytest.mark.slow
def test_growing_keeps_everything_and_happens_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(9)
    grown = Counter[str]()
    rebuild = AnchorTable._rebuild

    def counted(table: AnchorTable, bits: int) -> None:
        grown["times"] += 1
        rebuild(table, bits)

    monkeypatch.setattr(AnchorTable, "_rebuild", counted)
    index = SegmentIndex()
    segments = {name(i): text(rng, 130) for i in range(2000)}
    for segment_id, segment in segments.items():
        index.add(segment_id, segment)
    index.check_integrity()
    assert grown["times"] <= 10  # from 64 slots to 16384, of which 6000 are filled
    for segment_id in rng.sample(sorted(segments), 50):
        assert index.find(segments[segment_id]) == [SegmentMatch(segment_id, 0, 0, 130)]

    sized = SegmentIndex(expected_tokens=2000 * 133)
    grown.clear()
    for segment_id, segment in segments.items():
        sized.add(segment_id, segment)
    assert not grown


@pytest.mark.slow
def test_memory_is_what_the_docstring_says_and_returns() -> None:
    rng = random.Random(10)
    index = SegmentIndex()
    for i in range(1000):
        index.add(name(i), text(rng, 500))
    anchors = 1000 * 15
    tokens = 1000 * 500 * 4
    assert tokens + 24 * anchors <= index.nbytes <= tokens + 49 * anchors
    for i in range(1000):
        assert index.remove(name(i))
    index.check_integrity()
    assert len(index) == 0
    assert index.nbytes <= 49 * anchors
    for i in range(1000):
        index.add(name(i), text(rng, 500))
    assert index.nbytes <= tokens + 49 * anchors


# ---------------------------------------------------------------------------------------------
# the calls


def test_adding_twice_is_once_and_other_tokens_are_refused() -> None:
    index = SegmentIndex(4)
    assert index.add(b"s", [1, 2, 3, 4])
    assert index.add(b"s", (1, 2, 3, 4))
    assert len(index) == 1
    assert b"s" in index
    with pytest.raises(ConfigError, match="held with other tokens"):
        index.add(b"s", [1, 2, 3, 5])
    assert index.remove(b"s")
    assert not index.remove(b"s")
    assert index.add(b"s", [1, 2, 3, 5])
    assert index.find([1, 2, 3, 5]) == [SegmentMatch(b"s", 0, 0, 4)]


def test_too_short_ever_to_be_found_is_not_kept() -> None:
    index = SegmentIndex(5)
    assert not index.add(b"s", [1, 2, 3, 4])
    assert b"s" not in index
    assert index.find([1, 2, 3, 4]) == []
    assert index.find([]) == []


def test_tokens_of_any_kind() -> None:
    index = SegmentIndex(3)
    index.add(b"s", np.array([5, 2**32 - 1, 7, 9], dtype=np.uint32))
    wanted = [SegmentMatch(b"s", 1, 0, 4)]
    prompt = [0, 5, 2**32 - 1, 7, 9]
    assert index.find(prompt) == wanted
    assert index.find(np.array(prompt, dtype=np.int64)) == wanted
    assert index.find(iter(prompt)) == wanted
    with pytest.raises(ConfigError, match="token ids"):
        index.find([-1, 2, 3])


@pytest.mark.parametrize("name", ["min_tokens", "max_twins", "max_checks", "tag_bits"])
def test_settings_out_of_range_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        SegmentIndex(**{name: 0})


# ---------------------------------------------------------------------------------------------
# parts


@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=80),
    st.integers(1, 40),
    st.integers(0, 2**64 - 1),
    st.integers(0, 30),
)
def test_a_window_hashes_alike_wherever_it_stands(
    tokens: list[int], window: int, salt: int, before: int
) -> None:
    alone = window_tags(np.array(tokens, dtype=np.uint32), window, salt)
    assert len(alone) == max(len(tokens) - window + 1, 0)
    assert alone.all()
    moved = window_tags(np.array([*range(before), *tokens], dtype=np.uint32), window, salt)
    assert len(alone) == 0 or (moved[before:] == alone).all()


@pytest.mark.parametrize("window", [1, 2, 3, 7, 31, 32, 33])
def test_every_token_of_a_window_and_their_order_count(window: int) -> None:
    rng = random.Random(11)
    tokens = text(rng, window)

    def tag(changed: list[int]) -> int:
        return int(window_tags(np.array(changed, dtype=np.uint32), window, 12345)[0])

    tags = {tag(tokens), tag(tokens[::-1])}
    for i in range(window):
        tags.add(tag([*tokens[:i], tokens[i] + 1, *tokens[i + 1 :]]))
    assert len(tags) == window + (1 if window == 1 else 2)


@given(
    st.lists(
        st.tuples(st.sampled_from([1, 2, 3, 2**31, 2**32 - 2, 2**32 - 1]), st.integers(0, 8)),
        max_size=250,
    )
)
def test_the_table_against_a_set(steps: list[tuple[int, int]]) -> None:
    """A step enters its pair, or takes it out where it is held. Homes crowd at both ends."""
    table, held = AnchorTable(0, max_twins=1 << 30), set[tuple[int, int]]()
    for tag, place in steps:
        if (tag, place) in held:
            assert table.remove(tag, place)
            held.discard((tag, place))
        else:
            assert not table.remove(tag, place)
            assert table.put(tag, place)
            held.add((tag, place))
    table.check_integrity()
    tags = np.array(sorted({tag for tag, _ in steps}), dtype=np.uint32)
    queries, places = table.lookup(tags)
    seen = zip(tags[queries].tolist(), places.tolist(), strict=True)
    assert sorted(seen) == sorted(held)


def test_the_table_keeps_so_many_twins_and_no_more() -> None:
    table = AnchorTable(0, max_twins=3)
    assert [table.put(99, place) for place in range(5)] == [True, True, True, False, False]
    assert table.remove(99, 1)
    assert table.put(99, 7)
    assert sorted(table.lookup(np.array([99], dtype=np.uint32))[1].tolist()) == [0, 2, 7]


def test_the_table_grows_when_its_end_is_full() -> None:
    table = AnchorTable(0, max_twins=1 << 30)
    for place in range(300):
        assert table.put(2**32 - 1, place)
        table.check_integrity()
    assert table.nbytes < 300 * 12 * 6
    assert len(table.lookup(np.array([2**32 - 1], dtype=np.uint32))[1]) == 300
