"""vLLM's scheduler side and remote stores: a lookup that needs a store is answered "ask again"."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvcore.config import load_config
from kvcore.connector.build import build_leader, leader_parts
from kvcore.connector.disagg import promised
from kvcore.connector.messages import StepReport
from kvcore.connector.step_transport import Outbox
from kvcore.errors import FormatError
from kvcore.explain.recorder import RequestRecorder
from kvcore.model.keys import KeyChain
from kvcore.model.shape import BlockShape
from kvcore.model.spec import LayerGroup, ModelDescription
from kvcore.runtime.build import geometry
from kvcore.tiers.remote import Shard
from kvcore.tiers.remote.memory import shared_store

pytestmark = pytest.mark.engine

SHAPE = BlockShape(2, 2, 8, 16, "bfloat16")
HAS_ALL: Any = SimpleNamespace(expected=len, points=None, node="")
"""What the manager of who promises says: it holds every block."""
MODEL = ModelDescription(SHAPE, (LayerGroup(0, 16, (0, 1)),), b"fingerprint", 1)


def request(tokens: list[int]) -> Any:
    """What the scheduler side looks at of a vLLM request."""
    return SimpleNamespace(
        request_id="r",
        num_tokens=len(tokens),
        num_prompt_tokens=len(tokens),
        prompt_token_ids=tokens,
        _all_token_ids=tokens,
        prompt_embeds=None,
        skip_reading_prefix_cache=False,
        pooling_params=None,
        resumable=False,
        mm_features=[],
        lora_request=None,
        cache_salt=None,
        kv_transfer_params=None,
    )


@pytest.fixture
def make_side() -> Iterator[Callable[..., Any]]:
    """A scheduler side whose tier is the process's store of that name."""
    scheduler = pytest.importorskip("kvcore_vllm.leader")
    made: list[Any] = []

    def make(name: str, promise_s: float = 300.0) -> Any:
        options = {"name": name, "lookup_s": 60.0}
        far = {"plugin": "memory-store", "capacity": "1MiB", "options": options}
        tables = {"host": {"capacity": "1MiB"}, "tiers": {"far": far}}
        config = load_config(None, {**tables, "vllm": {"promise_s": promise_s}})
        outbox, recorder = Outbox(1), RequestRecorder()
        leader = build_leader(config, MODEL, outbox, recorder)
        parts = leader_parts(leader, outbox, recorder)
        made.append(scheduler.Leader(config, MODEL, parts, outbox, leader.open_tiers))
        return made[-1]

    yield make
    for side in made:
        side.close()


def fill(name: str, keys: Sequence[bytes]) -> None:
    [shard] = Shard.all_of(geometry(MODEL), "kvcore")
    for key in keys:
        shared_store(name).values[shard.name(key)] = b"?"


def looked_up(side: Any, one: Any) -> tuple[int | None, bool]:
    limit = time.monotonic() + 300
    while (answer := side.get_num_new_matched_tokens(one, 0)) == (None, False):
        assert time.monotonic() < limit
        time.sleep(0.01)
    found: tuple[int | None, bool] = answer
    return found


def test_a_prompt_in_a_store_is_found_at_the_second_lookup(
    make_side: Callable[..., Any],
) -> None:
    name = uuid.uuid4().hex
    side = make_side(name)
    tokens = list(range(1, 101))
    one = request(tokens)
    chain = KeyChain(side.namespaces.of(), MODEL.shape.block_tokens)
    fill(name, chain.extend(tokens)[:5])
    assert side.get_num_new_matched_tokens(one, 0) == (None, False)
    answer = looked_up(side, one)
    assert answer == (80, True), "five blocks, loaded between steps"
    assert side.get_num_new_matched_tokens(one, 0) == answer
    assert side.get_num_new_matched_tokens(one, 80) == (0, False)


def test_a_prompt_that_was_promised_waits_for_its_blocks(make_side: Callable[..., Any]) -> None:
    tokens = list(range(1, 101))
    name = uuid.uuid4().hex
    side = make_side(name)
    one = request(tokens)
    chain = KeyChain(side.namespaces.of(), MODEL.shape.block_tokens)
    keys = chain.extend(tokens)
    assert looked_up(side, request(tokens)) == (0, False), "without it, what is not there is not"
    one.request_id = "promised"
    one.kv_transfer_params = {"kvcore": {"promise": promised(chain, 6, HAS_ALL)}}
    for _ in range(30):
        assert side.get_num_new_matched_tokens(one, 0) == (None, False)
        time.sleep(0.01)
    fill(name, keys)
    assert looked_up(side, one) == (96, True)


def test_a_promise_that_was_not_kept_is_not_waited_for_again(
    make_side: Callable[..., Any],
) -> None:
    """vLLM asks again while it has no room: by then the promise is an old one."""
    side = make_side(uuid.uuid4().hex, promise_s=0.1)
    tokens = list(range(1, 101))
    one = request(tokens)
    chain = KeyChain(side.namespaces.of(), MODEL.shape.block_tokens)
    chain.extend(tokens)
    one.kv_transfer_params = {"kvcore": {"promise": promised(chain, 6, HAS_ALL)}}
    assert looked_up(side, one) == (0, False)
    for _ in range(3):
        assert side.get_num_new_matched_tokens(one, 0) == (0, False)


@pytest.mark.parametrize(("computed", "blocks"), [(0, 0), (40, 2), (100, 6)])
def test_as_much_is_promised_as_is_saved(
    make_side: Callable[..., Any], computed: int, blocks: int
) -> None:
    side = make_side(uuid.uuid4().hex)
    one = request(list(range(1, 101)))
    one.kv_transfer_params = {"do_remote_decode": True}
    one.num_prompt_tokens, one.num_computed_tokens = 100, computed
    one.get_finished_reason = lambda: None
    assert looked_up(side, one) == (0, False)
    told = side.request_finished(one, [list(range(1, 8))])
    promise = {} if told is None else told["kvcore"]["promise"]
    assert promise.get("blocks", 0) == blocks


def test_messages_that_are_none_are_refused_by_name() -> None:
    """As everything between an adapter's parts: of lists in lists, too."""
    messages = pytest.importorskip("kvcore_vllm.messages")
    deep = b"\x81\xa1x\x81\xa1y" + b"\x91" * 100_000
    plan = messages.StepPlan(open_tiers={"far": {"a": 1}})
    assert messages.KVCoreMetadata.of(plan).plan() == plan
    for wrong in (b"\xc1", b"\x91\xa2\xff\xff", deep, b"\x91" + deep, b"\x92\x90" + deep):
        with pytest.raises(FormatError, match="not a step plan of this version"):
            messages.KVCoreMetadata(wrong).plan()
        rebuild, _ = messages.KVCoreWorkerMetadata([StepReport()]).__reduce__()
        assert "not a step report of this version" in rebuild(wrong).merged().stopped
