"""Sums of kvcore's metrics, from this process or from an engine's text samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry

from kvcore.telemetry.metrics import Metrics

__all__ = ["total", "total_of_samples"]


def total(kept: Iterable[Metrics], name: str, labels: Mapping[str, str]) -> float:
    """Return the sum of the samples of ``name`` that have ``labels``, over several `Metrics`."""
    found = 0.0
    for metrics in kept:
        registry = CollectorRegistry()
        metrics.register(registry)
        found += sum(
            sample.value
            for family in registry.collect()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )
    return found


def total_of_samples(samples: Mapping[str, float], name: str, labels: Mapping[str, str]) -> float:
    """Return the same sum over samples whose keys are names with labels, ``name{a="b"}``."""
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(
        value
        for sample, value in samples.items()
        if sample.split("{")[0] == name and all(label in sample for label in wanted)
    )
