"""Rebuilding a tier's part of the index from what a scan of its medium found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from kvcore.index.state import IndexState
from kvcore.index.tables import NONE, PUBLISHED, ROOT, TierTable
from kvcore.index.values import ScannedBlock
from kvcore.model.keys import KEY_BYTES, ROOT_PARENT


def _nowhere(_key: bytes) -> None:
    """Stand in for `KeyTable.get` while the table is empty."""


class Restorer:
    """Publishes scanned blocks in bulk: columns at once, keys and slots one by one."""

    def __init__(self, state: IndexState) -> None:
        self._state = state
        self._nodes = state.nodes

    def restore(self, table: TierTable, records: Iterable[ScannedBlock]) -> list[ScannedBlock]:
        """Publish the records that fit and return the others; see `Admin.restore`."""
        ranked = sorted(records, key=attrgetter("stamp"), reverse=True)
        dropped = []
        claimed: list[ScannedBlock] = []
        place: dict[bytes, int] = {}
        find, state = self._nodes.keys.get if len(self._nodes.keys) else _nowhere, table.state
        claim = table.pool.claim
        for record in ranked:  # the latest first: it wins its key and its slot
            key = record.key
            new = key not in place and len(key) == KEY_BYTES
            held = new and (node := find(key)) is not None and state[node] != NONE
            if new and not held and claim(record.slot):
                place[key] = len(claimed)
                claimed.append(record)
            else:
                dropped.append(record)
        above = np.array([place.get(record.parent, ROOT) for record in claimed], dtype=np.int64)
        whole = self._rooted(table, claimed, above)
        for index in np.flatnonzero(~whole).tolist():
            table.pool.free(claimed[index].slot)
            dropped.append(claimed[index])
        renumbered = np.append(np.cumsum(whole) - 1, ROOT)  # ROOT (-1) picks the last: ROOT
        kept = [claimed[index] for index in np.flatnonzero(whole).tolist()]
        self._enter_restored(table, kept, renumbered[above[whole]])
        return dropped

    def _rooted(
        self, table: TierTable, records: Sequence[ScannedBlock], above: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_]:
        """Tell which records descend from a published block or a prompt's start, as a mask.

        ``above`` is the place of each record's parent, or ROOT if it is not among the records.
        """
        everyone = np.arange(len(records))
        tops = np.zeros(len(records), dtype=np.bool_)
        for index in np.flatnonzero(above == ROOT).tolist():
            tops[index] = self._may_stand_on(table, records[index].parent)
        up = np.where(above == ROOT, everyone, above)
        for _ in range(len(records).bit_length()):  # reaches the end of any chain
            up = up[up]
        rooted: npt.NDArray[np.bool_] = tops[up]
        return rooted

    def _may_stand_on(self, table: TierTable, parent: bytes) -> bool:
        node = self._nodes.keys.get(parent)
        published = node is not None and table.state[node] == PUBLISHED
        return parent == ROOT_PARENT or published

    def _nodes_for(self, records: Sequence[ScannedBlock]) -> list[int]:
        """Return a node for each record: that of the block in another tier, or a new one."""
        if len(self._nodes.keys):
            found = [self._nodes.keys.get(record.key) for record in records]
        else:
            found = [None] * len(records)
        new = [record for record, node in zip(records, found, strict=True) if node is None]
        self._state.reserve_nodes(len(new))
        made = iter(self._nodes.make_all([r.key for r in new], [r.namespace for r in new]))
        return [next(made) if node is None else node for node in found]

    def _enter_restored(
        self, table: TierTable, records: Sequence[ScannedBlock], above: npt.NDArray[np.int64]
    ) -> None:
        """Publish rooted records, newest first, with ``above`` as for `_rooted`."""
        made = self._nodes_for(records)
        nodes = np.array(made, dtype=np.int64)
        parents = np.append(nodes, ROOT)[above]
        inside = parents != ROOT
        for index in np.flatnonzero(~inside).tolist():
            if records[index].parent != ROOT_PARENT:
                parents[index] = self._nodes.keys[records[index].parent]
                table.add_child(int(parents[index]))
        np.frombuffer(self._nodes.parent, dtype=np.int32)[nodes] = parents
        np.frombuffer(table.slot, dtype=table.slot.typecode)[nodes] = [r.slot for r in records]
        np.frombuffer(table.state, dtype=np.uint8)[nodes] = PUBLISHED
        children = np.frombuffer(table.children, dtype=np.int32)
        np.add.at(children, parents[inside], 1)
        leaves = children[nodes] == 0
        del children  # a column with a live view cannot grow
        if table.quotas is not None:
            table.quotas.entered(made)
        self._nodes.recency.restore(nodes[::-1])
        if self._state.observer is not None:
            for record in records:
                self._state.notify(True, table, (record.key,), record.parent)
        for index in np.flatnonzero(leaves | table.policy.watches_blocks)[::-1].tolist():
            table.policy.stored(made[index], records[index].key)
            if leaves[index]:
                table.policy.add(made[index])
