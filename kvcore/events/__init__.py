"""What tiers begin and cease to hold, told to routers and other consumers.

    BlockIndex ──▶ Feed ──▶ Publisher ──▶ ZMQ, NATS JetStream ──▶ Subscriber, vLLM's consumers

Off until ``events.endpoint`` or ``events.nats`` is set. `docs/events.md` tells the format.
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
