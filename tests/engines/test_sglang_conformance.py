"""The conformance kit's driver of SGLang. The kit's whole column takes many engine starts:
`kvcore conformance --engine sglang`."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcore.testing.conformance import CASES, Kit, find_driver, run

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]

QUICK = ("clear-forgets", "metrics-add-up", "disk-hit-after-restart", "a-blend-that-fails")
"""A clear, a case in which nothing but SGLang's own numbers is right, one of three engines in turn
that one process serves, and blends that fail."""


def test_quick_cases(tmp_path: Path) -> None:
    with Kit(find_driver("sglang"), tmp_path) as kit:
        results = run(kit, [one for one in CASES if one.name in QUICK])
    assert {r.case: (r.outcome, r.why) for r in results} == dict.fromkeys(QUICK, ("passed", ""))
