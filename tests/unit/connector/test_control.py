"""What a request may ask of kvcore: read whatever it is, counted, followed or refused whole."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.connector.control import CONTROLS, MAX_TEXT, ControlReader, RequestControl
from kvcore.telemetry.metrics import Metrics, MissReason
from support.budget import examples

COUNTED = "kvcore_request_controls_total"

scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.binary()
)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner),
    max_leaves=12,
)
tables = st.dictionaries(
    st.sampled_from([*CONTROLS, "report", "fusion", "promise"]), anything, max_size=5
)
right = st.fixed_dictionaries(
    {},
    optional={
        "load": st.booleans(),
        "save": st.booleans(),
        "save_tokens": st.none() | st.integers(0, 1 << 53),
        "report": st.booleans(),
    },
)


def read(given: Any) -> tuple[RequestControl, dict[str, Any]]:
    metrics = Metrics()
    control = ControlReader(metrics).read("r", given)
    return control, metrics.snapshot().get(COUNTED, {})


@settings(max_examples=examples(300), deadline=None)
@given(asked=anything | tables | st.text() | tables.map(repr))
def test_whatever_a_client_sends_costs_nobody_else_anything(asked: Any) -> None:
    """It is read, or its request is computed without kvcore and the client is told why."""
    control, counted = read(asked)
    assert sum(counted.values()) == max(len(control.shown()), bool(control.error))
    if control.error:
        assert not control.load
        assert control.savable(1000) == 0
        assert list(control.shown()) == ["error"]
        assert control.why_no_load is MissReason.UNREADABLE
        [place] = counted
        assert place.split("|")[0] in (*CONTROLS, "kvcore")
        assert len(control.error) < 1000
        assert "\n" not in control.error
    json.dumps(control.shown()).encode()


@settings(max_examples=examples(200), deadline=None)
@given(asked=right, tokens=st.integers(0, 1 << 20), text=st.booleans())
def test_what_is_right_is_followed(asked: dict[str, Any], tokens: int, text: bool) -> None:
    control, counted = read(json.dumps(asked) if text else asked)
    assert not control.error
    assert control.load is asked.get("load", True)
    most = asked.get("save_tokens")
    wanted = tokens if most is None else min(tokens, most)
    assert control.savable(tokens) == (wanted if asked.get("save", True) else 0)
    assert control.saves_all == (asked.get("save", True) and most is None)
    changed = {
        name: value
        for name, value in asked.items()
        if (value is False and name != "report") or (name == "save_tokens" and value is not None)
    }
    assert control.shown() == changed
    assert counted == {f"{name}|followed": 1 for name in changed}


@pytest.mark.parametrize(
    ("asked", "option", "named"),
    [
        ({"load": 0}, "load", "true or false"),
        ({"load": "false"}, "load", "true or false"),
        ({"load": None}, "load", "true or false"),
        ({"save": []}, "save", "true or false"),
        ({"save_tokens": -1}, "save_tokens", "whole number"),
        ({"save_tokens": 1.5}, "save_tokens", "whole number"),
        ({"save_tokens": True}, "save_tokens", "whole number"),
        ({"save_tokens": 1 << 54}, "save_tokens", "whole number"),
        ({"save": False, "load": 3}, "load", "true or false"),
        ([{"save": False}], "kvcore", "a table of options"),
        (7, "kvcore", "a table of options"),
        ("save", "kvcore", "JSON"),
        ('{"save": false', "kvcore", "JSON"),
        ("[" * 100_000, "kvcore", "nested too deeply"),
        ("[1]", "kvcore", "a table of options"),
        (" " * (MAX_TEXT + 1), "kvcore", str(MAX_TEXT)),
    ],
)
def test_what_cannot_be_read_is_named(asked: Any, option: str, named: str) -> None:
    control, counted = read(asked)
    assert named in control.error
    assert counted == {f"{option}|unreadable": 1}
    assert control.shown() == {"error": control.error}


@pytest.mark.parametrize("asked", [None, {}, True, False, "", "{}", "true", {"report": True}])
def test_who_asks_for_nothing_is_loaded_and_saved(asked: Any) -> None:
    control, counted = read(asked)
    assert control == RequestControl()
    assert not counted
    assert control.shown() == {}


def test_a_client_cannot_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    reader = ControlReader(Metrics())
    with caplog.at_level(logging.WARNING, "kvcore.connector"):
        for name in range(50):
            reader.read(name, {"save": "never"})
            reader.read(name, {"load": 1})
    assert len(caplog.records) == 2
    assert "request=0 is computed without kvcore: kvcore.save is 'never'" in caplog.text
