"""kvcore's counters inside vLLM's connector metrics: its log line and its Prometheus endpoint."""

from __future__ import annotations

import logging
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvcore._util.log_limit import LogLimit
from kvcore.connector.guard import Neutral, attempt, covered
from kvcore.telemetry.metrics import PrometheusSink, merge, summary

_log = logging.getLogger("kvcore.vllm.stats")
_limit = LogLimit()


def _lost(name: str, error: Exception) -> None:
    if _limit.admit((name, type(error))) is not None:
        _log.error("an error in the metrics' %s: counts are lost", name, exc_info=error)


@covered(
    {
        "reset": Neutral(lambda: None),
        "aggregate": Neutral(lambda: None),
        "reduce": Neutral(dict),
        "is_empty": Neutral(lambda: True),
    }
)
class KVCoreStats(KVConnectorStats):
    """A delta of ``kvcore.telemetry.metrics.Metrics`` in vLLM's container, to pickle and add up."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data=data if data is not None else {})

    def reset(self) -> None:
        """Drop the delta."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another delta to this one, and return it."""
        merge(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the numbers for vLLM's log line."""
        return summary(self.data)

    def is_empty(self) -> bool:
        """Return True if nothing was counted."""
        return not self.data

    def _failed(
        self, name: str, error: Exception, args: tuple[Any, ...]
    ) -> KVConnectorStats | None:
        """Log it: these counts are lost. `aggregate` goes on with its own."""
        _lost(name, error)
        return self if name == "aggregate" else None


@covered({"observe": Neutral(lambda: None)})
class KVCorePromMetrics(KVConnectorPromMetrics):
    """kvcore's metrics on vLLM's ``/metrics``, labelled by model and engine like vLLM's own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        from prometheus_client import Counter, Gauge, Histogram

        classes = {
            Counter: self._counter_cls,
            Gauge: self._gauge_cls,
            Histogram: self._histogram_cls,
        }
        self._sink = attempt(
            "making kvcore's metrics: vLLM serves without them",
            lambda: PrometheusSink(self._labelnames, classes=classes),
            None,
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add a delta to the samples of one engine."""
        if self._sink is not None:
            labels = [str(value) for value in self.per_engine_labelvalues[engine_idx]]
            self._sink.apply(transfer_stats_data, labels)

    def _failed(self, name: str, error: Exception, args: tuple[Any, ...]) -> None:
        _lost(name, error)
