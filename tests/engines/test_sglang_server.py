"""SGLang and the reference engine behind one kvcore server: what one computed the other loads; and
when the server is killed every answer stays the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq")

from kvcore.config import load_config
from kvcore.testing.asking import ANSWER, answers, settled, small_engine
from kvcore.testing.engine import EngineArgs, Llama, ReferenceEngine, load
from kvcore.testing.models import tiny_model
from kvcore.testing.prompts import windows
from kvcore.testing.served import server_process

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]

BLOCK = 16
PAGE = 16


@pytest.fixture(scope="module")
def folder() -> Path:
    return tiny_model("llama", layers=4, heads=4, kv_heads=2, head_dim=64)


@pytest.fixture(scope="module")
def model(folder: Path) -> Llama:
    return load(folder)


@pytest.fixture(scope="module")
def plain(model: Llama) -> Iterator[Callable[[Sequence[Sequence[int]]], list[list[int]]]]:
    """Answers without kvcore."""
    args = EngineArgs(num_pages=256, prefix_cache=False)
    with ReferenceEngine(model, args) as engine:
        yield lambda prompts: [engine.generate([prompt], ANSWER)[0] for prompt in prompts]


def asked(engine: ReferenceEngine, prompts: Sequence[Sequence[int]]) -> list[int]:
    """Tokens of each prompt that came from host memory."""
    requests = [engine.submit(prompt, ANSWER) for prompt in prompts]
    engine.run()
    engine.settle()
    return [request.reused.get("host", 0) for request in requests]


def test_both_share_a_server_and_a_killed_one_changes_no_answer(
    tmp_path: Path, folder: Path, model: Llama, plain: Any
) -> None:
    prompts = windows(folder, 8, 150, 500, seed=21)
    first, second = prompts[:4], prompts[4:]
    shared = {"address": "local", "folder": str(tmp_path / "kv"), "deadline_s": 20.0}
    kvcore = {"server": shared, "sglang": {"keep_on_flush": True}}
    given = (f"server.folder={tmp_path / 'kv'}", "host.capacity=256MiB", "log.level=warning")
    config = load_config(None, {"server": shared}, {})
    with (
        server_process(*given) as server,
        ReferenceEngine(model, EngineArgs(prefix_cache=False), config) as reference,
    ):
        assert asked(reference, first) == [0] * len(first)
        with small_engine(folder, kvcore, engine="sglang", page_size=PAGE) as sglang:
            found = answers(sglang, first)
            assert [answer.token_ids for answer in found] == plain(first)
            whole = [(len(prompt) - 1) // PAGE * PAGE for prompt in first]
            assert [answer.tiers for answer in found] == [{"host": count} for count in whole]
            assert [answer.token_ids for answer in answers(sglang, second)] == plain(second)
            settled(sglang)
            read = asked(reference, second)
            assert all(
                count >= len(prompt) - BLOCK for count, prompt in zip(read, second, strict=True)
            )
            server.kill()
            server.wait()
            gone = answers(sglang, prompts)
            assert [answer.token_ids for answer in gone] == plain(prompts)
            settled(sglang)
            again = answers(sglang, prompts)
            assert [answer.token_ids for answer in again] == plain(prompts)
            assert not any(answer.reused_tokens for answer in again), "there is nothing to reuse"
