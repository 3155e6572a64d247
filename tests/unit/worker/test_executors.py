"""What the executors of tier operations log and wait for."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from kvcore._util.log_limit import LogLimit
from kvcore.errors import BlockMissing, CorruptBlock, Mismatch, TierError, TierUnavailable
from kvcore.telemetry.metrics import Metrics
from kvcore.tiers.base import DeviceRead
from kvcore.transfer.graph import Path, RowError, Span, TransferOp
from kvcore.worker.executors import Failures, StagedRead


def op(path: Path) -> TransferOp:
    return TransferOp(op_id=0, path=path, rows=Span(0, 50), tier="disk")


def test_a_full_disk_is_logged_once_and_then_once_a_minute_with_a_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [0.0]
    failures = Failures(limit=LogLimit(60.0, clock=lambda: now[0]))
    rows = list(range(50))
    full: list[TierError | None] = [
        TierUnavailable(f"slot {row}: the disk is full") for row in rows
    ]
    with caplog.at_level(logging.WARNING, logger="kvcore.worker"):
        failed = failures.of(op(Path.H2DISK), rows, full)
        failures.of(op(Path.H2DISK), rows, full)
        assert caplog.messages == ["h2disk tier=disk failed: slot 0: the disk is full"]
        now[0] = 60.0
        failures.of(op(Path.H2DISK), rows, full)
    assert failed == dict.fromkeys(rows, RowError.IO)
    assert caplog.messages[1:] == [
        "h2disk tier=disk failed: slot 0: the disk is full (99 more failed since the last line)"
    ]


def test_blocks_that_are_gone_with_a_node_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever their lines say: its silence first, and then that no node has them."""
    rows, failures = list(range(50)), Failures()
    gone: list[TierError | None] = [BlockMissing(f"no node holds {row}") for row in rows]
    gone[0] = BlockMissing("the node does not answer")
    gone[7] = CorruptBlock("slot 7")
    with caplog.at_level(logging.WARNING, logger="kvcore.worker"):
        failed = failures.of(op(Path.REMOTE2H), rows, gone)
        failures.of(op(Path.REMOTE2H), [0], [TierUnavailable("every lane is in use")])
    assert failed == {**dict.fromkeys(rows, RowError.MISSING), 7: RowError.CORRUPT}
    assert [message.partition(": ")[2] for message in caplog.messages] == [
        "the node does not answer",
        "slot 7",
        "every lane is in use",
    ]


def test_refused_blocks_are_counted_by_reason_and_each_reason_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whoever can write to a store could otherwise fill the log."""
    metrics = Metrics()
    bad: list[TierError | None] = [CorruptBlock("slot 3"), None, CorruptBlock("slot 5")]
    bad += [CorruptBlock(f"slot {slot}", Mismatch.FORGED) for slot in (7, 8)]
    with caplog.at_level(logging.WARNING, logger="kvcore.worker"):
        failed = Failures(metrics).of(op(Path.DISK2H), range(5), bad)
    assert failed == dict.fromkeys((0, 2, 3, 4), RowError.CORRUPT)
    assert [message.partition(": ")[2] for message in caplog.messages] == ["slot 3", "slot 7"]
    counted = metrics.snapshot()["kvcore_refused_blocks_total"]
    assert counted == {"disk|corrupt": 2, "disk|forged": 2}


def test_a_read_into_staging_has_ended_when_the_device_has_it() -> None:
    """What depends on it is issued to another stream."""
    log: list[str] = []

    class Sync:
        @contextmanager
        def copying(self, *graph_ids: int) -> Iterator[SimpleNamespace]:
            yield SimpleNamespace(wait=lambda: log.append("waited"))
            log.append("issued")

    def read(name: str, tier: object, requests: Sequence[DeviceRead]) -> list[None]:
        log.append("read")
        return [None] * len(requests)

    graph = SimpleNamespace(
        tier_slots=[7], keys=[bytes(16)], staged=[0], parent_of=lambda row: bytes(16), namespace=b""
    )
    reads = SimpleNamespace(read=read)
    executor = StagedRead({}, reads, Sync(), Metrics(enabled=False))  # type: ignore[arg-type]
    assert executor.run(graph, op(Path.DISK2D), [0]) == {}  # type: ignore[arg-type]
    assert log == ["read", "issued", "waited"]
