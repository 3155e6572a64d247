"""The default policy saves points at ends and junctions, and between them as their bytes allow."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import ConfigError
from kvcore.index.policy import BUILTIN_POINTS, EveryPoint, PointRequest, SpacedPoints

STEPS = range(100, 1001, 100)


def asked(**fields: Any) -> PointRequest:
    given: dict[str, Any] = {
        "offered": STEPS,
        "ends": (),
        "junctions": (),
        "kept": 0,
        "point_tokens": 50,
    }
    return PointRequest(**given | fields)


def taken(request: PointRequest, **options: Any) -> list[int]:
    return list(SpacedPoints(**options).take(request))


def test_between_ends_and_junctions_points_take_an_eighth_of_the_bytes() -> None:
    assert taken(asked()) == [400, 800]
    assert taken(asked(), share=4) == [200, 400, 600, 800, 1000]
    assert taken(asked(point_tokens=5000)) == []


def test_ends_and_junctions_are_always_saved_and_others_are_counted_from_there() -> None:
    large = {"point_tokens": 5000}
    assert taken(asked(ends=[1000], junctions=[300], **large)) == [300, 1000]
    assert taken(asked(ends=[1000], junctions=[300])) == [300, 700, 1000]
    assert taken(asked(ends=[1000], junctions=[300], **large), ends=False) == [300]
    assert taken(asked(ends=[1000], junctions=[300], **large), junctions=False) == [1000]


def test_points_that_are_kept_count() -> None:
    assert taken(asked(kept=350)) == [800]
    assert taken(asked(kept=5000)) == []
    assert taken(asked(kept=5000, junctions=[100])) == [100]


def test_every_replaces_the_share() -> None:
    assert taken(asked(point_tokens=5000), every=500) == [500, 1000]
    assert taken(asked(ends=[700]), every=0) == [700]


@given(
    st.lists(st.integers(1, 60).map(lambda n: n * 16), unique=True).map(sorted),
    st.integers(1, 300),
    st.integers(0, 900),
)
def test_one_at_a_time_is_as_all_at_once(offered: list[int], size: int, kept: int) -> None:
    """A prompt is offered in pieces. What is taken does not depend on them, and is spaced."""
    whole = taken(asked(offered=offered, kept=kept, point_tokens=size))
    last, pieces = kept, []
    for boundary in offered:
        if taken(asked(offered=[boundary], kept=last, point_tokens=size)):
            pieces.append(boundary)
            last = boundary
    assert whole == pieces
    assert all(b - a >= 8 * size for a, b in zip([kept, *whole], whole, strict=False))


def test_all_takes_all() -> None:
    assert list(EveryPoint().take(asked(kept=5000, point_tokens=5000))) == list(STEPS)


@pytest.mark.parametrize("wrong", [{"every": -1}, {"share": 0}, {"share": -2.0}])
def test_options_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"supported are 0 tokens or more, and a share above 0"):
        SpacedPoints(**wrong)


def test_each_is_known_by_its_name() -> None:
    assert {name: policy.name for name, policy in BUILTIN_POINTS.items()} == {
        "spaced": "spaced",
        "all": "all",
    }
