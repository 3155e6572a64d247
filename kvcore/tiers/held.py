"""What each machine holds of a tier whose ranks are on several machines, and what all of them hold.

    another machine   Held.of       the slots and keys that its store has ──▶ the leader
    the leader        agree         a block is there if each machine has it in the same slot

A machine may have a disk that is empty, older than the others', or another engine's. Its records
are then in other slots or under other keys, and those blocks are misses. What all machines have
under a key is that block, whoever wrote it and when: a read verifies it by key on each rank.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore.model.keys import KEY_BYTES
from kvcore.tiers.base import BlockRecord
from kvcore.tiers.spec import PreparedTier

__all__ = ["MAX_TOLD", "Held", "agree"]

_log = logging.getLogger("kvcore.tiers.disk")

MAX_TOLD = 1 << 22
"""The most blocks of which a machine tells the leader: 96 MB. The oldest come first, because blocks
are written after those that they continue."""


@dataclass(frozen=True)
class Held:
    """What a machine holds of a tier. Pickled.

    ``slots`` are numbers of 8 bytes each, ascending, and ``keys`` their keys, packed.
    ``rank_options`` are for the ranks of that machine. ``why`` says why the tier cannot be used
    there; empty if it can.
    """

    num_slots: int = 0
    rank_options: Mapping[str, Any] = field(default_factory=dict)
    slots: bytes = b""
    keys: bytes = field(default=b"", repr=False)
    torn: int = 0
    why: str = ""

    @classmethod
    def of(cls, prepared: PreparedTier, rank_options: Mapping[str, Any]) -> Held:
        """Return what ``prepared`` holds, at most `MAX_TOLD` blocks."""
        records = prepared.records
        if len(records) > MAX_TOLD:
            _log.warning(
                "%d of %d blocks on this machine's disk are not used: its rank tells of %d at most",
                len(records) - MAX_TOLD,
                len(records),
                MAX_TOLD,
            )
            records = sorted(records, key=lambda record: record.stamp)[:MAX_TOLD]
        records = sorted(records)  # by slot
        slots = np.fromiter((record.slot for record in records), np.int64, len(records))
        keys = b"".join(record.key for record in records)
        return cls(prepared.num_slots, dict(rank_options), slots.tobytes(), keys, prepared.torn)


def agree(prepared: PreparedTier, others: Sequence[Held]) -> PreparedTier:
    """Return ``prepared``, the leader's own, with the slots and blocks that all machines have.

    Without ``others`` it is returned as it is, with what it mounts.
    """
    if not others:
        return prepared
    records, num_slots = list(prepared.records), prepared.num_slots
    for other in others:
        num_slots = min(num_slots, other.num_slots)
        records = _also_in(records, other)
    records = [record for record in records if record.slot < num_slots]
    torn = prepared.torn + sum(other.torn for other in others)
    return replace(prepared, num_slots=num_slots, records=records, torn=torn)


def _also_in(records: Sequence[BlockRecord], other: Held) -> list[BlockRecord]:
    """Return the records whose slot holds the same block on another machine."""
    slots: npt.NDArray[np.int64] = np.frombuffer(other.slots, np.int64)
    keys = np.frombuffer(other.keys, f"V{KEY_BYTES}")
    mine = np.fromiter((record.slot for record in records), np.int64, len(records))
    _, own, theirs = np.intersect1d(mine, slots, assume_unique=True, return_indices=True)
    return [
        records[i]
        for i, key in zip(own.tolist(), keys[theirs].tolist(), strict=True)
        if records[i].key == key
    ]
