"""The examples on vLLM, run as their first lines say. test_vllm_readme.py runs vllm_offline.py."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvcore.harness.models import smollm2

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.exhaustive]

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, folder: Path, *arguments: str) -> str:
    """What the example prints."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), str(smollm2()), *arguments],
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_rag_with_fusion(tmp_path: Path) -> None:
    printed = run("rag_fusion.py", tmp_path)
    blended = re.search(r"blended: .* s, (\d+) of (\d+) tokens blended, ' salt", printed)
    exact = re.search(r"exact: .* s, 0 of \d+ tokens blended, ' salt", printed)
    assert blended, printed
    assert exact, printed
    assert int(blended[1]) > int(blended[2]) / 2


def test_two_engines_on_one_store(tmp_path: Path) -> None:
    store = (tmp_path / "store").as_uri()
    printed = [run("two_engines_one_store.py", tmp_path, store) for _ in range(2)]
    line = re.compile(r"^reused by tier: ({.*}), (.*)$", re.MULTILINE)
    (first, answer), (second, again) = [line.findall(text)[0] for text in printed]
    assert first == "{}"
    assert second.startswith("{'shared': ")
    assert answer == again
