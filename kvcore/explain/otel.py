"""Records of requests as OpenTelemetry spans, in the trace of the engine's request.

    kvcore             from lookup to end: matches, causes of misses, the plan
    └─ kvcore.<step>   lookup, load, prefill, rest

Spans go to the tracer provider of the process. Without a provider they are discarded. Needs the
package opentelemetry-api, which is imported only when a `Spans` is made.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from kvcore.errors import UnsupportedError
from kvcore.explain.request_log import RequestRecord

__all__ = ["Spans"]


class Spans:
    """Makes the spans of a complete record. As thread-safe as its provider."""

    def __init__(self, provider: Any = None) -> None:
        """Get a tracer from ``provider``, by default the provider of the process.

        Raises UnsupportedError without the package opentelemetry-api.
        """
        try:
            from opentelemetry import trace
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise UnsupportedError(
                f"{error}: explain.spans needs `pip install opentelemetry-api`"
            ) from error
        self._trace = trace
        self._tracer = trace.get_tracer("kvcore", tracer_provider=provider)
        self._extract = TraceContextTextMapPropagator().extract

    def emit(self, record: RequestRecord, headers: Mapping[str, str] | None = None) -> None:
        """Emit the spans of a request that ends now; ``headers`` are its W3C trace context."""
        now, total = time.time_ns(), sum(record.steps.values())
        start = now - int(1e9 * total)
        parent = self._extract(dict(headers or {}))
        span = self._tracer.start_span(
            "kvcore", context=parent, start_time=start, attributes=_attributes(record)
        )
        below = self._trace.set_span_in_context(span, parent)
        at = start
        for name, seconds in record.steps.items():
            step = self._tracer.start_span(f"kvcore.{name}", context=below, start_time=at)
            at += int(1e9 * seconds)
            step.end(at)
        span.end(now)


def _attributes(record: RequestRecord) -> dict[str, str | int | float | list[str]]:
    found: dict[str, str | int | float | list[str]] = {
        "kvcore.request": record.request_id,
        "kvcore.tokens": record.tokens,
        "kvcore.engine_held": record.computed,
        "kvcore.outcome": record.outcome,
        "kvcore.failures": record.failures,
        "kvcore.misses": [miss.cause.value for miss in record.misses],
    }
    for tier, tokens in record.loaded.items():
        found[f"kvcore.loaded.{tier}"] = tokens
    if record.plan is not None:
        found["kvcore.plan"] = record.plan.action.value
        found["kvcore.plan.why"] = record.plan.why.value
        found["kvcore.plan.expected_ms"] = 1e3 * record.plan.chosen.seconds
        found["kvcore.plan.recompute_ms"] = 1e3 * record.plan.recompute.seconds
    if record.otherwise is not None:
        found["kvcore.estimate.unknown"] = list(record.otherwise.unknown)
        for name in ("load_all", "recompute", "loading"):
            if (seconds := getattr(record.otherwise, name)) is not None:
                found[f"kvcore.estimate.{name}_ms"] = 1e3 * seconds
    return found
