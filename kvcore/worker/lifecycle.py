"""What every worker side does with its rank's worker, at the start and at the end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from kvcore.errors import KVCoreError, TierUnavailable, UnsupportedError
from kvcore.tiers.base import Tier
from kvcore.worker.refusing import DeadTier, RefusingWorker
from kvcore.worker.worker import KVWorker

__all__ = ["TierOpener", "close_worker", "open_tiers", "refuse_tier"]

_log = logging.getLogger("kvcore.connector")

TierOpener = Callable[[str, dict[str, Any]], Tier]
"""Opens a tier by its name and what the leader was told of it; raises a KVCoreError."""


def refuse_tier(name: str, told: Mapping[str, Any]) -> Tier:
    """`TierOpener` of a rank that takes no work."""
    raise UnsupportedError(f"tier {name!r} is not opened: this worker stores nothing")


def open_tiers(
    worker: KVWorker | RefusingWorker,
    opener: TierOpener,
    told: Mapping[str, dict[str, Any]],
) -> None:
    """Open tiers with what the leader was told of them. Does I/O. One that cannot be had is named
    in the log, and fails every read and write."""
    for name, options in told.items():
        try:
            tier = opener(name, options)
        except KVCoreError as error:
            _log.error("tier %s cannot be opened here: %s", name, error)
            tier = DeadTier(TierUnavailable(str(error)))
        worker.open_tier(name, tier)


def close_worker(worker: KVWorker | RefusingWorker) -> None:
    """Finish saves in flight and flush them; nothing that was saved is lost. Blocks, and names in
    the log what could not be finished."""
    try:
        if not worker.close():
            _log.warning("transfers still hung at shutdown; what they wrote is not published")
    except KVCoreError as error:
        _log.error("shutdown: %s", error)
