"""Drafts and latents on vLLM: models whose cache is more, or other, than K and V of each layer.

A draft model has KV of its own. What it drafts never changes an answer, so an answer shows nothing
of that KV. The number of its tokens that the model accepts does: it is the same wherever the KV
came from.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvcore.harness.compare import answers, assert_same_answers, counted, settle_and_empty
from kvcore.harness.compare import small_engine as engine
from kvcore.harness.engine_process import EngineProcess, Generation
from kvcore.harness.models import tiny_eagle, tiny_model
from kvcore.harness.prompts import words

pytestmark = pytest.mark.engine

VOCABULARY = 512
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
ANSWER = 24
SHARED = 320
"""Tokens that two prompts begin with: whole blocks, so that a hit ends where they part."""


class Asked:
    """Prompts, and others that go on otherwise after whole blocks."""

    def __init__(self) -> None:
        self.first = [words(i, SHARED + 16 * i + 9, range(1, VOCABULARY - 8)) for i in range(4)]
        self.forked = [
            [*prompt[: SHARED + 16 * i], *words(100 + i, 33, range(1, VOCABULARY - 8))]
            for i, prompt in enumerate(self.first)
        ]


def speculation(kind: str) -> tuple[Path, dict[str, Any]]:
    """Return a model and vLLM's arguments for a draft that is right, or often, with its own KV.

    The draft model is the model itself, whose drafts are accepted. The EAGLE head is often right.
    """
    model = tiny_model("llama", layers=1 if kind == "eagle" else 2, vocabulary=VOCABULARY)
    draft = tiny_eagle(model) if kind == "eagle" else model
    told = {"method": kind, "model": str(draft), "num_speculative_tokens": 3}
    return model, {"speculative_config": told}


def ask(process: EngineProcess, prompts: Sequence[list[int]]) -> tuple[list[Generation], float]:
    """Return answers, and how many of the tokens drafted for them were accepted."""
    before = counted(process, ACCEPTED)
    got = answers(process, prompts, max_tokens=ANSWER)
    return got, counted(process, ACCEPTED) - before


@pytest.mark.parametrize(
    "kind", [pytest.param("draft_model", marks=pytest.mark.exhaustive), "eagle"]
)
def test_the_kv_of_a_draft_comes_back(kind: str, tmp_path: Path) -> None:
    """An EAGLE head's KV of a token depends on the next one: where prompts part it is computed."""
    model, draft = speculation(kind)
    asked = Asked()
    ahead = 1 if kind == "eagle" else 0
    with engine(model, None, enable_prefix_caching=False, **draft) as process:
        expected = {name: ask(process, getattr(asked, name)) for name in ("first", "forked")}
        assert min(accepted for _, accepted in expected.values()) > 4, "it shows nothing"

    def check(process: EngineProcess, name: str, tier: str | None) -> None:
        got, accepted = ask(process, getattr(asked, name))
        right, right_accepted = expected[name]
        assert_same_answers(got, right)
        assert accepted == right_accepted, "the draft's KV is not what it was"
        for i, answer in enumerate(got):
            assert answer.tiers == ({tier: SHARED + 16 * i - ahead} if tier else {})

    kvcore = {
        "host": {"capacity": "64MiB"},
        "disk": {"path": str(tmp_path / "kv"), "capacity": "64MiB"},
    }
    with engine(model, kvcore, **draft) as process:
        check(process, "first", None)
        for name in ("first", "forked"):
            settle_and_empty(process)
            check(process, name, "host")
        process.settle()
    with engine(model, kvcore, **draft) as process:
        check(process, "first", "disk")


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_latents_come_back(ranks: int, tmp_path: Path) -> None:
    """Every rank holds the same latents. vLLM's kernel for CPUs takes this width only."""
    model = tiny_model(
        "deepseek_v2", layers=3, heads=4, kv_heads=4, head_dim=64, latent=(512, 64),
        vocabulary=VOCABULARY,
    )  # fmt: skip
    # On a CPU with AMX vLLM would choose a kernel for it, which takes no float32.
    args = {"tensor_parallel_size": ranks, "attention_backend": "CPU_MLA"}
    prompts = Asked().first
    with engine(model, None, enable_prefix_caching=False, **args) as process:
        expected = answers(process, prompts)
    assert len({str(answer.token_ids) for answer in expected}) == len(prompts)
    kvcore = {
        "host": {"capacity": "64MiB"},
        "disk": {"path": str(tmp_path / "kv"), "capacity": "64MiB"},
    }
    with engine(model, kvcore, **args) as process:
        assert_same_answers(answers(process, prompts), expected)
        settle_and_empty(process)
        got = answers(process, prompts)
        assert_same_answers(got, expected)
        assert all(answer.tiers.get("host", 0) >= SHARED for answer in got)
        process.settle()
    with engine(model, kvcore, **args) as process:
        got = answers(process, prompts)
        assert_same_answers(got, expected)
        assert all(answer.tiers.get("disk", 0) >= SHARED for answer in got)
