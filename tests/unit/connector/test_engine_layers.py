"""What is checked of an engine's model before its layers are lent."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvcore.connector.engine_layers import (  # noqa: E402
    check_architecture,
    check_arguments,
    check_count,
    live_objects,
    refuse_unlike,
)
from kvcore.errors import UnsupportedError  # noqa: E402


class Runner:
    pass


class Quick(Runner):
    __slots__ = ("laps",)


class Awake:
    """Wakes up when asked for its class, as lazy modules do."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise AssertionError("asked for its class")


def test_objects_of_a_kind_are_found_and_nothing_is_woken() -> None:
    asleep, runner, quick = Awake(), Runner(), Quick()
    assert sorted(map(id, live_objects(Runner))) == sorted([id(runner), id(quick)])
    assert live_objects(Quick) == [quick]
    assert type(asleep) is Awake


def test_a_search_disturbs_no_tuple_that_another_thread_builds() -> None:
    """However often threads take turns: a busy machine interrupts a search anywhere."""
    many = [[number] for number in range(100_000)]
    ended, built, errors, interval = threading.Event(), [0], [], sys.getswitchinterval()

    def build() -> None:
        try:
            while not ended.is_set():
                built[0] += len(tuple(number for number in range(3000))) == 3000
        except SystemError as error:
            errors.append(error)

    thread = threading.Thread(target=build)
    sys.setswitchinterval(1e-5)
    try:
        thread.start()
        for _ in range(10):
            live_objects(Runner)
    finally:
        sys.setswitchinterval(interval)
        ended.set()
        thread.join()
    assert not errors
    assert built[0]
    assert many


def test_a_model_that_is_not_known_is_refused_by_name() -> None:
    check_architecture(["Other", "Llama"], ("Llama", "Qwen"))
    with pytest.raises(
        UnsupportedError, match="Mixtral is not supported by fusion, only Llama, Qwen"
    ):
        check_architecture(["Mixtral"], ("Llama", "Qwen"))
    check_count([1, 2], 2)
    with pytest.raises(UnsupportedError, match="3 decoder layers and 2 layers of KV"):
        check_count([1, 2, 3], 2)


def test_a_layer_is_called_as_it_is_known() -> None:
    class Layer:
        def forward(self, positions: Any, hidden: Any, residual: Any, more: Any = None) -> None:
            pass

    for call in (Layer.forward, Layer().forward):
        check_arguments(call, ("positions", "hidden"), "an engine 1.0")
        with pytest.raises(UnsupportedError, match=r"takes positions, hidden; fusion knows an eng"):
            check_arguments(call, ("hidden", "positions"), "an engine 1.0")


def test_a_feature_that_blends_would_ignore_is_named() -> None:
    refuse_unlike({"a window": False, "sinks": None, "scales": 0})
    with pytest.raises(UnsupportedError, match="attention with sinks is not supported by fusion"):
        refuse_unlike({"a window": False, "sinks": object()})
