"""vLLM's oldest and newest version in each of its configurations, with some of the kit's cases.

`kvcore conformance --engine vllm:0.33-v2 --python ...` runs every case. Of the product of versions,
configurations and groups of cases, `make test` runs a covering set: each version in each
configuration, and each group on each version and in each configuration, but preemption on Model
Runner V2, the newest version with synchronous scheduling, which the oldest has, and blends that
fail on the oldest. All other tests of vLLM run 0.32 with asynchronous scheduling, and
test_vllm_faults.py runs it in the other two configurations. `make test-all` runs the rest of the
product, also on 0.31.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcore.testing.conformance import CASES, Kit, find_driver, run
from support.environments import python_of
from support.pairs import covering

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

GROUPS = {
    "host": ("miss", "host-hit", "clear-forgets"),
    "abort": ("abort-while-loading",),
    "preemption": ("preemption",),
    "restart": ("disk-hit-after-restart",),
    "failed-read": ("a-read-that-fails",),
    "blend": ("everything-recomputed",),
    "failed-blend": ("a-blend-that-fails",),
}
"""Cases that differ between versions, by the engines that they start."""
VERSIONS = ("0.30", "0.31", "0.32", "0.33")
RUNS = ("sync", "async", "v2")
ROOT = Path(__file__).parents[2]


def interpreter(version: str) -> Path | None:
    """The Python of the environment of a version; none for the one that runs the tests."""
    return None if version == "0.32" else python_of(f"vllm-{version}")


ELSEWHERE = [
    *itertools.product(["0.32"], ["async"], GROUPS),
    *itertools.product(["0.32"], RUNS, ["host", "abort", "failed-read", "blend"]),
    ("0.32", "v2", "failed-blend"),  # a fault in test_vllm_faults.py
]
"""What the other tests of vLLM run."""
SLOW = 3.0
"""Cost of a group in Triton's interpreter, as a multiple of its cost on Model Runner V1."""
SLOWEST = ("v2", "preemption")
NIGHTLY = {("0.33", "sync"), ("0.30", "v2")}
NEWEST_ONLY = ("0.30", "failed-blend")
CHOSEN = covering(
    (
        row
        for row in itertools.product(("0.30", "0.33"), RUNS, GROUPS)
        # Nothing is as slow as preemption on Model Runner V2, which recomputes whole conversations.
        if row[1:] != SLOWEST and row[:2] not in NIGHTLY and row[::2] != NEWEST_ONLY
    ),
    given=ELSEWHERE,
    cost=lambda row: SLOW if row[1] == "v2" else 1.0,
)


def variants() -> Iterator[Any]:
    """Yield a version, a configuration and its groups: those of `make test`, then the rest."""
    for version, runs in itertools.product(VERSIONS, RUNS):
        if (version, runs) == ("0.32", "async"):  # all other tests of vLLM run that
            continue
        chosen = [group for group in GROUPS if (version, runs, group) in CHOSEN]
        left = [group for group in GROUPS if group not in chosen]
        if chosen:
            yield pytest.param(version, runs, chosen, id=f"{version}-{runs}")
        label = f"{version}-{runs}-{'rest' if chosen else 'all'}"
        yield pytest.param(version, runs, left, id=label, marks=pytest.mark.exhaustive)


@pytest.mark.parametrize(("version", "runs", "groups"), list(variants()))
def test_cases_that_differ(version: str, runs: str, groups: list[str], tmp_path: Path) -> None:
    python = interpreter(version)
    cases = [name for group in groups for name in GROUPS[group]]
    driver = find_driver(f"vllm:{version}-{runs}".removesuffix("-async"), python)
    with Kit(driver, tmp_path) as kit:
        results = run(kit, [one for one in CASES if one.name in cases])
    for result in results:
        print(f"{driver.name} {result.case}: {result.outcome} in {result.seconds} s {result.why}")
    assert {r.case: (r.outcome, r.why) for r in results} == dict.fromkeys(cases, ("passed", ""))


PROGRAM = """
import sys, time
import kvcore, vllm

if __name__ == "__main__":
    print("versions", vllm.__version__, kvcore.__file__)
    transfer = {"kv_connector": "KVCoreConnector", "kv_role": "kv_both"}
    llm = vllm.LLM(
        sys.argv[1], skip_tokenizer_init=True, enforce_eager=True, max_model_len=512,
        dtype="float32", kv_transfer_config=transfer, kv_cache_memory_bytes=64 << 20,
    )
    report = {"kv_transfer_params": {"kvcore": {"report": True}}}
    greedy = vllm.SamplingParams(temperature=0, max_tokens=4, detokenize=False, extra_args=report)
    for _ in range(2):
        [got] = llm.generate([{"prompt_token_ids": list(range(1, 300))}], greedy, use_tqdm=False)
        print("answer", got.outputs[0].token_ids, got.kv_transfer_params["kvcore"]["tiers"])
        time.sleep(1)  # saves end in the background
        llm.reset_prefix_cache()
"""


@pytest.mark.exhaustive
def test_the_built_wheel_serves_beside_the_newest_vllm(model: Path, tmp_path: Path) -> None:
    """kvcore as pip installs it, and nothing of this checkout."""
    python = interpreter(VERSIONS[-1])
    assert python is not None
    source, site, program = (tmp_path / name for name in ("source", "site", "program.py"))
    left_out = shutil.ignore_patterns(".*", "results", "__pycache__", "*.so", "site")
    shutil.copytree(ROOT, source, ignore=left_out)
    pip = [sys.executable, "-m", "pip", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", tmp_path, source], check=True, timeout=300)
    [wheel] = tmp_path.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", site, wheel], check=True, timeout=300)
    program.write_text(PROGRAM)
    env = {**os.environ, "PYTHONPATH": str(site), "HF_HUB_OFFLINE": "1"}
    env |= {"KVCORE__HOST__CAPACITY": "64MiB", "KVCORE__VLLM__MIN_LOAD_TOKENS": "1"}
    ran = subprocess.run(
        [python, program, model], env=env, cwd=tmp_path, text=True, capture_output=True, timeout=800
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    [[version, file]] = re.findall(r"^versions (\S+) (\S+)$", ran.stdout, re.MULTILINE)
    assert version.startswith(VERSIONS[-1])
    assert site in Path(file).parents
    [cold, hit] = re.findall(r"^answer (\S.*\]) (\{.*\})$", ran.stdout, re.MULTILINE)
    assert cold[0] == hit[0]
    assert (cold[1], hit[1][:8]) == ("{}", "{'host':")
