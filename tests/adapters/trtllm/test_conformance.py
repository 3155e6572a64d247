"""The conformance kit on TensorRT-LLM's connector in its harness, KV exchanged with the reference
engine. vLLM's run takes many engine starts: `kvcore conformance --engine vllm`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

pytest.importorskip("transformers")

from kvcore.testing.conformance import Driver, find_driver  # after the skip
from kvcore.testing.conformance.suite import ConformanceSuite

pytestmark = pytest.mark.slow  # a model runs in the harness


@pytest.mark.engine
class TestHarness(ConformanceSuite):
    """Every case."""

    def make_driver(self) -> Driver:
        return find_driver("trtllm")

    def make_partners(self) -> Sequence[Driver]:
        return [find_driver("reference")]
