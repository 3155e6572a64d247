"""What a tier is made from, and what its plugin offers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from kvcore.config.schema_cluster import ClusterConfig
    from kvcore.tiers.base import BlockRecord, Tier
    from kvcore.tiers.finder import Finder
    from kvcore.tiers.geometry import Geometry

__all__ = ["ClearRecord", "PreparedTier", "TierContext", "TierPlugin"]


@dataclass(frozen=True)
class TierContext:
    """What a backing tier is made from.

    Args:
        name: of the tier, as the settings have it.
        geometry: the model, the shape of a block, and each rank's KV heads and layers. Stored bytes
            can be read only if they fit it.
        capacity: in bytes, the total over all ranks.
        options: the tier's own settings.
        rank: which rank opens the tier.
        rank_options: those of the leader's `PreparedTier`; empty without a ``prepare``.
        share: how many leaders divide the capacity between them.
        cluster: the settings of `[cluster]`, for tiers that find other nodes through it.
        state_folders: folders for what a leader must leave to its successor, the best first.
        mac_key: the key of the MAC that each stored block must have; empty if there is no
            ``namespace.secret``.
    """

    name: str
    geometry: Geometry
    capacity: int
    options: Mapping[str, Any] = field(default_factory=dict)
    rank: int = 0
    rank_options: Mapping[str, Any] = field(default_factory=dict)
    share: int = 1
    cluster: ClusterConfig | None = None
    state_folders: Sequence[Path] = ()
    mac_key: bytes = field(default=b"", repr=False)

    @property
    def slot_nbytes(self) -> int:
        """Bytes of a slot of this rank: its part of one block, rounded up to 4096."""
        return self._slot_nbytes(self.rank)

    @property
    def num_slots(self) -> int:
        """Blocks that fit into this leader's share of ``capacity``, over all ranks."""
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


class ClearRecord(Protocol):
    """Records clears of a tier durably, so that they hold after a restart.

    The ranks also erase the blocks, but the erasing may fail, and an engine that is killed does not
    get that far. No call blocks.
    """

    def cleared(self, namespace: bytes | None, writing: Sequence[int] = ()) -> None:
        """Record a clear: blocks of a namespace (None: of all) written until now are void.

        Writes to the slots ``writing`` are still under way. What they leave there is void too,
        whenever it lands. Call `landed` when they have ended.
        """

    def landed(self, slots: Sequence[int]) -> None:
        """Record that writes of removed blocks to ``slots`` have ended.

        What the slots hold now is void. What is written to them later is not.
        """


@dataclass(frozen=True)
class PreparedTier:
    """What the leader knows of a tier before any rank has opened it.

    Args:
        num_slots: blocks that the tier has room for.
        records: the blocks that every rank holds whole.
        rank_options: plain data (JSON) that goes to each rank.
        release: called once, after the ranks have closed their tiers.
        foreign: True if records may lie in slots beyond ``num_slots``. Those are only read.
        finder: asks a store that other hosts write to which blocks it holds.
        node: the address at which others find this engine's blocks, if each engine keeps its own.
        torn: records that were found and dropped, because they were damaged or forged.
        clears: records clears durably. It is for a tier that outlives the engine.
    """

    num_slots: int
    records: Sequence[BlockRecord] = ()
    rank_options: Mapping[str, Any] = field(default_factory=dict)
    release: Callable[[], None] = _nothing
    foreign: bool = False
    finder: Finder | None = None
    node: str = ""
    torn: int = 0
    clears: ClearRecord | None = None


@dataclass(frozen=True)
class TierPlugin:
    """A kind of backing tier. ``medium`` is "disk", "remote" or "memory".

    ``factory`` opens the tier, once in each rank. ``prepare`` is for a tier that outlives the
    engine or is shared. It runs once in the leader, before any rank opens the tier; without it the
    tier starts empty. Both raise TierUnavailable if the medium cannot be used, and ConfigError if
    the options do not fit.
    """

    name: str
    medium: str
    factory: Callable[[TierContext], Tier]
    prepare: Callable[[TierContext], PreparedTier] | None = None
