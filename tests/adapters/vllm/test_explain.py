"""What vLLM's scheduler side tells of a request: to the operator, and to a client that asks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvcore.config import load_config
from kvcore.connector.leader import LeaderParts
from kvcore.connector.step_transport import Outbox
from kvcore.explain.file import read_records
from kvcore.explain.recorder import RequestRecorder
from kvcore.index import BlockIndex, TierSpec
from kvcore.manager import Backing, KVManager
from kvcore.manager.load_advisor import LoadAdvisor, tier_priors
from kvcore.model.keys import KeyChain
from kvcore.model.shape import BlockShape
from kvcore.model.spec import LayerGroup, ModelDescription
from kvcore.telemetry.metrics import Metrics
from kvcore.telemetry.rates import ComputeRates, ForwardPart, Rates
from kvcore_vllm.leader import Leader

BLOCK, LAYERS = 16, 4
SHAPE = BlockShape(LAYERS, 2, 64, BLOCK, "float16")
MODEL = ModelDescription(SHAPE, (LayerGroup(0, BLOCK, tuple(range(LAYERS))),), b"f" * 32, 1)
PROMPT = list(range(1, 402))


class Side:
    """A scheduler side with the first 384 tokens of ``PROMPT`` on disk, and records in a folder."""

    def __init__(self, folder: Path, disk_second_a_byte: float) -> None:
        settings = {"planner": {"enabled": True}, "explain": {"path": str(folder)}}
        config = load_config(overrides=settings, env={})
        self.recorder = RequestRecorder.of(config)
        index = BlockIndex([TierSpec("host", 64), TierSpec("disk", 64)])
        listener = self.recorder.listener(None)
        assert listener is not None
        index.watch(listener)
        outbox, metrics = Outbox(1), Metrics("leader")
        manager = KVManager(index, outbox, backing=[Backing("disk")], metrics=metrics)
        rates = Rates(LAYERS, ComputeRates(1e-3, 1e-6, 1e-10), tier_priors(["host", "disk"]))
        for n in (1, 2, 3, 4):
            rates.prefilled([ForwardPart(100 * n, 0)], n * 0.01)
            for tier in ("host", "disk"):
                rates.loaded(tier, n * 1_000_000, n * 1e6 * disk_second_a_byte)
        planning = LoadAdvisor(config, MODEL, manager, rates, min_load_tokens=64, layerwise=True)
        self.recorder.count_in(metrics)
        parts = LeaderParts[Any](
            manager=manager,
            transport=outbox,
            metrics=metrics,
            recorder=self.recorder,
            planning=planning,
        )
        self.side = Leader(config, MODEL, parts, outbox, {})
        chain = KeyChain(self.side.namespaces.of(), BLOCK)
        chain.extend(PROMPT)
        index.lifecycle.commit(
            index.lifecycle.reserve("disk", chain.keys, 0, 24, chain.namespace.digest)
        )

    def serve(self, asked: Any) -> dict[str, Any] | None:
        """From lookup to end, as vLLM calls it."""
        external, waits = self.side.get_num_new_matched_tokens(asked, 0)
        pages: Any = SimpleNamespace(get_block_ids=lambda: [np.arange(26).tolist()])
        self.side.update_state_after_alloc(asked, pages, external)
        if waits:
            self.side._load_ended(asked.request_id)
        return self.side.request_finished(asked, [np.arange(26).tolist()])


def request(name: str, **more: Any) -> Any:
    return SimpleNamespace(
        request_id=name, num_tokens=len(PROMPT), num_prompt_tokens=len(PROMPT),
        num_computed_tokens=0, prompt_token_ids=PROMPT, prompt_embeds=None, pooling_params=None,
        skip_reading_prefix_cache=False,
        resumable=False, mm_features=[], _all_token_ids=PROMPT, lora_request=None, cache_salt=None,
        kv_transfer_params=None, get_finished_reason=lambda: "stop", **more,
    )  # fmt: skip


def records(side: Side, folder: Path) -> list[dict[str, Any]]:
    side.side.close()
    return list(read_records(folder))


def test_a_load_is_told_with_its_plan_and_its_steps(tmp_path: Path) -> None:
    side = Side(tmp_path, 1e-10)
    assert side.serve(request("a")) is None, "who asks for nothing is told nothing"
    (record,) = records(side, tmp_path)
    assert record["matched"] == [{"tier": "disk", "tokens": [0, 384]}]
    assert (record["loaded"], record["outcome"]) == ({"disk": 384}, "stop")
    assert [miss["cause"] for miss in record["misses"]] == ["never seen"]
    assert record["plan"]["expected_ms"] < record["plan"]["recompute_ms"]
    assert list(record["ms"]) == ["lookup", "load", "rest"]


def test_a_plan_that_says_recompute_is_a_cause(tmp_path: Path) -> None:
    side = Side(tmp_path, 1e-5)
    side.serve(request("a"))
    (record,) = records(side, tmp_path)
    assert record["misses"][-1] == {"cause": "plan said recompute"}
    assert record["plan"]["load_all_ms"] > record["plan"]["recompute_ms"]
    assert record["loaded"] == {}


def test_another_tenants_request_is_told_to_the_operator_only(tmp_path: Path) -> None:
    side = Side(tmp_path, 1e-10)
    side.serve(request("a"))
    asked = request("b")
    asked.cache_salt, asked.kv_transfer_params = "other", {"kvcore": {"report": True}}
    answer = side.serve(asked)
    assert answer is not None
    assert answer["kvcore"]["explain"]["misses"] == [{"cause": "not held"}]
    newest, _ = records(side, tmp_path)
    assert newest["misses"] == [{"cause": "other namespace", "differed": ["cache_salt"]}]
