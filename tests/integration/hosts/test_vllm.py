"""Two real vLLMs on two hosts share a Redis on a third, over cables that delay and lose packets.

`make test` has the reference engine there (test_stores.py), and vLLM with faults of a store on one
host (tests/engines/test_vllm_faults.py).
"""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvcore.harness.compare import SMALL, answers, assert_same_answers
from kvcore.harness.engine_process import EngineProcess
from kvcore.harness.models import tiny_model
from kvcore.harness.prompts import windows
from kvcore_devtools.hosts import Network
from kvcore_devtools.servers import Start, need_client, redis_like

pytestmark = [pytest.mark.engine, pytest.mark.whole_machine, pytest.mark.exhaustive]

RETURNS = 40
"""Prompts after which a store that is back is used."""


def settings(url: str) -> dict[str, Any]:
    options = {"url": url, "timeout_s": 10.0, "lookup_s": 20.0, "deadline_s": 10.0, "retries": 0}
    return {
        "host": {"capacity": "64MiB", "huge_pages": False},
        "tiers": {"far": {"plugin": "redis", "capacity": "64MiB", "options": options}},
        "transfer": {"load_deadline_s": 20.0},
    }


def test_answers_stay_the_same_over_cables_that_delay_and_lose(
    network: Network, start_server: Start, tmp_path: Path
) -> None:
    """What is right is what the first says under a salt that nothing else has."""
    if not (network.facts.netem or network.facts.tap):
        pytest.skip(str(network.facts))
    need_client("redis")
    host = network["store"]
    server = start_server(redis_like("redis-server", bind=host.address), host)
    model = tiny_model("llama", layers=3, heads=4, kv_heads=2)
    documents = windows(model, 6 + RETURNS, 100, 200, seed=6)
    asked, [torn], more = documents[:5], documents[5:6], documents[6:]
    with ExitStack() as started:  # both at once
        a, b = (
            started.enter_context(
                closing(
                    EngineProcess(
                        model,
                        kvcore=settings(f"redis://{server.address}/0"),
                        within=network[name].command,
                        env={
                            "VLLM_HOST_IP": network[name].address,
                            "GLOO_SOCKET_IFNAME": "eth0",
                        },
                        log=tmp_path / f"vllm-{name}.log",
                        **SMALL,
                    )
                )
            )
            for name in ("a", "b")
        )
        a.wait_ready()
        b.wait_ready()
        for name in ("a", "b"):
            network[name].slow(delay_s=0.05, loss=0.02)
        expected = answers(a, documents[:6], cache_salt="alone")
        assert_same_answers(answers(a, documents[:6]), expected)
        a.settle()
        got = answers(b, asked)
        assert_same_answers(got, expected[:5])
        assert any("far" in answer.tiers for answer in got), "nothing came in time"
        network["b"].slow(20_000)
        before = network["b"].received
        answer = b.submit(torn, len(expected[5].token_ids))
        while network["b"].received - before < 10_000 and not answer.done():
            time.sleep(0.02)
        network["b"].slow(20_000, loss=0.6)
        assert_same_answers([answer.result(300)], expected[5:])
        network.heal()
        for document in more:
            [right] = answers(a, [document])
            a.settle()
            [back] = answers(b, [document])
            assert_same_answers([back], [right])
            if "far" in back.tiers:
                break
        else:
            raise AssertionError("host b never loads again")
