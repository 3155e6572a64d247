"""What tiers begin and cease to hold, told to routers and other consumers.

    BlockIndex ──▶ Feed ──▶ Publisher ──▶ ZMQ, NATS JetStream ──▶ Subscriber, vLLM's consumers

Off until ``events.endpoint`` or ``events.nats`` is set. `docs/events.md` tells the format.
"""

from kvcore.events.feed import Content, Feed
from kvcore.events.plan import Plan
from kvcore.events.process import PublisherProcess
from kvcore.events.publisher import Outlet, Pacing, Publisher, Request
from kvcore.events.view import Source, Subscriber
from kvcore.events.wire import Message

__all__ = [
    "Content",
    "Feed",
    "Message",
    "Outlet",
    "Pacing",
    "Plan",
    "Publisher",
    "PublisherProcess",
    "Request",
    "Source",
    "Subscriber",
]
