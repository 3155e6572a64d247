"""Metrics as plain data that adds up across processes, exported as Prometheus metrics.

    worker  Metrics ── delta() ──▶ engine's own channel ──▶ absorb() Metrics  leader
                                                 │
                                                 ├──▶ PrometheusSink   metrics of the engine
                                                 └──▶ register()       a registry of one's own

The data is ``{metric: {labels: value}}``. The labels are their values joined by ``|``. The value of
a counter is a number, that of a gauge ``{source: number}``, and that of a histogram two lists: the
number of observations in each bucket and their sums. Deltas of different sources, and consecutive
deltas of one source, may be merged in any grouping.
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
    "PAGE_SPECS",
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
    """Why a lookup gave the engine no tokens."""

    NOT_CACHED = "not_cached"  # no tier holds the first block that the engine itself lacks
    PENDING = "pending"  # it is being written and is not published yet
    TOO_SHORT = "too_short"  # the engine lacks less than a block, or found < `min_load_tokens`
    PLANNED = "planned"  # found, but recomputing is expected to be faster
    BUSY = "busy"  # the transfer queue is full
    UNSUPPORTED = "unsupported"  # a request whose KV cannot be told from other KV
    UNAVAILABLE = "unavailable"  # the files of its adapter were not read in time
    ASKED = "asked"  # the request asked kvcore not to load
    UNREADABLE = "unreadable"  # what the request asked of kvcore cannot be read
    LOAD_FAILED = "load_failed"  # found, but reading failed; recomputed
    DEADLINE = "deadline"  # found, but not loaded in time; recomputed


class SaveSkip(str, Enum):
    """Why blocks were not saved."""

    BUSY = "busy"  # the transfer queue is full
    NO_ROOM = "no_room"  # nothing in the tier is evictable
    ABORTED = "aborted"  # the request ended or was preempted before its pages were copied


class Kind(Enum):
    """Kind of a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class MetricSpec(NamedTuple):
    """Definition of a metric; ``buckets`` are the upper bounds of a histogram, in seconds."""

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
        "Tokens that engines asked about beyond those they held themselves, by result (hit or "
        "miss) and the tier they were read from; tokens of a load that fails count as both",
        ("result", "tier"),
    ),
    MetricSpec("kvcore_hits_total", Kind.COUNTER, "Lookups that gave the engine tokens"),
    MetricSpec(
        "kvcore_misses_total", Kind.COUNTER, "Lookups that gave the engine no tokens", ("reason",)
    ),
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
        "Bytes in use, by named tenant",
        ("tenant", "tier"),
    ),
    MetricSpec(
        "kvcore_tenant_quota_bytes",
        Kind.GAUGE,
        "Bytes a tenant may use: its quota, or the capacity of the tier",
        ("tenant", "tier"),
    ),
    MetricSpec(
        "kvcore_control_orders_total",
        Kind.COUNTER,
        "Operators' orders that change something, by whether they were done or refused",
        ("order", "outcome"),
    ),
    MetricSpec("kvcore_server_sessions", Kind.GAUGE, "Engines connected to a server", ("model",)),
    MetricSpec(
        "kvcore_server_refusals_total",
        Kind.COUNTER,
        "Messages that a server refused, by reason",
        ("kind",),
    ),
    MetricSpec(
        "kvcore_standing_aside", Kind.GAUGE, "1 if kvcore stopped serving the engine, see its log"
    ),
    MetricSpec("kvcore_queue_depth", Kind.GAUGE, "Transfer operations in flight", ("path",)),
    MetricSpec(
        "kvcore_evictions_total",
        Kind.COUNTER,
        "Blocks evicted because a tier or a tenant's quota was full",
        ("tier",),
    ),
    MetricSpec(
        "kvcore_cleared_blocks_total",
        Kind.COUNTER,
        "Blocks removed because an engine or an operator asked for it",
        ("tier",),
    ),
    MetricSpec(
        "kvcore_lost_blocks_total",
        Kind.COUNTER,
        "Blocks removed because they, or a block before them, were corrupt or missing",
        ("tier",),
    ),
    MetricSpec(
        "kvcore_corrupt_blocks_total",
        Kind.COUNTER,
        "Blocks whose bytes were not those written; they are dropped and recomputed",
        ("tier",),
    ),
    MetricSpec(
        "kvcore_refused_blocks_total",
        Kind.COUNTER,
        "Stored blocks that were refused: corrupt, forged, other (another block), truncated",
        ("tier", "reason"),
    ),
    MetricSpec(
        "kvcore_ignored_options_total",
        Kind.COUNTER,
        "Options of requests that were ignored because they cannot be read, by option",
        ("option",),
    ),
    MetricSpec(
        "kvcore_request_controls_total",
        Kind.COUNTER,
        "Requests that asked kvcore to load or save less, by option (load, save, save_tokens; "
        "kvcore for all of them) and whether it was followed or unreadable",
        ("option", "outcome"),
    ),
    MetricSpec(
        "kvcore_store_lookups_total",
        Kind.COUNTER,
        "Lookups of prompts in a remote store, by outcome: found, absent, late, failed",
        ("tier", "outcome"),
    ),
    MetricSpec(
        "kvcore_bounced_blocks_total",
        Kind.COUNTER,
        "Blocks meant to go straight from a tier to the device that went through host memory",
        ("tier",),
    ),
    MetricSpec(
        "kvcore_failures_total",
        Kind.COUNTER,
        "Blocks whose transfer failed, by class of error",
        ("path", "error"),
    ),
    MetricSpec(
        "kvcore_save_skipped_total", Kind.COUNTER, "Blocks that were not saved", ("reason",)
    ),
    MetricSpec(
        "kvcore_expected_ttft_seconds_total",
        Kind.COUNTER,
        "Estimated seconds to the first token of requests that loaded, with the load and if all "
        "had been recomputed",
        ("way",),
    ),
    MetricSpec(
        "kvcore_event_blocks_total",
        Kind.COUNTER,
        "Blocks in events, by whether they were published, dropped from a full queue, or not "
        "accepted by a bus",
        ("outcome",),
    ),
    MetricSpec(
        "kvcore_blends_total",
        Kind.COUNTER,
        "Prompts that fusion could serve, by outcome",
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
        "Time of a blend by part: waiting for layers, computing them, selecting tokens with the "
        "question",
        ("part",),
        _SECONDS,
    ),
    MetricSpec(
        "kvcore_blend_gate_total", Kind.COUNTER, "Verdicts of the quality gate", ("verdict",)
    ),
)
PAGE_SPECS = (
    MetricSpec("kvcore_pages_held", Kind.GAUGE, "Pages that a tier below another cache holds"),
    MetricSpec("kvcore_pages_stored_total", Kind.COUNTER, "Pages written to that tier"),
    MetricSpec("kvcore_pages_loaded_total", Kind.COUNTER, "Pages read from that tier"),
    MetricSpec(
        "kvcore_pages_corrupt_total", Kind.COUNTER, "Pages read there that were not as written"
    ),
    MetricSpec(
        "kvcore_page_jobs_late_total",
        Kind.COUNTER,
        "Loads and stores there that were given up at their deadline",
    ),
    MetricSpec(
        "kvcore_pages_aside", Kind.GAUGE, "1 if kvcore finds and stores no pages, see its log"
    ),
)
"""What kvcore counts where an engine has a cache of its own above it, in that cache's metrics."""

_BY_NAME = {spec.name: spec for spec in SPECS}


class Metrics:
    """Counts of one process. Thread-safe; calls block only for a short lock.

    ``source`` names the process, so that the gauges of several ranks add up and a later value of a
    rank replaces its earlier one. If ``enabled`` is False, every call does nothing.
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
        """Count a lookup that found ``found`` tokens, by tier, and missed ``missed`` tokens.

        Together they are the tokens that the engine asked about and does not hold itself.
        ``reason`` says why nothing was found (default: not cached).
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
        """Count an operation that moved ``nbytes`` in ``seconds``."""
        self._add("kvcore_transfer_bytes_total", nbytes, path)
        self._observe("kvcore_transfer_seconds", seconds, path)

    def tier(self, tier: str, used: int, capacity: int) -> None:
        """Set the bytes that a tier holds now and its capacity."""
        self._set("kvcore_tier_used_bytes", used, tier)
        self._set("kvcore_tier_capacity_bytes", capacity, tier)

    def tenant(self, tenant: str, tier: str, used: int, most: int) -> None:
        """Set the bytes of a tier that a tenant uses now and its limit."""
        self._set("kvcore_tenant_used_bytes", used, tenant, tier)
        self._set("kvcore_tenant_quota_bytes", most, tenant, tier)

    def ordered(self, order: str, outcome: str) -> None:
        """Count an operator's order, whose outcome is "done", "refused" or "abandoned"."""
        self._add("kvcore_control_orders_total", 1, order, outcome)

    def sessions(self, model: str, count: int) -> None:
        """Set the number of engines with this model that a server serves now."""
        self._set("kvcore_server_sessions", count, model)

    def refused(self, kind: str) -> None:
        """Count a message that a server refused."""
        self._add("kvcore_server_refusals_total", 1, kind)

    def aside(self) -> None:
        """Record that kvcore stands aside: it no longer serves the engine, or never did."""
        self._set("kvcore_standing_aside", 1)

    def queue(self, path: str, depth: int) -> None:
        """Set the number of transfer operations in flight on a path."""
        self._set("kvcore_queue_depth", depth, path)

    def evicted(self, tier: str, blocks: int = 1) -> None:
        """Count blocks evicted from a tier for lack of room."""
        self._add("kvcore_evictions_total", blocks, tier)

    def cleared(self, tier: str, blocks: int = 1) -> None:
        """Count blocks removed from a tier on request."""
        self._add("kvcore_cleared_blocks_total", blocks, tier)

    def lost(self, tier: str, blocks: int = 1) -> None:
        """Count blocks removed from a tier because their chain is corrupt or incomplete."""
        self._add("kvcore_lost_blocks_total", blocks, tier)

    def corrupt(self, tier: str, blocks: int = 1) -> None:
        """Count blocks whose bytes were not those written."""
        self._add("kvcore_corrupt_blocks_total", blocks, tier)

    def refused_block(self, tier: str, reason: str, blocks: int = 1) -> None:
        """Count stored blocks that are not those asked for (`kvcore.errors.Mismatch`)."""
        self._add("kvcore_refused_blocks_total", blocks, tier, reason)

    def ignored_option(self, option: str) -> None:
        """Count an option of a request, ``fusion`` or ``promise``, that could not be read."""
        self._add("kvcore_ignored_options_total", 1, option)

    def controlled(self, option: str, outcome: str) -> None:
        """Count a request's option to load or save less: "followed" or "unreadable"."""
        self._add("kvcore_request_controls_total", 1, option, outcome)

    def asked_store(self, tier: str, outcome: str) -> None:
        """Count a lookup in a remote store: "found", "absent", "late" or "failed"."""
        self._add("kvcore_store_lookups_total", 1, tier, outcome)

    def bounced(self, tier: str, blocks: int) -> None:
        """Count blocks of a tier that went through host memory on their way to the device."""
        self._add("kvcore_bounced_blocks_total", blocks, tier)

    def failed(self, path: str, error: BaseException | str, blocks: int = 1) -> None:
        """Count failed blocks by the class of ``error``, which bounds the number of series."""
        name = error if isinstance(error, str) else type(error).__name__
        self._add("kvcore_failures_total", blocks, path, name)

    def save_skipped(self, reason: SaveSkip, blocks: int = 1) -> None:
        """Count blocks that were not saved."""
        self._add("kvcore_save_skipped_total", blocks, reason)

    def expected_ttft(self, load: float, recompute: float) -> None:
        """Count the expected seconds to the first token of a request that loaded.

        ``load`` is the estimate with the load, ``recompute`` the estimate without it. The
        difference is the time saved.
        """
        self._add("kvcore_expected_ttft_seconds_total", load, "load")
        self._add("kvcore_expected_ttft_seconds_total", recompute, "recompute")

    def told(self, outcome: str, blocks: int) -> None:
        """Count block events: "published", "dropped" from a full queue, or "unsent" by a bus."""
        self._add("kvcore_event_blocks_total", blocks, outcome)

    def blend(self, outcome: str) -> None:
        """Count a prompt with chunks: "blended", "failed", or "declined" as too slow."""
        self._add("kvcore_blends_total", 1, outcome)

    def blended(self, tokens: int, share: float, seconds: Mapping[str, float]) -> None:
        """Count a blend of ``tokens`` tokens of chunks that recomputed ``share`` of them.

        ``seconds`` is the time of each part of the blend.
        """
        recomputed = round(tokens * share)
        self._add("kvcore_blend_tokens_total", tokens - recomputed, "reused")
        self._add("kvcore_blend_tokens_total", recomputed, "recomputed")
        for part, value in seconds.items():
            self._observe("kvcore_blend_seconds", value, part)

    def judged(self, verdict: str) -> None:
        """Count a verdict of the quality gate."""
        self._add("kvcore_blend_gate_total", 1, verdict)

    # -- data -----------------------------------------------------------------------------------

    def snapshot(self) -> Data:
        """Return everything counted since the start, as data for JSON or msgpack."""
        with self._lock:
            return merge(merge({}, self._sent), self._pending)

    def delta(self) -> Data:
        """Return what was counted since the last call, empty if nothing was."""
        with self._lock:
            pending, self._pending = self._pending, {}
            merge(self._sent, pending)
            return pending

    def absorb(self, delta: Data) -> None:
        """Add what another process counted, also to this process's next delta."""
        if self.enabled:
            with self._lock:
                merge(self._pending, delta)

    def register(self, registry: CollectorRegistry) -> Collector:
        """Export the snapshot through ``registry``; unregister the collector to stop."""
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
    """Add ``delta`` to ``into`` and return ``into``; ``delta`` is not kept."""
    for name, series in delta.items():
        if name in _BY_NAME:  # otherwise from a newer version
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
    """Return one number for each series under a readable name, for an engine's log line."""
    return {
        f"{name.removeprefix('kvcore_')}{_braced(spec, key)}": _number(spec.kind, value)
        for name, series in data.items()
        if (spec := _BY_NAME.get(name))
        for key, value in series.items()
    }


def _braced(spec: MetricSpec, key: str) -> str:
    return "{" + key.replace(_SEPARATOR, ",").rstrip(",") + "}" if spec.labels else ""


def _number(kind: Kind, value: Any) -> int | float:
    """Return a series as one number: the count, the sum over sources, or the total seconds."""
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
    """Builds Prometheus families from a snapshot at each scrape."""

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
    """Feeds deltas to metric objects that an engine insists on creating itself.

    ``classes`` maps the Counter, Gauge and Histogram of prometheus_client to the engine's
    replacements. ``labelnames`` precede kvcore's own labels (model and engine, for example). A
    second sink in one process shares the metrics of the first, because an engine may be built twice
    while a metric is registered once. Not thread-safe: an engine observes from one thread.
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
        """Add ``delta`` to the metrics; buckets, counts and sums of histograms stay exact."""
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
        if self._registry is not REGISTRY:  # an engine's replacements accept no other registry
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
    """Yield observations with the given bucket counts and sum: the mean of each bucket."""
    for bound, count, total in zip([*spec.buckets, float("inf")], *value, strict=True):
        if count:
            mean = min(total / count, bound)  # rounding must not raise it above the bound
            yield from [mean] * count
