"""What others wrote becomes a value or a FormatError, in bounded time and memory."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore._util.outside import converted, decode_json, printable, read_regular
from kvcore.errors import FormatError


class Kind(msgspec.Struct, forbid_unknown_fields=True):
    number: int = 0
    text: str = ""
    inner: dict[str, float] = {}


HOSTILE = [
    "[" * 5000,
    '{"a":' * 100_000,
    "\ud800",
    '{"text": "\ud800"}',
    '{"text": "\\ud800"}',
    '{"number": 1e400}',
    '{"number": ' + "9" * 5000 + "}",
    "NaN",
    '{"inner": {"": Infinity}}',
    '{"unknown": [1]}',
    "",
    "\0",
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.parametrize("kind", [Kind, dict[str, int]])
def test_hostile_json_is_a_short_error_that_can_be_written(text: str, kind: Any) -> None:
    with pytest.raises(FormatError) as caught:
        decode_json(text, kind)
    message = str(caught.value)
    assert len(message.encode()) < 1000
    assert "\n" not in message


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [nested(50_000), {"text": nested(50_000)}, {"\ud800": "\ud800"}],
    ids=["nested", "nested inside", "surrogates"],
)
@pytest.mark.parametrize("kind", [Kind, dict[str, int]])
def test_hostile_values_are_short_errors_that_can_be_written(value: object, kind: Any) -> None:
    with pytest.raises(FormatError) as caught:
        converted(value, kind)
    assert len(str(caught.value).encode()) < 1000


@given(st.binary(max_size=200) | st.text(max_size=200))
def test_any_text_is_a_value_or_a_format_error(text: bytes | str) -> None:
    try:
        assert isinstance(decode_json(text, Kind), Kind)
    except FormatError as error:
        str(error).encode()


@given(
    st.recursive(
        st.none() | st.integers(-(1 << 63), (1 << 64) - 1) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_what_is_right_is_read(value: Any) -> None:
    text = json.dumps(value)
    assert decode_json(text) == json.loads(text)


def test_a_file_up_to_the_limit_is_read(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"12345")
    (tmp_path / "link").symlink_to(file)
    assert read_regular(tmp_path / "link", 5) == b"12345"
    with pytest.raises(FormatError, match="file has 5 bytes; supported are 4"):
        read_regular(file, 4)


def test_a_sparse_file_costs_nothing(tmp_path: Path) -> None:
    file = tmp_path / "file"
    with file.open("wb") as opened:
        opened.truncate(1 << 40)
    with pytest.raises(FormatError, match="supported are 100"):
        read_regular(file, 100)


def test_pipes_sockets_and_devices_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "socket"))
        for name in ("pipe", "zero", "socket", "missing"):
            with pytest.raises(OSError, match=name):
                read_regular(tmp_path / name, 100)


def test_errors_about_the_decoder_say_what_the_input_is() -> None:
    assert (
        printable(RecursionError("maximum recursion depth exceeded")) == "it is nested too deeply"
    )
    assert printable(MemoryError()) == "a number in it is too large"
    assert printable(ValueError("two\nlines \ud800")) == "two lines \\ud800"
