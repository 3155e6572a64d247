"""What an adapter's parts tell each other: garbage is refused by name, whatever it is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcore_sglang.messages as sglang
import kvcore_trtllm.messages as trtllm
from kvcore._util.msgpack import decoder
from kvcore.connector.messages import StepReport
from kvcore.errors import FormatError
from kvcore.transfer.graph import OpReport

DEEP = b"\x91" * 100_000
"""Lists in lists."""
TIERS = ({"far": {"a": {"b": 1}}}, {"far": {"a": {"b": 1}}})
READERS: dict[str, tuple[Callable[[bytes], Any], Any]] = {
    "sglang order": (sglang.ORDERS.decode, sglang.Order(TIERS[0], cancel=[1], now=True)),
    "sglang report": (sglang.REPORTS.decode, StepReport([OpReport(1, 2)])),
    "trtllm plan": (
        lambda data: trtllm.KVCoreMetadata(data).plan(),
        trtllm.StepPlan(TIERS[1], cancel=[3]),
    ),
    "trtllm report": (trtllm.REPORTS.decode, StepReport([OpReport(1, 2)])),
}


@pytest.mark.parametrize("name", READERS)
def test_what_was_encoded_comes_back_and_nothing_else_does(name: str) -> None:
    read, message = READERS[name]
    data = msgspec.msgpack.encode(message)
    assert read(data) == message
    deep = b"\x92\xc3\x81\xa1x\x81\xa1y" + DEEP  # where anything may stand, in an order's tiers
    plan = b"\x91\x81\xa1x\x81\xa1y" + DEEP  # and in a plan's
    for wrong in (data[:-1], data + b"\0", b"\xc1", b"\x91\xa2\xff\xff", DEEP, deep, plan):
        with pytest.raises(FormatError, match="of this version of kvcore"):
            read(wrong)


@given(st.sampled_from(sorted(READERS)), st.binary(max_size=60), st.data())
def test_no_bytes_raise_anything_else(name: str, noise: bytes, data: st.DataObject) -> None:
    read, message = READERS[name]
    whole = bytearray(msgspec.msgpack.encode(message))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at : at + len(noise)] = noise
    for given_ in (noise, bytes(whole), bytes(whole[:at])):
        with contextlib.suppress(FormatError):
            read(given_)


def test_the_name_of_what_was_expected_is_told() -> None:
    with pytest.raises(FormatError, match="not a report of"):
        decoder(OpReport, "a report")(b"")
