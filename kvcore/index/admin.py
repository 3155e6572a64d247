"""What operators, restarts and event publishers ask of the index: listings, quotas, restore."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvcore.index.evictions import Evictions
from kvcore.index.quotas import Quota
from kvcore.index.restore import Restorer
from kvcore.index.state import IndexState
from kvcore.index.tables import NONE, PUBLISHED, ROOT
from kvcore.index.values import BlockInfo, Evicted, ScannedBlock
from kvcore.model.keys import KEY_BYTES, ROOT_PARENT


class Admin:
    """Whole-index queries, quotas and restore. Leader thread only; most calls are O(index)."""

    def __init__(self, state: IndexState, evictions: Evictions) -> None:
        self._state = state
        self._nodes = state.nodes
        self._tables = state.tables
        self._evictions = evictions
        self._restorer = Restorer(state)

    def list_blocks(self, namespace: bytes | None = None) -> list[BlockInfo]:
        """List published blocks, of one namespace or all, with their slot in each tier."""
        infos = []
        for node in self._nodes.keys.nodes():
            owner = self._nodes.space_names[self._nodes.space[node]]
            slots = {t.name: t.slot[node] for t in self._tables if t.state[node] == PUBLISHED}
            if slots and namespace in (None, owner):
                key, parent = self._nodes.key(node), self._nodes.parent_key(node)
                infos.append(BlockInfo(key, parent, owner, slots))
        return infos

    def leaves(
        self, tier: str, namespaces: Iterable[bytes] | None = None, prefix: bytes = b""
    ) -> tuple[list[bytes], int]:
        """Return the keys of a tier's published leaf blocks, and the number of all matching blocks.

        ``namespaces`` and ``prefix`` (of the key) restrict which blocks match. A leaf is a
        matching block without a matching child. O(index).
        """
        chosen = np.frombuffer(self._state.table(tier).state, dtype=np.uint8) == PUBLISHED
        if namespaces is not None:
            known = [self._nodes.space_ids[n] for n in namespaces if n in self._nodes.space_ids]
            chosen &= np.isin(np.frombuffer(self._nodes.space, dtype=np.uint32), known)
        nodes = np.flatnonzero(chosen)
        if prefix:
            keys = np.frombuffer(self._nodes.keys.pack(nodes), dtype=np.uint8)
            begin = keys.reshape(-1, KEY_BYTES)[:, : len(prefix)]
            nodes = nodes[(begin == np.frombuffer(prefix, dtype=np.uint8)).all(axis=1)]
        parents = np.frombuffer(self._nodes.parent, dtype=np.int32)[nodes]
        inner = np.zeros(len(chosen), dtype=np.bool_)
        inner[parents[parents != ROOT]] = True
        return [self._nodes.key(node) for node in nodes[~inner[nodes]].tolist()], len(nodes)

    def published(self, tier: str) -> tuple[bytes, bytes]:
        """Return the packed keys of a tier's published blocks, and their parent keys in that order.

        A block that starts a prompt has `ROOT_PARENT`. O(index), about 20 ms for a million blocks,
        because no object is made for a block as in `list_blocks`.
        """
        state = np.frombuffer(self._state.table(tier).state, dtype=np.uint8)
        nodes = np.flatnonzero(state == PUBLISHED)
        up = np.frombuffer(self._nodes.parent, dtype=np.int32)[nodes]
        parents = np.frombuffer(self._nodes.keys.pack(up), dtype=f"V{KEY_BYTES}").copy()
        parents[up == ROOT] = ROOT_PARENT
        return self._nodes.keys.pack(nodes), parents.tobytes()

    def usage(self, tier: str) -> dict[bytes, int]:
        """Count a tier's blocks, in any state, by namespace.

        O(index), a few ms for a million blocks.
        """
        state = np.frombuffer(self._state.table(tier).state, dtype=np.uint8)
        spaces = np.frombuffer(self._nodes.space, dtype=np.uint32)[state != NONE]
        names = self._nodes.space_names
        counts = np.bincount(spaces, minlength=1)
        return {names[space]: int(counts[space]) for space in np.flatnonzero(counts).tolist()}

    def free_slots(self, tier: str) -> list[int]:
        """Return the slots of a tier that the index does not use. O(slots).

        The medium may still hold bytes there: of dropped blocks, or left by an engine that was
        killed.
        """
        return self._state.table(tier).pool.free_slots()

    def quotas(self, tier: str) -> dict[str, Quota]:
        """Return the quotas of a tier by tenant."""
        quotas = self._state.table(tier).quotas
        shares = {} if quotas is None else quotas.shares
        return {
            tenant: Quota(share.used, share.limit, share.namespaces)
            for tenant, share in shares.items()
        }

    def set_quota(
        self, tier: str, tenant: str, namespaces: Iterable[bytes], blocks: int | None
    ) -> list[Evicted]:
        """Limit a tenant (all ``namespaces`` together) to ``blocks`` of a tier; None lifts it.

        Without namespaces, the tenant is everybody whom no other quota of the tier names. Blocks
        over the quota are evicted and returned. Blocks that are pinned or in flight stay, and
        nothing of the tenant is stored until it is below its quota. Raises `ConfigError` if a
        namespace belongs to another tenant. O(tier); see `kvcore.index.quotas`.
        """
        table = self._state.table(tier)
        if blocks is None:
            table.lift(tenant)
            return []
        chosen = frozenset(namespaces)
        table.grant(tenant, chosen, blocks, self._nodes)
        return self._evictions.within_quota(table, 0, next(iter(chosen), b""))[1]

    def restore(self, tier: str, records: Iterable[ScannedBlock]) -> list[ScannedBlock]:
        """Publish the blocks that a scan found, in any order; a later stamp counts as a later use.

        Returns the blocks that do not fit and must be dropped from the medium: orphans without a
        complete chain of ancestors, keys already held (the latest stamp wins), and slots that are
        taken or out of range. About 4 us a block.
        """
        return self._restorer.restore(self._state.table(tier), records)
