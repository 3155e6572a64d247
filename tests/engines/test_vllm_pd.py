"""Prefill on one real vLLM, decode on another; KV goes from memory to memory over NIXL."""

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import Any

import pytest

from kvcore.testing.asking import ANSWER, SMALL, SPACE, all_from, answers, counted, same
from kvcore.testing.engine_process import EngineProcess
from kvcore.testing.models import tiny_model
from kvcore.testing.prompts import windows
from kvcore.testing.servers import free_port, need_client
from kvcore.testing.split import prefill, split

pytestmark = pytest.mark.engine

pytest.importorskip("zmq")
need_client("nixl_cu13")

BLOCK = 16


def settings(listen: str, **more: Any) -> dict[str, Any]:
    """Patient with a busy machine, but for a node that is gone. It lists no node but itself."""
    options = {
        "listen": listen,
        "peers": [listen],
        **more,
        "lend": "64MiB",
        "timeout_s": 15.0,
        "lookup_s": 60.0,
        "deadline_s": 60.0,
        "lease_s": 60.0,
    }
    return {
        "host": {"capacity": "64MiB"},
        "tiers": {"far": {"plugin": "peer", "capacity": "64MiB", "options": options}},
        "transfer": {"load_deadline_s": 300.0},
        "vllm": {"promise_s": 30.0},
    }


def test_one_computes_and_the_other_answers() -> None:
    """What is right is what the first says when it answers itself, under a salt that nothing else
    has: without any KV of kvcore's. The other learns of the first by promises alone."""
    model = tiny_model("llama", layers=4, heads=4, kv_heads=2, head_dim=64)
    documents = windows(model, 9, 150, 600, seed=1)
    here, there = (f"127.0.0.1:{free_port()}" for _ in range(2))
    env = {**SPACE, "UCX_TLS": "tcp"}
    consumer = settings(there, guests=["127.0.0.1"])
    given = {"kv_producer": settings(here), "kv_consumer": consumer}
    with ExitStack() as started:  # both at once
        first, second = (
            started.enter_context(
                closing(EngineProcess(model, kvcore=kvcore, env=env, kv_role=role, **SMALL))
            )
            for role, kvcore in given.items()
        )
        asked, [foreign], lost = documents[:6], documents[6:7], documents[7:]
        got = split(first, second, asked, ANSWER)
        expected = answers(first, documents, cache_salt="alone")
        assert not any(answer.reused_tokens for answer in expected)
        assert len({tuple(answer.token_ids) for answer in expected}) > 6
        same(got, expected[:6])
        all_from("far", got, [min(len(d) // BLOCK * BLOCK, len(d) - 1) for d in asked])
        computed = [answer.prompt_tokens - answer.cached_tokens for answer in got]
        assert max(computed) <= BLOCK, "no more than what fills no block"
        assert counted(second, "kvcore_failures_total") == 0
        stranger = answers(second, [foreign], promise=prefill(first, foreign), cache_salt="tenant")
        same(stranger, expected[6:7])
        assert stranger[0].reused_tokens == 0, "promised to another tenant"
        promises = [prefill(first, document) for document in lost]
        first.kill()
        for document, promise, answer in zip(lost, promises, expected[7:], strict=True):
            recomputed = answers(second, [document], promise=promise)
            same(recomputed, [answer])
            assert recomputed[0].reused_tokens == 0, "there is nobody to have it from"
