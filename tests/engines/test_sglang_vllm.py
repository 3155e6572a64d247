"""The same KV, two engines: what vLLM wrote to disk SGLang reads, and the other way round.

Needs both environments: this one has SGLang, and .venvs/vllm has vLLM. Page sizes differ on
purpose, 128 tokens and 1.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcore.harness.compare import (
    answers,
    assert_same_answers,
    settle_and_empty,
    sglang_tiers,
    small_engine,
)
from kvcore.harness.models import tiny_model
from kvcore.harness.prompts import windows

VLLM = Path(__file__).parents[2] / ".venvs" / "vllm" / "bin" / "python"

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not VLLM.exists(), reason="no .venvs/vllm: python3 tools/env.py vllm"),
]

BLOCK = 16


def test_each_reads_what_the_other_wrote(tmp_path: Path) -> None:
    model = tiny_model("llama", layers=4, heads=4, kv_heads=2, head_dim=64)
    prompts = windows(model, 16, 150, 900, seed=12)
    first, second = prompts[:8], prompts[8:]
    kvcore = sglang_tiers(tmp_path)
    with small_engine(model, kvcore, python=VLLM, block_size=128) as vllm:
        of_vllm = answers(vllm, first)
    with small_engine(model, kvcore, engine="sglang", page_size=1) as sglang:
        read = answers(sglang, first)
        assert_same_answers(read, of_vllm)
        assert all(
            r.tiers.get("disk", 0) >= len(p) - BLOCK for r, p in zip(read, first, strict=True)
        )
        of_sglang = answers(sglang, second)
        assert sum(answer.reused_tokens for answer in of_sglang) == 0
        settle_and_empty(sglang)
        assert_same_answers(answers(sglang, second), of_sglang)
    with small_engine(model, kvcore, python=VLLM, block_size=128) as vllm:
        read = answers(vllm, second)
        assert_same_answers(read, of_sglang)
        assert all(
            r.tiers.get("disk", 0) >= len(p) - BLOCK for r, p in zip(read, second, strict=True)
        )


@pytest.mark.exhaustive
def test_neither_reads_what_the_other_computed_otherwise(tmp_path: Path) -> None:
    """vLLM windows every layer of this Mistral, and SGLang none. Prompts are longer than that."""
    model = tiny_model(
        "mistral",
        layers=4,
        heads=4,
        kv_heads=2,
        head_dim=64,
        sliding_window=256,
    )
    prompts = windows(model, 4, 600, 900, seed=13)
    kvcore = sglang_tiers(tmp_path)
    with small_engine(model, kvcore, python=VLLM, block_size=128) as vllm:
        of_vllm = answers(vllm, prompts)
        settle_and_empty(vllm)
    with small_engine(model, None, engine="sglang", disable_radix_cache=True) as sglang:
        expected = answers(sglang, prompts)
    assert [a.token_ids for a in expected] != [a.token_ids for a in of_vllm]
    with small_engine(model, kvcore, engine="sglang") as sglang:
        got = answers(sglang, prompts)
        assert_same_answers(got, expected)
        assert [answer.reused_tokens for answer in got] == [0] * len(prompts)
        settle_and_empty(sglang)
    with small_engine(model, kvcore, python=VLLM, block_size=128) as vllm:
        read = answers(vllm, prompts)
        assert_same_answers(read, of_vllm)
        assert all(answer.reused_tokens for answer in read), "its own are found"
