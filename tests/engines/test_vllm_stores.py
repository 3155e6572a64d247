"""vLLM's scheduler side and remote stores: a lookup that needs a store is answered "ask again"."""

from __future__ import annotations

import time
import uuid
from types import SimpleNamespace
from typing import Any

import pytest

from kvcore.adapting.build import build_leader, geometry
from kvcore.adapting.model import LayerGroup, ModelDescription
from kvcore.adapting.outbox import Outbox
from kvcore.block import KeyChain
from kvcore.config import load_config
from kvcore.layout import BlockShape
from kvcore.tiers.remote import Shard
from kvcore.tiers.remote.memory import shared_store

pytestmark = pytest.mark.engine

SHAPE = BlockShape(2, 2, 8, 16, "bfloat16")
MODEL = ModelDescription(SHAPE, (LayerGroup(0, 16, (0, 1)),), b"fingerprint", 1)


def request(tokens: list[int]) -> Any:
    """What the scheduler side looks at of a vLLM request."""
    return SimpleNamespace(
        request_id="r",
        num_tokens=len(tokens),
        prompt_token_ids=tokens,
        _all_token_ids=tokens,
        prompt_embeds=None,
        pooling_params=None,
        mm_features=[],
        lora_request=None,
        cache_salt=None,
        kv_transfer_params=None,
    )


def test_a_prompt_in_a_store_is_found_at_the_second_lookup() -> None:
    scheduler = pytest.importorskip("kvcore_vllm.scheduler")
    name = uuid.uuid4().hex
    far = {"plugin": "memory-store", "capacity": "1MiB", "options": {"name": name, "lookup_s": 60}}
    config = load_config(None, {"host": {"capacity": "1MiB"}, "tiers": {"far": far}})
    outbox = Outbox(1)
    parts = build_leader(config, MODEL, outbox)
    side = scheduler.SchedulerSide(
        config, MODEL, parts.manager, outbox, parts.metrics, parts.open_tiers, parts.releases
    )
    tokens = list(range(1, 101))
    one = request(tokens)
    chain = KeyChain(side._namespace(one), config.block.tokens)
    [shard] = Shard.all_of(geometry(MODEL), "kvcore")
    for key in chain.extend(tokens)[:5]:
        shared_store(name).values[shard.name(key)] = b"?"
    try:
        assert side.get_num_new_matched_tokens(one, 0) == (None, False)
        limit = time.monotonic() + 60
        while (answer := side.get_num_new_matched_tokens(one, 0)) == (None, False):
            assert time.monotonic() < limit
            time.sleep(0.01)
        assert answer == (80, True), "five blocks, loaded between steps"
        assert side.get_num_new_matched_tokens(one, 0) == answer
        assert side.get_num_new_matched_tokens(one, 80) == (0, False)
    finally:
        side.close()
