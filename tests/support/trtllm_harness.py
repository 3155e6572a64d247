"""Helpers for tests of the connector with harnesses that contain kvcore."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("transformers")

from kvcore.harness.models import SMALL_VOCABULARY
from kvcore.harness.prompts import words
from kvcore_trtllm.testing import Harness

ANSWER = 6
BLOCK = 16
Make = Callable[..., Harness]


def tokens(seed: int, count: int) -> list[int]:
    return words(seed, count, range(1, SMALL_VOCABULARY))


def leader(harness: Harness) -> Any:
    return harness.scheduler._leader


def settle(harness: Harness) -> None:
    """Iterate until every save is published, then empty the engine's own cache."""
    limit = time.monotonic() + 120
    harness.run()
    while leader(harness).manager.in_flight:
        # A step with work carries graphs to the workers, a poll brings reports.
        harness.generate([tokens(999, 3)], max_tokens=2)
        assert time.monotonic() < limit, "saves do not end"
    harness.forget()


def loaded(harness: Harness) -> int:
    """Return the number of tokens promised to the engine so far."""
    tiers = leader(harness).metrics.snapshot().get("kvcore_lookup_tokens_total", {})
    return int(sum(count for labels, count in tiers.items() if labels.startswith("hit")))
