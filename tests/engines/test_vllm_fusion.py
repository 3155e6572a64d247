"""Fusion in a real vLLM: right where it must be exact, and never exact where it is not."""

from __future__ import annotations

import itertools
import os
import random
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvcore.fusion.plan import Cached, ChunkKV, Fresh, PromptPlan
from kvcore.fusion.reference import Blender, Decoder, precompute
from kvcore.fusion.rope import rope_of
from kvcore.fusion.select import BUILTIN_SELECTORS, Ratio
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
    warm,
)
from kvcore.harness.compare import small_engine as engine
from kvcore.harness.engine_process import EngineProcess
from kvcore.harness.models import tiny_lora, tiny_model
from kvcore.harness.prompts import mixed, windows
from kvcore.telemetry.timeline import read_trace
from kvcore_vllm.testing import rig

pytestmark = pytest.mark.engine

FAULTY = Path(__file__).with_name("faulty")


def config(**fusion: Any) -> dict[str, Any]:
    return {"host": {"capacity": "256MiB"}, "fusion": {"enabled": True, **fusion}}


@pytest.fixture(scope="module")
def reference(model: Path) -> Iterator[Reference]:
    with engine(model, None, enable_prefix_caching=False) as process:
        yield Reference(process)


@pytest.fixture(scope="module")
def chunks(model: Path) -> list[list[int]]:
    return windows(model, 6, 150, 260, seed=31)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def process(model: Path, traces: Path) -> Iterator[EngineProcess]:
    """One engine for what can share one; steps are short, so that prompts are cut."""
    settings = {**config(), "trace": {"path": str(traces)}}
    with engine(model, settings, max_num_batched_tokens=512) as made:
        yield made


@pytest.fixture
def warmed(process: EngineProcess, chunks: list[list[int]]) -> EngineProcess:
    """That engine, knowing the chunks and nothing else."""
    process.reset_prefix_cache(connector=True)
    warm(process, chunks)
    return process


def with_faulty() -> dict[str, str]:
    """Where an engine finds the plugin that fails."""
    return {"PYTHONPATH": os.pathsep.join([str(FAULTY), os.environ.get("PYTHONPATH", "")])}


def test_everything_recomputed_is_the_engines_own_answer(
    reference: Reference, model: Path, chunks: list[list[int]], warmed: EngineProcess
) -> None:
    """One by one, several in a step, and with others prefilling and decoding beside."""
    asked = mixed(model, chunks, 12, seed=1)
    for batch in (1, 4):
        got = answers(warmed, asked, batch=batch, fusion=ALL, max_tokens=8)
        assert_same_answers(got, reference(asked))
        assert min(blended(got)) >= 400, blended(got)
        settle_and_empty(warmed)


def test_a_share_recomputed_is_what_the_reference_makes_of_it(
    model: Path, warmed: EngineProcess
) -> None:
    """The engine's answers over blends are those of `kvcore.fusion.reference` over the same model,
    at the same ratio; answers at another ratio are not."""
    texts = windows(model, 5, 160, 160, seed=71)
    warm(warmed, texts)
    own = windows(model, 4 * 8, 5, 40, seed=72)
    orders = [random.Random(number).sample(range(5), 3) for number in range(8)]
    plans = [
        PromptPlan(
            [
                Fresh(tuple(gaps[0])),
                *(
                    part
                    for gap, chunk in zip(gaps[1:], order, strict=True)
                    for part in (Cached(reference_chunk(model, texts[chunk])), Fresh(tuple(gap)))
                ),
            ]
        )
        for order, gaps in zip(orders, (own[i : i + 4] for i in range(0, 32, 4)), strict=True)
    ]
    expected: dict[float, list[list[int]]] = {}
    for ratio in (0.0, 0.2, 0.6):
        expected[ratio] = [reference_answer(model, plan, ratio) for plan in plans]
        asked = [plan.tokens.tolist() for plan in plans]
        spans = [
            [[at, at + len(part.tokens)] for at, part in plan.placed() if isinstance(part, Cached)]
            for plan in plans
        ]
        got = [
            answers(warmed, [prompt], fusion={"ratio": ratio, "chunks": chunks})[0]
            for prompt, chunks in zip(asked, spans, strict=True)
        ]
        assert blended(got) == [480] * len(plans)
        assert [a.token_ids for a in got] == expected[ratio]
        settle_and_empty(warmed)
    for one, other in itertools.combinations(expected.values(), 2):
        assert sum(a != b for a, b in zip(one, other, strict=True)) >= 2, "nothing is told apart"


@cache
def decoder(model: Path) -> Decoder:
    import torch
    from transformers import AutoModelForCausalLM

    made: Any = AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32)
    return Decoder(made.eval())


def reference_chunk(model: Path, text: Sequence[int]) -> ChunkKV:
    return precompute(decoder(model), text)


def reference_answer(model: Path, plan: PromptPlan, ratio: float) -> list[int]:
    """What the default selector, budget and rope make of a prompt, layer by layer in plain code."""
    own = decoder(model)
    settings = own.config.to_dict()
    ropes = [rope_of(settings, layer) for layer in range(own.layers)]
    made = Blender(own, plan, ropes).blend(BUILTIN_SELECTORS["runs"](), Ratio(ratio, spread=0.5))
    return made.context.greedy(made.logits, ANSWER)


def test_blends_side_by_side_share_nothing(
    model: Path, chunks: list[list[int]], warmed: EngineProcess
) -> None:
    """Answers of pure reuse do not depend on what is blended or decoded in the same steps."""
    asked = mixed(model, chunks, 8, seed=3)
    alone = []
    for prompt in asked:
        alone += answers(warmed, [prompt], fusion=REUSE)
        settle_and_empty(warmed)
    together = answers(warmed, asked, batch=8, fusion=REUSE)
    assert_same_answers(together, alone)
    assert min(blended(together)) >= 400


def test_a_prefix_that_is_computed_in_the_same_step(
    reference: Reference, model: Path, chunks: list[list[int]], warmed: EngineProcess
) -> None:
    """vLLM shares pages before they are computed; a blend must not read them then.

    A first prompt fills a step, so that the others have come when the next one is planned.
    """
    for round_ in range(3):
        [filling] = windows(model, 1, 500, 500, seed=40 + round_)
        [own] = windows(model, 1, 400, 400, seed=43 + round_)
        [rest] = windows(model, 1, 60, 60, seed=46 + round_)
        asked = [filling, own + rest, *([*own, *chunk, 7, 8] for chunk in chunks[:3])]
        got = answers(warmed, asked, batch=len(asked), fusion=ALL)
        assert_same_answers(got, reference(asked))
        assert min(blended(got)[2:]) >= 100


def test_no_layer_computes_before_it_has_landed(
    model: Path, chunks: list[list[int]], warmed: EngineProcess, traces: Path
) -> None:
    """By the trace of a prompt that is blended alone: every layer's loads, by the graphs of its
    chunks, have ended when it is looked at or recomputed."""
    [path] = traces.glob("rank0-*.json")
    before = len(list(read_trace(path)))
    [prompt] = mixed(model, chunks, 1, seed=15)
    [got] = answers(warmed, [prompt], fusion={"ratio": 0.2})
    assert blended([got])[0] >= 400
    found = list(read_trace(path))[before:]
    loads = [e for e in found if e["track"] == "h2d"]
    steps = [e for e in found if e["track"] in ("look", "recompute")]
    assert [e["name"] for e in steps] == [f"layer {n}" for n in (0, 1, 2, 3)] * 2
    graphs = {e["args"]["graph"] for e in loads}
    assert len(graphs) >= 3
    for step in steps:
        layer = int(step["name"].split()[1])
        own = [e for e in loads if _covers(e["name"], layer)]
        assert {e["args"]["graph"] for e in own} == graphs
        assert all(e["ts"] + e["dur"] <= step["ts"] + 1 for e in own)


def _covers(name: str, layer: int) -> bool:
    first, stop = map(int, name.removeprefix("layers ").split(".."))
    return first <= layer < stop


def test_wishes_that_make_no_sense(
    reference: Reference, model: Path, chunks: list[list[int]], warmed: EngineProcess
) -> None:
    asked = mixed(model, chunks, 1, seed=11)
    wrong: dict[str, Any] = {
        "ratio": 1.5,
        "chunks": [[10, 5]],
        "share": 0.1,
    }
    for name, value in wrong.items():
        got = answers(warmed, asked, fusion={name: value})
        assert_same_answers(got, reference(asked))
        assert name in got[0].kvcore["fusion"]["error"]


def test_approximate_is_never_exact_and_chunks_outlive_the_engine(
    reference: Reference, model: Path, chunks: list[list[int]], tmp_path: Path
) -> None:
    """Prompts are blended first and then asked for exactly: at once, with vLLM's own cache
    emptied, as the next turn of the blended one, and after a restart. There, the chunks come from
    disk, found by search and by offsets."""
    asked = mixed(model, chunks, 8, seed=2)
    settings = {**config(), "disk": {"path": str(tmp_path / "kv"), "capacity": "256MiB"}}
    with engine(model, settings) as process:
        warm(process, chunks)
        rough = answers(process, asked, fusion=REUSE)
        assert min(blended(rough)) >= 400
        right = reference(asked)
        assert sum(a.token_ids != b.token_ids for a, b in zip(rough, right, strict=True)) >= 4
        assert_same_answers(answers(process, asked[:4], fusion=EXACT), right[:4])
        again = answers(process, asked[:4], fusion=REUSE)  # now held exactly, as prefixes
        assert_same_answers(again, right[:4])
        settle_and_empty(process)
        turns = [[*p, *a.token_ids, 5, 6, 7] for p, a in zip(asked, rough, strict=True)]
        assert_same_answers(answers(process, turns[4:], fusion=EXACT), reference(turns[4:]))
    first, second = len(chunks[4]), len(chunks[0])
    pair = chunks[4] + chunks[0] + [5] * 9
    with engine(model, settings) as process:
        [found] = answers(process, [pair], fusion=ALL)
        settle_and_empty(process)
        [marked] = answers(process, [pair], fusion={**ALL, "chunks": [[first, first + second]]})
        assert_same_answers([found, marked], reference([pair, pair]))
        # the first chunk is a plain prefix; of the second, whole blocks are found, or in a prompt
        # that had it in its middle all of it
        assert blended([found])[0] >= second // 16 * 16
        assert blended([marked]) == [second // 16 * 16]
        assert counted(process, "kvcore_transfer_bytes_total", path="disk2h") > 0
        assert_same_answers(answers(process, asked, fusion=EXACT), right)


def test_preemption_and_eviction(
    reference: Reference, model: Path, chunks: list[list[int]], tmp_path: Path
) -> None:
    """Device, host and disk are far too small for the work: blends are taken back and made anew,
    chunks leave while requests wait. Everything recomputed, answers are the engine's own."""
    asked = mixed(model, chunks, 12, seed=12)
    settings = {
        **config(),
        "host": {"capacity": "5MiB"},
        "disk": {"path": str(tmp_path / "kv"), "capacity": "40MiB"},
    }
    limits: dict[str, Any] = {"num_gpu_blocks_override": 20, "block_size": 128}
    with engine(model, settings, max_num_batched_tokens=256, **limits) as process:
        warm(process, chunks)
        made = 0
        for _ in range(2):
            lengths = [ANSWER if i % 3 else 120 for i in range(len(asked))]
            futures = [
                process.submit(prompt, length, fusion=ALL)
                for prompt, length in zip(asked, lengths, strict=True)
            ]
            got = [future.result(300) for future in futures]
            for a, b in zip(got, reference(asked), strict=True):
                assert a.token_ids[:ANSWER] == b.token_ids[:ANSWER], a.kvcore
            made += sum(map(bool, blended(got)))
            settle_and_empty(process)
        assert made > 0
        assert counted(process, "vllm:num_preemptions_total") > 0, "nothing was preempted"
        assert counted(process, "kvcore_evictions_total", tier="host") > 0


exhaustive = pytest.mark.exhaustive


@pytest.mark.parametrize(
    "arch",
    [
        pytest.param("qwen2", marks=exhaustive),
        pytest.param("qwen3", marks=exhaustive),
        pytest.param("mistral", marks=exhaustive),
        pytest.param("gemma", marks=exhaustive),
        "phi3",
    ],
)
def test_other_shapes_of_models(arch: str) -> None:
    """With everything recomputed the answers are the exact ones, with pure reuse they are not.

    kvcore's own part in a family is its rope, and Phi-3's alone is not Llama's. Each layer is run
    by vLLM's own code; test_rope.py compares every family's rope with that of transformers.
    Gemma repeats its last token whatever it reads; there it is told by log-probabilities, for which
    vLLM's CPU build compiles something first.
    """
    other = tiny_model(arch, layers=3, sliding_window=0)
    chunks = windows(other, 4, 150, 200, seed=51)
    asked = mixed(other, chunks, 3, seed=52)
    logprobs = arch == "gemma"
    with engine(other, config()) as process:
        warm(process, chunks)
        rough = answers(process, asked, fusion=REUSE, logprobs=logprobs)
        got = answers(process, asked, fusion=ALL, logprobs=logprobs)
        expected = answers(process, asked, fusion=EXACT, logprobs=logprobs)
    assert_same_answers(got, expected)
    assert min(blended(got)) >= 400
    if logprobs:
        for a, b, c in zip(got, expected, rough, strict=True):
            assert a.logprobs == pytest.approx(b.logprobs, abs=2e-3)
            assert c.logprobs[0] != pytest.approx(b.logprobs[0], abs=2e-3)
    else:
        assert any(a.token_ids != b.token_ids for a, b in zip(rough, expected, strict=True))


@pytest.mark.exhaustive
def test_a_model_that_fusion_is_not_right_for_serves_exact_prefixes() -> None:
    other = tiny_model("gemma3", layers=2)
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


@pytest.mark.whole_machine
@exhaustive  # SGLang's ranks do it in `make test`: the choice and its vote are kvcore's own
def test_tensor_parallel_ranks_choose_the_same_rows(
    reference: Reference,
    model: Path,
    chunks: list[list[int]],
    warmed: EngineProcess,
    tmp_path: Path,
) -> None:
    """And where one of them fails in the middle of a blend, none waits for it."""
    asked = mixed(model, chunks, 8, seed=7)
    single = answers(warmed, asked[:4], fusion={"ratio": 0.2})
    fail = tmp_path / "fail"
    env = {**with_faulty(), "FAULTY_RANK": str(fail)}
    kvcore = {**config(), "ops": {"backend": "faulty"}}
    with engine(model, kvcore, env=env, tensor_parallel_size=2) as process:
        warm(process, chunks)
        assert_same_answers(answers(process, asked[:4], fusion={"ratio": 0.2}), single)
        settle_and_empty(process)
        everything = answers(process, asked[:4], fusion=ALL)
        assert_same_answers(everything, reference(asked[:4]))
        assert min(blended(everything)) >= 400
        assert counted(process, "kvcore_blends_total", outcome="failed") == 0
        fail.touch()
        assert_same_answers(answers(process, asked[4:], fusion=ALL), reference(asked[4:]))
        assert counted(process, "kvcore_blends_total", outcome="failed") >= 2
        fail.unlink()
        assert_same_answers(answers(process, asked[4:], fusion=EXACT), reference(asked[4:]))


@pytest.mark.parametrize(
    "compiled",
    [rig.PIECEWISE, pytest.param({"enforce_eager": False}, marks=exhaustive)],
    ids=["in pieces", "by Inductor"],
)
def test_compiled(
    reference: Reference, model: Path, chunks: list[list[int]], compiled: dict[str, Any]
) -> None:
    """The graph is split at attention, as on a GPU, and not run by a compiler, which takes most of
    a minute; or it is whole and compiled."""
    asked = mixed(model, chunks, 4, seed=8)
    with engine(model, config(), **compiled) as process:
        pieces = process.wait_ready()["pieces"]
        assert (pieces > 1) is (compiled is rig.PIECEWISE), pieces
        warm(process, chunks)
        got = answers(process, asked, fusion=ALL)
        assert_same_answers(got, reference(asked))
        assert min(blended(got)) >= 400


@pytest.mark.exhaustive
def test_adapters(
    reference: Reference, model: Path, chunks: list[list[int]], tmp_path: Path
) -> None:
    """Chunks are those of the adapter, and their rows are recomputed with it."""
    adapter = tiny_lora(tmp_path / "lora", model, seed=3)
    asked = mixed(model, chunks, 3, seed=9)
    lora: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    lora["max_num_batched_tokens"] = 256  # blends go through the adapter's layers in pieces
    with engine(model, config(), **lora) as process:
        warm(process, chunks, lora=adapter)
        got = answers(process, asked[:1], fusion=ALL)
        assert_same_answers(got, reference(asked[:1]))
        assert blended(got) == [0], "chunks of the adapter were used without it"
        process.reset_prefix_cache(connector=True)
        warm(process, chunks, lora=adapter)
        warm(process, chunks)
        plain = answers(process, asked, fusion=ALL)
        assert_same_answers(plain, reference(asked))
        adapted = answers(process, asked, lora=adapter, fusion=ALL)
        assert min(blended(plain + adapted)) >= 400
        process.reset_prefix_cache(connector=True)
        own = answers(process, asked, lora=adapter, fusion=EXACT)
        assert_same_answers(adapted, own)
        assert [a.token_ids for a in own] != [a.token_ids for a in plain]


def test_a_blend_that_fails_is_computed_by_the_engine(
    reference: Reference, model: Path, chunks: list[list[int]]
) -> None:
    """A third party's selector raises, at first now and then and later always."""
    asked = mixed(model, chunks, 10, seed=10)
    with engine(model, config(selector="faulty"), env=with_faulty()) as process:
        warm(process, chunks)
        got = answers(process, asked, fusion={"ratio": 0.999})
        right = reference(asked)
        told = [a.kvcore.get("fusion", {}) for a in got]
        failed = [i for i, fusion in enumerate(told) if "recomputed_share" not in fusion]
        assert 3 <= len(failed) < len(got), told
        tried = sum("blend failed" in fusion.get("error", "") for fusion in told)
        assert tried >= 3
        assert counted(process, "kvcore_blends_total", outcome="failed") == tried
        assert not any("blend" in got[i].kvcore["tiers"] for i in failed)
        assert_same_answers([got[i] for i in failed], [right[i] for i in failed])
        settle_and_empty(process)
        assert_same_answers(answers(process, asked, fusion=EXACT), right)
        assert "exact prefixes only" in process.log.read_text()


@pytest.mark.exhaustive
def test_blends_are_made_where_they_pay() -> None:
    """A blend that recomputes next to nothing is chosen unless what was measured speaks against
    it, one that recomputes next to everything is declined with a reason once it was tried; who asks
    for a ratio gets it either way."""
    deep = tiny_model("llama", layers=12, heads=8, kv_heads=2, head_dim=64)
    texts = windows(deep, 6, 300, 300, seed=81)
    asked = mixed(deep, texts, 4, seed=82)
    with engine(deep, config(ratio=0.02)) as process:
        warm(process, texts)
        got = answers(process, asked)
        assert any(blended(got)), [a.kvcore for a in got]
        for answer, tokens in zip(got, blended(got), strict=True):
            why = answer.kvcore["fusion"].get("declined", "")
            assert bool(why) is not bool(tokens), answer.kvcore
            if why:  # a busy machine's measurements may say so
                blend, prefix = re.findall(r"([0-9.e-]+) s[,;]", why)
                assert float(blend) > 0.8 * float(prefix), why
    with engine(deep, config(ratio=0.97, ratio_max=0.97)) as process:
        warm(process, texts)
        got = answers(process, asked)
        declined = [a.kvcore.get("fusion", {}).get("declined", "") for a in got]
        assert any("the prefix alone" in why for why in declined), [a.kvcore for a in got]
        refused = sum(map(bool, declined))
        assert counted(process, "kvcore_blends_total", outcome="declined") == refused
        process.reset_prefix_cache(connector=True)
        right = answers(process, asked, fusion=EXACT)
        plain = [(a, b) for a, b, why in zip(got, right, declined, strict=True) if why]
        assert_same_answers([a for a, _ in plain], [b for _, b in plain])
        process.reset_prefix_cache(connector=True)
        warm(process, texts)
        [wanted] = answers(process, asked[:1], fusion=ALL)
        assert blended([wanted])[0] >= 600
