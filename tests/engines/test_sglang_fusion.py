"""Fusion in a real SGLang: right where it must be exact, and never exact where it is not."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvcore.testing.asking import ANSWER, Reference, answers, counted, same, settled, small_engine
from kvcore.testing.engine_process import EngineProcess, Generation
from kvcore.testing.models import tiny_model
from kvcore.testing.prompts import windows

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]

engine = partial(small_engine, engine="sglang")
REUSE: dict[str, Any] = {"ratio": 0.0}
ALL: dict[str, Any] = {"ratio": 1.0}
EXACT: dict[str, Any] = {"enabled": False}


def config(**settings: Any) -> dict[str, Any]:
    return {
        "host": {"capacity": "256MiB"},
        "fusion": {"enabled": True, "adaptive": False},
        "sglang": {"keep_on_flush": True, "prefetch": "wait"},
        **settings,
    }


@pytest.fixture(scope="module")
def model() -> Path:
    return tiny_model("llama", layers=4, heads=4, kv_heads=2, head_dim=64)


@pytest.fixture(scope="module")
def reference(model: Path) -> Iterator[Reference]:
    with engine(model, None, disable_radix_cache=True) as process:
        yield Reference(process)


@pytest.fixture(scope="module")
def chunks(model: Path) -> list[list[int]]:
    return windows(model, 6, 150, 260, seed=31)


def prompts(model: Path, chunks: Sequence[Sequence[int]], count: int, seed: int) -> list[list[int]]:
    """Some chunks each, in another order, between words of their own."""
    picks, words = random.Random(seed), windows(model, 4 * count, 5, 40, seed=seed)
    made = []
    for number in range(count):
        chosen = picks.sample(range(len(chunks)), 3)
        own = words[4 * number : 4 * number + 4]
        prompt = list(own[0])
        for gap, chunk in zip(own[1:], chosen, strict=True):
            prompt += [*chunks[chunk], *gap]
        made.append(prompt)
    return made


def warm(process: EngineProcess, chunks: Sequence[Sequence[int]], **options: Any) -> None:
    answers(process, chunks, max_tokens=1, fusion=EXACT, **options)
    settled(process)


def blended(got: Sequence[Generation]) -> list[int]:
    """Tokens each answer took from chunks."""
    return [a.kvcore.get("fusion", {}).get("blended_tokens", 0) for a in got]


def test_one(reference: Reference, model: Path, chunks: list[list[int]]) -> None:
    asked = prompts(model, chunks, 3, seed=1)
    with engine(model, config()) as process:
        try:
            warm(process, chunks)
            got = answers(process, asked, fusion=ALL)
            print([a.kvcore for a in got])
            rough = answers(process, asked, fusion=REUSE)
            print(
                [a.kvcore for a in rough],
                [a.token_ids for a in rough],
                [a.token_ids for a in reference(asked)],
            )
            same(got, reference(asked))
            assert min(blended(got)) >= 400, blended(got)
        finally:
            print(process.log.read_text()[-6000:])
