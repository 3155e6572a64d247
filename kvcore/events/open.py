"""Opens the publisher that the settings ``[events]`` ask for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from kvcore.config import Config
from kvcore.errors import ConfigError
from kvcore.events.feed import Feed
from kvcore.events.plan import PublisherPlan, rank_endpoint
from kvcore.events.process import PublisherProcess
from kvcore.events.publisher import Pacing
from kvcore.index import BlockIndex
from kvcore.telemetry.metrics import Metrics

__all__ = ["RunningPublisher", "check_events", "endpoints", "open_events"]

_log = logging.getLogger("kvcore.events")


class RunningPublisher(NamedTuple):
    """A started publisher. Sends every event put into ``feed`` until ``close``.

    ``close`` sends what is queued and takes some seconds at most.
    """

    feed: Feed
    close: Callable[[], None]


def _all(keys: bytes, parents: bytes) -> tuple[bytes, bytes]:
    return keys, parents


def open_events(
    config: Config,
    index: BlockIndex,
    metrics: Metrics,
    rank: int | None = None,
    *,
    told: Callable[[bytes, bytes], tuple[bytes, bytes]] = _all,
) -> RunningPublisher | None:
    """Start the publisher; return None if no bus is set, or none can be opened.

    A bus that cannot be opened is logged, and the engine serves without its events. ``rank`` is the
    data-parallel rank. A consumer that begins, or begins anew, is told what ``told`` returns of
    packed keys and parent keys: what events tell too. Call it on the leader's thread. Starting a
    process takes a moment.
    """
    events = config.events
    if not (events.endpoint or events.nats):
        return None
    plan = PublisherPlan(
        endpoint=events.endpoint,
        replay_endpoint=events.replay_endpoint,
        topic=events.sent_topic,
        keys=None if events.keys is None else str(events.keys),
        nats=events.nats,
        nats_stream=events.nats_stream,
        block_tokens=config.block.tokens,
        token_ids=events.token_ids,
        format=events.format,
        rank=rank,
        pacing=Pacing(
            interval_s=events.interval_s,
            queue_blocks=events.queue_blocks,
            history_bytes=events.history_max,
            heartbeat_s=events.heartbeat_s,
        ),
    )
    feed = Feed(
        plan.pacing.queue_blocks,
        lambda: {tier: told(*index.admin.published(tier)) for tier in index.tiers},
        token_ids=plan.token_ids,
        count=metrics.told,
    )
    if events.publisher == "process":
        process = PublisherProcess(plan, feed, metrics.told)
        try:
            return RunningPublisher(feed, process.close) if process.start() else None
        except OSError as error:
            _log.warning("a thread tells block events, as no process can be started: %s", error)
    return _thread(plan, feed, metrics)


def _thread(plan: PublisherPlan, feed: Feed, metrics: Metrics) -> RunningPublisher | None:
    outlets = plan.outlets()
    if not outlets:
        return None
    publisher = plan.publisher(feed.content(), feed.items, outlets, metrics.told)
    publisher.start(failed=feed.close)
    return RunningPublisher(feed, publisher.close)


def check_events(config: Config) -> None:
    """Raise ConfigError if a server could not keep its models' events apart."""
    events, models = config.events, config.server.models
    if models > 1 and (events.endpoint or events.nats):
        raise ConfigError(
            f"events of {models} models (server.models) would be published at one address: start a "
            "server for each model, with its own events.endpoint and events.topic, or set "
            "server.models to 1"
        )


def endpoints(config: Config, rank: int | None = None) -> dict[str, str]:
    """Return where events can be had, in the form that goes into a cluster directory."""
    events = config.events
    found = {"topic": events.sent_topic} if events.endpoint or events.nats else {}
    if events.endpoint:
        found["events"] = rank_endpoint(events.endpoint, rank).removeprefix("@")
    if events.endpoint and events.replay_endpoint:
        found["replay"] = rank_endpoint(events.replay_endpoint, rank).removeprefix("@")
    if events.nats:
        found["nats"] = events.nats
    return found
