"""Which repeats of a log line are written."""

from __future__ import annotations

from kvcore._util import log_limit
from kvcore._util.log_limit import LogLimit


def test_the_first_line_is_written_and_then_one_a_minute_with_a_count() -> None:
    now = [0.0]
    limit = LogLimit(60.0, clock=lambda: now[0])
    assert limit.admit("full") == 0
    assert [limit.admit("full") for _ in range(3)] == [None] * 3
    assert limit.admit("another line") == 0
    now[0] = 59.9
    assert limit.admit("full") is None
    now[0] = 60.0
    assert limit.admit("full") == 4
    assert limit.admit("full") is None


def test_lines_without_end_are_few_and_take_no_memory() -> None:
    """A client that chooses the text of lines fills neither the log nor memory."""
    now = [0.0]
    limit = LogLimit(60.0, clock=lambda: now[0])
    written = [limit.admit(number) for number in range(1000)]
    assert sum(line is not None for line in written) == log_limit.MAX_KEYS + 1
    assert len(limit._seen) == log_limit.MAX_KEYS + 1
    now[0] = 60.0
    assert limit.admit("new") == 0, "the old ones are forgotten"
    assert len(limit._seen) == 1
