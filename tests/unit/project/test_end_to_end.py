"""The benchmark of the reference engine goes from end to end without a GPU, and sees mistakes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from benchmarks import end_to_end
from benchmarks.end_to_end import (
    BLEND,
    COLD,
    COLUMNS,
    DRY,
    EXACT,
    FULL,
    ON_HOST,
    OWN,
    Answer,
    Setting,
    checked,
    main,
    prompt_of,
    row_of,
    wrong_attention,
    wrong_tokens,
)
from kvcore.testing.engine.fusing import RankLayers
from kvcore.worker.executors import DeviceCopy

pytestmark = pytest.mark.slow  # each runs a model

CPU = torch.device("cpu")
GIB = 1 << 30


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(CPU, tmp_path, "auto", "auto")


def test_the_dry_run_measures_every_way_at_every_length(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--dry-run", "--rounds", "2", "--out", str(tmp_path)]) == 0
    assert "checked: 0 wrong" in capsys.readouterr().out
    report = json.loads((tmp_path / "end_to_end.json").read_text())
    rows = report["rows"]
    assert [(row["tokens"], row["way"]) for row in rows] == [
        (tokens, way) for tokens in DRY.tokens for way in (*EXACT, BLEND)
    ]
    assert all(row[column] is not None for row in rows for column in COLUMNS)
    assert all(row["as cold"] == row["rounds"] == 2 for row in rows if row["way"] in EXACT)
    assert all(row["to cold"] == 1 for row in rows if row["way"] == COLD)
    notes = report["notes"]
    assert notes["wrong"] == []
    assert {"copies", "blends", "attention", "gpu", "shape", "dtype"} <= notes.keys()
    assert (tmp_path / "end_to_end.png").exists()


def test_without_a_gpu_it_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main([]) == 2
    assert "--dry-run" in capsys.readouterr().err


@pytest.mark.parametrize("tokens", ["300", "288"])
def test_lengths_that_do_not_divide_are_refused(
    tokens: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--dry-run", "--tokens", tokens])
    assert f"--tokens [{tokens}]: give multiples of 16" in capsys.readouterr().err


# --- mistakes that it has to see --------------------------------------------------------------


def test_nothing_is_wrong_with_what_is_right(setting: Setting) -> None:
    assert checked(DRY, setting) == []


def test_kv_that_is_loaded_wrong(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    right = DeviceCopy._copy

    def broken(self: DeviceCopy, device: Any, *rest: Any) -> None:
        right(self, device, *rest)
        if self._to_device:
            device.tensors[0].zero_()

    monkeypatch.setattr(DeviceCopy, "_copy", broken)
    bad = "\n".join(checked(DRY, setting))
    assert "host hit answered" in bad
    assert "disk hit answered" in bad
    assert "miss" not in bad


def test_a_blend_that_computes_something_else(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = RankLayers.embed
    monkeypatch.setattr(RankLayers, "embed", lambda self, tokens: right(self, tokens).flip(0))
    [bad] = checked(DRY, setting)
    assert bad.startswith("blend at 100% answered")


def test_a_way_that_reuses_what_it_should_not(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(end_to_end.Contest, "_clear", lambda self: None)
    assert any(bad.startswith("miss of 321 tokens reused") for bad in checked(DRY, setting))


def test_attention_that_hides_the_wrong_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    def upper_left(queries: Any, kv: Any, attention: Any) -> Any:
        q, k, v = (heads.transpose(0, 1)[None] for heads in (queries, *kv))
        out = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=attention.scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)

    half = replace(DRY, dtype=torch.bfloat16)
    assert not list(wrong_attention(half, CPU))
    monkeypatch.setattr(end_to_end, "attend_last", upper_left)
    wrong = [what.split(" is off")[0] for what in wrong_attention(half, CPU)]
    assert wrong == ["attention of the last 63 of 500 rows", "attention of the last 1 of 500 rows"]


def test_a_hit_that_answers_otherwise_than_the_engines_own_cache() -> None:
    got = {OWN: Answer(1.0, (3,), {}), ON_HOST: Answer(1.0, (4,), {})}
    assert list(wrong_tokens(got, [OWN], OWN)) == []
    assert list(wrong_tokens(got, [ON_HOST], OWN)) == ["host hit answered (4,), own cache (3,)"]


# --- arithmetic -------------------------------------------------------------------------------


def test_ratios_are_taken_round_by_round() -> None:
    rounds = [
        {COLD: Answer(cold, (1,), {}), ON_HOST: Answer(hit, (token,), {"host": 320})}
        for cold, hit, token in ((1.0, 0.5, 1), (2.0, 0.2, 1), (4.0, 0.8, 2))
    ]
    assert row_of(320, ON_HOST, rounds) == {
        "tokens": 320, "way": ON_HOST, "ms": 500.0, "to cold": 0.2, "reused": 320, "as cold": 2,
        "rounds": 3,
    }  # fmt: skip


@pytest.mark.parametrize("scale", [DRY, FULL, FULL.checked])
def test_a_prompt_is_chunks_of_whole_blocks_and_a_question(scale: end_to_end.Scale) -> None:
    for tokens in scale.tokens:
        prompt, other = (prompt_of(scale, tokens, seed) for seed in range(2))
        assert len(prompt.tokens) == tokens + 1
        held = [token for chunk in prompt.chunks for token in chunk]
        assert prompt.tokens[16 : 16 + len(held)] == held
        assert tokens - 16 - len(held) >= 32
        assert {len(chunk) % 16 for chunk in prompt.chunks} == {0}
        assert prompt.tokens[:16] != other.tokens[:16]


def test_the_full_scale_fits_an_h200() -> None:
    """139 GiB on the device, 128 GiB of host memory, 64 GiB of disk, each with room to spare."""
    needs = FULL.needs
    assert 32 * GIB < needs["device"] < 100 * GIB
    assert needs["host"] < 64 * GIB
    assert needs["disk"] < 32 * GIB
    assert FULL.kv_nbytes == (32768 + 32) * 128 * 1024
