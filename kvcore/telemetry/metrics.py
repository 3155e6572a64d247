"""What kvcore counts: plain data that adds up across processes, shown as Prometheus metrics.

    worker  Metrics ── delta() ──▶ engine's own channel ──▶ absorb() Metrics  leader
                                                 │
                                                 ├──▶ PrometheusSink   metrics of the engine
                                                 └──▶ register()       a registry of one's own

The data is ``{metric: {labels: value}}``: labels are their values joined by ``|``; a counter's
value is a number, a gauge's ``{source: number}``, a histogram's two lists, of how many
observations fell in each bucket and of their sums. Deltas of different sources, and of one source
in order, may be merged in any grouping.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, ClassVar, NamedTuple

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

__all__ = [
    "SPECS",
    "Data",
    "Kind",
    "MetricSpec",
    "Metrics",
    "MissReason",
    "PrometheusSink",
    "SaveSkip",
    "merge",
    "summary",
]

Data = dict[str, dict[str, Any]]
_SEPARATOR = "|"


class MissReason(str, Enum):
    """Why a lookup gave the engine nothing."""

    NOT_CACHED = "not_cached"  # no tier holds the first block the engine lacks
    PENDING = "pending"  # it is being written and not published yet
    TOO_SHORT = "too_short"  # less than a block, or than the fewest tokens worth loading
    PLANNED = "planned"  # found, but computing it is expected to be faster
    BUSY = "busy"  # the queue of transfers is full
    UNSUPPORTED = "unsupported"  # a model or request that kvcore leaves alone
    UNAVAILABLE = "unavailable"  # the tier that holds it is down
    LOAD_FAILED = "load_failed"  # found, but it could not be read; recomputed
    DEADLINE = "deadline"  # found, but late; recomputed


class SaveSkip(str, Enum):
    """Why blocks were not saved."""

    BUSY = "busy"  # the queue of transfers is full
    NO_ROOM = "no_room"  # everything in the tier is in use
    NOT_ADMITTED = "not_admitted"  # not used often enough for this tier
    UNSUPPORTED = "unsupported"  # a model or request that kvcore leaves alone
    ABORTED = "aborted"  # the request ended or was preempted before its pages were copied
    UNAVAILABLE = "unavailable"  # the tier is down


class Kind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class MetricSpec(NamedTuple):
    """One metric: ``buckets`` are the upper bounds of a histogram, in seconds."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


_SECONDS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip

SPECS = (
    MetricSpec(
        "kvcore_lookup_tokens_total",
        Kind.COUNTER,
        "Tokens looked up, by whether a tier had them and which one was read",
        ("result", "tier"),
    ),
    MetricSpec("kvcore_hits_total", Kind.COUNTER, "Lookups that gave the engine tokens"),
    MetricSpec("kvcore_misses_total", Kind.COUNTER, "Lookups that gave it none", ("reason",)),
    MetricSpec("kvcore_transfer_bytes_total", Kind.COUNTER, "Bytes moved", ("path",)),
    MetricSpec(
        "kvcore_transfer_seconds",
        Kind.HISTOGRAM,
        "Duration of one operation of a transfer graph",
        ("path",),
        _SECONDS,
    ),
    MetricSpec("kvcore_tier_used_bytes", Kind.GAUGE, "Bytes in use", ("tier",)),
    MetricSpec("kvcore_tier_capacity_bytes", Kind.GAUGE, "Bytes configured", ("tier",)),
    MetricSpec(
        "kvcore_tenant_used_bytes",
        Kind.GAUGE,
        "Bytes in use, by the tenants that have a name",
        ("tenant", "tier"),
    ),
    MetricSpec(
        "kvcore_tenant_quota_bytes",
        Kind.GAUGE,
        "Bytes a tenant may have: its quota, or the tier",
        ("tenant", "tier"),
    ),
    MetricSpec(
        "kvcore_control_orders_total",
        Kind.COUNTER,
        "Orders of operators that change something, by whether they were done or refused",
        ("order", "outcome"),
    ),
    MetricSpec("kvcore_server_sessions", Kind.GAUGE, "Engines that a server serves", ("model",)),
    MetricSpec(
        "kvcore_server_refusals_total",
        Kind.COUNTER,
        "Messages that a server refused, by why",
        ("kind",),
    ),
    MetricSpec("kvcore_queue_depth", Kind.GAUGE, "Transfer operations in flight", ("path",)),
    MetricSpec("kvcore_evictions_total", Kind.COUNTER, "Blocks evicted", ("tier",)),
    MetricSpec(
        "kvcore_corrupt_blocks_total",
        Kind.COUNTER,
        "Blocks whose bytes were not those written; dropped and recomputed",
        ("tier",),
    ),
    MetricSpec(
        "kvcore_store_lookups_total",
        Kind.COUNTER,
        "Questions to a remote store of how much of a prompt it holds, by how they ended: found, "
        "absent, late, failed",
        ("tier", "outcome"),
    ),
    MetricSpec(
        "kvcore_bounced_blocks_total",
        Kind.COUNTER,
        "Blocks that were to go from a tier straight to the device, and went through host memory",
        ("tier",),
    ),
    MetricSpec(
        "kvcore_failures_total",
        Kind.COUNTER,
        "Blocks whose transfer failed, by the error's class",
        ("path", "error"),
    ),
    MetricSpec(
        "kvcore_save_skipped_total", Kind.COUNTER, "Blocks that were not saved", ("reason",)
    ),
    MetricSpec(
        "kvcore_expected_ttft_seconds_total",
        Kind.COUNTER,
        "Estimated seconds to the first token of requests that loaded: as they were loaded, and "
        "had all been computed",
        ("way",),
    ),
    MetricSpec(
        "kvcore_event_blocks_total",
        Kind.COUNTER,
        "Blocks in events, by whether they were published, dropped for want of room, or not taken "
        "by a bus",
        ("outcome",),
    ),
    MetricSpec(
        "kvcore_blends_total",
        Kind.COUNTER,
        "Prompts that fusion could serve, by what became of it",
        ("outcome",),
    ),
    MetricSpec(
        "kvcore_blend_tokens_total",
        Kind.COUNTER,
        "Tokens of chunks in blends, by whether their KV was reused or recomputed",
        ("kind",),
    ),
    MetricSpec(
        "kvcore_blend_seconds",
        Kind.HISTOGRAM,
        "Where the time of a blend went: waiting for layers, computing them, looking with the "
        "question",
        ("part",),
        _SECONDS,
    ),
    MetricSpec(
        "kvcore_blend_gate_total", Kind.COUNTER, "Verdicts of the quality gate", ("verdict",)
    ),
)
_BY_NAME = {spec.name: spec for spec in SPECS}


class Metrics:
    """Counts of one process. Thread-safe; nothing blocks but a short lock.

    ``source`` tells processes apart, so that gauges of several ranks add up and a later value of
    one rank replaces its earlier one. Not ``enabled``, every call does nothing.
    """

    def __init__(self, source: str = "", *, enabled: bool = True) -> None:
        self.source = source
        self.enabled = enabled
        self._lock = threading.Lock()
        self._sent: Data = {}
        self._pending: Data = {}

    # -- events ---------------------------------------------------------------------------------

    def looked_up(
        self, found: Mapping[str, int], missed: int, reason: MissReason | None = None
    ) -> None:
        """A lookup found ``found`` tokens, by tier, and ``missed`` it did not.

        ``reason`` is why, when nothing was found (default: not cached).
        """
        for tier, tokens in found.items():
            if tokens:
                self._add("kvcore_lookup_tokens_total", tokens, "hit", tier)
        if missed:
            self._add("kvcore_lookup_tokens_total", missed, "miss", "")
        if any(found.values()):
            self._add("kvcore_hits_total", 1)
        else:
            self._add("kvcore_misses_total", 1, reason or MissReason.NOT_CACHED)

    def transferred(self, path: str, nbytes: int, seconds: float) -> None:
        """An operation moved ``nbytes`` in ``seconds``."""
        self._add("kvcore_transfer_bytes_total", nbytes, path)
        self._observe("kvcore_transfer_seconds", seconds, path)

    def tier(self, tier: str, used: int, capacity: int) -> None:
        """Bytes a tier holds now, and may hold."""
        self._set("kvcore_tier_used_bytes", used, tier)
        self._set("kvcore_tier_capacity_bytes", capacity, tier)

    def tenant(self, tenant: str, tier: str, used: int, most: int) -> None:
        """Bytes of a tier that a tenant has now, and may have."""
        self._set("kvcore_tenant_used_bytes", used, tenant, tier)
        self._set("kvcore_tenant_quota_bytes", most, tenant, tier)

    def ordered(self, order: str, outcome: str) -> None:
        """An operator's order was "done" or "refused"."""
        self._add("kvcore_control_orders_total", 1, order, outcome)

    def sessions(self, model: str, count: int) -> None:
        """Engines with this model that a server serves now."""
        self._set("kvcore_server_sessions", count, model)

    def refused(self, kind: str) -> None:
        """A server refused a message."""
        self._add("kvcore_server_refusals_total", 1, kind)

    def queue(self, path: str, depth: int) -> None:
        self._set("kvcore_queue_depth", depth, path)

    def evicted(self, tier: str, blocks: int = 1) -> None:
        self._add("kvcore_evictions_total", blocks, tier)

    def corrupt(self, tier: str, blocks: int = 1) -> None:
        self._add("kvcore_corrupt_blocks_total", blocks, tier)

    def asked_store(self, tier: str, outcome: str) -> None:
        """A remote store was asked what it holds: "found", "absent", "late" or "failed"."""
        self._add("kvcore_store_lookups_total", 1, tier, outcome)

    def bounced(self, tier: str, blocks: int) -> None:
        """Blocks of a tier went through host memory on their way to the device."""
        self._add("kvcore_bounced_blocks_total", blocks, tier)

    def failed(self, path: str, error: BaseException | str, blocks: int = 1) -> None:
        """``error`` is counted by its class, so that the number of series stays bounded."""
        name = error if isinstance(error, str) else type(error).__name__
        self._add("kvcore_failures_total", blocks, path, name)

    def save_skipped(self, reason: SaveSkip, blocks: int = 1) -> None:
        self._add("kvcore_save_skipped_total", blocks, reason)

    def expected_ttft(self, load: float, recompute: float) -> None:
        """A request that loaded was estimated to take so many seconds to its first token, and so
        many had all of it been computed. What was saved is the difference."""
        self._add("kvcore_expected_ttft_seconds_total", load, "load")
        self._add("kvcore_expected_ttft_seconds_total", recompute, "recompute")

    def told(self, outcome: str, blocks: int) -> None:
        """Block events were "published", "dropped" for want of room, or left "unsent" by a bus."""
        self._add("kvcore_event_blocks_total", blocks, outcome)

    def blend(self, outcome: str) -> None:
        """What became of a prompt with chunks: "blended", "failed", or "declined" as too slow."""
        self._add("kvcore_blends_total", 1, outcome)

    def blended(self, tokens: int, share: float, seconds: Mapping[str, float]) -> None:
        """A blend of ``tokens`` tokens of chunks recomputed this share; ``seconds`` by part."""
        recomputed = round(tokens * share)
        self._add("kvcore_blend_tokens_total", tokens - recomputed, "reused")
        self._add("kvcore_blend_tokens_total", recomputed, "recomputed")
        for part, value in seconds.items():
            self._observe("kvcore_blend_seconds", value, part)

    def judged(self, verdict: str) -> None:
        """The quality gate said this of a blend."""
        self._add("kvcore_blend_gate_total", 1, verdict)

    # -- data -----------------------------------------------------------------------------------

    def snapshot(self) -> Data:
        """Everything counted since the start, as data that JSON and msgpack carry."""
        with self._lock:
            return merge(merge({}, self._sent), self._pending)

    def delta(self) -> Data:
        """What was counted since the last call; empty when that is nothing."""
        with self._lock:
            pending, self._pending = self._pending, {}
            merge(self._sent, pending)
            return pending

    def absorb(self, delta: Data) -> None:
        """Add what another process counted. It is then part of this one's next delta too."""
        if self.enabled:
            with self._lock:
                merge(self._pending, delta)

    def register(self, registry: CollectorRegistry) -> Collector:
        """Show the snapshot in ``registry`` from now on; unregister the collector to stop."""
        collector = _SnapshotCollector(self)
        registry.register(collector)
        return collector

    def _series(self, name: str) -> dict[str, Any]:
        return self._pending.setdefault(name, {})

    def _add(self, name: str, value: float, *labels: str) -> None:
        if self.enabled:
            key = _join(labels)
            with self._lock:
                series = self._series(name)
                series[key] = series.get(key, 0) + value

    def _set(self, name: str, value: float, *labels: str) -> None:
        if self.enabled:
            with self._lock:
                self._series(name).setdefault(_join(labels), {})[self.source] = value

    def _observe(self, name: str, value: float, *labels: str) -> None:
        if self.enabled:
            buckets = _BY_NAME[name].buckets
            with self._lock:
                empty = [0] * (len(buckets) + 1), [0.0] * (len(buckets) + 1)
                counts, sums = self._series(name).setdefault(_join(labels), empty)
                at = bisect_left(buckets, value)
                counts[at] += 1
                sums[at] += value


def merge(into: Data, delta: Data) -> Data:
    """Add ``delta`` to ``into``, which is changed and returned; ``delta`` is not kept."""
    for name, series in delta.items():
        if name in _BY_NAME:  # else of a newer version
            mine = into.setdefault(name, {})
            for key, value in series.items():
                mine[key] = _combine(_BY_NAME[name].kind, mine.get(key), value)
    return into


def _combine(kind: Kind, old: Any, new: Any) -> Any:
    if kind is Kind.COUNTER:
        return (old or 0) + new
    if kind is Kind.GAUGE:
        return {**(old or {}), **new}
    if old is None:
        return [list(part) for part in new]
    return [[a + b for a, b in zip(x, y, strict=True)] for x, y in zip(old, new, strict=True)]


def summary(data: Data) -> dict[str, int | float]:
    """One number a series, under a name to read: for a log line of an engine."""
    return {
        f"{name.removeprefix('kvcore_')}{_braced(spec, key)}": _number(spec.kind, value)
        for name, series in data.items()
        if (spec := _BY_NAME.get(name))
        for key, value in series.items()
    }


def _braced(spec: MetricSpec, key: str) -> str:
    return "{" + key.replace(_SEPARATOR, ",").rstrip(",") + "}" if spec.labels else ""


def _number(kind: Kind, value: Any) -> int | float:
    """A series as one number: the count, the sum over sources, or the seconds in all."""
    if kind is Kind.COUNTER:
        parts = [value]
    else:
        parts = list(value.values()) if kind is Kind.GAUGE else value[1]
    total: int | float = sum(parts)
    return total


def _join(labels: Sequence[str]) -> str:
    return _SEPARATOR.join([_plain(label).replace(_SEPARATOR, "_") for label in labels])


def _plain(label: str) -> str:
    return str(label.value) if isinstance(label, Enum) else label


def _split(spec: MetricSpec, key: str) -> list[str]:
    return key.split(_SEPARATOR) if spec.labels else []


class _SnapshotCollector(Collector):
    """Makes Prometheus families of a snapshot when scraped."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def describe(self) -> Iterable[Any]:
        return [_family(spec, {}) for spec in SPECS]

    def collect(self) -> Iterator[Any]:
        data = self._metrics.snapshot()
        for spec in SPECS:
            yield _family(spec, data.get(spec.name, {}))


def _family(spec: MetricSpec, series: Mapping[str, Any]) -> Any:
    if spec.kind is Kind.HISTOGRAM:
        histogram = HistogramMetricFamily(spec.name, spec.help, labels=spec.labels)
        for key, (counts, sums) in series.items():
            bounds = [*map(str, spec.buckets), "+Inf"]
            running = [float(sum(counts[: n + 1])) for n in range(len(counts))]
            pairs = list(zip(bounds, running, strict=True))
            histogram.add_metric(_split(spec, key), pairs, sum(sums))
        return histogram
    make = CounterMetricFamily if spec.kind is Kind.COUNTER else GaugeMetricFamily
    family = make(spec.name, spec.help, labels=spec.labels)
    for key, value in series.items():
        family.add_metric(_split(spec, key), _number(spec.kind, value))
    return family


class PrometheusSink:
    """Feeds deltas to metric objects that an engine wants to make itself.

    ``classes`` maps prometheus_client's Counter, Gauge and Histogram to the engine's stand-ins;
    ``labelnames`` come before kvcore's own (model and engine, say). A second sink of one process
    shares the metrics of the first: an engine may be built twice, a metric is registered once.
    Not thread-safe: an engine observes from one thread.
    """

    _made: ClassVar[dict[tuple[Any, ...], Any]] = {}

    def __init__(
        self,
        labelnames: Sequence[str] = (),
        *,
        classes: Mapping[Any, Any] | None = None,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        self._gauges: dict[tuple[str, ...], dict[str, float]] = {}
        self._registry = registry
        self._metrics = {
            spec.name: self._metric(spec, (*labelnames, *spec.labels), classes or {})
            for spec in SPECS
        }

    def apply(self, delta: Data, labelvalues: Sequence[str] = ()) -> None:
        """Add ``delta`` to the metrics. Buckets, counts and sums of histograms come out exact."""
        for name, series in delta.items():
            if spec := _BY_NAME.get(name):
                for key, value in series.items():
                    labels = (*map(str, labelvalues), *_split(spec, key))
                    self._apply(spec, labels, value)

    def _apply(self, spec: MetricSpec, labels: tuple[str, ...], value: Any) -> None:
        metric = self._metrics[spec.name]
        child = metric.labels(*labels) if labels else metric
        if spec.kind is Kind.COUNTER:
            child.inc(value)
        elif spec.kind is Kind.GAUGE:
            known = self._gauges.setdefault((spec.name, *labels), {})
            known.update(value)
            child.set(sum(known.values()))
        else:
            for seconds in _replay(spec, value):
                child.observe(seconds)

    def _metric(
        self, spec: MetricSpec, labelnames: tuple[str, ...], classes: Mapping[Any, Any]
    ) -> Any:
        base, more = _PROMETHEUS[spec.kind]
        make = classes.get(base, base)
        if spec.buckets:
            more = {"buckets": spec.buckets}
        if self._registry is not REGISTRY:  # an engine's stand-ins know only their own
            more = {**more, "registry": self._registry}
        at = (make, self._registry, spec.name, labelnames)
        if at not in self._made:
            self._made[at] = make(
                name=spec.name, documentation=spec.help, labelnames=list(labelnames), **more
            )
        return self._made[at]


_PROMETHEUS: dict[Kind, tuple[Any, dict[str, Any]]] = {
    Kind.COUNTER: (Counter, {}),
    Kind.GAUGE: (Gauge, {"multiprocess_mode": "mostrecent"}),
    Kind.HISTOGRAM: (Histogram, {}),
}


def _replay(spec: MetricSpec, value: Any) -> Iterator[float]:
    """Observations with the same bucket counts and the same sum: the mean of each bucket."""
    for bound, count, total in zip([*spec.buckets, float("inf")], *value, strict=True):
        if count:
            mean = min(total / count, bound)  # rounding must not lift it over the bound
            yield from [mean] * count
