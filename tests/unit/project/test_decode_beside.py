"""The benchmark of decoding beside transfers runs without a GPU, and sees mistakes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import decode_beside
from benchmarks.decode_beside import ALONE, BARS, DRY, LOAD, SAVE, DecodeStep, main, rows_of, run
from kvcore.testing.engine import random_llama


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """More would wait for each other wherever cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


SMALL = DRY._replace(blocks=64, steps=2)
CPU = torch.device("cpu")


def test_saves_and_loads_run_and_nothing_is_changed(tmp_path: Path) -> None:
    assert run(SMALL, CPU, "auto", tmp_path) == 0
    report = json.loads((tmp_path / "decode_beside.json").read_text())
    assert report["notes"]["wrong"] == []
    assert all(report["notes"]["transfers"][what] > 0 for what in (SAVE, LOAD))
    assert report["rows"][0]["beside"] == ALONE


def test_a_load_that_brings_other_bytes_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Astray(decode_beside.Transfers):
        def end(self) -> None:
            super().end()
            self._part.view().tensors[0][int(self._away[0])] += 1

    monkeypatch.setattr(decode_beside, "Transfers", Astray)
    assert run(SMALL, CPU, "auto", tmp_path) == 1


def test_a_step_writes_the_last_token_and_gives_logits() -> None:
    model = random_llama(**DRY.shape)
    with torch.no_grad():
        step = DecodeStep(model, DRY)
        before = [keys.clone() for keys, _ in step._kv]
        assert step() > 0
        assert step._compute().shape == (DRY.batch, DRY.shape["vocabulary"])
    for old, (keys, _) in zip(before, step._kv, strict=True):
        assert torch.equal(old[:, :, :-1], keys[:, :, :-1])
        assert not torch.equal(old[:, :, -1], keys[:, :, -1])


def test_ratios_are_of_medians() -> None:
    taken: dict[str, list[float]] = {ALONE: [2.0, 1.0, 9.0], SAVE: [3.0], LOAD: []}
    alone, save = rows_of(taken)
    assert (alone["p50 to alone"], alone["bar"]) == (1.0, None)
    assert (save["p50 to alone"], save["bar"]) == (1.5, BARS[SAVE])


def test_without_a_gpu_it_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main([]) == 2
    assert "--dry-run" in capsys.readouterr().err
