"""The measurement of what pinning costs others, on a device that takes a given time to pin."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import link_options
from benchmarks.copies import IdleDevice
from benchmarks.link_options import Seen, pinning
from kvcore.memory import pinned

CHUNK, NBYTES, CHUNK_S = 2 << 20, 8 << 20, 0.25


class Clock:
    """A clock that stands still but for sleep and work."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


class Pinning(IdleDevice):
    """Registers memory in `CHUNK_S`, and counts what is registered."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(torch.device("meta"))
        self.clock, self.held = clock, 0

    def register(self, address: int, nbytes: int) -> None:
        self.clock.now += CHUNK_S
        self.held += 1

    def unregister(self, address: int) -> None:
        self.held -= 1


def test_pauses_are_as_long_as_the_chunk_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, rows = Clock(), list[dict[str, Any]]()
    monkeypatch.setattr(link_options, "time", clock)
    monkeypatch.setattr(link_options, "CHUNKS", (NBYTES, CHUNK))
    default = pinned.CHUNK_NBYTES
    device = Pinning(clock)
    watching = SimpleNamespace(stop=lambda: Seen(0.004, 12))
    report: Any = SimpleNamespace(add=lambda **row: rows.append(row))
    pinning(report, NBYTES, device, lambda: watching)
    chunks = NBYTES // CHUNK
    for row in rows:
        pauses = "with pauses" in row["what"]
        count = chunks if f"chunks of {CHUNK >> 20} MiB" in row["what"] else 1
        assert row["seconds"] == pytest.approx(CHUNK_S * (count + pauses * (count - 1)))
        assert row["longest wait ms"] == pytest.approx(4)
        assert row["launches/s"] == pytest.approx(12 / row["seconds"])
    assert len({row["what"] for row in rows}) == len(rows)
    assert sum("with pauses" in row["what"] for row in rows) == 2
    assert clock.slept == [CHUNK_S] * (chunks - 1) * 2
    assert device.held == 0
    assert default == pinned.CHUNK_NBYTES
