"""kvcore's events in the batches of vLLM's own publisher."""

from __future__ import annotations

import msgspec
import pytest

kv_events = pytest.importorskip("vllm.distributed.kv_events")

from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash  # noqa: E402

from kvcore.events.vllm_format import hash_of  # noqa: E402
from kvcore.manager import HOST, Event  # noqa: E402
from kvcore.transfer.graph import NO_PARENT  # noqa: E402
from kvcore_vllm.events import engine_event  # noqa: E402

FIRST, SECOND = bytes(range(16)), bytes(range(240, 256))
"""The last 8 bytes of the second are no signed number."""


def test_keys_are_numbers_as_vllm_s_hashes_beside_them() -> None:
    """Dynamo's router drops a batch that has bytes in it, vLLM's own events too."""
    first = engine_event(Event(True, HOST, (FIRST,), NO_PARENT), 16)
    second = engine_event(Event(True, "far", (SECOND,), FIRST), 16)
    gone = engine_event(Event(False, HOST, (SECOND,)), 16)
    assert first.block_hashes == [maybe_convert_block_hash(FIRST)]
    assert first.parent_block_hash is None
    assert second.block_hashes == gone.block_hashes == [0xF8F9FAFBFCFDFEFF]
    assert second.parent_block_hash == first.block_hashes[0]
    batch = msgspec.msgpack.encode(
        kv_events.KVEventBatch(ts=1.0, events=[first, second, gone], data_parallel_rank=0)
    )
    told = msgspec.msgpack.decode(batch)[1]
    assert all(isinstance(each, int) for event in told for each in event["block_hashes"])


def test_they_are_bytes_where_vllm_s_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    event = engine_event(Event(True, HOST, (SECOND,), FIRST), 16)
    assert event.block_hashes == [SECOND]
    assert event.parent_block_hash == FIRST


def test_kvcore_s_own_publisher_shortens_keys_as_vllm_does() -> None:
    assert [hash_of(key) for key in (FIRST, SECOND)] == [
        maybe_convert_block_hash(FIRST),
        maybe_convert_block_hash(SECOND),
    ]
