"""The conformance kit's driver of SGLang. The kit's whole column takes many engine starts:
`kvcore conformance --engine sglang`."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcore.harness.compare import ONE_THREAD
from kvcore.testing.conformance import CASES, Kit, find_driver, run

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]

QUICK = ("clear-forgets", "metrics-add-up", "as-the-request-asks")
"""A clear, a case in which nothing but SGLang's own numbers is right, and what requests ask of
kvcore where the tree decides what is kept."""
ELSEWHERE = ("disk-hit-after-restart", "a-blend-that-fails")
"""test_sglang.py has a restart, and `TestFaults` of test_sglang_faults.py has blends that fail, of
other engines than the kit's."""


@pytest.mark.parametrize("names", [QUICK, pytest.param(ELSEWHERE, marks=pytest.mark.exhaustive)])
def test_quick_cases(
    names: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = find_driver("sglang")
    # As of the other engines here, which are forks of one process. No case is about retraction.
    monkeypatch.setattr(driver, "environment", ONE_THREAD)
    with Kit(driver, tmp_path) as kit:
        results = run(kit, [one for one in CASES if one.name in names])
    assert {r.case: (r.outcome, r.why) for r in results} == dict.fromkeys(names, ("passed", ""))
