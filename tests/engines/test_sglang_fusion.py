"""Fusion in a real SGLang: right where it must be exact, and never exact where it is not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvcore.harness.compare import (
    ALL,
    ANSWER,
    EXACT,
    REUSE,
    Reference,
    answers,
    assert_same_answers,
    blended,
    counted,
    settle_and_empty,
    small_engine,
    warm,
)
from kvcore.harness.engine_process import EngineProcess, Generation
from kvcore.harness.models import smollm2, tiny_model
from kvcore.harness.prompts import mixed, windows
from support.faulty import faulty_plugin

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]

engine = partial(small_engine, engine="sglang")


def config(**settings: Any) -> dict[str, Any]:
    return {
        "host": {"capacity": "256MiB"},
        "fusion": {"enabled": True},
        "sglang": {"keep_on_flush": True, "prefetch": "wait"},
        **settings,
    }


@pytest.fixture(scope="module")
def reference(model: Path) -> Iterator[Reference]:
    with engine(model, None, disable_radix_cache=True) as process:
        yield Reference(process)


@pytest.fixture(scope="module")
def chunks(model: Path) -> list[list[int]]:
    return windows(model, 6, 150, 260, seed=31)


@pytest.fixture(scope="module")
def process(model: Path) -> Iterator[EngineProcess]:
    """One engine for what can share one; batches are short, so that prompts are cut."""
    with engine(model, config(), chunked_prefill_size=512) as made:
        yield made


@pytest.fixture
def warmed(process: EngineProcess, chunks: list[list[int]]) -> EngineProcess:
    """That engine, knowing the chunks; its own tree is empty."""
    settle_and_empty(process)
    warm(process, chunks)
    return process


def test_everything_recomputed_is_the_engines_own_answer(
    reference: Reference, model: Path, chunks: list[list[int]], warmed: EngineProcess
) -> None:
    """One by one, several in a batch, and with another request decoding beside them; also where
    the question is so long that the engine cuts it."""
    asked = mixed(model, chunks, 7, seed=1)
    asked.append(asked[0] + windows(model, 1, 700, 700, seed=44)[0])
    [own] = windows(model, 1, 200, 200, seed=41)
    before = counted(warmed, "kvcore_blends_total", outcome="blended")
    decoding = warmed.submit(own, 150, fusion=EXACT)
    for batch in (1, 4):
        got = answers(warmed, asked, batch=batch, fusion=ALL)
        assert_same_answers(got, reference(asked))
        assert min(blended(got)) >= 400, blended(got)
    assert decoding.result(600).token_ids[:ANSWER] == reference([own])[0].token_ids
    assert counted(warmed, "kvcore_blends_total", outcome="blended") == before + 16
    assert "could not be timed" not in warmed.log.read_text()


def test_blends_side_by_side_share_nothing(
    reference: Reference, model: Path, chunks: list[list[int]], warmed: EngineProcess
) -> None:
    """Answers of a share recomputed do not depend on what is blended in the same batches."""
    asked = mixed(model, chunks, 6, seed=3)
    alone = answers(warmed, asked, fusion={"ratio": 0.2})
    together = answers(warmed, asked, batch=6, fusion={"ratio": 0.2})
    assert_same_answers(together, alone)
    assert min(blended(together)) >= 400
    exact = reference(asked)
    assert any(a.token_ids != b.token_ids for a, b in zip(alone, exact, strict=True))


def test_an_exact_prefix_comes_first(
    reference: Reference, model: Path, chunks: list[list[int]], warmed: EngineProcess
) -> None:
    """What the tree holds is kept, what host memory holds is loaded; chunks stand behind."""
    [opening] = windows(model, 1, 320, 320, seed=42)
    asked = [[*opening, 5, *chunk, 6, 7] for chunk in chunks[:3]]
    assert_same_answers(answers(warmed, [opening], fusion=EXACT), reference([opening]))
    on_device = answers(warmed, asked, fusion=ALL)
    assert_same_answers(on_device, reference(asked))
    assert all(set(a.tiers) == {"blend"} for a in on_device), [a.tiers for a in on_device]
    for answer, made in zip(on_device, blended(on_device), strict=True):
        assert answer.cached_tokens >= 320 + made
    settle_and_empty(warmed)
    from_host = answers(warmed, asked, batch=3, fusion=ALL)
    assert_same_answers(from_host, reference(asked))
    assert all(a.tiers["host"] >= 304 for a in from_host), [a.tiers for a in from_host]
    assert min(blended(from_host)) >= 64


def test_wishes_that_make_no_sense(
    reference: Reference, model: Path, chunks: list[list[int]], warmed: EngineProcess
) -> None:
    asked = mixed(model, chunks, 1, seed=11)
    wrong: dict[str, Any] = {"ratio": 1.5, "chunks": [[10, 5]], "share": 0.1}
    for name, value in wrong.items():
        got = answers(warmed, asked, fusion={name: value})
        assert_same_answers(got, reference(asked))
        assert name in got[0].kvcore["fusion"]["error"]
        settle_and_empty(warmed)


def test_approximate_is_never_exact_and_chunks_outlive_the_engine(
    reference: Reference, model: Path, chunks: list[list[int]], tmp_path: Path
) -> None:
    """Prompts are blended first and then asked for exactly: at once, with SGLang's tree emptied, as
    the next turn of the blended one, and after a restart. There, the chunks come from disk, found
    by search and by offsets. Pages of 16 tokens: blends end at their borders."""
    asked = mixed(model, chunks, 8, seed=2)
    settings = config(disk={"path": str(tmp_path / "kv"), "capacity": "256MiB"})
    with engine(model, settings, page_size=16) as process:
        warm(process, chunks)
        rough = answers(process, asked, fusion=REUSE)
        assert min(blended(rough)) >= 300, blended(rough)
        right = reference(asked)
        assert sum(a.token_ids != b.token_ids for a, b in zip(rough, right, strict=True)) >= 4
        turns = [[*p, *a.token_ids, 5, 6, 7] for p, a in zip(asked, rough, strict=True)]
        assert_same_answers(answers(process, turns[4:6], fusion=EXACT), reference(turns[4:6]))
        assert_same_answers(answers(process, asked[:4], fusion=EXACT), right[:4])
        again = answers(process, asked[:4], fusion=REUSE)  # now held exactly, as prefixes
        assert_same_answers(again, right[:4])
        settle_and_empty(process)
        assert_same_answers(answers(process, turns[6:], fusion=EXACT), reference(turns[6:]))
        assert_same_answers(answers(process, asked[4:6], fusion=EXACT), right[4:6])
    first, second = len(chunks[4]), len(chunks[0])
    pair = chunks[4] + chunks[0] + [5] * 9
    with engine(model, settings, page_size=16) as process:
        [found] = answers(process, [pair], fusion=ALL)
        settle_and_empty(process)
        [marked] = answers(process, [pair], fusion={**ALL, "chunks": [[first, first + second]]})
        assert_same_answers([found, marked], reference([pair, pair]))
        assert min(blended([found, marked])) >= second - 32
        assert counted(process, "kvcore_transfer_bytes_total", path="disk2h") > 0
        assert_same_answers(answers(process, asked, fusion=EXACT), right)


@pytest.mark.parametrize("arch", ["qwen3", pytest.param("qwen2", marks=pytest.mark.exhaustive)])
def test_other_shapes_of_models(arch: str) -> None:
    """With everything recomputed the answers are the exact ones, with pure reuse they are not."""
    other = tiny_model(arch, layers=3, sliding_window=0)
    chunks = windows(other, 4, 150, 200, seed=51)
    asked = mixed(other, chunks, 3, seed=52)
    with engine(other, config()) as process:
        warm(process, chunks)
        rough = answers(process, asked, fusion=REUSE)
        got = answers(process, asked, fusion=ALL)
        assert_same_answers(got, answers(process, asked, fusion=EXACT))
    assert min(blended(got)) >= 400
    assert any(a.token_ids != b.token_ids for a, b in zip(rough, got, strict=True))


@pytest.mark.exhaustive
def test_a_model_that_fusion_is_not_right_for_serves_exact_prefixes() -> None:
    """Gemma scales its embeddings on the way to the first layer."""
    other = tiny_model("gemma", layers=2)
    chunks = windows(other, 4, 150, 200, seed=61)
    asked = mixed(other, chunks, 2, seed=62)
    with engine(other, config()) as process:
        warm(process, chunks)
        first = answers(process, asked, fusion=REUSE)
        settle_and_empty(process)
        second = answers(process, asked, fusion=REUSE)
        assert_same_answers(second, first)
        assert blended(first) + blended(second) == [0, 0, 0, 0]
        assert sum(a.reused_tokens for a in second) > 0
        assert "exact prefixes only" in process.log.read_text()


def test_a_future_token_changes_no_earlier_row_and_chunks_that_fail_are_computed(
    tmp_path: Path,
) -> None:
    """A plugin's selector tells the keys that it is shown, of scattered rows on the later layers.
    Then every copy out of host memory fails for a while."""
    deep = tiny_model("llama", layers=7, heads=4, kv_heads=2, head_dim=64)
    first, second = windows(deep, 2, 200, 200, seed=91)
    [own] = windows(deep, 1, 30, 30, seed=92)
    asked = [[*own, *first, *gap, *second, 3, 4, 5] for gap in ([11, 12, 13], [11, 12, 99])]
    faulty = faulty_plugin(tmp_path / "faulty")
    settings = config(ops={"backend": "faulty"})
    settings["fusion"]["selector"] = "telling"
    with engine(deep, settings, faulty.env) as process:
        warm(process, [first, second])
        for prompt in asked:
            [got] = answers(process, [prompt], fusion={"ratio": 0.5})
            assert blended([got])[0] >= 300
        _only_later_rows_differ(faulty.told, change=30 + 200 + 2)
        faulty.fails.touch()
        failed = answers(process, asked, batch=2, fusion=ALL)
        faulty.fails.unlink()
        assert_same_answers(failed, answers(process, asked, fusion=EXACT, cache_salt="apart"))
        assert all("error" in a.kvcore["fusion"] for a in failed), [a.kvcore for a in failed]
        assert not any("blend" in a.kvcore["tiers"] for a in failed), [a.kvcore for a in failed]
        assert counted(process, "kvcore_blends_total", outcome="failed") > 0


def _only_later_rows_differ(folder: Path, change: int) -> None:
    import torch

    told = [torch.load(path) for path in sorted(folder.iterdir())]
    half = len(told) // 2
    assert half >= 4, "scattered rows are seen from the second choice on"
    for one, other in zip(told[:half], told[half:], strict=True):
        assert one["layer"] == other["layer"]
        assert torch.equal(one["rows"], other["rows"])
        before = one["rows"] < change
        assert 20 <= int(before.sum()) < len(before)
        torch.testing.assert_close(one["keys"][before], other["keys"][before])
        assert not torch.allclose(one["keys"][~before], other["keys"][~before], atol=1e-3)


@pytest.mark.exhaustive  # tests/unit/fusion/test_reference.py has the real model
def test_the_real_model_at_a_share() -> None:
    """SmolLM2 at the configured 15%: most next tokens are those of full prefill, and more of them
    than where nothing is recomputed."""
    real = smollm2()
    chunks = windows(real, 4, 200, 200, seed=8)
    asked = mixed(real, chunks, 6, seed=9)
    with engine(real, config(fusion={"enabled": True, "adaptive": False})) as process:
        warm(process, chunks)
        rough = answers(process, asked, max_tokens=1, fusion=REUSE, logprobs=True)
        got = answers(process, asked, max_tokens=1, logprobs=True)
        exact = answers(process, asked, max_tokens=1, fusion=EXACT, logprobs=True)
    assert min(blended(got)) >= 400, blended(got)
    shares = [a.kvcore["fusion"]["recomputed_share"] for a in got]
    assert max(shares) < 0.35, shares  # two full layers of 30, the gaps, and 15%
    alike = sum(a.token_ids == b.token_ids for a, b in zip(got, exact, strict=True))
    assert alike >= 4, (alike, shares)
    assert _off(got, exact) < _off(rough, exact)


def _off(got: Sequence[Generation], exact: Sequence[Generation]) -> float:
    """Mean distance of the log-probability of the token said; of another token, 1."""
    return sum(
        abs(a.logprobs[0] - b.logprobs[0]) if a.token_ids == b.token_ids else 1.0
        for a, b in zip(got, exact, strict=True)
    ) / len(got)


def test_tensor_parallel_ranks_choose_the_same_rows(
    reference: Reference, model: Path, chunks: list[list[int]], process: EngineProcess
) -> None:
    """Beside one rank that knows as much of this tenant: what is known decides what is reused."""
    asked = mixed(model, chunks, 3, seed=7)
    settle_and_empty(process)
    warm(process, chunks, cache_salt="ranks")
    single = answers(process, asked, fusion={"ratio": 0.2}, cache_salt="ranks")
    assert min(blended(single)) >= 400, blended(single)
    with engine(model, config(), chunked_prefill_size=512, tp_size=2) as two:
        warm(two, chunks)
        assert_same_answers(answers(two, asked, fusion={"ratio": 0.2}), single)
        everything = answers(two, asked, fusion=ALL)
        assert_same_answers(everything, reference(asked))
        assert min(blended(everything)) >= 400
