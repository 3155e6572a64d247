"""Fusion in SGLang's leader, without the engine: what is planned, where it ends, what is told.

The oracle for a plan is the prompt itself: every chunk must be the same tokens where it was stored,
and a blend must begin and end at pages' borders behind the exact prefix.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from kvcore.config import load_config  # noqa: E402
from kvcore.connector.fusion_chunks import MAX_FAILURES  # noqa: E402
from kvcore.connector.fusion_messages import BlendOrder, BlendReport  # noqa: E402
from kvcore.connector.fusion_policy import make_fusion_policy  # noqa: E402
from kvcore.connector.fusion_scheduler import FusionRequest, FusionTraits  # noqa: E402
from kvcore.connector.rank_guard import RankGuard  # noqa: E402
from kvcore.connector.step_transport import Outbox  # noqa: E402
from kvcore.errors import ConfigError  # noqa: E402
from kvcore.fusion.controller import Mode  # noqa: E402
from kvcore.fusion.options import FusionOptions  # noqa: E402
from kvcore.fusion.segments import Segments  # noqa: E402
from kvcore.harness.prompts import words as words_of  # noqa: E402
from kvcore.index import BlockIndex, TierSpec  # noqa: E402
from kvcore.index.policy import BUILTIN_POLICIES  # noqa: E402
from kvcore.manager import HOST, KVManager  # noqa: E402
from kvcore.model.keys import KeyChain, Namespace  # noqa: E402
from kvcore.model.shape import BlockShape  # noqa: E402
from kvcore.telemetry.metrics import Metrics  # noqa: E402
from kvcore_sglang.fusion import lent  # noqa: E402
from kvcore_sglang.fusion_scheduler import (  # noqa: E402  (needs torch)
    Asking,
    SglangFusionScheduler,
    asking_of,
    options_of,
)
from kvcore_sglang.gate import LayerGate  # noqa: E402

words = functools.partial(words_of, ids=range(100, 50_000))
BLOCK = 16
NAMESPACE = Namespace(b"model")
SHAPE = BlockShape(2, 1, 4, BLOCK, "float32")


class FusionRig:
    """A fusion leader over chains that are stored in host memory."""

    def __init__(self, page: int = 1, pace: Any = None, **fusion: Any) -> None:
        self.outbox = Outbox()
        self.index = BlockIndex([TierSpec(HOST, 500, BUILTIN_POLICIES["lru"])])
        manager = KVManager(self.index, self.outbox)
        config = load_config(
            overrides={"fusion": {"enabled": True, "min_tokens": 32, **fusion}}, env={}
        )
        self.metrics = Metrics("leader")
        self.leader = SglangFusionScheduler(
            config,
            SHAPE.nbytes,
            manager,
            Segments(BLOCK, min_tokens=32),
            (),
            self.metrics,
            FusionTraits(page, ends_at_page=True),
            pace,
        )
        self.requests: dict[str, FusionRequest] = {}

    def put(self, tokens: Sequence[int]) -> None:
        chain = KeyChain(NAMESPACE, BLOCK)
        chain.extend(list(tokens))
        keys = chain.keys
        self.index.lifecycle.commit(
            self.index.lifecycle.reserve(HOST, keys, 0, len(keys), NAMESPACE.digest)
        )
        self.leader.chunks.learn(chain, 0, len(keys), list(tokens))

    def plan(self, rid: str, prompt: Sequence[int], exact: int = 0, wishes: Any = None) -> Any:
        asking = Asking(np.array(prompt), wishes)
        self.requests[rid] = self.leader.track(rid, asking)
        return self.leader.plan(self.requests[rid], asking.tokens, NAMESPACE, exact)

    def order(self, rid: str, prompt: Sequence[int], plan: Any) -> Any:
        request = self.requests[rid]
        return self.leader.order(request, np.array(prompt), plan, ())

    def blends(self, outcome: str) -> float:
        found = self.metrics.snapshot().get("kvcore_blends_total", {})
        return float(sum(value for labels, value in found.items() if outcome in labels))


@settings(max_examples=30, deadline=None)
@given(
    page=st.sampled_from([1, 4, 16, 64]),
    exact=st.integers(0, 3),
    before=st.integers(1, 70),
    length=st.integers(32, 200),
    behind=st.integers(1, 70),
)
def test_a_blend_lies_between_borders_of_pages(
    page: int, exact: int, before: int, length: int, behind: int
) -> None:
    rig, text = FusionRig(page), words(1, 208)
    rig.put(text)
    prompt = words(2, 64 * exact + before) + text[:length] + words(3, behind)
    start = 64 * exact
    plan = rig.plan("one", prompt, start)
    stop = (start + before + min(length, 208)) // page * page
    if plan is None:
        assert stop - (start + before) < 32 + BLOCK
        return
    assert (plan.exact, plan.stop % page) == (start, 0)
    assert plan.stop <= min(stop, len(prompt) - 1)
    for chunk in plan.chunks:
        here = prompt[chunk.prompt_start : chunk.prompt_start + chunk.length]
        assert here == text[chunk.source_start : chunk.source_start + chunk.length]
        assert plan.exact <= chunk.prompt_start < plan.stop
    assert rig.leader.in_host(plan) == plan


def test_an_order_carries_the_graphs_of_its_chunks() -> None:
    rig, texts = FusionRig(), [words(seed, 96) for seed in (1, 2)]
    for text in texts:
        rig.put(text)
    prompt = [*words(9, 20), *texts[1], *words(8, 5), *texts[0], 1, 2, 3]
    plan = rig.plan("two", prompt)
    order = rig.order("two", prompt, plan)
    assert len({chunk.graph.graph_id for chunk in order.chunks}) == 2
    assert not rig.outbox.graphs, "the order carries its graphs itself"
    assert (order.exact, order.readable, order.stop) == (0, 0, 20 + 96 + 5 + 96)
    assert sum(chunk.graph.num_rows for chunk in order.chunks) == 12
    assert [chunk.position for chunk in order.chunks] == [20, 121]
    assert np.frombuffer(order.tokens, dtype="<u4").tolist() == prompt
    assert rig.leader.results["two"] == {"blended_tokens": 192, "ratio": 0.15}
    rig.leader.take_report(BlendReport("two", share=0.3, ratio=0.15))
    assert rig.leader.results["two"]["recomputed_share"] == 0.3
    assert rig.blends("blended") == 1
    rig.leader.refuse("two")
    assert "error" in rig.leader.results["two"]


@pytest.mark.parametrize(
    ("report", "ends"),
    [
        (BlendReport("", ok=False), True),
        (BlendReport("", ok=False, arrived=False), False),
        (BlendReport(""), False),
    ],
    ids=["the blend failed", "its chunks did not come", "another load of the batch failed"],
)
def test_failures_one_after_another_end_fusion(report: BlendReport, ends: bool) -> None:
    """Not loads that fail, as they do when a server has ended: the next one may be there soon."""
    rig, text = FusionRig(), words(1, 96)
    rig.put(text)
    prompt = [7, *text, 1]
    for number in range(MAX_FAILURES):
        plan = rig.plan(f"r{number}", prompt)
        assert plan is not None
        rig.order(f"r{number}", prompt, plan)
        rig.leader.refuse(f"r{number}")
        rig.leader.take_report(msgspec.structs.replace(report, request_id=f"r{number}"))
        assert "error" in rig.leader.results[f"r{number}"]
    assert (rig.plan("last", prompt) is None) is ends
    assert rig.blends("failed") == MAX_FAILURES


class Declining:
    """A controller that blends nothing."""

    def decide(self, *asked: Any) -> Any:
        return SimpleNamespace(mode=Mode.PREFIX, reason="slower")


def test_a_decision_is_heeded_unless_the_request_wants_a_ratio() -> None:
    rig, text = FusionRig(pace=Declining()), words(1, 96)
    rig.put(text)
    prompt = [7, *text, 1]
    assert rig.plan("plain", prompt) is None
    assert rig.leader.results["plain"] == {"declined": "slower"}
    assert rig.blends("declined") == 1
    plan = rig.plan("wishing", prompt, wishes='{"fusion": {"ratio": 0.4}}')
    assert plan.ratio == 0.4


def test_wishes_come_as_json() -> None:
    def request(params: Any, **told: Any) -> Any:
        given: dict[str, Any] = {
            "origin_input_ids": list(range(40)),
            "output_ids": [],
            "session": None,
            "sampling_params": SimpleNamespace(custom_params=params),
        }
        return SimpleNamespace(**{**given, **told})

    wishes = {"fusion": {"ratio": 0.5, "chunks": [[3, 9]]}}
    asked = asking_of(request({"kvcore": json.dumps(wishes), "other": 1}))
    found = options_of(asked)
    assert (found.ratio, found.chunks, asked.fresh) == (0.5, ((3, 9),), True)
    for nothing in (None, {}, {"other": 1}):
        assert options_of(asking_of(request(nothing))).enabled
    for wrong in ("{", '{"fusion": {"ratio": 2}}', '{"fusion": {"chunks": [[3, 99]]}}'):
        with pytest.raises(ConfigError):
            options_of(asking_of(request({"kvcore": wrong})))
    rig, text = FusionRig(), words(1, 96)
    rig.put(text)
    assert rig.plan("wrong", [7, *text, 1], wishes="{") is None
    assert "JSON" in rig.leader.results["wrong"]["error"]
    assert not asking_of(request(None, output_ids=[5])).fresh
    assert not asking_of(request(None, session=object())).fresh
    assert rig.leader.track("old", Asking(np.array([1]), None, False)) == FusionRequest(
        "old", options_of(Asking(np.array([1]), {"fusion": {"enabled": False}}))
    )


@pytest.mark.parametrize(
    "wishes",
    [
        "[" * 5000,
        '{"fusion": ' + "[" * 200_000,
        "\ud800",
        {"fusion": {"ratio": "\ud800"}},
        {"fusion": {"\ud800": 1}},
        '{"fusion": {"chunks": [[0, 1e400]]}}',
        '{"fusion": {"ratio": ' + "9" * 5000 + "}}",
    ],
    ids=range(7),
)
def test_what_a_client_says_costs_its_own_request_only(wishes: Any) -> None:
    """Each of these raised another error than was expected, and kvcore stopped for everybody."""
    rig, text = FusionRig(), words(1, 96)
    rig.put(text)
    assert rig.plan("hostile", [7, *text, 1], wishes=wishes) is None
    told = rig.leader.results["hostile"]["error"]
    assert len(told.encode()) < 1000
    assert rig.metrics.snapshot()["kvcore_ignored_options_total"] == {"fusion": 1}
    assert rig.plan("friendly", [7, *text, 1]) is not None


def test_no_error_of_a_reader_of_options_goes_further() -> None:
    rig = FusionRig()

    def read() -> FusionOptions:
        raise MemoryError

    options, why = rig.leader.read_options("request", read)
    assert not options.enabled
    assert why == "a number in it is too large"


def test_the_controller_of_an_engine_decides() -> None:
    """It is asked with the bytes of the chunks by tier."""
    config = load_config(overrides={"fusion": {"enabled": True}}, env={}).fusion
    pace = make_fusion_policy(
        config, hidden=64, device="cpu", layers=8, ranks=1, paths={HOST: "h2d"}, looks=False
    )
    rig, text = FusionRig(pace=pace), words(1, 96)
    rig.put(text)
    prompt = [7, *text, 1]
    decided = rig.plan("one", prompt)
    assert (decided is None) == ("declined" in rig.leader.results.get("one", {}))


# --- on a rank -----------------------------------------------------------------------------------


class Blending:
    """A rank's worker that notes what is asked of it; blends come to ``good``."""

    def __init__(self, good: bool) -> None:
        self.good = good
        self.calls: list[Any] = []
        worker: Any = self
        self.guard = RankGuard(worker, list)

    def blend(self, orders: Sequence[BlendOrder], landed: Any) -> bool:
        self.calls.append([order.request_id for order in orders])
        landed(1)
        return self.good

    def start_loads(self, graphs: Any) -> None:
        self.calls.append("loads")

    def wait_layer(self, graph_ids: Any, layer: int) -> None:
        self.calls.append(("wait", graph_ids, layer))

    def finish(self, graph_ids: Any) -> bool:
        return True

    def take_on(self, graphs: Any, orders: Any = ()) -> None:
        pass


@pytest.mark.parametrize("good", [True, False])
def test_blends_are_made_when_their_batch_runs(good: bool) -> None:
    worker: Any = Blending(good)
    gate = LayerGate(worker, layers=2, layerwise=True)
    orders = [BlendOrder("one", b"", 0, 0, 1, [], 0.5, [], 1)]
    graph: Any = SimpleNamespace(graph_id=7)
    assert gate.start([], []) == -1
    first, second = gate.start([graph], orders), gate.start([graph])
    assert worker.calls == ["loads", "loads"]
    gate.set_consumer(second)
    assert gate.finish(second), "another batch's blends are not its own"
    gate.set_consumer(first)
    gate.set_consumer(first)
    assert worker.calls[2:] == [["one"], ("wait", [7], 1)], "made once, while the loads land"
    assert gate.finish(first) is good
    assert gate.finish(gate.start([], orders)) is False, "KV that was never made is not good"


def test_a_lent_attention_is_answered_and_given_back() -> None:
    class Attention(torch.nn.Module):  # type: ignore[misc,name-defined]
        tp_q_head_num, tp_k_head_num, tp_v_head_num = 4, 2, 2
        qk_head_dim, v_head_dim = 8, 8

        def forward(self, q: Any, k: Any, v: Any, forward_batch: Any) -> Any:
            return "the engine's own"

    attention = Attention()
    q, k = torch.randn(3, 32), torch.randn(3, 16)

    def attend(queries: Any, keys: Any, values: Any) -> Any:
        assert (queries.shape, keys.shape, values.shape) == ((3, 4, 8), (3, 2, 8), (3, 2, 8))
        return queries * 2

    with lent(attention, attend):
        assert torch.equal(attention(q, k, k, None, save_kv_cache=False), q * 2)
    assert attention(q, k, k, None) == "the engine's own"
    with pytest.raises(ZeroDivisionError), lent(attention, lambda q, k, v: 1 / 0):  # type: ignore[arg-type,return-value]
        attention(q, k, k, None)
    assert attention(q, k, k, None) == "the engine's own"
