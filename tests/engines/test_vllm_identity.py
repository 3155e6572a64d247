"""Real vLLM where KV is easily taken for other KV: formats, sessions, counts and sizes of pages."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from kvcore.harness.compare import (
    ALL,
    EXACT,
    REUSE,
    SPACE,
    Reference,
    answers,
    assert_same_answers,
    counted,
    settle_and_empty,
    warm,
)
from kvcore.harness.compare import small_engine as engine
from kvcore.harness.engine_process import EngineProcess, run_program
from kvcore.harness.models import tiny_lora, tiny_vision_model
from kvcore.harness.prompts import mixed, windows
from kvcore_devtools.servers import need_client, redis_like, servers

pytestmark = pytest.mark.engine

SESSION = Path(__file__).with_name("vllm_session.py")
VARIANTS = Path(__file__).with_name("variants")
HOST = {"host": {"capacity": "256MiB"}}
FUSED = {"fusion": {"enabled": True, "min_tokens": 64}}
TOKEN_NBYTES = 4 * 2 * 2 * 64 * 4  # layers, key and value, heads, head size, float32
IN_STEP_TOKENS = 600


@pytest.fixture(scope="module")
def documents(model: Path) -> list[list[int]]:
    return windows(model, 6, 300, 900, seed=33)


@pytest.fixture(scope="module")
def chunks(model: Path) -> list[list[int]]:
    return windows(model, 5, 200, 300, seed=34)


@pytest.fixture(scope="module")
def reference(model: Path) -> Iterator[Reference]:
    with engine(model, None, enable_prefix_caching=False) as process:
        yield Reference(process)


def variant(folder: Path, name: str, seen: str = "") -> dict[str, str]:
    """Return the environment of an engine with a variant of vLLM (``kvcore_variants``)."""
    (folder / "kvcore_wanted.py").write_text(f"VARIANT, SEEN = {(name, seen)}\n")
    path = [str(VARIANTS), str(folder), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(path)}


@pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="vLLM keeps FP8 on CPUs with AVX-512 only"
)
def test_eight_bit_formats_never_read_each_others_kv(
    model: Path, documents: list[list[int]], tmp_path: Path
) -> None:
    kvcore = HOST | {"disk": {"path": str(tmp_path / "kv"), "capacity": "256MiB"}}
    for name in ("fp8_e4m3", "fp8_e5m2"):
        with engine(model, None, kv_cache_dtype=name, enable_prefix_caching=False) as process:
            expected = answers(process, documents)
        with engine(model, kvcore, kv_cache_dtype=name) as process:
            got = answers(process, documents)
            assert_same_answers(got, expected)
            assert not any(answer.reused_tokens for answer in got), "it read the other format's KV"
            settle_and_empty(process)
            again = answers(process, documents)
            assert_same_answers(again, expected)
            assert all(answer.reused_tokens for answer in again), "this format is not stored at all"
            assert "not found after a restart" not in process.log.read_text()
            assert counted(process, "kvcore_tier_used_bytes", tier="disk") > 0


@pytest.mark.exhaustive
def test_runs_that_differ_in_one_setting_find_nothing_of_each_other(
    model: Path, documents: list[list[int]], tmp_path: Path
) -> None:
    """Over one disk folder and one store. What a request under its own salt gives is right."""
    need_client("redis")
    with servers(tmp_path) as start:
        url = f"redis://127.0.0.1:{start(redis_like('redis-server')).port}/0"
        options = {"url": url, "lookup_s": 60.0, "timeout_s": 60.0}
        far = {"plugin": "redis", "capacity": "512MiB", "options": options}
        _differ_in_one_setting(model, documents, tmp_path, {"tiers": {"far": far}})


def _differ_in_one_setting(
    model: Path, documents: list[list[int]], tmp_path: Path, store: dict[str, Any]
) -> None:
    other = tmp_path / "edited"
    shutil.copytree(model, other)
    [file] = other.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.layers.0.input_layernorm.weight"][:64] *= 2
    save_file(tensors, file, {"format": "pt"})
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    adapters = [tiny_lora(tmp_path / name / "adapter", model) for name in "ab"]
    told = json.loads((adapters[1] / "adapter_config.json").read_text())
    (adapters[1] / "adapter_config.json").write_text(json.dumps(told | {"lora_alpha": 64}))
    lora = {"enable_lora": True, "max_lora_rank": 8}
    runs: list[tuple[Path, dict[str, Any], list[Path | None]]] = [
        (model, {"load_format": "dummy"}, [None]),
        (model, {"hf_overrides": rope}, [None]),
        (other, {}, [None]),
        (model, lora, [None, *adapters]),
        (model, {}, [None]),
        (model, {}, [None]),
    ]
    disk = {"disk": {"path": str(tmp_path / "kv"), "capacity": "512MiB"}}
    kinds, alone = set(), []
    for number, (folder, settings, choices) in enumerate(runs):
        tier = "far" if number == 5 else "disk"
        with engine(folder, HOST | store | (disk if tier == "disk" else {}), **settings) as process:
            for choice in choices:
                salt = f"{number} {choice}"
                expected = answers(process, documents[:2], lora=choice, cache_salt=salt)
                got = answers(process, documents[:2], lora=choice)
                assert_same_answers(got, expected)
                if number < 4:
                    assert not any(answer.reused_tokens for answer in got), (settings, choice)
                else:
                    assert min(answer.tiers.get(tier, 0) for answer in got) > 200
                kinds.add(str([answer.token_ids for answer in expected]))
            settle_and_empty(process)
            alone.append("not found after a restart" in process.log.read_text())
    assert len(kinds) == 6, "a setting changes no answer"
    assert alone == [True, False, False, False, False, False]


@pytest.mark.exhaustive
def test_a_session_never_reads_the_kv_of_another_sessions_picture(tmp_path: Path) -> None:
    """Its keys began with a text. The picture came later, and its pages were taken away then."""
    pictures = []
    for seed in range(2):
        pixels = np.random.default_rng(seed).integers(0, 256, (56, 56, 3), dtype=np.uint8)
        pictures.append(tmp_path / f"{seed}.png")
        Image.fromarray(pixels).save(pictures[-1])
    model = tiny_vision_model()
    said = run_program("vllm", model, SESSION, model, json.dumps(HOST), *pictures, env=SPACE)
    right, got = map(json.loads, re.findall(r'^{"tokens".*', said, re.MULTILINE))
    assert got == right | {"hits": 0}, "kvcore leaves sessions alone"


# -- vLLM takes other counts than it was offered -------------------------------------------------


@pytest.fixture(scope="module")
def taking(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """An engine that takes of an offer what the first word of a request's salt says."""
    env = variant(tmp_path_factory.mktemp("taken"), "taken")
    in_step = {"transfer": {"sync_load_max": IN_STEP_TOKENS * TOKEN_NBYTES}}
    with engine(model, HOST | FUSED | in_step, env) as process:
        yield process


@pytest.mark.parametrize("taken", ["fewer", "half", "none"])
def test_fewer_tokens_than_offered_are_loaded_from_the_start(
    reference: Reference, taking: EngineProcess, documents: list[list[int]], taken: str
) -> None:
    """In the step, and between steps if they are many."""
    assert min(map(len, documents)) < IN_STEP_TOKENS < max(map(len, documents)) - 64
    right = reference(documents)
    options = {"cache_salt": f"{taken} documents", "fusion": EXACT}
    assert_same_answers(answers(taking, documents, **options), right)
    settle_and_empty(taking)
    got = answers(taking, documents, **options)
    assert_same_answers(got, right)
    assert all((answer.reused_tokens > 0) == (taken != "none") for answer in got)
    if taken == "half":
        shares = [
            answer.reused_tokens / len(one) for answer, one in zip(got, documents, strict=True)
        ]
        assert max(shares) < 0.6, "more than half was taken"
    settle_and_empty(taking)
    assert_same_answers(answers(taking, documents, **options), right)


def test_a_blend_of_which_only_a_part_is_taken_is_computed(
    reference: Reference, taking: EngineProcess, model: Path, chunks: list[list[int]]
) -> None:
    """Its chunks cannot be cut. At ratio 0 its tokens would be others than the engine's."""
    asked = mixed(model, chunks, 3, seed=7)
    warm(taking, chunks, cache_salt="half chunks")
    got = answers(taking, asked, fusion=REUSE, cache_salt="half chunks")
    assert_same_answers(got, reference(asked))
    assert not any(answer.tiers.get("blend") for answer in got)


def test_kernel_pages_smaller_than_the_schedulers_and_than_blocks(
    reference: Reference,
    model: Path,
    documents: list[list[int]],
    chunks: list[list[int]],
    tmp_path: Path,
) -> None:
    """A block of 64 tokens lies in two of the kernel's pages of 32; the scheduler's have 128."""
    seen = tmp_path / "seen"
    settings = HOST | FUSED | {"block": {"tokens": 64}}
    asked = mixed(model, chunks, 3, seed=8)
    env = variant(tmp_path, "kernel", str(seen))
    with engine(model, settings, env, block_size=128) as process:
        assert_same_answers(answers(process, documents), reference(documents))
        settle_and_empty(process)
        got = answers(process, documents)
        assert_same_answers(got, reference(documents))
        assert sum(answer.reused_tokens for answer in got) > 1000
        warm(process, chunks)
        got = answers(process, asked, fusion=ALL)
        assert_same_answers(got, reference(asked))
        assert sum(answer.tiers.get("blend", 0) for answer in got) > 400
        log = process.log.read_text()
    assert "Connector attributed" not in log, "vLLM counts other sources than tokens"
    for line in seen.read_text().splitlines():
        page_tokens, *pages = json.loads(line)
        assert page_tokens == 32
        assert [page % 4 for page in pages[:8]] == [0, 1, 2, 3, 0, 1, 2, 3][: len(pages)]
