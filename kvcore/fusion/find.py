"""Finds stored segments anywhere in a prompt that does not mark them.

    stored    [====]     [====]     [====]     [=       an anchor: a window at every ``stride``
                   |<-   a match  ->|
    prompt    .....|................|............       a window is looked up at every offset

``window + stride - 1 = min_tokens``: a stretch of ``min_tokens`` tokens holds a whole anchor of
the segment it was taken from, wherever it was cut, so no match of that length goes unseen. What a
hash leads to is compared token by token, and extended to both sides as far as it is the same.

Of all matches the prompt is covered from the left: at the first place where one of at least
``min_tokens`` begins, the longest that begins there is taken (then the smallest segment id, then
the smallest start), and the search goes on behind it. What is left uncovered holds no further
match. `NaiveSegmentIndex` says the same in a few lines.

Memory: 4 bytes a token for the comparison (KV is thousands of times that), 24 to 48 bytes a
``stride`` for the anchors, and about 400 bytes a segment.
"""

from __future__ import annotations

import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from kvcore.errors import ConfigError
from kvcore.fusion._anchors import TAG_BITS, AnchorTable, Tokens, window_tags
from kvcore.model.keys import TOKEN_BYTES, pack_tokens

__all__ = [
    "NaiveSegmentIndex",
    "SegmentIndex",
    "SegmentMatch",
    "SegmentSearch",
    "as_array",
    "common",
]

MAX_TWINS = 4
MAX_CHECKS = 2048


class SegmentMatch(NamedTuple):
    """prompt[prompt_start:][:length] equals segment[segment_start:][:length]."""

    segment_id: bytes
    prompt_start: int
    segment_start: int
    length: int


class _MatchRun(NamedTuple):
    """A match that cannot be extended to either side: ``start`` and ``stop`` in the prompt."""

    number: int
    start: int
    stop: int
    segment_start: int


class SegmentIndex:
    """Stored segments, to be found again in prompts. Not thread-safe; nothing blocks.

    ``min_tokens``: the shortest match that counts. ``expected_tokens``: of all segments together;
    the table is sized for it at once, where it would otherwise double now and then (a pause of
    0.1 s a million anchors). Two bounds keep repetitive text from costing memory and time:

    - ``max_twins`` places are kept of windows that hash alike. Segments that begin alike are found
      all the same, by the windows in which they differ. A window that was not kept stays out until
      its segment is removed and added again.
    - `find` compares at ``max_checks`` places (about 5 us each). Past that, what was found so far
      is the answer, and `cut_short` counts it.

    ``tag_bits`` below 32 makes hashes collide: for tests.
    """

    def __init__(
        self,
        min_tokens: int = 64,
        *,
        expected_tokens: int = 0,
        max_twins: int = MAX_TWINS,
        max_checks: int = MAX_CHECKS,
        tag_bits: int = TAG_BITS,
    ) -> None:
        bounds = {"min_tokens": min_tokens, "max_twins": max_twins, "max_checks": max_checks}
        for name, value in bounds.items():
            if value < 1:
                raise ConfigError(f"{name} is {value}; at least 1 is needed")
        if not 1 <= tag_bits <= TAG_BITS:
            raise ConfigError(f"tag_bits is {tag_bits}; 1 .. {TAG_BITS} are possible")
        self.min_tokens = min_tokens
        self.max_checks = max_checks
        self.cut_short = 0
        self._window = (min_tokens + 1) // 2
        self._stride = min_tokens - self._window + 1
        self._tag_bits = tag_bits
        self._salt = secrets.randbits(64)
        self._table = AnchorTable(expected_tokens // self._stride, max_twins)
        self._numbers: dict[bytes, int] = {}
        self._ids: list[bytes] = []
        self._tokens: list[Tokens] = []
        self._free: list[int] = []
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, segment_id: bytes) -> bool:
        return segment_id in self._numbers

    @property
    def nbytes(self) -> int:
        """Bytes of tokens and anchors; Python's own (about 400 a segment) not counted. O(1)."""
        return self._table.nbytes + self._num_tokens * TOKEN_BYTES

    def tokens(self, segment_id: bytes) -> Tokens:
        """A held segment's tokens, not to be written to."""
        return self._tokens[self._numbers[segment_id]]

    def add(self, segment_id: bytes, tokens: Iterable[int]) -> bool:
        """Enter a segment. False, and nothing done, if it is too short ever to be found.

        An id that is there already may be added again with the same tokens; with others it is a
        `ConfigError`, for then one of them is not what the id says. O(tokens).
        """
        segment = as_array(tokens)
        held = self._numbers.get(segment_id)
        if held is not None:
            if not np.array_equal(self._tokens[held], segment):
                raise ConfigError(
                    f"segment {segment_id.hex()} is held with other tokens; "
                    "give every segment an id of its own, or remove it first"
                )
            return True
        if len(segment) < self.min_tokens:
            return False
        number = self._number_for(segment_id, segment)
        for tag, place in self._anchors(number, 0):
            self._table.put(tag, place)
        return True

    def extend(self, segment_id: bytes, tokens: Iterable[int]) -> None:
        """Append tokens to a held segment. O(tokens) in Python, and the segment is copied."""
        number = self._numbers[segment_id]
        known = self._tokens[number]
        self._hold(number, np.concatenate((known, as_array(tokens))))
        for tag, place in self._anchors(number, self._count_anchors(len(known))):
            self._table.put(tag, place)

    def cut(self, segment_id: bytes, length: int) -> bool:
        """Forget all but the first ``length`` tokens of a held segment; False if it is held no
        more, being too short. O(tokens forgotten) in Python, and the rest is copied."""
        if length < self.min_tokens:
            self.remove(segment_id)
            return False
        number = self._numbers[segment_id]
        for tag, place in self._anchors(number, self._count_anchors(length)):
            self._table.remove(tag, place)
        self._hold(number, self._tokens[number][:length].copy())
        return True

    def remove(self, segment_id: bytes) -> bool:
        """Forget a segment. False if it is not held. O(tokens)."""
        number = self._numbers.pop(segment_id, None)
        if number is None:
            return False
        for tag, place in self._anchors(number, 0):
            self._table.remove(tag, place)
        self._ids[number] = b""
        self._hold(number, _NO_TOKENS)
        self._free.append(number)
        return True

    def find(self, tokens: Iterable[int]) -> list[SegmentMatch]:
        """What of the prompt is stored: in the prompt's order, not overlapping in the prompt."""
        return self.search(tokens).cover()

    def search(self, tokens: Iterable[int]) -> SegmentSearch:
        """`find` in two steps, for who wants to `remove` or `cut` some of its candidates before
        it compares."""
        prompt = as_array(tokens)
        if not self._numbers or len(prompt) < self.min_tokens:
            return SegmentSearch(self, prompt, [], [])
        tags = window_tags(prompt, self._window, self._salt, self._tag_bits)
        offsets, places = self._table.lookup(tags)
        order = np.argsort(offsets, kind="stable")
        return SegmentSearch(self, prompt, offsets[order].tolist(), places[order].tolist())

    def check_integrity(self) -> None:
        """Assert that table, numbers and segments agree."""
        self._table.check_integrity()
        assert sorted([*self._numbers.values(), *self._free]) == list(range(len(self._ids)))
        assert all(self._ids[number] == name for name, number in self._numbers.items())
        for number in self._free:
            assert not len(self._tokens[number])
        assert self._num_tokens == sum(map(len, self._tokens))
        assert self._table.count <= sum(self._count_anchors(len(held)) for held in self._tokens)

    def _number_for(self, segment_id: bytes, segment: Tokens) -> int:
        if self._free:
            number = self._free.pop()
        else:
            number = len(self._ids)
            self._ids.append(b"")
            self._tokens.append(_NO_TOKENS)
        self._ids[number] = segment_id
        self._hold(number, segment)
        self._numbers[segment_id] = number
        return number

    def _hold(self, number: int, tokens: Tokens) -> None:
        self._num_tokens += len(tokens) - len(self._tokens[number])
        self._tokens[number] = tokens

    def _count_anchors(self, length: int) -> int:
        """How many anchors so many tokens have."""
        return max(0, -(-(length - self._window + 1) // self._stride))

    def _anchors(self, number: int, begin: int) -> Iterable[tuple[int, int]]:
        """Tag and place of each of a segment's anchors from the ``begin``-th on."""
        start = begin * self._stride
        rest = self._tokens[number][start:]
        tags = window_tags(rest, self._window, self._salt, self._tag_bits)
        first = (number << 32) + start
        anchored = tags[:: self._stride].tolist()
        places = range(first, first + len(tags), self._stride)
        return zip(anchored, places, strict=True)


class SegmentSearch:
    """One prompt's search. ``offsets`` (ascending) and ``places`` are where hashes agree.

    Between its making and `cover`, segments may be removed and cut, but none added or extended.
    """

    def __init__(
        self, index: SegmentIndex, prompt: Tokens, offsets: list[int], places: list[int]
    ) -> None:
        self._index = index
        self.prompt = prompt
        self._offsets = offsets
        self._places = places
        self._runs: dict[
            tuple[int, int], _MatchRun
        ] = {}  # by segment and diagonal, the last one seen
        self._checks = index.max_checks

    @property
    def candidates(self) -> list[bytes]:
        """Ids of the held segments that `cover` may find, and perhaps of others."""
        numbers = sorted({place >> 32 for place in self._places})
        return [self._index._ids[number] for number in numbers if self._index._ids[number]]

    def cover(self) -> list[SegmentMatch]:
        """Cover the prompt from the left, as the module's docstring says."""
        covered, done = [], 0
        while self._checks and (found := self._next(done)) is not None:
            covered.append(found)
            done = found.prompt_start + found.length
        self._index.cut_short += not self._checks
        return covered

    def _next(self, done: int) -> SegmentMatch | None:
        """The match that begins first at or after ``done``, the longest of those."""
        best: SegmentMatch | None = None
        hit = bisect_left(self._offsets, done)
        while self._checks and (hit := self._worth(hit, best)) < len(self._offsets):
            if best is None or self._may_beat(hit, done, best):
                found = self._found(hit, done)
                if found is not None and (best is None or _rank(found) < _rank(best)):
                    best = found
            hit += 1
        return best

    def _worth(self, hit: int, best: SegmentMatch | None) -> int:
        """The next hit, from this one on, that may lead to something better than ``best``.

        Whatever begins no later has an anchor in the first stride. Where that is one of many twins
        and was not kept, a longer match shows by the first anchor that reaches past the best.
        """
        offsets, stride = self._offsets, self._index._stride
        if best is None or hit == len(offsets) or offsets[hit] < best.prompt_start + stride:
            return hit
        past = best.prompt_start + best.length - self._index._window
        hit = bisect_right(offsets, past, hit)
        return hit if hit < len(offsets) and offsets[hit] <= past + stride else len(offsets)

    def _may_beat(self, hit: int, done: int, best: SegmentMatch) -> bool:
        """Whether the segment, laid at the hit, begins before ``best`` or else reaches as far."""
        number, start = self._place(hit)
        first = self._offsets[hit] - start
        start, stop = max(first, done), first + len(self._index._tokens[number])
        return start < best.prompt_start or (
            start == best.prompt_start and stop >= best.prompt_start + best.length
        )

    def _place(self, hit: int) -> tuple[int, int]:
        """Number of the segment, and where in it the window stands."""
        place = self._places[hit]
        return place >> 32, place & 0xFFFFFFFF

    def _found(self, hit: int, done: int) -> SegmentMatch | None:
        """The match at a hit, without what is covered already; None if it is too short then."""
        run = self._run(hit)
        if run is None:
            return None
        start = max(run.start, done)
        if run.stop - start < self._index.min_tokens:
            return None
        segment_start = run.segment_start + start - run.start
        return SegmentMatch(self._index._ids[run.number], start, segment_start, run.stop - start)

    def _run(self, hit: int) -> _MatchRun | None:
        """The run of equal tokens around a hit; None if only the hashes agree."""
        at, (number, start) = self._offsets[hit], self._place(hit)
        known = self._runs.get((number, start - at))
        if known is not None and known.start <= at < known.stop:
            return known
        self._checks -= 1
        prompt, segment = self.prompt, self._index._tokens[number]
        ahead = common(prompt[at:], segment[start:])
        if ahead < self._index._window:
            return None
        behind = common(prompt[:at][::-1], segment[:start][::-1])
        run = _MatchRun(number, at - behind, at + ahead, start - behind)
        self._runs[number, start - at] = run
        return run


def _rank(found: SegmentMatch) -> tuple[int, int, bytes, int]:
    """Smaller is better."""
    return found.prompt_start, -found.length, found.segment_id, found.segment_start


def common(left: Tokens, right: Tokens) -> int:
    """How many tokens two sequences begin with alike; looks little further than that."""
    stop, done, step = min(len(left), len(right)), 0, 256
    while done < stop:
        ahead = slice(done, min(done + step, stop))
        differs = left[ahead] != right[ahead]
        first = int(differs.argmax())
        if differs[first]:
            return done + first
        done, step = ahead.stop, 4 * step
    return stop


def as_array(tokens: Iterable[int]) -> Tokens:
    """Token ids of any kind that `pack_tokens` takes, as an array of their own."""
    return np.frombuffer(pack_tokens(tokens), dtype="<u4")


_NO_TOKENS = as_array(())


class NaiveSegmentIndex:
    """The same answers as `SegmentIndex` by comparing everything with everything."""

    def __init__(self, min_tokens: int = 64) -> None:
        self.min_tokens = min_tokens
        self._segments: dict[bytes, list[int]] = {}

    def add(self, segment_id: bytes, tokens: Iterable[int]) -> bool:
        """As `SegmentIndex.add`."""
        segment = list(tokens)
        if len(segment) < self.min_tokens:
            return False
        self._segments[segment_id] = segment
        return True

    def extend(self, segment_id: bytes, tokens: Iterable[int]) -> None:
        """As `SegmentIndex.extend`."""
        self._segments[segment_id] = [*self._segments[segment_id], *tokens]

    def cut(self, segment_id: bytes, length: int) -> bool:
        """As `SegmentIndex.cut`."""
        return self.add(segment_id, self._segments.pop(segment_id)[:length])

    def remove(self, segment_id: bytes) -> bool:
        """As `SegmentIndex.remove`."""
        return self._segments.pop(segment_id, None) is not None

    def find(self, tokens: Iterable[int]) -> list[SegmentMatch]:
        """As `SegmentIndex.find`. O(tokens of the prompt x tokens stored x length)."""
        prompt, covered, at = list(tokens), [], 0
        while at < len(prompt):
            best = max(self._matches(prompt, at), key=lambda found: found.length, default=None)
            if best is None:
                at += 1
            else:
                covered.append(best)
                at += best.length
        return covered

    def _matches(self, prompt: list[int], at: int) -> Iterable[SegmentMatch]:
        """Long enough matches that begin at ``at``, by segment id and start."""
        for segment_id in sorted(self._segments):
            segment = self._segments[segment_id]
            for start in range(len(segment)):
                length = 0
                for ours, theirs in zip(prompt[at:], segment[start:], strict=False):
                    if ours != theirs:
                        break
                    length += 1
                if length >= self.min_tokens:
                    yield SegmentMatch(segment_id, at, start, length)
