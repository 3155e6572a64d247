"""What a worker opens of the disk tier: the leader's choice of stores, and how to access files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["STORE_SHIFT", "DiskAccess", "MountedStore"]

STORE_SHIFT = 40
"""A slot number is ``store << STORE_SHIFT | slot``. Store 0 is the tier's own."""


@dataclass(frozen=True)
class MountedStore:
    """The stores that a leader prepared and its workers open.

    Args:
        folder: of the tier's own store, which exists and which no other engine uses.
        num_slots: the most blocks that the store may hold.
        foreign: the folders of stores with the same base geometry, by store number. They are read
            and never written.
        clock: the origin of the leader's stamps (`Stamps.origin`); None for the worker's own.
    """

    folder: Path
    num_slots: int
    foreign: Mapping[int, Path] = field(default_factory=dict)
    clock: Mapping[str, Any] | None = None

    def to_options(self) -> dict[str, Any]:
        """Return the value as plain data, for `from_options` in a worker."""
        return {
            "folder": str(self.folder),
            "num_slots": self.num_slots,
            "foreign": {str(number): str(path) for number, path in self.foreign.items()},
            "clock": self.clock,
        }

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> MountedStore:
        """Return the value that `to_options` wrote."""
        foreign = {int(number): Path(path) for number, path in options["foreign"].items()}
        return cls(Path(options["folder"]), options["num_slots"], foreign, options.get("clock"))


@dataclass(frozen=True)
class DiskAccess:
    """How a worker reads and writes its shard.

    Args:
        direct_io: "auto", "on" or "off". With "on" a tier raises TierUnavailable if the file system
            refuses direct I/O.
        io_threads: threads for reads and writes that the kernel's queue cannot take, for foreign
            stores, and for decryption.
        sync_interval_s: writes are flushed to the medium within so many seconds, by a thread of
            its own; at 0, before a write returns.
        device_sums: whether the records of new blocks carry the sum that `Tier.read_device`
            verifies blocks by.
    """

    direct_io: str = "auto"
    io_threads: int = 4
    sync_interval_s: float = 5.0
    device_sums: bool = False
