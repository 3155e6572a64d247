"""The control plane of one model: what is loaded, saved, moved and removed.

It runs on the leader's thread and does no I/O.
"""

from __future__ import annotations

__all__ = [
    "HOST",
    "Backing",
    "Event",
    "Hit",
    "KVManager",
    "Manager",
    "Readiness",
    "TokenPublisher",
    "TransferOptions",
    "Transport",
    "WritePolicy",
]

from kvcore.manager.base import (
    HOST,
    Backing,
    Event,
    Hit,
    Manager,
    Readiness,
    TransferOptions,
    Transport,
    WritePolicy,
)
from kvcore.manager.manager import KVManager
from kvcore.manager.offloader import TokenPublisher
