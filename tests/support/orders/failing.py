"""Copies to the device whose first attempt fails."""

from __future__ import annotations

import random
import time

import pytest

from kvcore.errors import TransferError
from kvcore.transfer.graph import Path, TransferGraph, TransferOp
from kvcore.worker.executors import DeviceCopy
from kvcore.worker.streams import IssuedCopies

__all__ = ["fail_first_attempts"]


def fail_first_attempts(
    monkeypatch: pytest.MonkeyPatch, seed: int = 0, *, share: float = 1 / 3, after_s: float = 0.0
) -> None:
    """Let the first op of a ``share`` of the loads fail once, before it has used a stream.

    Later ops do not fail: the second attempt would copy again what the forward reads by then. The
    bytes are the same, but it is a race all the same. It fails after ``after_s`` seconds, in which
    other threads may have copied the rest.
    """
    run, chance = DeviceCopy.run, random.Random(seed)
    failed: set[tuple[int, int]] = set()

    def failing(
        copy: DeviceCopy, graph: TransferGraph, op: TransferOp, rows: list[int]
    ) -> dict | IssuedCopies:  # type: ignore[type-arg]
        attempt = id(copy), graph.graph_id
        first = op.path is Path.H2D and op.op_id == 0 and attempt not in failed
        if first and chance.random() < share:
            failed.add(attempt)
            time.sleep(after_s)
            raise TransferError("this copy fails once")
        return run(copy, graph, op, rows)

    monkeypatch.setattr(DeviceCopy, "run", failing)
