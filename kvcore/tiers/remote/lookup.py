"""Asks a store, in the background, how much of a prompt it holds.

    leader's thread      ask ──▶ StoreQuery ······ found so far, ended?
                                    ▲
    the finder's threads            └── exists, in batches that grow ──▶ store

The leader never waits: it looks at the query when the request is looked up again. What is not
there as this deployment's ranks share a block is asked for as others do (`ShardRegistry`).

Where a store has nodes, what they have promised is asked by a thread of its own: a node that is
gone costs time, and not that of whoever asks for something else.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvcore.errors import TierError, TierUnavailable
from kvcore.tiers.remote.base import BlockStore
from kvcore.tiers.remote.object_keys import Shard
from kvcore.tiers.remote.pending_deletes import PendingDeletes
from kvcore.tiers.remote.shard_registry import ShardRegistry

_log = logging.getLogger("kvcore.tiers.remote")

MAX_OPEN = 256
MAX_PENDING_DELETES = 1 << 20
"""Blocks that a store still is to remove, the oldest forgotten first."""
DELETE_RETRY_S = 5.0
"""Seconds after which a store is asked again to remove them, though nobody asks it anything."""
PROMISE_POLL_S = 0.02
"""How often a store is asked for what another engine has promised to put there."""
_FIRST_WINDOW = 16
_MAX_WINDOW = 512
_ROUND = 32
"""Queries in one round: many short ones must not wait behind each other's round trips."""


class Promise(NamedTuple):
    """The first ``blocks`` of a prompt are being put into a store by another engine, and worth
    ``wait_s`` seconds of waiting. What is not found by then is computed. ``node`` is where that
    engine keeps what it puts (`BlockStore.node`); "" where it has not said so."""

    blocks: int
    wait_s: float
    node: str = ""

    def beyond(self, start: int) -> Promise | None:
        """What is promised of the blocks from ``start`` on; None where nothing is."""
        return self._replace(blocks=self.blocks - start) if self.blocks > start else None


class StoreQuery:
    """How many of ``keys``, from the first on, does the store hold?

    ``found`` of them are known to be there. ``ended``: no more will become known, and with
    ``failed`` that is because the store did not answer; ``error`` is why. What a ``promise`` says
    is on its way is asked for again as long as that is worth it. ``node_only``: of one node, which
    tells nothing of the store as a whole.
    """

    __slots__ = (
        "asked_at", "due_at", "ended", "error", "failed", "found", "keys", "node", "node_only",
        "promised", "until", "window",
    )  # fmt: skip

    def __init__(self, keys: Sequence[bytes], promise: Promise | None = None) -> None:
        self.keys = tuple(keys)
        self.found = 0
        self.ended = False
        self.failed = False
        self.error = ""
        self.asked_at = time.monotonic()
        self.due_at = self.asked_at
        self.promised = 0 if promise is None else min(promise.blocks, len(self.keys))
        self.node = "" if promise is None else promise.node
        self.node_only = False
        self.until = self.asked_at + (0.0 if promise is None else promise.wait_s)
        self.window = _FIRST_WINDOW

    def due(self) -> tuple[bytes, ...]:
        """The keys of its next batch."""
        return self.keys[self.found : self.found + self.window]

    def take(self, held: int) -> None:
        """Of the batch that was due, the first ``held`` are there."""
        short, now = held < self.window, time.monotonic()
        self.found += held
        if short and self.found < self.promised and now < self.until:
            self.due_at = now + PROMISE_POLL_S
            return
        self.ended = short or self.found == len(self.keys)
        self.window = min(2 * self.window, _MAX_WINDOW)


class Finder:
    """Queries to ``store``, which is closed with it. All ``shards`` of a block must be there, or
    all that ``registry`` knows of another deployment's. ``lookup_s`` and ``absent_s`` are for the
    leader, who keeps time. ``note`` is where it is written down what the store is still to remove,
    for the leader that comes after this one.

    Any thread may call; only `wait` and `close` block.
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
        note: PendingDeletes | None = None,
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
        self._note = note
        self._pending: dict[bytes, None] = {}  # to be removed, as soon as the store takes it
        if note is not None:
            self._pending = dict.fromkeys(note.read()[-MAX_PENDING_DELETES:])
        self._retry_at = time.monotonic()
        self._answered = 0
        self._closed = False
        self._threads: dict[bool, threading.Thread] = {}
        self._start(False)

    def _start(self, node_only: bool) -> None:
        """The thread for queries that are ``node_only``, or for the others."""
        name = f"kvcore-find-{self._name}{'-nodes' if node_only else ''}"
        thread = threading.Thread(target=self._serve, args=(node_only,), name=name, daemon=True)
        self._threads[node_only] = thread
        thread.start()

    def is_node_only(self, promise: Promise | None) -> bool:
        """Whether a query is one node's: `StoreQuery.node_only`. No I/O."""
        return promise is not None and bool(promise.node) and self._store.has_nodes

    def ask(self, keys: Sequence[bytes], promise: Promise | None = None) -> StoreQuery | None:
        """Begin to ask; None when too many queries are open, or it is closed. ``promise`` is of
        the first of these keys."""
        query = StoreQuery(keys, promise)
        query.node_only = self.is_node_only(promise)
        with self._changed:
            if self._closed or len(self._open) >= MAX_OPEN:
                return None
            self._open.append(query)
            if query.node_only not in self._threads:
                self._start(query.node_only)
            self._changed.notify_all()
        return query

    def drop(self, query: StoreQuery) -> None:
        """Nobody waits for this answer any more. What it found stays."""
        with self._changed:
            query.ended = True
            if query in self._open:
                self._open.remove(query)

    def delete(self, keys: Sequence[bytes]) -> None:
        """Begin to remove blocks from the store, for everyone. What fails is named in the log, is
        tried again when the store answers, and is not found meanwhile."""
        with self._changed:
            self._unwanted += keys
            self._changed.notify_all()

    def wait(self, timeout: float) -> bool:
        """Block until a query ends, at most ``timeout`` seconds; False when none is open."""
        with self._changed:
            if not self._open:
                return False
            answered = self._answered
            return self._changed.wait_for(lambda: self._answered != answered, timeout)

    def close(self, timeout: float = 5.0) -> None:
        """Stop asking. What was to be removed is removed first. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        threads = list(self._threads.values())
        until = time.monotonic() + timeout
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            _log.warning(
                "store %s still answers nothing at shutdown: it is left behind", self._name
            )
        else:
            self._store.close()
            if self._note is not None:
                self._note.close()

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
        """Open queries of a thread that need not wait before they are asked again."""
        now = time.monotonic()
        return [one for one in self._open if one.node_only == node_only and one.due_at <= now]

    @property
    def _is_to_remove(self) -> bool:
        return bool(self._unwanted or (self._pending and time.monotonic() >= self._retry_at))

    def _pause(self, node_only: bool) -> float | None:
        """Seconds until there is something to do; None where nothing waits."""
        waiting = [query.due_at for query in self._open if query.node_only == node_only]
        if self._pending and not node_only:
            waiting.append(self._retry_at)
        return max(0.0, min(waiting) - time.monotonic()) if waiting else None

    def _ask(self, round_: Sequence[StoreQuery]) -> None:
        """Ask what is due, each node's promises by themselves: one that is gone fails no others."""
        for node in dict.fromkeys(query.node for query in round_):
            self._ask_at(node, [query for query in round_ if query.node == node])

    def _ask_at(self, node: str, round_: Sequence[StoreQuery]) -> None:
        batches = [query.due() for query in round_]
        held: set[bytes] | None = None
        why = ""
        try:
            held = self._held(dict.fromkeys(key for batch in batches for key in batch), node)
        except TierError as error:
            why = str(error)
            _log.warning("store %s does not tell what it holds: %s", self._name, error)
        except Exception as error:  # noqa: BLE001 - thread boundary: the queries fail, the thread lives on
            why = f"{type(error).__name__}: {error}"
            _log.exception("asking store %s failed", self._name)
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
                    query.take([*(key in held for key in batch), False].index(False))
            ended = [query for query in round_ if query.ended]
            self._open = [query for query in self._open if not query.ended]
            self._answered += len(ended)
            self._changed.notify_all()

    def _held(self, keys: Iterable[bytes], node: str) -> set[bytes]:
        """The blocks that are whole, in whatever parts."""
        asked = list(keys)
        held = self._whole(asked, [self._shards], node)
        absent = [key for key in asked if key not in held]
        if absent and self._registry is not None:
            self._registry.refresh()
            held |= self._whole(absent, self._others(), node)
        return held

    def _others(self) -> list[tuple[Shard, ...]]:
        """The shards of a block as other deployments cut it."""
        if self._registry is None:
            return []
        return [tuple(map(self._shards[0].sibling, split)) for split in self._registry.others]

    def _whole(
        self, keys: Sequence[bytes], ways: Sequence[Sequence[Shard]], node: str
    ) -> set[bytes]:
        """The blocks of which all shards of one of the ``ways`` are there."""
        names = [shard.name(key) for key in keys for way in ways for shard in way]
        if not names:
            return set()
        store = self._store
        found = store.exists_at(node, names) if node else store.exists(names)
        there = dict(zip(names, found, strict=True))
        return {key for key in keys if any(all(there[s.name(key)] for s in way) for way in ways)}

    def _remove(self, keys: Sequence[bytes]) -> None:
        """Remove these, and what is pending."""
        new = [key for key in dict.fromkeys(keys) if key not in self._pending]
        if self._note is not None:
            self._note.add(new)  # first: this process may end at any time
        pending = [*self._pending, *new][-MAX_PENDING_DELETES:]
        self._pending = dict.fromkeys(pending)  # another thread may read the one before
        try:
            shards = self._every_shard()
            self._store.delete(_names(pending, shards))
            if more := [shard for shard in self._every_shard() if shard not in shards]:
                self._store.delete(_names(pending, more))  # nodes have said so with their answers
            pending = []
        except TierError as error:
            _log.warning("store %s keeps %d blocks: %s", self._name, len(pending), error)
        except Exception:  # noqa: BLE001 - thread boundary
            _log.exception("removing from store %s failed", self._name)
        self._retry_at = time.monotonic() + DELETE_RETRY_S
        self._pending = dict.fromkeys(pending)
        if self._note is not None and (not pending or len(self._note) > 2 * MAX_PENDING_DELETES):
            self._note.replace(pending)

    def _every_shard(self) -> list[Shard]:
        """Of which every value of a block is one, at whatever size it was written."""
        if self._registry is not None:
            self._registry.refresh()
            if not self._registry.known:
                raise TierUnavailable("at which sizes others write is not known yet")
        ways = [self._shards, *self._others()]
        return list(dict.fromkeys(shard for way in ways for shard in way))


def _names(keys: Sequence[bytes], shards: Sequence[Shard]) -> list[str]:
    return [shard.name(key) for key in keys for shard in shards]
