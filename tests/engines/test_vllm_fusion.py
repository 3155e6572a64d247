"""Fusion in a real vLLM: right where it must be exact, and never exact where it is not."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvcore.testing.asking import Reference, answers, counted, same, settled
from kvcore.testing.asking import small_engine as engine
from kvcore.testing.engine_process import EngineProcess, Generation
from kvcore.testing.models import tiny_lora, tiny_model
from kvcore.testing.prompts import windows

pytestmark = pytest.mark.engine

FAULTY = Path(__file__).with_name("faulty")
REUSE: dict[str, Any] = {"ratio": 0.0}
ALL: dict[str, Any] = {"ratio": 1.0}
EXACT: dict[str, Any] = {"enabled": False}


def config(**fusion: Any) -> dict[str, Any]:
    return {"host": {"capacity": "256MiB"}, "fusion": {"enabled": True, **fusion}}


@pytest.fixture(scope="module")
def model() -> Path:
    return tiny_model("llama", layers=4, heads=4, kv_heads=2, head_dim=64)


@pytest.fixture(scope="module")
def reference(model: Path) -> Iterator[Reference]:
    with engine(model, None, enable_prefix_caching=False) as process:
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


def test_everything_recomputed_is_the_engines_own_answer(
    reference: Reference, model: Path, chunks: list[list[int]]
) -> None:
    """One by one, several in a step, and cut into small steps with others decoding beside."""
    asked = prompts(model, chunks, 12, seed=1)
    narrow: dict[str, Any] = {"max_num_batched_tokens": 160}
    for limits in ({}, narrow):
        with engine(model, config(), **limits) as process:
            warm(process, chunks)
            for batch in (1, 4):
                got = answers(process, asked, batch=batch, fusion=ALL, max_tokens=8)
                same(got, reference(asked))
                assert min(blended(got)) >= 400, blended(got)
                settled(process)


def test_what_is_approximate_is_never_taken_for_exact(
    reference: Reference, model: Path, chunks: list[list[int]], tmp_path: Path
) -> None:
    """The same prompts, blended first and then asked for exactly: at once, with vLLM's own cache
    emptied, as the next turn of the blended one, and after a restart."""
    asked = prompts(model, chunks, 8, seed=2)
    settings = {**config(), "disk": {"path": str(tmp_path / "kv"), "capacity": "256MiB"}}
    with engine(model, settings) as process:
        warm(process, chunks)
        rough = answers(process, asked, fusion=REUSE)
        assert min(blended(rough)) >= 400
        right = reference(asked)
        assert sum(a.token_ids != b.token_ids for a, b in zip(rough, right, strict=True)) >= 4
        same(answers(process, asked, fusion=EXACT), right)
        again = answers(process, asked, fusion=REUSE)  # now each is held exactly, as a prefix
        same(again, right)
        settled(process)
        turns = [[*p, *a.token_ids, 5, 6, 7] for p, a in zip(asked, rough, strict=True)]
        same(answers(process, turns, fusion=EXACT), reference(turns))
        settled(process)
        same(answers(process, asked, fusion=EXACT), right)
    with engine(model, settings) as process:
        same(answers(process, asked, fusion=EXACT), right)


def test_blends_side_by_side_share_nothing(model: Path, chunks: list[list[int]]) -> None:
    """Answers of pure reuse do not depend on what is blended or decoded in the same steps."""
    asked = prompts(model, chunks, 8, seed=3)
    with engine(model, config(), enable_prefix_caching=False) as process:
        warm(process, chunks)
        alone = answers(process, asked, fusion=REUSE)
        together = answers(process, asked, batch=8, fusion=REUSE)
        same(together, alone)
        assert min(blended(together)) >= 400


def test_a_prefix_that_is_computed_in_the_same_step(
    reference: Reference, model: Path, chunks: list[list[int]]
) -> None:
    """vLLM shares pages before they are computed; a blend must not read them then."""
    own = windows(model, 1, 400, 400, seed=41)[0]
    tails = [chunks[0], chunks[1], chunks[2]]
    asked = [own + windows(model, 1, 300, 300, seed=42)[0], *([*own, *t, 7, 8] for t in tails)]
    with engine(model, config(), max_num_batched_tokens=2048) as process:
        warm(process, chunks)
        for _ in range(3):
            got = answers(process, asked, batch=len(asked), fusion=ALL)
            same(got, reference(asked))
            assert min(blended(got)[1:]) >= 100
            process.reset_prefix_cache(connector=True)
            warm(process, chunks)


def test_chunks_come_back_from_disk(
    reference: Reference, model: Path, chunks: list[list[int]], tmp_path: Path
) -> None:
    """After a restart: unmarked, marked with offsets, and between separators."""
    mark = [0, 1, 0]
    asked = [chunks[1] + mark + chunks[3] + mark + [9, 8, 7] * 5, chunks[4] + chunks[0] + [5] * 9]
    spans = [[0, len(chunks[4])], [len(chunks[4]), len(chunks[4]) + len(chunks[0])]]
    settings = {
        **config(separator=mark),
        "disk": {"path": str(tmp_path / "kv"), "capacity": "256MiB"},
    }
    with engine(model, settings) as process:
        warm(process, chunks)
    with engine(
        model, {**settings, "fusion": {**settings["fusion"], "unmarked": False}}
    ) as process:
        [cut] = answers(process, asked[:1], fusion=ALL)
        [offsets] = answers(process, asked[1:], fusion={**ALL, "chunks": spans})
        same([cut, offsets], reference(asked))
        # the first chunk of each is a plain prefix; whole blocks of the second are found
        assert blended([cut, offsets]) == [len(chunks[3]) // 16 * 16, len(chunks[0]) // 16 * 16]
        assert counted(process, "kvcore_hit_tokens_total", tier="disk") >= 0
    with engine(model, settings) as process:
        [found] = answers(process, asked[1:], fusion=ALL)
        same([found], reference(asked[1:]))
        assert blended([found]) == [len(chunks[0]) // 16 * 16]


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "mistral", "gemma", "phi3"])
def test_other_shapes_of_models(arch: str) -> None:
    other = tiny_model(arch, layers=3, sliding_window=0)
    chunks = windows(other, 4, 150, 200, seed=51)
    asked = prompts(other, chunks, 4, seed=52)
    with engine(other, None, enable_prefix_caching=False) as process:
        expected = answers(process, asked)
    with engine(other, config()) as process:
        warm(process, chunks)
        rough = answers(process, asked, fusion=REUSE)
        got = answers(process, asked, fusion=ALL)
        same(got, expected)
        assert min(blended(got)) >= 400
        assert any(a.token_ids != b.token_ids for a, b in zip(rough, expected, strict=True))


@pytest.mark.parametrize("arch", ["gemma3", "mistral"])
def test_models_that_fusion_is_not_right_for_serve_exact_prefixes(arch: str) -> None:
    other = tiny_model(arch, layers=2)
    chunks = windows(other, 4, 150, 200, seed=61)
    asked = prompts(other, chunks, 2, seed=62)
    with engine(other, None, enable_prefix_caching=False) as process:
        expected = answers(process, asked)
    with engine(other, config()) as process:
        warm(process, chunks)
        for _ in range(2):
            got = answers(process, asked, fusion=REUSE)
            same(got, expected)
            assert blended(got) == [0, 0]
            settled(process)
        assert sum(a.reused_tokens for a in got) > 0
        assert "exact prefixes only" in process.log.read_text()


def test_tensor_parallel_ranks_choose_the_same_rows(
    reference: Reference, model: Path, chunks: list[list[int]]
) -> None:
    asked = prompts(model, chunks, 4, seed=7)
    with engine(model, config()) as process:
        warm(process, chunks)
        single = answers(process, asked, fusion={"ratio": 0.2})
    with engine(model, config(), tensor_parallel_size=2) as process:
        warm(process, chunks)
        got = answers(process, asked, fusion={"ratio": 0.2})
        same(got, single)
        settled(process)
        everything = answers(process, asked, fusion=ALL)
        same(everything, reference(asked))
        assert min(blended(everything)) >= 400


def test_compiled(reference: Reference, model: Path, chunks: list[list[int]]) -> None:
    asked = prompts(model, chunks, 4, seed=8)
    with engine(model, config(), enforce_eager=False) as process:
        warm(process, chunks)
        got = answers(process, asked, fusion=ALL)
        same(got, reference(asked))
        assert min(blended(got)) >= 400


def test_adapters(model: Path, chunks: list[list[int]], tmp_path: Path) -> None:
    """Chunks are those of the adapter, and their rows are recomputed with it."""
    adapter = tiny_lora(tmp_path / "lora", model, seed=3)
    asked = prompts(model, chunks, 3, seed=9)
    settings: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    with engine(model, None, enable_prefix_caching=False, **settings) as process:
        plain, adapted = (answers(process, asked, lora=lora) for lora in (None, adapter))
        assert [a.token_ids for a in plain] != [a.token_ids for a in adapted]
    with engine(model, config(), **settings) as process:
        warm(process, chunks, lora=adapter)
        got = answers(process, asked[:1], fusion=ALL)
        same(got, plain[:1])
        assert blended(got) == [0], "chunks of the adapter were used without it"
        process.reset_prefix_cache(connector=True)
        warm(process, chunks, lora=adapter)
        warm(process, chunks)
        for lora, expected in ((adapter, adapted), (None, plain)):
            got = answers(process, asked, lora=lora, fusion=ALL)
            same(got, expected)
            assert min(blended(got)) >= 400


def test_a_blend_that_fails_is_computed_by_the_engine(
    reference: Reference, model: Path, chunks: list[list[int]]
) -> None:
    """A third party's selector raises, at first now and then and later always."""
    asked = prompts(model, chunks, 10, seed=10)
    path = os.pathsep.join([str(FAULTY), os.environ.get("PYTHONPATH", "")])
    with engine(model, config(selector="faulty"), env={"PYTHONPATH": path}) as process:
        warm(process, chunks)
        got = answers(process, asked, fusion={"ratio": 0.999})
        right = reference(asked)
        failed = [
            i for i, a in enumerate(got) if "recomputed_share" not in a.kvcore.get("fusion", {})
        ]
        assert 3 <= len(failed) < len(got), [a.kvcore for a in got]
        same([got[i] for i in failed], [right[i] for i in failed])
        settled(process)
        same(answers(process, asked, fusion=EXACT), right)
        assert "exact prefixes only" in process.log.read_text()


def test_wishes_that_make_no_sense(
    reference: Reference, model: Path, chunks: list[list[int]]
) -> None:
    asked = prompts(model, chunks, 1, seed=11)
    wrong: list[dict[str, Any]] = [
        {"ratio": 1.5},
        {"ratio": "much"},
        {"chunks": [[10, 5]]},
        {"chunks": [[0, 10**6]]},
        {"share": 0.1},
    ]
    with engine(model, config(), enable_prefix_caching=False) as process:
        warm(process, chunks)
        for wishes in wrong:
            got = answers(process, asked, fusion=wishes)
            same(got, reference(asked))
            [name] = set(wishes) & {"ratio", "chunks", "share"}
            assert name in got[0].kvcore["fusion"]["error"]
            process.reset_prefix_cache(connector=True)
            warm(process, chunks)
