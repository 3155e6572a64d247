"""vLLM's oldest and newest version in each of its configurations, with some of the kit's cases.

`kvcore conformance --engine vllm:0.33-v2 --python ...` runs every case."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcore.testing.conformance import CASES, Kit, find_driver, run

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

MATTERS = (
    "miss",
    "host-hit",
    "abort-while-loading",
    "preemption",
    "disk-hit-after-restart",
    "clear-forgets",
    "everything-recomputed",
    "a-read-that-fails",
    "a-blend-that-fails",
)
VERSIONS = ("0.30", "0.32", "0.33")
ENVIRONMENTS = Path(__file__).parents[2] / ".venvs"


def interpreter(version: str) -> Path | None:
    """The Python of the environment of a version; none for the one that runs the tests."""
    return None if version == "0.32" else ENVIRONMENTS / f"vllm-{version}" / "bin" / "python"


@pytest.mark.parametrize("runs", ["sync", "", "v2"])
@pytest.mark.parametrize("version", VERSIONS)
def test_cases_that_differ(version: str, runs: str, tmp_path: Path) -> None:
    python = interpreter(version)
    if python is not None and not python.exists():
        pytest.skip(f"there is no {python}: make env-compat makes it")
    driver = find_driver("vllm:" + "-".join(filter(None, [version, runs])), python)
    with Kit(driver, tmp_path) as kit:
        results = run(kit, [one for one in CASES if one.name in MATTERS])
    for result in results:
        print(f"{driver.name} {result.case}: {result.outcome} in {result.seconds} s {result.why}")
    assert {r.case: (r.outcome, r.why) for r in results} == dict.fromkeys(MATTERS, ("passed", ""))
