"""The benchmark of the kernels goes from end to end without a GPU, and sees what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BROKEN = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import kvcore_kernels.choose.launch as choose
right = choose.keep_top
choose.keep_top = lambda rows, scores, count: right(rows, -scores, count)
from benchmarks.kernels import main
raise SystemExit(main())
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, env=env, cwd=ROOT
    )


@pytest.mark.exhaustive  # the next test goes through it too; kernels have tests of their own
def test_the_dry_run_goes_through_every_op(tmp_path: Path) -> None:
    done = run("-m", "benchmarks.kernels", "--dry-run", "--gib", "1e-6", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "kernels.json").read_text())
    ops = {row["op"].split(",")[0] for row in report["rows"] if row["way"] == "triton"}
    assert ops == {
        "gather", "scatter", "to the host", "from the host", "shift", "pack e4m3",
        "unpack e4m3", "pack int8", "unpack int8", "merge", "deviation", "choose", "attend",
    }  # fmt: skip
    looks = {row["way"] for row in report["rows"] if row["op"] == "look"}
    assert looks == {"torch", "attention alone"}
    ways = {row["way"] for row in report["rows"]}
    assert {"torch", "a copy a piece", "batched copies", "masked SDPA"} <= ways
    assert all(row["agrees"] for row in report["rows"])
    assert report["notes"]["dry_run"]
    assert report["notes"]["wrong"] == []


def test_a_wrong_kernel_is_named(tmp_path: Path) -> None:
    done = run("-c", BROKEN, "--dry-run", "--gib", "0", "--out", str(tmp_path))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "choose, 3 rows: triton" in done.stdout


def test_without_a_gpu_it_says_what_to_do() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = run("-m", "benchmarks.kernels")
    assert done.returncode == 2
    assert "--dry-run" in done.stderr
