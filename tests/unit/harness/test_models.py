"""Folders of models are whole or absent. (That the models answer is the engine tests' matter.)"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvcore.errors import UnsupportedError
from kvcore.harness import models


def write(folder: Path, text: str = "weights") -> None:
    (folder / "model.safetensors").write_text(text)


def visible(folder: Path) -> list[str]:
    """What lies in `folder`, locks excepted."""
    return [entry.name for entry in folder.iterdir() if not entry.name.endswith(".lock")]


def test_a_folder_is_made_once(tmp_path: Path) -> None:
    calls: list[Path] = []

    def make(folder: Path) -> None:
        calls.append(folder)
        write(folder)

    target = tmp_path / "cache" / "model"
    for _ in range(3):
        assert models.made_once(target, make) == target
    assert len(calls) == 1
    assert (target / "model.safetensors").read_text() == "weights"
    assert visible(target.parent) == ["model"]


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    def make(folder: Path) -> None:
        write(folder)
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        models.made_once(tmp_path / "model", make)
    assert visible(tmp_path) == []


@pytest.mark.parametrize("harm", ["truncate", "remove", "manifest", "no manifest"])
def test_a_damaged_folder_is_made_again(tmp_path: Path, harm: str) -> None:
    target = tmp_path / "model"
    models.made_once(target, write)
    weights, manifest = target / "model.safetensors", target / models.MANIFEST
    if harm == "truncate":
        weights.write_text("wei")
    elif harm == "remove":
        weights.unlink()
    elif harm == "manifest":
        manifest.write_text('{"files": {')
    else:
        manifest.unlink()
    models.made_once(target, lambda folder: write(folder, "new weights"))
    assert weights.read_text() == "new weights"
    assert visible(tmp_path) == ["model"]


def test_many_at_once_agree(tmp_path: Path) -> None:
    target = tmp_path / "model"
    calls: list[Path] = []

    def make(folder: Path) -> None:
        calls.append(folder)
        time.sleep(0.02)
        write(folder)

    with ThreadPoolExecutor(8) as threads:
        futures = [threads.submit(models.made_once, target, make) for _ in range(32)]
    assert {future.result() for future in futures} == {target}
    assert len(calls) == 1, "the others wait instead of making it too"
    assert models._is_whole(target)
    assert visible(tmp_path) == ["model"]


def test_other_shapes_have_other_names() -> None:
    def digest(**changed: int) -> str:
        shape = {
            "layers": 2,
            "heads": 4,
            "kv_heads": 2,
            "head_dim": 32,
            "max_positions": 8192,
            "sliding_window": 0,
            "seed": 0,
        }
        return models.Shape("llama", **{**shape, **changed}).digest

    assert digest() == digest()
    others = [digest(seed=1), digest(layers=3), digest(kv_heads=4), digest(vocabulary=512)]
    assert len({digest(), *others}) == 5


def test_an_unknown_architecture_is_named_with_the_known() -> None:
    with pytest.raises(UnsupportedError, match="'gpt9': choose one of llama"):
        models.tiny_model("gpt9")
