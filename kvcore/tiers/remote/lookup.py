"""Background lookups of how much of a prompt a remote store holds.

    leader's thread      ask ──▶ StoreQuery ······ found so far, ended?
                                    ▲
    the finder's threads            └── exists, in growing batches ──▶ store

The leader never waits. It reads the state of the query when the request is looked up again. Blocks
that are missing in this deployment's own split are looked up in the splits of other deployments
(`ShardRegistry`).

If a store has nodes, a second thread looks up the blocks that a node has promised. A node that does
not answer costs time, which must not delay other lookups.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from functools import partial

from kvcore._util.threads import GuardedThread
from kvcore.errors import TierError, TierUnavailable
from kvcore.tiers.finder import MAX_OPEN, Ends, Finder, Promise, StoreQuery
from kvcore.tiers.remote.base import BlockStore
from kvcore.tiers.remote.object_keys import Shard
from kvcore.tiers.remote.pending_deletes import PendingDeletes
from kvcore.tiers.remote.shard_registry import ShardRegistry

_log = logging.getLogger("kvcore.tiers.remote")

MAX_PENDING_DELETES = 1 << 20
"""Most blocks whose deletion is pending; the oldest are dropped first."""
DELETE_RETRY_S = 5.0
"""Seconds after which pending deletes are retried, even without a lookup."""
_ROUND = 32
"""Most queries answered by one round trip, so that short queries do not wait for each other."""


class StoreFinder(Finder):
    """Looks up and deletes blocks in ``store``, on threads of its own. Closing it closes the store.

    A block counts as held if the store has all ``shards`` of it, or all shards of another split
    that ``registry`` lists. ``lookup_s`` and ``absent_s`` are read by the leader, which measures
    the time. ``pending_deletes`` records on disk which deletes are pending, for the next leader.

    Any thread may call. Only `wait` and `close` block.
    """

    def __init__(
        self,
        store: BlockStore,
        shards: Sequence[Shard],
        *,
        name: str,
        registry: ShardRegistry | None = None,
        lookup_s: float = 0.5,
        absent_s: float = 2.0,
        pending_deletes: PendingDeletes | None = None,
    ) -> None:
        self.lookup_s = lookup_s
        self.absent_s = absent_s
        self._store = store
        self._shards = tuple(shards)
        self._registry = registry
        self._name = name
        self._changed = threading.Condition()
        self._open: list[StoreQuery] = []
        self._unwanted: list[bytes] = []
        self._pending_file = pending_deletes
        self._pending: dict[bytes, None] = {}  # deletes to be retried
        if pending_deletes is not None:
            self._pending = dict.fromkeys(pending_deletes.read()[-MAX_PENDING_DELETES:])
        self._retry_at = time.monotonic()
        self._answered = 0
        self._closed = False
        self._threads: dict[bool, GuardedThread] = {}
        self._start(False)

    def _start(self, node_only: bool) -> None:
        """Start the thread for ``node_only`` queries, or the one for all others."""
        name = f"kvcore-find-{self._name}{'-nodes' if node_only else ''}"
        serve, die = partial(self._serve, node_only), partial(self._die, node_only)
        self._threads[node_only] = thread = GuardedThread(name, serve, die)
        thread.start()

    def _die(self, node_only: bool, error: BaseException) -> None:
        """Fail the queries of a thread that has died. Nothing more is asked of it."""
        with self._changed:
            lost = [query for query in self._open if query.node_only == node_only]
            for query in lost:
                query.error = f"the thread that looks blocks up has stopped: {error!r}"
                query.ended = query.failed = True
            self._open = [query for query in self._open if not query.ended]
            self._answered += len(lost)
            unwanted, self._unwanted = ([], self._unwanted) if node_only else (self._unwanted, [])
            self._changed.notify_all()
        self._leave_deletes(unwanted)

    def _leave_deletes(self, keys: Sequence[bytes]) -> None:
        """Leave deletes, which no thread will carry out, to the next leader."""
        if not keys:
            return
        if self._pending_file is not None:
            self._pending_file.add(keys)
        _log.error("deleting %d blocks from store %s is left undone", len(keys), self._name)

    def is_node_only(self, promise: Promise | None) -> bool:
        return promise is not None and bool(promise.node) and self._store.has_nodes

    def ask(
        self, keys: Sequence[bytes], promise: Promise | None = None, ends: Ends | None = None
    ) -> StoreQuery | None:
        """Start a query. Returns None if too many queries are open or the finder is closed.

        Also returns None if the thread that would answer it has died. ``promise`` covers the first
        of these keys.
        """
        query = StoreQuery(keys, promise, ends)
        query.node_only = self.is_node_only(promise)
        with self._changed:
            if self._closed or len(self._open) >= MAX_OPEN:
                return None
            if query.node_only not in self._threads:
                self._start(query.node_only)
            if self._threads[query.node_only].error is not None:
                return None
            self._open.append(query)
            self._changed.notify_all()
        return query

    def cancel(self, query: StoreQuery) -> None:
        with self._changed:
            query.ended = True
            if query in self._open:
                self._open.remove(query)

    def held(self, keys: Sequence[bytes]) -> set[bytes]:
        found = self._held(dict.fromkeys(keys), "")
        with self._changed:
            unwanted = set(self._unwanted)
        return found - self._pending.keys() - unwanted

    def delete(self, keys: Sequence[bytes]) -> None:
        """Start deleting blocks. A failure is logged and retried when the store answers."""
        with self._changed:
            dead = self._threads[False].error is not None
            if not dead:
                self._unwanted += keys
                self._changed.notify_all()
        if dead:
            self._leave_deletes(keys)

    def wait(self, timeout: float) -> bool:
        with self._changed:
            if not self._open:
                return False
            answered = self._answered
            return self._changed.wait_for(lambda: self._answered != answered, timeout)

    def close(self, timeout: float = 5.0) -> None:
        """Attempt the requested deletes, then stop, and close the store. Idempotent.

        Blocks for at most ``timeout`` seconds. If a thread still hangs then, it is abandoned and
        the store stays open.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        threads = list(self._threads.values())
        until = time.monotonic() + timeout
        for thread in threads:
            thread.join(until - time.monotonic())
        if any(thread.is_alive() for thread in threads):
            _log.warning(
                "store %s does not answer at shutdown: its threads are abandoned", self._name
            )
        else:
            self._store.close()
            if self._pending_file is not None:
                self._pending_file.close()

    # -- the threads ------------------------------------------------------------------------

    def _serve(self, node_only: bool) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: (
                        self._due(node_only)
                        or (self._is_to_remove and not node_only)
                        or self._closed
                    ),
                    self._pause(node_only),
                )
                unwanted: list[bytes] = []
                if not node_only:
                    unwanted, self._unwanted = self._unwanted, unwanted
                if self._closed and not unwanted:
                    return
                round_ = self._due(node_only)[:_ROUND]
            if unwanted or (self._is_to_remove and not node_only):
                self._remove(unwanted)
            if round_:
                self._ask(round_)

    def _due(self, node_only: bool) -> list[StoreQuery]:
        """Return the open queries of a thread whose next batch is due."""
        now = time.monotonic()
        return [one for one in self._open if one.node_only == node_only and one.due_at <= now]

    @property
    def _is_to_remove(self) -> bool:
        return bool(self._unwanted or (self._pending and time.monotonic() >= self._retry_at))

    def _pause(self, node_only: bool) -> float | None:
        """Return the seconds until the next work is due; None if none is scheduled."""
        waiting = [query.due_at for query in self._open if query.node_only == node_only]
        if self._pending and not node_only:
            waiting.append(self._retry_at)
        return max(0.0, min(waiting) - time.monotonic()) if waiting else None

    def _ask(self, round_: Sequence[StoreQuery]) -> None:
        """Ask for what is due, one request per node.

        A node that does not answer thus fails no other query.
        """
        for node in dict.fromkeys(query.node for query in round_):
            self._ask_at(node, [query for query in round_ if query.node == node])

    def _ask_at(self, node: str, round_: Sequence[StoreQuery]) -> None:
        """Look up what is due of these queries, and tell them what was found, or the error."""
        batches = [query.due() for query in round_]
        held: set[bytes] | None = None
        why = ""
        try:
            held = self._held(dict.fromkeys(key for batch in batches for key in batch), node)
        except TierError as error:
            why = str(error)
            _log.warning("looking up blocks in store %s failed: %s", self._name, error)
        except Exception as error:  # noqa: BLE001 - thread boundary: the queries fail, the thread goes on
            why = f"{type(error).__name__}: {error}"
            _log.exception("a lookup in store %s failed unexpectedly", self._name)
        if held is not None and self._pending:
            held -= self._pending.keys()
            if not node:
                self._remove(())
        with self._changed:
            for query, batch in zip(round_, batches, strict=True):
                if held is None:
                    query.error = why
                    query.ended = query.failed = True
                elif not query.ended:
                    query.take([key in held for key in batch])
            self._count_ended(round_)

    def _count_ended(self, round_: Sequence[StoreQuery]) -> None:
        """Drop queries that have ended, and wake who waits. The caller holds the lock."""
        self._open = [query for query in self._open if not query.ended]
        self._answered += sum(query.ended for query in round_)
        self._changed.notify_all()

    def _held(self, keys: Iterable[bytes], node: str) -> set[bytes]:
        """Return the blocks that the store holds completely, in any split."""
        asked = list(keys)
        held = self._whole(asked, [self._shards], node)
        absent = [key for key in asked if key not in held]
        if absent and self._registry is not None:
            self._registry.refresh()
            held |= self._whole(absent, self._others(), node)
        return held

    def _others(self) -> list[tuple[Shard, ...]]:
        """Return the shards of a block in each split of other deployments."""
        if self._registry is None:
            return []
        return [tuple(map(self._shards[0].sibling, split)) for split in self._registry.others]

    def _whole(
        self, keys: Sequence[bytes], splits: Sequence[Sequence[Shard]], node: str
    ) -> set[bytes]:
        """Return the blocks of which the store holds every shard of one of the ``splits``."""
        names = [shard.name(key) for key in keys for split in splits for shard in split]
        if not names:
            return set()
        store = self._store
        found = store.exists_at(node, names) if node else store.exists(names)
        there = dict(zip(names, found, strict=True))
        return {
            key
            for key in keys
            if any(all(there[shard.name(key)] for shard in split) for split in splits)
        }

    def _remove(self, keys: Sequence[bytes]) -> None:
        """Delete these blocks, and those whose deletion is pending."""
        new = [key for key in dict.fromkeys(keys) if key not in self._pending]
        if self._pending_file is not None:
            self._pending_file.add(new)  # first, because this process may end at any time
        pending = [*self._pending, *new][-MAX_PENDING_DELETES:]
        self._pending = dict.fromkeys(
            pending
        )  # a new dict: another thread may be reading the old one
        try:
            shards = self._every_shard()
            self._store.delete(_names(pending, shards))
            if more := [shard for shard in self._every_shard() if shard not in shards]:
                self._store.delete(
                    _names(pending, more)
                )  # nodes have reported them in their answers
            pending = []
        except TierError as error:
            _log.warning(
                "deleting %d blocks from store %s failed: %s", len(pending), self._name, error
            )
        except Exception:  # noqa: BLE001 - thread boundary
            _log.exception("deleting from store %s failed unexpectedly", self._name)
        self._retry_at = time.monotonic() + DELETE_RETRY_S
        self._pending = dict.fromkeys(pending)
        file = self._pending_file
        if file is not None and (not pending or len(file) > 2 * MAX_PENDING_DELETES):
            file.replace(pending)

    def _every_shard(self) -> list[Shard]:
        """Return every shard that a value of a block may be, in any split."""
        if self._registry is not None:
            self._registry.refresh()
            if not self._registry.known:
                raise TierUnavailable("the splits of other engines are not known yet")
        splits = [self._shards, *self._others()]
        return list(dict.fromkeys(shard for split in splits for shard in split))


def _names(keys: Sequence[bytes], shards: Sequence[Shard]) -> list[str]:
    return [shard.name(key) for key in keys for shard in shards]
