"""The conformance kit's driver of SGLang. The kit's whole column takes many engine starts:
`kvcore conformance --engine sglang`."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcore.testing.conformance import CASES, Ask, Kit, find_driver, run

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]

QUICK = ("metrics-add-up", "disk-hit-after-restart")
"""A case in which nothing but SGLang's own numbers is right, and one of three engines in turn that
one process serves."""


def test_cases_and_a_clear_that_forgets(tmp_path: Path) -> None:
    with Kit(find_driver("sglang"), tmp_path) as kit:
        with kit.engine() as engine:
            ask = Ask(kit.tokens(9000, 150))
            kit.stored(engine, [ask])
            [found] = engine.ask([ask])
            assert found.reused == {"host": kit.reusable(ask)}
            engine.clear()
            [computed] = engine.ask([ask])
            kit.assert_same([found, computed], [ask, ask])
            assert not computed.reused, "what was cleared was found"
        results = run(kit, [one for one in CASES if one.name in QUICK])
    assert {r.case: (r.outcome, r.why) for r in results} == dict.fromkeys(QUICK, ("passed", ""))
