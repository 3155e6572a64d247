"""Prefill on one real vLLM, decode on another; KV goes from memory to memory over NIXL. Each has
tiers of its own, or is behind a server."""

from __future__ import annotations

import json
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from kvcore.harness.compare import (
    ANSWER,
    SMALL,
    Reference,
    answers,
    assert_all_from,
    assert_same_answers,
    counted,
    small_engine,
)
from kvcore.harness.engine_process import EngineProcess
from kvcore.harness.models import tiny_model
from kvcore.harness.prompts import windows
from kvcore_devtools.disagg_proxy import prefill, split
from kvcore_devtools.server_fixture import server_process, wait_until_idle
from kvcore_devtools.servers import free_port, need_client

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
        "timeout_s": 5.0,
        "lookup_s": 60.0,
        "deadline_s": 60.0,
        "lease_s": 60.0,
    }
    return {
        "host": {"capacity": "64MiB"},
        "tiers": {"far": {"plugin": "peer", "capacity": "64MiB", "options": options}},
        "transfer": {"load_deadline_s": 300.0},
        "vllm": {"promise_s": 15.0},
    }


def test_one_computes_and_the_other_answers() -> None:
    """What is right is what the first says when it answers itself, under a salt that nothing else
    has: without any KV of kvcore's. The other learns of the first by promises alone."""
    model = tiny_model("llama", layers=4, heads=4, kv_heads=2, head_dim=64)
    documents = windows(model, 8, 150, 600, seed=1)
    here, there = (f"127.0.0.1:{free_port()}" for _ in range(2))
    env = {"UCX_TLS": "tcp"}
    consumer = settings(there, guests=["127.0.0.1"], guest_ports="1024-65535")
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
        assert_same_answers(got, expected[:6])
        assert_all_from("far", got, [min(len(d) // BLOCK * BLOCK, len(d) - 1) for d in asked])
        computed = [answer.prompt_tokens - answer.cached_tokens for answer in got]
        assert max(computed) <= BLOCK, "no more than what fills no block"
        assert counted(second, "kvcore_failures_total") == 0
        stranger = answers(second, [foreign], promise=prefill(first, foreign), cache_salt="tenant")
        assert_same_answers(stranger, expected[6:7])
        assert stranger[0].reused_tokens == 0, "promised to another tenant"
        promises = [prefill(first, document) for document in lost]
        first.kill()
        for document, promise, answer in zip(lost, promises, expected[7:], strict=True):
            recomputed = answers(second, [document], promise=promise)
            assert_same_answers(recomputed, [answer])
            assert recomputed[0].reused_tokens == 0, "there is nobody to have it from"


def serving(folder: Path, listen: str, **more: Any) -> list[str]:
    """What `kvcore server` is told: the tiers of `settings`, and where it is."""
    told = settings(listen, **more)
    options = told["tiers"]["far"].pop("options")
    tables = {
        "server.folder": str(folder),
        "host.capacity": "64MiB",
        "log.level": "warning",
        **{f"tiers.far.{name}": value for name, value in told["tiers"]["far"].items()},
        **{f"tiers.far.options.{name}": value for name, value in options.items()},
    }
    return [f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in tables.items()]


@pytest.mark.exhaustive
def test_each_behind_a_server_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first engine may be gone, since its server has promised; a server that is gone costs the
    computing alone."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    model = tiny_model("llama", layers=4, heads=4, kv_heads=2, head_dim=64)
    documents = windows(model, 6, 150, 600, seed=2)
    asked, [gone], [lost] = documents[:4], documents[4:5], documents[5:]
    with small_engine(model, None, enable_prefix_caching=False) as plain:
        expected = Reference(plain)(documents)
    here, there = (f"127.0.0.1:{free_port()}" for _ in range(2))
    folders = [tmp_path / name for name in ("here", "there")]
    with ExitStack() as started:
        servers = [
            started.enter_context(server_process(*serving(folders[0], here))),
            started.enter_context(
                server_process(
                    *serving(folders[1], there, guests=["127.0.0.1"], guest_ports="1024-65535")
                )
            ),
        ]
        first, second = (
            started.enter_context(
                closing(EngineProcess(model, kvcore=kvcore, kv_role=role, **SMALL))
            )
            for role, kvcore in zip(
                ("kv_producer", "kv_consumer"), map(client, folders), strict=True
            )
        )
        got = split(first, second, asked, ANSWER)
        assert_same_answers(got, expected[:4])
        assert_all_from("far", got, [min(len(d) // BLOCK * BLOCK, len(d) - 1) for d in asked])
        assert counted(second, "kvcore_failures_total") == 0
        promises = [prefill(first, document) for document in (gone, lost)]
        assert {promise["node"] for promise in promises} == {here}, "not an engine's: its server's"
        wait_until_idle(folders[0])
        first.kill()
        [kept] = answers(second, [gone], promise=promises[0])
        assert_same_answers([kept], expected[4:5])
        assert_all_from("far", [kept], [min(len(gone) // BLOCK * BLOCK, len(gone) - 1)])
        servers[0].kill()
        servers[0].wait()
        [broken] = answers(second, [lost], promise=promises[1])
        assert_same_answers([broken], expected[5:])
        assert broken.reused_tokens == 0, "there is nobody to have it from"
        wait_until_idle(folders[1])


def client(folder: Path) -> dict[str, Any]:
    """Of an engine whose server has this folder."""
    return {
        "server": {"address": "local", "folder": str(folder), "deadline_s": 20.0},
        "transfer": {"load_deadline_s": 300.0},
        "vllm": {"promise_s": 60.0},
    }
