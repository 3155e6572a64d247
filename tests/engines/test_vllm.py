"""Real vLLM, with and without kvcore: whatever happens, the same greedy tokens.

Every test asks an engine with kvcore what one without it was asked, and says where the KV must
have come from, so that a test cannot pass because nothing was reused.

In float32: in bfloat16 vLLM's CPU build changes tokens by itself when a prompt is computed in other
pieces (its own prefix-cache hits differ from its cold answers in one of four), which says nothing
about kvcore. That every byte is in its place in 2-byte types is what
tests/unit/memory/test_layout.py and the check against vLLM's write kernel at every start are for.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvcore.harness.compare import (
    ANSWER,
    SMALL,
    Reference,
    answers,
    assert_same_answers,
    counted,
    settle_and_empty,
)
from kvcore.harness.compare import small_engine as engine
from kvcore.harness.engine_process import EngineProcess, Generation
from kvcore.harness.models import smollm2, tiny_model
from kvcore.harness.prompts import tokens, windows
from kvcore_vllm.testing.conformance import STAGED

pytestmark = pytest.mark.engine

BLOCK_NBYTES = 4 * 2 * 2 * 64 * 16 * 4
"""Layers x heads x k/v x dim x tokens x bytes of the small model's blocks of 16."""
TP2 = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
EVERY_SIZE = ("ranks", "one", "stages", "ranks", "one")


@pytest.fixture(scope="module")
def documents(model: Path) -> list[list[int]]:
    return windows(model, 48, 150, 900, seed=1)


@pytest.fixture(scope="module")
def partial(model: Path, documents: list[list[int]]) -> list[list[int]]:
    """Prompts that leave a document's path somewhere, on no border of anything."""
    picks = random.Random(3)
    text = tokens(model)
    prompts = []
    for document in documents[:32]:
        cut = picks.randint(70, len(document) - 1)
        start = picks.randrange(len(text) - 200)
        prompts.append(document[:cut] + text[start : start + picks.randint(1, 120)])
    return prompts


Ask = Callable[[Sequence[Sequence[int]]], list[Generation]]


@pytest.fixture(scope="module")
def reference(model: Path) -> Iterator[Ask]:
    with engine(model, None, enable_prefix_caching=False) as process:
        yield Reference(process)


def test_prompts_have_different_answers(reference: Ask, documents: list[list[int]]) -> None:
    """Equality proves nothing where every prompt is answered alike."""
    kinds = {tuple(answer.token_ids) for answer in reference(documents)}
    assert len(kinds) > len(documents) * 0.8


@pytest.mark.parametrize(
    ("count", "block", "page", "arrangement"),
    [
        (12, 16, 128, "blockwise"),
        pytest.param(48, 16, 128, "blockwise", marks=pytest.mark.exhaustive),
        pytest.param(12, 128, 32, "layerwise", marks=pytest.mark.exhaustive),
        pytest.param(12, 64, 128, "blockwise", marks=pytest.mark.exhaustive),
    ],
)
def test_host_disk_and_restart(
    reference: Ask,
    model: Path,
    documents: list[list[int]],
    partial: list[list[int]],
    tmp_path: Path,
    count: int,
    block: int,
    page: int,
    arrangement: str,
) -> None:
    """And, where blocks are small, all that an engine can be asked between two starts.

    Two tests below have larger blocks, of several pages and of half a page.
    """
    kvcore = {
        "block": {"tokens": block},
        "host": {"capacity": "1GiB", "arrangement": arrangement},
        "disk": {"path": str(tmp_path / "kv"), "capacity": "4GiB"},
    }
    asked, branches = documents[:count], partial[:count]
    alone, shared, *rotting = windows(model, 6, 900, 900, seed=31)

    def reused(document: Sequence[int]) -> int:
        whole = len(document) // block * block
        found = min(whole, len(document) - 1)
        return found if found >= 64 else 0

    with engine(model, kvcore, block_size=page) as process:
        cold = answers(process, asked)
        assert_same_answers(cold, reference(asked))
        assert sum(answer.reused_tokens for answer in cold) == 0
        settle_and_empty(process)
        warm = answers(process, asked)
        assert_same_answers(warm, reference(asked))
        assert [w.tiers.get("host", 0) for w in warm] == [reused(d) for d in asked]
        settle_and_empty(process)
        branched = answers(process, branches, batch=4)
        assert_same_answers(branched, reference(branches))
        assert sum(answer.reused_tokens for answer in branched) > len(branches) * block
        if block == 16:
            _turns(process, reference, asked[:6])
            _tenants(process, reference, asked[0])
            _aborts(process, reference, model)
            answers(process, [alone, shared], cache_salt="at once")
            answers(process, rotting, cache_salt="rot", batch=4)
            assert counted(process, "kvcore_failures_total") == 0
            assert counted(process, "kvcore_hits_total") > 1.5 * len(asked)
            saved = "kvcore_expected_ttft_seconds_total"
            assert counted(process, saved, way="recompute") > 0, "it is counted by default"
    with engine(model, kvcore, block_size=page) as process:
        restarted = answers(process, asked, batch=3)
        assert_same_answers(restarted, reference(asked))
        assert [w.tiers.get("disk", 0) for w in restarted] == [reused(d) for d in asked]
        settle_and_empty(process)
        again = answers(process, asked[:8])
        assert_same_answers(again, reference(asked[:8]))
        assert all("host" in answer.tiers for answer in again if answer.reused_tokens), (
            "what came from disk was not kept in host memory"
        )
        if block == 16:
            _several_at_once(process, reference, alone, shared)
            _rots(process, reference, rotting, tmp_path / "kv")


def _turns(process: EngineProcess, reference: Ask, asked: Sequence[list[int]]) -> None:
    """The next turn finds the answer's KV too."""
    follow = [
        [*document, *answer.token_ids, *range(300, 340)]
        for document, answer in zip(asked, reference(asked), strict=True)
    ]
    settle_and_empty(process)
    turns = answers(process, follow)
    assert_same_answers(turns, reference(follow))
    assert all(t.reused_tokens >= len(d) - 16 for t, d in zip(turns, asked, strict=True))


def _tenants(process: EngineProcess, reference: Ask, document: list[int]) -> None:
    """Another tenant's KV is not to be had, and one's own is."""
    settle_and_empty(process)
    first = answers(process, [document], cache_salt="tenant-a")
    settle_and_empty(process)
    second = answers(process, [document], cache_salt="tenant-a")
    other = answers(process, [document], cache_salt="tenant-b")
    for got in (first, second, other):
        assert_same_answers(got, reference([document]))
    assert (first[0].reused_tokens, other[0].reused_tokens) == (0, 0)
    assert second[0].reused_tokens > 0


def _aborts(process: EngineProcess, reference: Ask, model: Path) -> None:
    """Requests aborted before, while and after they load and save; then the same asked again."""
    prompts = windows(model, 6, 500, 900, seed=9)
    for after in (0, 1, 3):
        futures = [process.submit(p, 64, abort_after=after) for p in prompts]
        for future in futures:
            future.result(120)
        settle_and_empty(process)
    got = answers(process, prompts, batch=5)
    assert_same_answers(got, reference(prompts))


def _several_at_once(
    process: EngineProcess, reference: Ask, alone: list[int], shared: list[int]
) -> None:
    """What several want at once is read from disk once."""

    def read(asked: list[list[int]]) -> float:
        """Bytes that come from disk when these are asked for together."""
        before = counted(process, "kvcore_transfer_bytes_total", path="disk2h")
        got = answers(process, asked, batch=len(asked), cache_salt="at once")
        assert_same_answers(got, reference(asked))
        assert all(answer.cached_tokens > 800 for answer in got)
        settle_and_empty(process)
        return counted(process, "kvcore_transfer_bytes_total", path="disk2h") - before

    once = read([alone])
    assert once > 0
    assert read([shared] * 4) == once


def _rots(process: EngineProcess, reference: Ask, asked: list[list[int]], folder: Path) -> None:
    """Blocks that rot on the disk cost time, not correctness, and are written anew."""
    _rot(folder, counted(process, "kvcore_tier_used_bytes", tier="disk"))
    got = answers(process, asked, batch=4, cache_salt="rot")
    assert_same_answers(got, reference(asked))
    assert counted(process, "kvcore_corrupt_blocks_total", tier="disk") > 0
    settle_and_empty(process)
    healed = answers(process, asked, cache_salt="rot")
    assert_same_answers(healed, reference(asked))
    assert sum(h.reused_tokens for h in healed) > sum(g.reused_tokens for g in got)


def _rot(folder: Path, used: float) -> None:
    """Change bytes in one block of eleven, at least one of every document."""
    [data] = folder.rglob("shard-0.data")
    with data.open("r+b") as file:
        for start in range(0, int(used), 11 * BLOCK_NBYTES):
            file.seek(start + 64)
            file.write(b"\xa5" * 64)


@pytest.mark.parametrize("nixl", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_straight_from_disk_to_the_pages(
    reference: Ask, model: Path, documents: list[list[int]], tmp_path: Path, nixl: bool
) -> None:
    """`disk.to_device`: past host memory with NIXL, and through it all the same without; what
    rotted is computed."""
    kvcore = {
        "host": {"capacity": "256MiB"},
        "disk": {"path": str(tmp_path / "kv"), "capacity": "1GiB", "to_device": "on"},
    }
    env = {} if nixl else _without_nixl(tmp_path)
    asked, rotting = documents[:8], documents[8:16]
    with engine(model, kvcore) as process:
        answers(process, [*asked, *rotting])
    with engine(model, kvcore, env) as process:
        got = answers(process, asked, batch=4)
        assert_same_answers(got, reference(asked))
        assert all(answer.tiers.get("disk", 0) >= 128 for answer in got)
        moved = "kvcore_transfer_bytes_total"
        straight = counted(process, moved, path="disk2d")
        assert straight == counted(process, moved, path="d2d") > 0
        bounced = counted(process, "kvcore_bounced_blocks_total", tier="disk")
        assert bounced == (0 if nixl else straight / BLOCK_NBYTES)
        assert counted(process, "kvcore_failures_total") == 0
        _rot(tmp_path / "kv", counted(process, "kvcore_tier_used_bytes", tier="disk"))
        got = answers(process, rotting, batch=4)
        assert_same_answers(got, reference(rotting))
        assert counted(process, "kvcore_corrupt_blocks_total", tier="disk") > 0
        assert counted(process, moved, path="disk2d") > straight
        settle_and_empty(process)
        healed = answers(process, rotting)
        assert_same_answers(healed, reference(rotting))
        assert sum(h.reused_tokens for h in healed) > sum(g.reused_tokens for g in got)


def _without_nixl(folder: Path) -> dict[str, str]:
    """The environment of a process that cannot import it."""
    for name in ("nixl_cu13", "nixl_cu12", "nixl"):
        (folder / "none" / name).mkdir(parents=True)
        (folder / "none" / name / "__init__.py").write_text("raise ImportError('none here')")
    return {"PYTHONPATH": f"{folder / 'none'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


def test_a_killed_engine_leaves_only_whole_blocks(
    reference: Ask, model: Path, documents: list[list[int]], tmp_path: Path
) -> None:
    kvcore = {
        "block": {"tokens": 64},
        "host": {"capacity": "256MiB"},
        "disk": {"path": str(tmp_path / "kv"), "capacity": "2GiB"},
    }
    asked = documents[16:28]
    process = EngineProcess(model, kvcore=kvcore, block_size=32, **SMALL)
    assert_same_answers(answers(process, asked[:6]), reference(asked[:6]))
    settle_and_empty(process)
    for document in asked[6:]:
        process.submit(document, 64)
    time.sleep(0.7)
    process.kill()
    with engine(model, kvcore, block_size=32) as restarted:
        got = answers(restarted, asked)
        assert_same_answers(got, reference(asked))
        assert sum(g.tiers.get("disk", 0) for g in got[:5]) > 0


@pytest.mark.parametrize(
    ("count", "write", "block", "arrangement"),
    [
        (12, "write_back", 64, "layerwise"),
        pytest.param(20, "write_through", 32, "blockwise", marks=pytest.mark.exhaustive),
        pytest.param(20, "write_back", 32, "blockwise", marks=pytest.mark.exhaustive),
        pytest.param(20, "selective", 32, "blockwise", marks=pytest.mark.exhaustive),
    ],
)
def test_eviction_preemption_and_chunked_prefill(
    reference: Ask,
    model: Path,
    documents: list[list[int]],
    tmp_path: Path,
    count: int,
    write: str,
    block: int,
    arrangement: str,
) -> None:
    """Tiers and device memory far too small for the work, many requests at once.

    test_reference_engine.py has every policy.
    """
    kvcore = {
        "block": {"tokens": block},
        "host": {"capacity": "16MiB", "arrangement": arrangement},
        "disk": {
            "path": str(tmp_path / "kv"),
            "capacity": "60MiB",
            "write": write,
            "policy": "s3fifo",
        },
        "vllm": {"layerwise": write != "selective"},
    }
    asked = documents[:count]
    with engine(
        model, kvcore, num_gpu_blocks_override=20, max_num_batched_tokens=256, block_size=128
    ) as process:
        for _ in range(2):
            futures = [process.submit(d, ANSWER if i % 3 else 150) for i, d in enumerate(asked)]
            got = [future.result(300) for future in futures]
            wrong = [
                i
                for i, (a, b) in enumerate(zip(got, reference(asked), strict=True))
                if a.token_ids[:ANSWER] != b.token_ids
            ]
            assert not wrong, f"answers {wrong} differ"
            settle_and_empty(process)
        assert counted(process, "vllm:num_preemptions_total") > 0, "nothing was preempted"
        assert counted(process, "kvcore_evictions_total", tier="host") > 0
        assert counted(process, "kvcore_hits_total") > 0
        if write != "selective":
            assert counted(process, "kvcore_lookup_tokens_total", result="hit", tier="disk") > 0
    used = sum(f.stat().st_size for f in (tmp_path / "kv").rglob("*") if f.is_file())
    assert used <= 60 << 20, "the disk tier is larger than its capacity"


@pytest.mark.exhaustive
def test_a_disk_that_cannot_be_used_is_left_out(
    reference: Ask, model: Path, documents: list[list[int]], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("not a folder")
    kvcore = {"host": {"capacity": "256MiB"}, "disk": {"path": str(tmp_path / "file")}}
    with engine(model, kvcore) as process:
        assert_same_answers(answers(process, documents[:3]), reference(documents[:3]))
        settle_and_empty(process)
        warm = answers(process, documents[:3])
        assert_same_answers(warm, reference(documents[:3]))
        assert all(answer.tiers.keys() == {"host"} for answer in warm)
        assert "is not a folder" in process.log.read_text()
        process.reset_prefix_cache(connector=True)
        [forgotten] = answers(process, documents[:1])
        assert forgotten.reused_tokens == 0, "reset_prefix_cache(reset_connector=True) kept blocks"


@pytest.mark.exhaustive
def test_the_real_model_answers_alike_from_every_tier(tmp_path: Path) -> None:
    """SmolLM2: text that can be read, 30 layers, three heads."""
    real = smollm2()
    prompts = windows(real, 4, 100, 250, seed=2)
    kvcore = {
        "host": {"capacity": "256MiB"},
        "disk": {"path": str(tmp_path / "kv"), "capacity": "1GiB"},
    }
    with engine(real, None, enable_prefix_caching=False) as process:
        expected = answers(process, prompts)
    with engine(real, kvcore) as process:
        assert_same_answers(answers(process, prompts), expected)
        settle_and_empty(process)
        warm = answers(process, prompts, batch=2)
        assert_same_answers(warm, expected)
        assert all(
            w.tiers.get("host", 0) >= len(p) - 16 for w, p in zip(warm, prompts, strict=True)
        )
    with engine(real, kvcore) as process:
        got = answers(process, prompts, batch=2)
        assert_same_answers(got, expected)
        assert all(g.tiers.get("disk", 0) >= len(p) - 16 for g, p in zip(got, prompts, strict=True))


@pytest.mark.parametrize(
    "order", [("one", "ranks", "stages"), pytest.param(EVERY_SIZE, marks=pytest.mark.exhaustive)]
)
def test_ranks_and_stages_read_what_the_others_wrote(
    order: tuple[str, ...], tmp_path: Path
) -> None:
    """Two ranks save and load their own heads, two stages their own layers, of which one has two
    and the other one. Each engine reads from disk what those before it wrote."""
    tiny = tiny_model("llama", layers=3, heads=4, kv_heads=2)
    prompts = windows(tiny, 9, 100, 600, seed=4)
    kvcore = {
        "host": {"capacity": "256MiB"},
        "disk": {"path": str(tmp_path / "kv"), "capacity": "1GiB"},
    }
    ranks: dict[str, Any] = {"tensor_parallel_size": 2}
    stages: dict[str, Any] = {"pipeline_parallel_size": 2, **STAGED}
    with engine(tiny, None, TP2, enable_prefix_caching=False) as process:
        at_one = answers(process, prompts)
    with engine(tiny, None, TP2, enable_prefix_caching=False, **ranks) as process:
        at_two = answers(process, prompts)
    sizes = {"one": ({}, at_one), "ranks": (ranks, at_two), "stages": (stages, at_one)}
    before = 0
    for number, name in enumerate(order, 1):
        size, right = sizes[name]
        upto = min(3 * number, len(prompts))
        with engine(tiny, kvcore, TP2, **size) as process:
            found = answers(process, prompts[:before], batch=2)
            assert_same_answers(found, right[:before])
            assert_all_whole("disk", found, prompts)
            cold = answers(process, prompts[before:upto])
            assert_same_answers(cold, right[before:upto])
            assert not any(answer.reused_tokens for answer in cold)
            settle_and_empty(process)
            warm = answers(process, prompts[before:upto], batch=4)
            assert_same_answers(warm, right[before:upto])
            assert_all_whole("host", warm, prompts[before:])
        before = upto


def assert_all_whole(
    tier: str, got: Sequence[Generation], prompts: Sequence[Sequence[int]]
) -> None:
    """Assert that the tier had every whole block of these prompts."""
    for answer, prompt in zip(got, prompts, strict=False):
        assert answer.tiers.get(tier, 0) >= len(prompt) - 16, answer.kvcore


@pytest.mark.exhaustive
def test_sliding_window_beside_full_attention(tmp_path: Path) -> None:
    """Blocks keep both. Pages out of the window are dropped by the engine, and not missed."""
    tiny = tiny_model("gemma3")
    prompts = windows(tiny, 8, 200, 900, seed=6)
    kvcore = {
        "host": {"capacity": "256MiB"},
        "disk": {"path": str(tmp_path / "kv"), "capacity": "1GiB"},
        "vllm": {"windows": "dense"},
    }
    with engine(tiny, None, enable_prefix_caching=False) as process:
        expected = answers(process, prompts)
    with engine(tiny, kvcore, max_num_batched_tokens=256) as process:
        assert_same_answers(answers(process, prompts, batch=3), expected)
        settle_and_empty(process)
        warm = answers(process, prompts, batch=3)
        assert_same_answers(warm, expected)
        assert sum(w.tiers.get("host", 0) for w in warm) > 0
    with engine(tiny, kvcore) as process:
        got = answers(process, prompts)
        assert_same_answers(got, expected)
        assert sum(g.tiers.get("disk", 0) for g in got) > 0
