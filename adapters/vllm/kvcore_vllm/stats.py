"""kvcore's counters inside vLLM's connector metrics: its log line and its Prometheus endpoint."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvcore.telemetry.metrics import PrometheusSink, merge, summary


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
        self._sink = PrometheusSink(self._labelnames, classes=classes)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add a delta to the samples of one engine."""
        labels = [str(value) for value in self.per_engine_labelvalues[engine_idx]]
        self._sink.apply(transfer_stats_data, labels)
