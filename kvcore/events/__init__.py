"""Block events: which blocks each tier holds, published for routers and other consumers.

    BlockIndex ──▶ Feed ──▶ Publisher ──▶ ZMQ, NATS JetStream ──▶ Subscriber, vLLM's consumers

Off until ``events.endpoint`` or ``events.nats`` is set. `docs/events.md` describes the format.

    feed               the bounded queue between the leader and the publisher
    record, frames     events as bytes: in the queue, and on the socket to a process
    publisher          numbers and sends batches, answers those that missed some
    process            runs the publisher in a process; publisher_process is that process
    plan, open         what is published where, from settings
    token_cache        tokens of blocks, for events that carry them
    wire               the bytes on the bus
    zmq_bus, nats_bus  the buses
    view               `Subscriber`, a consumer's view of one publisher
"""

from kvcore.events.feed import Content, Feed
from kvcore.events.plan import PublisherPlan
from kvcore.events.process import PublisherProcess
from kvcore.events.publisher import Outlet, Pacing, Publisher, ReplayRequest
from kvcore.events.view import MessageSource, Subscriber
from kvcore.events.wire import Message

__all__ = [
    "Content",
    "Feed",
    "Message",
    "MessageSource",
    "Outlet",
    "Pacing",
    "Publisher",
    "PublisherPlan",
    "PublisherProcess",
    "ReplayRequest",
    "Subscriber",
]
