"""Verification of stores that no engine uses: every record, and every block's checksum.

A block whose bytes are not those that were written is removed, as a read would do: its record is
erased in every shard. Torn records are erased too. Stores in use, and stores of another version,
are reported and left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvcore.errors import ConfigError, FormatError, TierUnavailable
from kvcore.memory.arena import slot_bytes
from kvcore.memory.hugepages import Pages
from kvcore.tiers.disk.files import DataFile, IndexFile, Piece
from kvcore.tiers.disk.format import Table, read_table, shard_files, suspect_slots
from kvcore.tiers.disk.store import exclusive, lock_store, stores_under, truncate
from kvcore.tiers.geometry import RECORD_NBYTES, Geometry
from kvcore.tiers.guard import BlockGuard

__all__ = ["BadBlock", "StoreReport", "StoreState", "scrub"]

_AT_ONCE_NBYTES = 64 << 20
_NAMED = 100  # bad blocks that a report names; the others are only counted


class StoreState(str, Enum):
    """The result of scrubbing a store."""

    WHOLE = "whole"
    DAMAGED = "damaged"
    IN_USE = "in use"
    NOT_READ = "not read"


class BadBlock(NamedTuple):
    """A block that is not whole, and the reason."""

    shard: int
    slot: int
    key: bytes
    why: str


@dataclass
class StoreReport:
    """What scrubbing found in a store.

    Args:
        folder: of the store.
        state: the result.
        why: the reason, if the store was not read.
        blocks: the number of blocks that are whole in every shard of the folder.
        partial: the number of blocks that some shard lacks. An engine that is killed leaves such
            blocks. They are never served.
        torn: the number of records that are neither valid nor empty.
        num_bad: the number of blocks that are not whole.
        erased: the number of records and blocks that were erased.
        nbytes: the number of bytes that were read.
        bad: the first 100 of the bad blocks.
    """

    folder: Path
    state: StoreState = StoreState.WHOLE
    why: str = ""
    blocks: int = 0
    partial: int = 0
    torn: int = 0
    num_bad: int = 0
    erased: int = 0
    nbytes: int = 0
    bad: list[BadBlock] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values, for JSON."""
        return {
            "store": str(self.folder),
            "state": self.state.value,
            "why": self.why,
            "blocks": self.blocks,
            "partial": self.partial,
            "torn_records": self.torn,
            "bad_blocks": self.num_bad,
            "erased": self.erased,
            "bytes": self.nbytes,
            "bad": [
                {"shard": bad.shard, "slot": bad.slot, "key": bad.key.hex(), "why": bad.why}
                for bad in self.bad
            ],
        }


def scrub(
    path: Path,
    *,
    erase: bool = True,
    done: Callable[[int], object] = lambda nbytes: None,
    guards: Sequence[BlockGuard] = (),
) -> Iterator[StoreReport]:
    """Verify the stores under ``path``, and yield a report of each. Blocks while it reads.

    A store that one of the ``guards`` wrote is verified with it. Without the guard of a store only
    checksums are verified, which tell rot and not forgery.

    ``done`` is called with the number of bytes after each batch of reads. Each store's lock is held
    while the store is read. Without ``erase`` nothing is changed. Raises ConfigError if there is no
    such folder, and TierUnavailable if it cannot be read.
    """
    if not path.is_dir():
        raise ConfigError(f"{path} is not a folder: give the folder that disk.path names")
    try:
        with exclusive(path):
            folders = [folder for base in sorted(path.iterdir()) for folder in stores_under(base)]
        for folder in sorted(folders):
            yield _scrub_store(path, folder, erase, done, {one.name: one for one in guards})
    except OSError as error:
        raise TierUnavailable(f"cannot read {path}: {error}") from error


def _scrub_store(
    path: Path,
    folder: Path,
    erase: bool,
    done: Callable[[int], object],
    guards: Mapping[str, BlockGuard],
) -> StoreReport:
    report = StoreReport(folder)
    with ExitStack() as locks:
        with exclusive(path):  # an engine that made room may have removed the store
            lock = lock_store(folder) if folder.is_dir() else None
        if lock is None:
            report.state, report.why = (
                StoreState.IN_USE,
                "an engine uses it: scrub it when that engine has ended",
            )
            return report
        locks.callback(lock.close)
        try:
            geometry = Geometry.load(folder)
        except FormatError as error:
            report.state, report.why = StoreState.NOT_READ, str(error)
            return report
        _Scrub(folder, geometry, erase, report, done, guards.get(geometry.cipher)).run()
    if report.num_bad or report.torn:
        report.state = StoreState.DAMAGED
    return report


class _Scrub:
    """The scrubbing of one store, whose lock is held."""

    def __init__(
        self,
        folder: Path,
        geometry: Geometry,
        erase: bool,
        report: StoreReport,
        done: Callable[[int], object],
        guard: BlockGuard | None,
    ) -> None:
        self._folder = folder
        self._geometry = geometry
        self._erase_bad = erase
        self._report = report
        self._done = done
        self._guard = guard
        self._bad_slots: set[int] = set()

    def run(self) -> None:
        """Verify all shards, fill the report, and erase bad blocks if that is wanted."""
        tables = [self._shard(shard) for shard in self._geometry.shards]
        whole = tables[0]
        for table in tables[1:]:
            whole = whole.also_in(table)
        seen = np.unique(np.concatenate([table.slots for table in tables]))
        good = np.setdiff1d(whole.slots, list(self._bad_slots))
        self._report.blocks = len(good)
        self._report.partial = len(np.setdiff1d(seen, list(self._bad_slots))) - len(good)
        if self._erase_bad:
            self._erase_everywhere(sorted(self._bad_slots))

    def _shard(self, shard: int) -> Table:
        """Verify a shard. Return its valid records."""
        data, index = shard_files(self._folder, shard)
        if not index.exists():
            return Table.empty()
        sealed = self._guard is not None or not self._geometry.cipher
        table, torn = read_table(index, self._guard, sealed=sealed)
        self._report.torn += torn
        if torn and self._erase_bad:
            self._erase_torn(index, table)
        shape = self._geometry.shard_shape(shard)
        size = data.stat().st_size if data.exists() else 0
        for place in np.flatnonzero(table.rows["nbytes"] != shape.nbytes):
            self._found(shard, table, int(place), "its record is of a block of another size")
        inside = (table.slots + 1) * slot_bytes(shape) <= size
        for place in np.flatnonzero(~inside & (table.rows["nbytes"] == shape.nbytes)):
            self._found(shard, table, int(place), "the data file ends before it")
        readable = np.flatnonzero(inside & (table.rows["nbytes"] == shape.nbytes))
        if len(readable):
            self._read(shard, table, readable.tolist(), data)
        return table

    def _read(self, shard: int, table: Table, places: list[int], data: Path) -> None:
        """Read and verify the blocks of the rows ``places``."""
        nbytes = self._geometry.shard_shape(shard).nbytes
        slot_nbytes = slot_bytes(self._geometry.shard_shape(shard))
        at_once = max(1, min(_AT_ONCE_NBYTES // slot_nbytes, len(places)))
        with ExitStack() as stack:
            file = stack.enter_context(
                closing(DataFile(data, slot_nbytes, num_slots=None, io_threads=2))
            )
            pages = stack.enter_context(closing(Pages(at_once * slot_nbytes)))
            views = [pages.view[i * slot_nbytes : (i + 1) * slot_nbytes] for i in range(at_once)]
            for first in range(0, len(places), at_once):
                some = places[first : first + at_once]
                pieces = [Piece(i, int(table.slots[at]), [views[i]]) for i, at in enumerate(some)]
                for i, outcome in file.read(pieces):
                    self._judge(shard, table, some[i], views[i][:nbytes], outcome)
                self._report.nbytes += len(some) * nbytes
                self._done(len(some) * nbytes)
            for view in views:
                view.release()

    def _judge(
        self, shard: int, table: Table, place: int, block: memoryview, outcome: int | OSError
    ) -> None:
        record = table.record(place)
        if isinstance(outcome, OSError):
            self._found(shard, table, place, f"it cannot be read: {outcome}", sure=False)
        elif not record.fits([block]):
            self._found(shard, table, place, "its bytes are not those written")
        elif self._guard is not None and record.mismatch(
            self._guard, [block], self._geometry.shard_name(shard)
        ):
            self._found(shard, table, place, "it was written without this secret or key")

    def _found(self, shard: int, table: Table, place: int, why: str, *, sure: bool = True) -> None:
        """Report a bad block, and mark it for erasure.

        A block that could not be read (``sure`` is False) is not erased: a later read may succeed.
        """
        slot, key = int(table.slots[place]), bytes(table.rows[place]["key"])
        self._report.num_bad += 1
        if len(self._report.bad) < _NAMED:
            self._report.bad.append(BadBlock(shard, slot, key, why))
        if sure:
            self._bad_slots.add(slot)

    def _erase_torn(self, index: Path, table: Table) -> None:
        with closing(IndexFile(index)) as file:
            for slot in suspect_slots(index, table):
                file.erase(slot)
                self._report.erased += 1
        truncate(index, index.stat().st_size // RECORD_NBYTES * RECORD_NBYTES)

    def _erase_everywhere(self, slots: list[int]) -> None:
        for shard in self._geometry.shards:
            _, index = shard_files(self._folder, shard)
            if slots and index.exists():
                with closing(IndexFile(index)) as file:
                    for slot in slots:
                        file.erase(slot)
                    file.sync()
        self._report.erased += len(slots)
