"""What is published where, as data from which a thread or a process makes its publisher."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from kvcore.errors import ConfigError, UnsupportedError
from kvcore.events.feed import Content, CountBlocks, Item
from kvcore.events.publisher import Outlet, Pacing, Publisher

__all__ = ["PublisherPlan", "rank_endpoint"]

_log = logging.getLogger("kvcore.events")


class PublisherPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one publisher.

    ``rank`` is the data-parallel rank. Each rank has its own port, counted up from ``endpoint`` and
    ``replay_endpoint``, and its own NATS topic. The other fields are those of the settings
    ``[events]``.
    """

    endpoint: str | None = None
    replay_endpoint: str | None = None
    topic: str = "kvcore"
    keys: str | None = None
    nats: str | None = None
    nats_stream: str = "KVCORE"
    block_tokens: int
    token_ids: bool = False
    format: str = "kvcore"
    rank: int | None = None
    pacing: Pacing = Pacing()

    @property
    def as_vllm(self) -> bool:
        """True if everything is sent as vLLM sends it."""
        return self.format == "vllm"

    def outlets(self) -> list[Outlet]:
        """Open the buses.

        One that cannot be opened is logged, and the engine serves without its events.
        """
        return list(self._outlets())

    def publisher(
        self,
        content: Content,
        take: Callable[[], Sequence[Item]],
        outlets: Sequence[Outlet],
        count: CountBlocks,
    ) -> Publisher:
        """Return the publisher; the arguments are those of `Publisher`."""
        return Publisher(
            content,
            take,
            outlets,
            self.block_tokens,
            pacing=self.pacing,
            rank=self.rank,
            token_ids=self.token_ids,
            as_vllm=self.as_vllm,
            count=count,
        )

    def _outlets(self) -> Iterator[Outlet]:
        makers: list[tuple[str, str, Callable[[], Outlet]]] = []
        if self.endpoint:
            makers.append((self.endpoint, "pyzmq", self._zmq_outlet))
        if self.nats:
            makers.append((self.nats, "nats-py", self._nats_outlet))
        for where, package, make in makers:
            try:
                yield make()
            except (ImportError, UnsupportedError) as error:  # noqa: PERF203  one bus is no reason to lose the other
                _log.warning("no block events to %s: pip install %s (%s)", where, package, error)
            except ConfigError as error:
                _log.warning("no block events: %s", error)

    def _zmq_outlet(self) -> Outlet:
        from kvcore.events.zmq_bus import ZmqOutlet

        assert self.endpoint is not None
        replay = self.replay_endpoint
        return ZmqOutlet(
            rank_endpoint(self.endpoint, self.rank),
            rank_endpoint(replay, self.rank) if replay else None,
            self.topic,
            keys=None if self.keys is None else Path(self.keys),
            counts=not self.as_vllm,
        )

    def _nats_outlet(self) -> Outlet:
        from kvcore.events.nats_bus import NatsOutlet

        assert self.nats is not None
        topic = self.topic or "kvcore"  # a subject needs a name
        topic = f"{topic}-dp{self.rank}" if self.rank else topic
        return NatsOutlet(self.nats, self.nats_stream, topic)


def rank_endpoint(endpoint: str, rank: int | None) -> str:
    """Return ``endpoint`` for a data-parallel rank, counted as vLLM does: by port or by file name.

    Raises ConfigError for a TCP endpoint without a port.
    """
    if not rank:
        return endpoint
    if not endpoint.removeprefix("@").startswith("tcp://"):
        return f"{endpoint}_dp{rank}"
    address, colon, port = endpoint.rpartition(":")
    if not colon or not port.isdecimal():
        raise ConfigError(f"given the endpoint {endpoint!r}; supported is tcp://ADDRESS:PORT")
    return f"{address}:{int(port) + rank}"
