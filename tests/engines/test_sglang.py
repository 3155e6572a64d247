"""Real SGLang, with and without kvcore: whatever happens, the same greedy tokens.

Every test asks an engine with kvcore what one without it was asked, and says where the KV must
have come from, so that a test cannot pass because nothing was reused. In float32, where SGLang on
a CPU answers alike however a prompt is cut: `test_the_engine_agrees_with_itself` says so.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvcore.testing.asking import ANSWER, Reference, answers, counted, same, settled, small_engine
from kvcore.testing.engine_process import EngineProcess, Generation
from kvcore.testing.models import smollm2, tiny_model
from kvcore.testing.prompts import tokens, windows

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]

engine = partial(small_engine, engine="sglang")
FAULTY = Path(__file__).with_name("faulty")
BLOCK = 16
BLOCK_NBYTES = 4 * 2 * 2 * 64 * BLOCK * 4
"""Layers x heads x k/v x dim x tokens x bytes of the small model's blocks of 16."""

Ask = Callable[[Sequence[Sequence[int]]], list[Generation]]


def settings(folder: Path, **sglang: Any) -> dict[str, Any]:
    """Tiers of host and disk; lookups wait for the disk, so that what is found is certain."""
    return {
        "host": {"capacity": "512MiB"},
        "disk": {"path": str(folder / "kv"), "capacity": "2GiB"},
        "sglang": {"keep_on_flush": True, "prefetch": "wait", **sglang},
    }


@pytest.fixture(scope="module")
def model() -> Path:
    """Small and random, so that hundreds of prompts are answered in seconds."""
    return tiny_model("llama", layers=4, heads=4, kv_heads=2, head_dim=64)


@pytest.fixture(scope="module")
def documents(model: Path) -> list[list[int]]:
    return windows(model, 32, 150, 900, seed=1)


@pytest.fixture(scope="module")
def branches(model: Path, documents: list[list[int]]) -> list[list[int]]:
    """Prompts that leave a document's path somewhere, on no border of anything."""
    picks = random.Random(3)
    text = tokens(model)
    prompts = []
    for document in documents[:16]:
        cut = picks.randint(70, len(document) - 1)
        start = picks.randrange(len(text) - 200)
        prompts.append(document[:cut] + text[start : start + picks.randint(1, 120)])
    return prompts


@pytest.fixture(scope="module")
def plain(model: Path) -> Iterator[EngineProcess]:
    with engine(model, None, disable_radix_cache=True) as process:
        yield process


@pytest.fixture(scope="module")
def reference(plain: EngineProcess) -> Ask:
    return Reference(plain)


def test_prompts_have_different_answers(reference: Ask, documents: list[list[int]]) -> None:
    """Equality proves nothing where every prompt is answered alike."""
    kinds = {tuple(answer.token_ids) for answer in reference(documents)}
    assert len(kinds) > len(documents) * 0.8


def test_the_engine_agrees_with_itself(
    plain: EngineProcess, reference: Ask, documents: list[list[int]]
) -> None:
    """In other batches it answers the same."""
    same(answers(plain, documents[:12], batch=4), reference(documents[:12]))


def reusable(document: Sequence[int], page: int) -> int:
    """Tokens of a document that kvcore must bring back once it was answered: whole blocks and whole
    pages of all tokens but the last, which SGLang looks up."""
    found = (len(document) - 1) // BLOCK * BLOCK // page * page
    return found if found >= 64 else 0


@pytest.mark.parametrize("page", [1, 16, 64])
def test_host_disk_and_restart(
    reference: Ask,
    model: Path,
    documents: list[list[int]],
    branches: list[list[int]],
    tmp_path: Path,
    page: int,
) -> None:
    kvcore = settings(tmp_path)
    asked = documents if page == 1 else documents[:10]
    with engine(model, kvcore, page_size=page) as process:
        cold = answers(process, asked)
        same(cold, reference(asked))
        assert sum(answer.reused_tokens for answer in cold) == 0
        settled(process)
        warm = answers(process, asked)
        same(warm, reference(asked))
        _all_from("host", warm, asked, page)
        settled(process)
        branched = answers(process, branches, batch=4)
        same(branched, reference(branches))
        assert sum(answer.reused_tokens for answer in branched) > len(branches) * max(page, BLOCK)
        if page == 1:
            _turns(process, reference, asked[:6])
            _tenants(process, reference, asked[0])
        _aborts(process, reference, model)
        assert counted(process, "kvcore_failures_total") == 0
    with engine(model, kvcore, page_size=page) as process:
        restarted = answers(process, asked, batch=3)
        same(restarted, reference(asked))
        _all_from("disk", restarted, asked, page)
        settled(process)
        again = answers(process, asked[:6])
        same(again, reference(asked[:6]))
        assert all("host" in answer.tiers for answer in again if answer.reused_tokens), (
            "what came from disk was not kept in host memory"
        )


def _all_from(
    tier: str, got: Sequence[Generation], asked: Sequence[list[int]], page: int = 1
) -> None:
    """All that can be reused came from the tier, but for a few tokens that documents have in
    common and that the engine's own tree therefore holds."""
    assert [answer.cached_tokens for answer in got] == [reusable(d, page) for d in asked]
    for answer in got:
        assert answer.tiers.keys() <= {tier}
        assert 0 <= answer.cached_tokens - answer.reused_tokens < 8


def _turns(process: EngineProcess, reference: Ask, asked: Sequence[list[int]]) -> None:
    """The next turn finds the answer's KV too."""
    follow = [
        [*document, *answer.token_ids, *range(300, 340)]
        for document, answer in zip(asked, reference(asked), strict=True)
    ]
    settled(process)
    turns = answers(process, follow)
    same(turns, reference(follow))
    assert all(t.reused_tokens >= len(d) - BLOCK for t, d in zip(turns, asked, strict=True))


def _tenants(process: EngineProcess, reference: Ask, document: list[int]) -> None:
    """Another tenant's KV is not to be had, and one's own is."""
    settled(process)
    first = answers(process, [document], cache_salt="tenant-a")
    settled(process)
    second = answers(process, [document], cache_salt="tenant-a")
    other = answers(process, [document], cache_salt="tenant-b")
    for got in (first, second, other):
        same(got, reference([document]))
    assert (first[0].reused_tokens, other[0].reused_tokens) == (0, 0)
    assert second[0].reused_tokens > 0


def _aborts(process: EngineProcess, reference: Ask, model: Path) -> None:
    """Requests aborted before, while and after they load and save; then the same asked again."""
    prompts = windows(model, 8, 500, 900, seed=9)
    for after in (0, 1, 3):
        futures = [process.submit(p, 64, abort_after=after) for p in prompts]
        for future in futures:
            future.result(600)
        settled(process)
    got = answers(process, prompts, batch=4)
    same(got, reference(prompts))


def test_a_rotten_disk_costs_time_not_correctness(
    reference: Ask, model: Path, documents: list[list[int]], tmp_path: Path
) -> None:
    kvcore = settings(tmp_path)
    asked = documents[:12]
    with engine(model, kvcore) as process:
        answers(process, asked)
    [data] = (tmp_path / "kv").rglob("shard-0.data")
    picks = random.Random(5)
    with data.open("r+b") as file:
        used = sum(len(d) // BLOCK for d in asked) * BLOCK_NBYTES
        for _ in range(60):
            file.seek(picks.randrange(used))
            file.write(b"\xa5" * 64)
    with engine(model, kvcore) as process:
        got = answers(process, asked, batch=4)
        same(got, reference(asked))
        assert counted(process, "kvcore_corrupt_blocks_total", tier="disk") > 0
        settled(process)
        healed = answers(process, asked)
        same(healed, reference(asked))
        assert sum(h.reused_tokens for h in healed) > sum(g.reused_tokens for g in got)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_load_that_fails_is_computed_and_not_aborted(
    reference: Ask, model: Path, documents: list[list[int]], tmp_path: Path, overlap: bool
) -> None:
    """Every copy into the engine's pages fails for a while, also of prompts in chunks."""
    flag = tmp_path / "fail"
    env = {
        "PYTHONPATH": os.pathsep.join([str(FAULTY), os.environ.get("PYTHONPATH", "")]),
        "FAULTY_OPS": str(flag),
    }
    asked = documents[:8]
    kvcore = {**settings(tmp_path), "ops": {"backend": "faulty"}}
    with engine(
        model, kvcore, env, chunked_prefill_size=256, disable_overlap_schedule=not overlap
    ) as process:
        answers(process, asked)
        settled(process)
        flag.touch()
        got = answers(process, asked, batch=3)
        same(got, reference(asked))
        assert all(answer.finish_reason == "length" for answer in got)
        assert counted(process, "kvcore_misses_total", reason="load_failed") >= len(asked)
        flag.unlink()
        settled(process)
        healed = answers(process, asked)
        same(healed, reference(asked))
        assert all(answer.tiers.get("host", 0) > 0 for answer in healed)


@pytest.mark.parametrize("write", ["write_through", "write_back", "selective"])
def test_eviction_retraction_and_chunked_prefill(
    reference: Ask, model: Path, documents: list[list[int]], tmp_path: Path, write: str
) -> None:
    """Tiers and device memory far too small for the work, many requests at once."""
    kvcore = {
        "block": {"tokens": 32},
        "host": {"capacity": "16MiB"},
        "disk": {
            "path": str(tmp_path / "kv"),
            "capacity": "60MiB",
            "write": write,
            "policy": "s3fifo",
        },
        "sglang": {
            "keep_on_flush": True,
            "prefetch": "wait",
            "layerwise": write != "selective",
        },
    }
    asked = documents[:16]
    with engine(
        model,
        kvcore,
        {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "20"},  # as if out of memory
        max_total_tokens=2600,
        chunked_prefill_size=256,
    ) as process:
        for _ in range(2):
            futures = [process.submit(d, ANSWER if i % 3 else 150) for i, d in enumerate(asked)]
            got = [future.result(1200) for future in futures]
            wrong = [
                i
                for i, (a, b) in enumerate(zip(got, reference(asked), strict=True))
                if a.token_ids[:ANSWER] != b.token_ids
            ]
            assert not wrong, f"answers {wrong} differ"
            settled(process)
        assert counted(process, "kvcore_evictions_total", tier="host") > 0
        assert counted(process, "kvcore_hits_total") > 0
        assert "retracted" in process.log.read_text().lower(), "nothing was retracted"
    used = sum(f.stat().st_size for f in (tmp_path / "kv").rglob("*") if f.is_file())
    assert used <= 60 << 20, "the disk tier is larger than its capacity"


def test_a_flush_forgets_everything_unless_told_otherwise(
    reference: Ask, model: Path, documents: list[list[int]], tmp_path: Path
) -> None:
    kvcore = settings(tmp_path, keep_on_flush=False)
    with engine(model, kvcore) as process:
        same(answers(process, documents[:3]), reference(documents[:3]))
        process.reset_prefix_cache(connector=True)
        forgotten = answers(process, documents[:3])
        same(forgotten, reference(documents[:3]))
        assert sum(answer.reused_tokens for answer in forgotten) == 0


def test_the_real_model_answers_alike_from_every_tier(tmp_path: Path) -> None:
    """SmolLM2: text that can be read, 30 layers, three heads."""
    real = smollm2()
    prompts = windows(real, 5, 100, 320, seed=2)
    kvcore = settings(tmp_path)
    with engine(real, None, disable_radix_cache=True) as process:
        expected = answers(process, prompts)
    with engine(real, kvcore) as process:
        same(answers(process, prompts), expected)
        settled(process)
        warm = answers(process, prompts, batch=2)
        same(warm, expected)
        _all_from("host", warm, prompts)
    with engine(real, kvcore) as process:
        got = answers(process, prompts, batch=2)
        same(got, expected)
        _all_from("disk", got, prompts)


def test_tensor_parallel_blocks_are_read_at_another_size(tmp_path: Path) -> None:
    """TP=2 saves and loads its own heads; TP=1 then reads what TP=2 wrote, from disk."""
    tiny = tiny_model("llama", layers=3, heads=4, kv_heads=2)
    prompts = windows(tiny, 10, 100, 600, seed=4)
    kvcore = settings(tmp_path)
    two = {"tp_size": 2, "env": {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}}
    with engine(tiny, None, disable_radix_cache=True, **two) as process:
        at_two = answers(process, prompts)
    with engine(tiny, kvcore, **two) as process:
        same(answers(process, prompts), at_two)
        settled(process)
        warm = answers(process, prompts, batch=4)
        same(warm, at_two)
        _all_from("host", warm, prompts)
    with engine(tiny, kvcore) as process:
        got = answers(process, prompts)
        _all_from("disk", got, prompts)
        same(got, at_two)


def test_what_is_not_served_runs_untouched(tmp_path: Path) -> None:
    """Sliding windows: one warning that says why, and the engine's own answers."""
    tiny = tiny_model("gemma3")
    with EngineProcess(
        tiny,
        engine="sglang",
        kvcore=settings(tmp_path),
        dtype="float32",
        max_total_tokens=4096,
        start_method="fork",
    ) as process:
        assert "kvcore stands aside" in process.log.read_text()
