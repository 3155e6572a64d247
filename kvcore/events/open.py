"""The publisher that `[events]` asks for."""

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
    """A publisher that runs: what is noted in ``feed`` is published until ``close``, which sends
    what is queued and takes some seconds at most."""

    feed: Feed
    close: Callable[[], None]


def open_events(
    config: Config, index: BlockIndex, metrics: Metrics, rank: int | None = None
) -> RunningPublisher | None:
    """A publisher that runs; None where no bus is set, or none can be had.

    A bus that cannot be had is named in the log: the engine serves without its events. ``rank`` is
    the data-parallel rank. On the leader's thread; a process takes a moment to start.
    """
    events = config.events
    if not (events.endpoint or events.nats):
        return None
    plan = PublisherPlan(
        endpoint=events.endpoint,
        replay_endpoint=events.replay_endpoint,
        topic=events.topic,
        nats=events.nats,
        nats_stream=events.nats_stream,
        block_tokens=config.block.tokens,
        token_ids=events.token_ids,
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
        lambda: {tier: index.admin.published(tier) for tier in index.tiers},
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
    publisher.start()
    return RunningPublisher(feed, publisher.close)


def check_events(config: Config) -> None:
    """Raises ConfigError where a server could not tell its models' events apart."""
    events, models = config.events, config.server.models
    if models > 1 and (events.endpoint or events.nats):
        raise ConfigError(
            f"events of {models} models (server.models) would be told at one address: start a "
            "server for each model, with events.endpoint and events.topic of its own, or set "
            "server.models to 1"
        )


def endpoints(config: Config, rank: int | None = None) -> dict[str, str]:
    """Where events are had, as a directory tells it."""
    events = config.events
    told = {"topic": events.topic} if events.endpoint or events.nats else {}
    if events.endpoint:
        told["events"] = rank_endpoint(events.endpoint, rank)
    if events.endpoint and events.replay_endpoint:
        told["replay"] = rank_endpoint(events.replay_endpoint, rank)
    if events.nats:
        told["nats"] = events.nats
    return told
