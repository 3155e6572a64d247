"""Counts that travel: deltas add up to the snapshot, and Prometheus shows the same numbers."""

from __future__ import annotations

import copy
import json
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvcore import log
from kvcore.errors import CorruptBlock
from kvcore.telemetry.metrics import (
    SPECS,
    Kind,
    Metrics,
    MissReason,
    PrometheusSink,
    SaveSkip,
    merge,
    summary,
)

Event = Callable[[Metrics], None]
tiers = st.sampled_from(["host", "disk"])
paths = st.sampled_from(["h2d", "d2h"])
counts = st.integers(0, 1000)
seconds = st.sampled_from([0.0, 0.0005, 0.1, 0.1000001, 3.0, 99.0])

events: st.SearchStrategy[Event] = st.one_of(
    st.builds(
        lambda found, n, why: lambda m: m.looked_up(found, n, why),
        st.dictionaries(tiers, counts),
        counts,
        st.none() | st.sampled_from(MissReason),
    ),
    st.builds(lambda p, n, s: lambda m: m.transferred(p, n, s), paths, counts, seconds),
    st.builds(lambda t, n: lambda m: m.tier(t, n, 1000), tiers, counts),
    st.builds(lambda p, n: lambda m: m.queue(p, n), paths, counts),
    st.builds(lambda t, n: lambda m: m.evicted(t, n), tiers, counts),
    st.builds(lambda t, n: lambda m: m.cleared(t, n), tiers, counts),
    st.builds(lambda t, n: lambda m: m.lost(t, n), tiers, counts),
    st.builds(lambda t, n: lambda m: m.corrupt(t, n), tiers, counts),
    st.builds(lambda p, n: lambda m: m.failed(p, CorruptBlock("x"), n), paths, counts),
    st.builds(lambda r, n: lambda m: m.save_skipped(r, n), st.sampled_from(SaveSkip), counts),
)


def samples(registry: CollectorRegistry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """What a scrape of ``registry`` shows, without creation times."""
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        (s.name, tuple(sorted(s.labels.items()))): pytest.approx(s.value)
        for family in families
        for s in family.samples
        if not s.name.endswith("_created")
    }


@given(st.lists(st.tuples(st.integers(0, 2), events, st.booleans()), max_size=30))
def test_deltas_of_many_sources_add_up_to_their_snapshots(
    steps: list[tuple[int, Event, bool]],
) -> None:
    workers = [Metrics(f"rank{n}") for n in range(3)]
    leader, wire = Metrics("leader"), {}
    for n, event, ship in steps:
        event(workers[n])
        if ship:
            delta = msgspec.msgpack.decode(msgspec.msgpack.encode(workers[n].delta()))
            leader.absorb(delta)
            merge(wire, leader.delta())
    for worker in workers:
        leader.absorb(worker.delta())
        assert worker.delta() == {}
    merge(wire, leader.delta())
    expected: dict[str, dict[str, object]] = {}
    for worker in workers:
        merge(expected, worker.snapshot())
    assert as_approx(leader.snapshot()) == as_approx(expected)
    assert as_approx(wire) == as_approx(expected)


def as_approx(data: object) -> object:
    """Sums of seconds differ in their last digits by the order of addition."""
    if isinstance(data, dict):
        return {key: as_approx(value) for key, value in data.items()}
    if isinstance(data, list):
        return [as_approx(value) for value in data]
    return round(data, 6) if isinstance(data, float) else data


@given(st.lists(st.tuples(events, st.booleans()), max_size=20))
def test_a_registry_and_a_sink_show_the_same(steps: list[tuple[Event, bool]]) -> None:
    metrics, own, engines = Metrics("rank0"), CollectorRegistry(), CollectorRegistry()
    metrics.register(own)
    sink = PrometheusSink(registry=engines)
    for event, ship in steps:
        event(metrics)
        if ship:
            sink.apply(metrics.delta())
    sink.apply(metrics.delta())
    shown = samples(engines)
    for name in ("kvcore_hits_total", "kvcore_standing_aside"):
        if not metrics.snapshot().get(name):  # a metric without labels starts at 0
            del shown[name, ()]
    assert shown == samples(own)


def test_a_mean_that_rounds_up_stays_in_its_bucket() -> None:
    assert (0.1 + 0.1 + 0.1) / 3 > 0.1
    metrics, registry = Metrics(), CollectorRegistry()
    for _ in range(3):
        metrics.transferred("h2d", 1, 0.1)
    PrometheusSink(registry=registry).apply(metrics.delta())
    line = 'kvcore_transfer_seconds_bucket{le="0.1",path="h2d"} 3.0'
    assert line in generate_latest(registry).decode()


def test_prometheus_names_and_labels() -> None:
    metrics, registry = Metrics("rank0"), CollectorRegistry()
    metrics.register(registry)
    metrics.looked_up({"host": 48, "disk": 0}, 16)
    metrics.looked_up({}, 10, MissReason.TOO_SHORT)
    metrics.transferred("h2d", 4096, 0.1)
    metrics.tier("host", 10, 20)
    metrics.failed("disk2h", CorruptBlock("bits"))
    metrics.save_skipped(SaveSkip.BUSY, 3)
    text = generate_latest(registry).decode()
    for line in (
        'kvcore_lookup_tokens_total{result="hit",tier="host"} 48.0',
        'kvcore_lookup_tokens_total{result="miss",tier=""} 26.0',
        "kvcore_hits_total 1.0",
        'kvcore_misses_total{reason="too_short"} 1.0',
        'kvcore_transfer_bytes_total{path="h2d"} 4096.0',
        'kvcore_transfer_seconds_bucket{le="0.05",path="h2d"} 0.0',
        'kvcore_transfer_seconds_bucket{le="0.1",path="h2d"} 1.0',
        'kvcore_tier_capacity_bytes{tier="host"} 20.0',
        'kvcore_failures_total{error="CorruptBlock",path="disk2h"} 1.0',
        'kvcore_save_skipped_total{reason="busy"} 3.0',
    ):
        assert line in text.splitlines()


def test_gauges_of_ranks_add_up_and_of_one_rank_replace() -> None:
    leader = Metrics("leader")
    for rank, used in (("rank0", 10), ("rank1", 5), ("rank0", 7)):
        worker = Metrics(rank)
        worker.tier("host", used, 100)
        leader.absorb(worker.delta())
    assert summary(leader.snapshot()) == {
        "tier_used_bytes{host}": 12,
        "tier_capacity_bytes{host}": 200,
    }


def test_an_engine_is_built_twice_and_brings_its_own_labels() -> None:
    registry = CollectorRegistry()
    metrics = Metrics()
    for engine in ("0", "1"):
        metrics.evicted("host", 2)
        sink = PrometheusSink(["model", "engine"], registry=registry)
        sink.apply(metrics.delta(), ["m", engine])
    shown = generate_latest(registry).decode()
    for engine in ("0", "1"):
        line = f'kvcore_evictions_total{{engine="{engine}",model="m",tier="host"}} 2.0'
        assert line in shown


def test_a_delta_shares_nothing_with_what_goes_on() -> None:
    metrics = Metrics("a")
    metrics.transferred("h2d", 1, 0.2)
    metrics.queue("h2d", 1)
    delta = metrics.delta()
    before = copy.deepcopy(delta)
    metrics.transferred("h2d", 1, 0.2)
    metrics.queue("h2d", 2)
    metrics.snapshot()
    metrics.delta()
    assert delta == before


def test_disabled_counts_nothing_and_newer_metrics_are_skipped() -> None:
    metrics = Metrics(enabled=False)
    metrics.evicted("host")
    metrics.absorb({"kvcore_evictions_total": {"host": 1}})
    assert metrics.snapshot() == {}
    assert merge({}, {"kvcore_of_next_year": {"": 1}}) == {}
    PrometheusSink(registry=CollectorRegistry()).apply({"kvcore_of_next_year": {"": 1}})


def test_a_separator_in_a_label_cannot_shift_the_others() -> None:
    metrics = Metrics()
    metrics.failed("a|b", "c")
    assert metrics.snapshot() == {"kvcore_failures_total": {"a_b|c": 1}}


def test_every_metric_has_a_kind_its_name_shows() -> None:
    for spec in SPECS:
        assert spec.name.endswith("_total") == (spec.kind is Kind.COUNTER)
        assert bool(spec.buckets) == (spec.kind is Kind.HISTOGRAM)


# -- log lines ----------------------------------------------------------------------------------


@pytest.fixture
def _kvcore_logging() -> Iterator[None]:
    root = logging.getLogger("kvcore")
    before = (root.level, list(root.handlers), root.propagate)
    yield
    root.level, root.handlers[:], root.propagate = before[0], before[1], before[2]
    logging.getLogger().manager._clear_cache()  # type: ignore[attr-defined]


@pytest.mark.usefixtures("_kvcore_logging")
def test_text_lines(caplog: pytest.LogCaptureFixture) -> None:
    log.configure("debug", "text")
    logger = log.get_logger("kvcore.somewhere")
    logger.debug(
        "match", request="r 7", n=3, took=0.123456789, key=b"\x01\xff", path=SaveSkip.BUSY, e=""
    )
    assert caplog.messages == [
        'match request="r 7" n=3 took=0.123457 key=01ff path=busy e=""',
    ]
    logger.warning("lines", value="a\nb=c")
    assert caplog.messages[-1] == r'lines value="a\nb=c"'
    assert caplog.records[0].funcName == "test_text_lines"
    log.configure("warning", "text")
    logger.info("quiet")
    assert len(caplog.messages) == 2
    assert not logger.enabled(logging.INFO)


@pytest.mark.usefixtures("_kvcore_logging")
def test_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("info", "json")
    log.configure("info", "json")
    logger = log.get_logger("kvcore.somewhere")
    logger.info("match", request="r7", tokens=3, key=b"\x01", event="x")
    logging.getLogger("kvcore.plain").warning("dropped %d blocks", 4)
    try:
        raise CorruptBlock("bits")
    except CorruptBlock:
        logger.exception("bad")
    first, second, third = map(json.loads, capsys.readouterr().err.splitlines())
    assert first["event"] == "match"
    assert (first["request"], first["tokens"], first["key"]) == ("r7", 3, "01")
    assert first["field_event"] == "x"
    assert (second["level"], second["event"]) == ("warning", "dropped 4 blocks")
    assert "CorruptBlock: bits" in third["traceback"]


def test_every_reason_is_given_by_some_code() -> None:
    """Alerts and panels read reasons. One that nothing gives never fires."""
    root = Path(__file__).parents[3]
    files = (file for part in ("kvcore", "adapters") for file in (root / part).rglob("*.py"))
    code = "".join(file.read_text() for file in files)
    for reason in (*MissReason, *SaveSkip):
        assert re.search(rf"\b{type(reason).__name__}\.{reason.name}\b", code), reason
