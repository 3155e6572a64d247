"""What a tier is made from, and what its plugin offers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcore.config.schema_cluster import ClusterConfig
    from kvcore.tiers.base import BlockRecord, Tier
    from kvcore.tiers.geometry import Geometry
    from kvcore.tiers.remote.lookup import Finder

__all__ = ["PreparedTier", "TierContext", "TierPlugin", "_nothing"]


@dataclass(frozen=True)
class TierContext:
    """What a backing tier is made from.

    ``capacity`` is in bytes, the total over all ranks. ``geometry`` tells the model, the shape of a
    block and each rank's KV heads and layers: stored bytes are readable only where it fits.
    ``rank_options`` is what the leader's ``prepare`` returned, empty without one. ``share`` is the
    number of leaders that divide the capacity. ``cluster`` is `[cluster]`, for what finds others
    through it.
    ``notes`` are folders for what a leader must leave to the next one, the best first.
    """

    name: str
    geometry: Geometry
    capacity: int
    options: Mapping[str, Any] = field(default_factory=dict)
    rank: int = 0
    rank_options: Mapping[str, Any] = field(default_factory=dict)
    share: int = 1
    cluster: ClusterConfig | None = None
    notes: Sequence[Path] = ()

    @property
    def slot_nbytes(self) -> int:
        """Bytes of a slot of this rank, a multiple of 4096: its part of one block."""
        return self._slot_nbytes(self.rank)

    @property
    def num_slots(self) -> int:
        """Blocks that fit into this leader's part of ``capacity``, over all ranks."""
        return (
            self.capacity
            // self.share
            // sum(map(self._slot_nbytes, range(len(self.geometry.heads))))
        )

    def _slot_nbytes(self, rank: int) -> int:
        from kvcore.memory.arena import slot_bytes

        return slot_bytes(self.geometry.shard_shape(rank))


def _nothing() -> None:
    return None


@dataclass(frozen=True)
class PreparedTier:
    """What the leader knows of a tier before any rank has opened it.

    ``records`` are the blocks that every rank holds whole. ``rank_options`` is sent to each rank
    and is plain data (JSON). ``release`` is called once, after the ranks have closed theirs. If
    ``foreign`` is True, records may lie in slots beyond ``num_slots``, which are read and never
    written. A store that other hosts write to has a ``finder``, which asks it what it holds. If
    each engine keeps its own blocks, ``node`` is the address at which others find them. A tier that
    outlives the engine has ``record_clear``: it writes down that the blocks of a namespace (None:
    all) are cleared, and returns at once. The ranks erase them too, unless the engine is killed
    before they do.
    """

    num_slots: int
    records: Sequence[BlockRecord] = ()
    rank_options: Mapping[str, Any] = field(default_factory=dict)
    release: Callable[[], None] = _nothing
    foreign: bool = False
    finder: Finder | None = None
    node: str = ""
    record_clear: Callable[[bytes | None], None] | None = None


@dataclass(frozen=True)
class TierPlugin:
    """A kind of backing tier: ``medium`` is "disk", "remote" or "memory".

    ``factory`` opens it, once in each rank. ``prepare``, for a tier that outlives the engine or is
    shared, runs once before that, in the leader; without it the tier starts empty. Both raise
    TierUnavailable when the medium cannot be used, ConfigError when the options do not fit.
    """

    name: str
    medium: str
    factory: Callable[[TierContext], Tier]
    prepare: Callable[[TierContext], PreparedTier] | None = None
