"""The conformance kit on TensorRT-LLM's connector in its harness, KV exchanged with the reference
engine. vLLM's run takes many engine starts: `kvcore conformance --engine vllm`.

`make test` leaves out cases that other tests of this adapter have, and cases of what lies below an
adapter, which the reference engine has (tests/unit/testing/test_conformance.py)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

pytest.importorskip("transformers")

from kvcore.testing.conformance import CASES, Case, Driver, Kit, find_driver  # after the skip
from kvcore.testing.conformance.suite import ConformanceSuite

pytestmark = pytest.mark.slow  # a model runs in the harness

ELSEWHERE = {
    # test_connector.py
    "miss", "host-hit", "small-blocks", "large-blocks", "shared-prefixes", "many-at-once",
    "eviction-under-pressure", "large-loads", "two-ranks", "disk-hit-after-restart",
    "corrupt-block", "a-load-that-hangs",
    # test_fusion.py; and a row that sees the future is no longer as the oracle has it
    "everything-recomputed", "a-blend-that-fails", "no-row-sees-the-future",
    # test_identity.py
    "another-model-is-apart", "another-revision-is-apart", "another-rope-is-apart",
    "another-dtype-is-apart",
    # the reference engine: what tiers and budgets do
    "vanished-block", "a-tier-that-is-down", "budgets-held",
}  # fmt: skip
"""What `make test` leaves out here, by the tests that have it."""


@pytest.mark.engine
class TestHarness(ConformanceSuite):
    """Every case, some of them nightly."""

    def make_driver(self) -> Driver:
        return find_driver("trtllm")

    def make_partners(self) -> Sequence[Driver]:
        return [find_driver("reference")]

    @pytest.mark.parametrize(
        "one",
        [
            pytest.param(
                one,
                id=f"{one.section}-{one.name}",
                marks=pytest.mark.exhaustive if one.name in ELSEWHERE else [],
            )
            for one in CASES
        ],
    )
    def test_case(self, kit: Kit, one: Case) -> None:
        super().test_case(kit, one)


def test_what_is_left_out_is_there() -> None:
    assert {one.name for one in CASES} >= ELSEWHERE
