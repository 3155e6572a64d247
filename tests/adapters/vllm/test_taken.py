"""What vLLM takes of an offer from host memory, in the step and between steps; and misses."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from kvcore.config import load_config
from kvcore.connector.leader import LeaderParts
from kvcore.connector.step_transport import Outbox
from kvcore.errors import TransferError
from kvcore.explain.recorder import RequestRecorder
from kvcore.index import BlockIndex, TierSpec
from kvcore.manager import KVManager, Readiness
from kvcore.manager.load_policy import Action
from kvcore.model.keys import KeyChain
from kvcore.model.shape import BlockShape
from kvcore.model.spec import LayerGroup, ModelDescription
from kvcore.telemetry.metrics import Metrics
from kvcore.transfer.graph import SKIP, TransferGraph
from kvcore_vllm.leader import Leader

BLOCK, PAGE, LAYERS = 16, 32, 4
SHAPE = BlockShape(LAYERS, 2, 64, BLOCK, "float16")
MODEL = ModelDescription(SHAPE, (LayerGroup(0, PAGE, tuple(range(LAYERS))),), b"f" * 32, 1)
PROMPT = list(range(1, 402))
PAGES = list(range(100, 113))


def request(name: str = "r") -> Any:
    return SimpleNamespace(
        request_id=name, num_tokens=len(PROMPT), num_prompt_tokens=len(PROMPT),
        prompt_token_ids=PROMPT, prompt_embeds=None, pooling_params=None, resumable=False,
        skip_reading_prefix_cache=False,
        mm_features=[], _all_token_ids=PROMPT, lora_request=None, cache_salt=None,
        kv_transfer_params=None,
    )  # fmt: skip


class Side:
    """A scheduler side whose host memory holds ``held`` blocks of `PROMPT`."""

    def __init__(self, held: int = 25, sync: bool = True) -> None:
        self.metrics, recorder = Metrics("leader"), RequestRecorder()
        recorder.count_in(self.metrics)
        index, outbox = BlockIndex([TierSpec("host", 64)]), Outbox(1)
        settings: Any = {} if sync else {"transfer": {"sync_load_max": 0}}
        self.manager = KVManager(index, outbox)
        parts = LeaderParts[Any](
            manager=self.manager, transport=outbox, metrics=self.metrics, recorder=recorder
        )
        self.side = Leader(load_config(None, settings), MODEL, parts, outbox, {})
        if held:
            chain = KeyChain(self.side.namespaces.of(), BLOCK)
            keys, space = chain.extend(PROMPT), chain.namespace.digest
            index.lifecycle.commit(index.lifecycle.reserve("host", keys, 0, held, space))
        self.asked = request()

    def ask(self, computed: int = 0) -> Any:
        return self.side.get_num_new_matched_tokens(self.asked, computed)

    def take(self, external: int) -> None:
        blocks: Any = SimpleNamespace(get_block_ids=lambda: (PAGES,))
        self.side.update_state_after_alloc(self.asked, blocks, external)

    @property
    def plan(self) -> Any:
        return self.side._plan

    @property
    def loads(self) -> list[TransferGraph]:
        return [*self.plan.sync_loads, *(graph for _, graph in self.plan.async_loads)]

    @property
    def misses(self) -> dict[str, int]:
        return self.metrics.snapshot().get("kvcore_misses_total", {})


def filled(graph: TransferGraph) -> dict[int, int]:
    """The place of each token of a load, as ``page * PAGE + offset``, from its units and rows."""
    [table] = graph.units
    tokens: dict[int, int] = {}
    first = graph.keys
    for row, units in enumerate(table.array().tolist()):
        for part, unit in enumerate(units):
            if unit != SKIP:
                tokens[row * len(units) + part] = unit
    assert len(first) == len(table.array())
    return tokens


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("computed", [0, 64])
@pytest.mark.parametrize("taken", [32, 160, 320])
def test_the_tokens_that_are_taken_are_the_first_ones(
    computed: int, taken: int, sync: bool
) -> None:
    side = Side(sync=sync)
    assert side.ask(computed) == (400 - computed, not sync)
    side.take(taken)
    [graph] = side.loads
    assert bool(side.plan.sync_loads) is sync, "vLLM waits for it as it was offered"
    first = computed // BLOCK
    chain = side.side._requests["r"].chain
    assert list(graph.keys) == chain.keys[first : first + taken // BLOCK]
    units = np.arange(first, first + taken // BLOCK)
    expected = np.asarray(PAGES)[units // 2] * 2 + units % 2
    assert list(filled(graph).values()) == expected.tolist()


def test_a_large_offer_of_which_little_is_taken_still_loads_between_steps() -> None:
    """vLLM waits for its end, which a load in the step would never tell."""
    side = Side()
    side.side._config = load_config(None, {"transfer": {"sync_load_max": 4 * SHAPE.nbytes}})
    assert side.ask() == (400, True)
    side.take(32)
    assert [name for name, _ in side.plan.async_loads] == ["r"]
    assert not side.plan.sync_loads


def test_nothing_is_loaded_if_nothing_is_taken() -> None:
    side = Side()
    assert side.ask() == (400, False)
    side.take(0)
    side.take(0)
    assert (side.loads, side.plan.failed_loads) == ([], [])


def test_more_than_was_offered_between_steps_is_told_as_a_failed_load() -> None:
    side = Side(held=10, sync=False)
    assert side.ask() == (160, True)
    side.take(320)
    assert (side.loads, side.plan.failed_loads) == ([], ["r"])


def test_what_was_offered_before_counts_no_more() -> None:
    side = Side()
    assert side.ask() == (400, False)
    assert side.ask(400) == (0, False)
    with pytest.raises(TransferError, match="was offered None"):
        side.take(320)
    assert side.loads == []


def test_the_sources_of_a_hit_are_as_many_as_its_tokens() -> None:
    side = Side()
    side.ask(64)
    side.take(160)
    assert side.side.hit_sources("r", 160) == {"host": 160}
    side.side._requests["r"].reused = {"blend": 96, "host": 32}
    assert side.side.hit_sources("r", 160) == {"blend": 96, "host": 32, "none": 32}
    assert side.side.hit_sources("unknown", 5) == {"none": 5}


# -- misses --------------------------------------------------------------------------------------


def test_a_request_that_finds_no_pages_is_one_miss_however_often_vllm_asks() -> None:
    side = Side(held=0)
    for _ in range(5):
        assert side.ask() == (0, False)
    assert side.misses == {}
    side.take(0)
    side.take(0)
    assert side.misses == {"not_cached": 1}
    assert side.metrics.snapshot()["kvcore_lookup_tokens_total"] == {"miss|": 401}


def test_a_request_that_cannot_load_now_is_one_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Side()
    monkeypatch.setattr(side.manager, "can_load", lambda *_: Readiness.NEVER)
    for _ in range(5):
        assert side.ask() == (0, False)
    assert side.misses == {}
    side.take(0)
    assert side.misses == {"busy": 1}


@pytest.mark.parametrize("why", ["busy", "not_cached", "too_short", "planned", "load_failed"])
def test_what_vllm_holds_itself_is_no_miss(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the reason: all tokens behind those that vLLM holds are missed, and no others."""
    side = Side(held={"not_cached": 4, "too_short": 5}.get(why, 25))
    monkeypatch.setattr(side.side, "_traits", replace(side.side._traits, min_load_tokens=32))
    if why == "busy":
        monkeypatch.setattr(side.manager, "can_load", lambda *_: Readiness.NEVER)
    if why == "planned":
        recompute = SimpleNamespace(action=Action.RECOMPUTE)
        monkeypatch.setattr(side.side, "_planning", SimpleNamespace(plan=lambda *_: recompute))
    if why == "load_failed":
        monkeypatch.setattr(side.manager, "plan_load", Mock(side_effect=TransferError("gone")))
    assert side.ask(64)[0] == (336 if why == "load_failed" else 0)
    side.take(336 if why == "load_failed" else 0)
    assert side.misses == {why: 1}
    assert side.metrics.snapshot()["kvcore_lookup_tokens_total"] == {"miss|": 401 - 64}


def test_a_miss_that_became_a_hit_is_none() -> None:
    side = Side(held=0)
    side.ask()
    chain = side.side._requests["r"].chain
    index = side.manager.index
    space = chain.namespace.digest
    index.lifecycle.commit(index.lifecycle.reserve("host", chain.keys, 0, 25, space))
    assert side.ask() == (400, False)
    side.take(400)
    assert side.misses == {}


# -- sessions ------------------------------------------------------------------------------------


def test_a_session_is_left_alone() -> None:
    side = Side()
    side.asked.resumable = True
    assert side.ask() == (0, False)
    assert side.side.request_finished(side.asked, [PAGES]) is None
    assert not side.side._requests
