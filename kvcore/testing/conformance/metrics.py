"""Reading kvcore's metrics where they are kept, and where an engine shows them as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry

from kvcore.telemetry.metrics import Metrics

__all__ = ["total", "total_of_samples"]


def total(kept: Iterable[Metrics], name: str, labels: Mapping[str, str]) -> float:
    """Sum of the samples of ``name`` whose labels are these, over several collections."""
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
    """The same of samples by name with labels, ``name{a="b"}``."""
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(
        value
        for sample, value in samples.items()
        if sample.split("{")[0] == name and all(label in sample for label in wanted)
    )
