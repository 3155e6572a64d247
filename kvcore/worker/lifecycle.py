"""Opening the tiers of a rank's worker at the start, and closing the worker at the end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvcore.errors import KVCoreError, TierUnavailable, UnsupportedError
from kvcore.telemetry.metrics import Metrics
from kvcore.tiers.base import Tier
from kvcore.worker.refusing import DeadTier, RefusingWorker
from kvcore.worker.worker import KVWorker

__all__ = ["RankParts", "TierOpener", "close_worker", "open_tiers", "refuse_tier", "refusing_parts"]

_log = logging.getLogger("kvcore.connector")

TierOpener = Callable[[str, dict[str, Any]], Tier]
"""Opens a tier by its name and the options from the leader; raises a KVCoreError."""


@dataclass(frozen=True)
class RankParts:
    """A rank's worker, its metrics, and what opens the tiers that its leader names."""

    worker: KVWorker | RefusingWorker
    metrics: Metrics
    open_tier: TierOpener


def refusing_parts() -> RankParts:
    """Return the parts of a rank that takes no work, so that its leader learns of it."""
    return RankParts(RefusingWorker(), Metrics(), refuse_tier)


def refuse_tier(name: str, rank_options: Mapping[str, Any]) -> Tier:
    """Refuse to open a tier: the `TierOpener` of a rank that takes no work."""
    raise UnsupportedError(f"tier {name!r} is not opened: this worker stores nothing")


def open_tiers(
    worker: KVWorker | RefusingWorker,
    opener: TierOpener,
    tiers: Mapping[str, dict[str, Any]],
) -> None:
    """Open tiers with the options that the leader sent. Does I/O.

    A tier that cannot be opened is logged, and fails every read and write.
    """
    for name, options in tiers.items():
        try:
            tier = opener(name, options)
        except KVCoreError as error:
            _log.error("tier %s cannot be opened here: %s", name, error)
            tier = DeadTier(TierUnavailable(str(error)))
        worker.open_tier(name, tier)


def close_worker(worker: KVWorker | RefusingWorker) -> None:
    """Finish the saves in flight and flush them. Blocks.

    Nothing that was saved is lost. What could not be finished is logged.
    """
    try:
        if not worker.close():
            _log.warning("transfers still hung at shutdown; what they wrote is not published")
    except KVCoreError as error:
        _log.error("shutdown: %s", error)
