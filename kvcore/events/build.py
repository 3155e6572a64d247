"""The publisher that `[events]` asks for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from kvcore.config import Config
from kvcore.errors import ConfigError, UnsupportedError
from kvcore.events.publisher import Outlet, Pacing, Publisher
from kvcore.index import BlockIndex
from kvcore.metrics import Metrics

__all__ = ["check_events", "endpoints", "open_publisher", "rank_endpoint"]

_log = logging.getLogger("kvcore.events")


def open_publisher(
    config: Config, index: BlockIndex, metrics: Metrics, rank: int | None = None
) -> Publisher | None:
    """A publisher that runs; None where no bus is set, or none can be had.

    A bus that cannot be had is named in the log: the engine serves without its events. ``rank`` is
    the data-parallel rank: each has a port of its own, counted up from the one in the settings.
    """
    outlets = list(_outlets(config, rank))
    if not outlets:
        return None
    events = config.events
    publisher = Publisher(
        lambda: {tier: index.published(tier) for tier in index.tiers},
        outlets,
        config.block.tokens,
        pacing=Pacing(
            interval_s=events.interval_s,
            queue_blocks=events.queue_blocks,
            history_bytes=events.history_max,
            heartbeat_s=events.heartbeat_s,
        ),
        rank=rank,
        token_ids=events.token_ids,
        metrics=metrics,
    )
    publisher.start()
    return publisher


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


def rank_endpoint(endpoint: str, rank: int | None) -> str:
    """``endpoint`` for a data-parallel rank, as vLLM counts: the port, or the file's name, goes on.

    Raises ConfigError for a TCP endpoint without a port.
    """
    if not rank:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{rank}"
    address, colon, port = endpoint.rpartition(":")
    if not colon or not port.isdecimal():
        raise ConfigError(f"given the endpoint {endpoint!r}; supported is tcp://ADDRESS:PORT")
    return f"{address}:{int(port) + rank}"


def _outlets(config: Config, rank: int | None) -> Iterator[Outlet]:
    makers: list[tuple[str, str, Callable[[Config, int | None], Outlet]]] = []
    if config.events.endpoint:
        makers.append((config.events.endpoint, "pyzmq", _zmq_outlet))
    if config.events.nats:
        makers.append((config.events.nats, "nats-py", _nats_outlet))
    for where, package, make in makers:
        try:
            yield make(config, rank)
        except (ImportError, UnsupportedError) as error:  # noqa: PERF203  one bus is no reason to lose the other
            _log.warning("no block events to %s: pip install %s (%s)", where, package, error)
        except ConfigError as error:
            _log.warning("no block events: %s", error)


def _zmq_outlet(config: Config, rank: int | None) -> Outlet:
    from kvcore.events.zmq_bus import ZmqOutlet

    events = config.events
    assert events.endpoint is not None
    replay = events.replay_endpoint
    return ZmqOutlet(
        rank_endpoint(events.endpoint, rank),
        rank_endpoint(replay, rank) if replay else None,
        events.topic,
    )


def _nats_outlet(config: Config, rank: int | None) -> Outlet:
    from kvcore.events.nats_bus import NatsOutlet

    events = config.events
    assert events.nats is not None
    topic = f"{events.topic}-dp{rank}" if rank else events.topic
    return NatsOutlet(events.nats, events.nats_stream, topic)
