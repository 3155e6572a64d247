"""A clear takes what it names, and nothing that was stored after it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvcore.config import load_config
from kvcore.errors import TierError, TierUnavailable
from kvcore.testing.engine import EngineArgs, ReferenceEngine, random_llama
from kvcore.tiers.base import BlockWrite
from kvcore.tiers.disk import DiskTier
from kvcore_devtools.server_fixture import serve, words

LONG = words(7, 20 * 16 + 4)  # its blocks are written by two ops


def engine_over(path: Path) -> ReferenceEngine:
    settings = {"disk": {"path": str(path), "capacity": "64MiB"}, "host": {"capacity": "1MiB"}}
    return ReferenceEngine(
        random_llama(), EngineArgs(prefix_cache=False), load_config(None, settings)
    )


def test_a_failed_write_after_a_clear_voids_nothing_that_was_stored_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any write may fail, days after the clear. A restart then erased the whole disk tier."""
    engine = engine_over(tmp_path)
    serve(engine, words(1, 100))
    engine.settle()
    engine.leader.manager.clear()
    _, kept = words(1, 100), words(2, 100)
    serve(engine, kept)
    engine.settle()
    right, calls = DiskTier.write, []

    def once(tier: DiskTier, requests: Sequence[BlockWrite]) -> list[TierError | None]:
        calls.append(len(requests))
        if len(calls) == 1:
            return [TierUnavailable("the disk hiccups")] * len(requests)
        return right(tier, requests)

    with monkeypatch.context() as patch:
        patch.setattr(DiskTier, "write", once)
        serve(engine, LONG)
        engine.settle()
    assert len(calls) > 1, "the second write stands on the one that failed"
    engine.close()

    engine = engine_over(tmp_path)
    found: Any = serve(engine, kept)[1]
    assert found == {"disk": 96}, "it was stored after the clear"
    assert serve(engine, words(1, 100))[1] == {}, "it was cleared"
    engine.settle()
    engine.close()
