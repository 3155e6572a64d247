"""Other models on real SGLang, and more than one replica; as in test_sglang.py.

latent    DeepSeek-V2's attention: a latent in place of K and V
replicas  two of one model; in `make test-all` also of SmolLM2: 30 layers, three heads
windows   sliding windows, in the one pool of all layers
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from kvcore.harness.compare import (
    REUSE,
    answers,
    assert_all_from,
    assert_same_answers,
    blended,
    settle_and_empty,
    sglang_tiers,
    small_engine,
)
from kvcore.harness.models import smollm2, tiny_model
from kvcore.harness.prompts import windows

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]

engine = partial(small_engine, engine="sglang")
BLOCK = 16
WINDOW = 256
"""Tokens that the windowed layers of a tiny model see."""


def whole(prompts: list[list[int]], unit: int = BLOCK) -> list[int]:
    """Tokens of each that can be brought back, of all but the last."""
    return [(len(prompt) - 1) // unit * unit for prompt in prompts]


def test_latent_attention(tmp_path: Path) -> None:
    """Written under pages of one token, read from disk under pages of 64."""
    tiny = tiny_model("deepseek_v2", layers=3)
    prompts = windows(tiny, 6, 150, 600, seed=6)
    with engine(tiny, None, disable_radix_cache=True) as process:
        expected = answers(process, prompts)
    assert len({tuple(answer.token_ids) for answer in expected}) > len(prompts) * 0.8
    with engine(tiny, sglang_tiers(tmp_path)) as process:
        cold = answers(process, prompts)
        assert_same_answers(cold, expected)
        assert sum(answer.reused_tokens for answer in cold) == 0
        settle_and_empty(process)
        warm = answers(process, prompts, batch=4)
        assert_same_answers(warm, expected)
        assert_all_from("host", warm, whole(prompts))
    with engine(tiny, sglang_tiers(tmp_path), page_size=64) as process:
        got = answers(process, prompts, batch=3)
        assert_same_answers(got, expected)
        assert_all_from("disk", got, whole(prompts, 64))


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_two_replicas(tmp_path: Path, model: Path, real: bool) -> None:
    """Each replica brings back what it made itself; a restarted engine reads from disk what one of
    them wrote: the other has no disk tier."""
    model = smollm2() if real else model
    prompts = windows(model, 6, 100, 300, seed=2)
    with engine(model, None, disable_radix_cache=True) as process:
        expected = answers(process, prompts)
    replicas = {"dp_size": 2, "load_balance_method": "round_robin"}
    with engine(model, sglang_tiers(tmp_path), **replicas) as process:
        cold = answers(process, prompts)
        assert_same_answers(cold, expected)
        assert sum(answer.reused_tokens for answer in cold) == 0
        settle_and_empty(process)
        warm = answers(process, prompts)  # an even number in the same order: to the same replicas
        assert_same_answers(warm, expected)
        assert_all_from("host", warm, whole(prompts))
        assert "the tier disk is off" in process.log.read_text()
    with engine(model, sglang_tiers(tmp_path)) as process:
        got = answers(process, prompts, batch=2)
        assert_same_answers(got, expected)
        kept = [i for i, answer in enumerate(got) if answer.reused_tokens]
        assert kept in ([0, 2, 4], [1, 3, 5]), (
            "every other prompt went to the replica with the disk"
        )
        assert_all_from("disk", [got[i] for i in kept], whole([prompts[i] for i in kept]))


def test_sliding_windows(tmp_path: Path) -> None:
    """In the one pool of all layers, where SGLang keeps those of Gemma 3, they are served.

    Fusion is not right for this model: exact prefixes are served, and nothing is blended."""
    tiny = tiny_model("gemma3", layers=4)
    prompts = windows(tiny, 5, 200, 700, seed=8)
    assert max(map(len, prompts)) > 2 * WINDOW
    with engine(tiny, None, disable_radix_cache=True) as process:
        expected = answers(process, prompts)
    kvcore = {**sglang_tiers(tmp_path), "fusion": {"enabled": True}}
    with engine(tiny, kvcore) as process:
        assert_same_answers(answers(process, prompts), expected)
        settle_and_empty(process)
        warm = answers(process, prompts, batch=3, fusion=REUSE)
        assert_same_answers(warm, expected)
        assert_all_from("host", warm, whole(prompts))
        behind = [[5, *prompt] for prompt in prompts[:2]]  # known text, where it is no prefix
        cold = answers(process, behind, fusion=REUSE)
        settle_and_empty(process)
        assert_same_answers(answers(process, behind, fusion=REUSE), cold)
        assert blended(cold) == [0, 0]
        assert "exact prefixes only" in process.log.read_text()
