"""The tier of one rank over a remote store: framing, verification, retries and request batching.

A block is found by its key, whichever rank wrote it. Slots only count, for the leader, what it
believes the store to hold. They have no meaning here.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from kvcore._util.threads import started
from kvcore.errors import BlockMissing, ConfigError, CorruptBlock, TierError, TierUnavailable
from kvcore.memory.buffers import Buffers, nbytes_of
from kvcore.tiers.base import BlockRead, BlockRecord, BlockWrite, SlotError, Tier
from kvcore.tiers.guard import BlockGuard, first_bytes, guard_of
from kvcore.tiers.remote.base import BlockStore, Item
from kvcore.tiers.remote.format import HEADER_NBYTES, Header, seal, verify
from kvcore.tiers.remote.lookup import StoreFinder
from kvcore.tiers.remote.object_keys import Shard, ShardSlice
from kvcore.tiers.remote.options import StoreOptions, read_options
from kvcore.tiers.remote.pending_deletes import PendingDeletes
from kvcore.tiers.remote.shard_registry import ShardRegistry
from kvcore.tiers.sharding import places
from kvcore.tiers.spec import PreparedTier

if TYPE_CHECKING:
    from kvcore.tiers.spec import TierContext

_log = logging.getLogger("kvcore.tiers.remote")

_BACKOFF_S = 0.05
T = TypeVar("T")
_Call = Callable[[Sequence[Item]], list[TierError | None]]
_Layout = tuple[ShardSlice, ...]
"""The slices that make up a rank's part of a block, for blocks that were written in one split."""


class StoreKind(NamedTuple):
    """A kind of store: its options, a subclass of `StoreOptions`, and how to open it with them.

    ``open`` takes the options and a rank. It is called in every rank and, with None for the rank,
    in the leader, which only queries. It raises ConfigError for invalid settings, and
    UnsupportedError if the store's client is not installed.

    ``join`` is for stores that need more than their own options. It is called with the opened store
    and the tier's context, and may raise ConfigError.
    """

    options: type[StoreOptions]
    open: Callable[[Any, int | None], BlockStore]
    join: Callable[[Any, TierContext], None] | None = None


def open_tier(context: TierContext, kind: StoreKind) -> StoreTier:
    """Open a rank's tier over a store of ``kind``. Raises ConfigError, UnsupportedError."""
    options = read_options(kind.options, context)
    guard = guard_of(context, options.key_env, options.key_file)
    geometry = context.geometry.guarded(guard)
    if context.rank_options.get("cipher", geometry.cipher) != geometry.cipher:
        raise ConfigError(
            f"[tiers.{context.name}]: values are protected by {geometry.cipher or 'nothing'} in "
            f"rank {context.rank}, and by {context.rank_options['cipher'] or 'nothing'} in the "
            "leader: give every rank the same namespace.secret and key"
        )
    shard = Shard.of(geometry, context.rank, options.prefix)
    store = _opened(context, kind, options, context.rank)
    shards = Shard.all_of(geometry, options.prefix)
    registry = ShardRegistry(store, shards, every_s=options.splits_s)
    size = context.slot_nbytes
    return StoreTier(store, shard, options, registry=registry, slot_nbytes=size, guard=guard)


def _opened(
    context: TierContext, kind: StoreKind, options: StoreOptions, rank: int | None
) -> BlockStore:
    store = kind.open(options, rank)
    if kind.join is not None:
        try:
            kind.join(store, context)
        except ConfigError as error:
            store.close()
            raise ConfigError(f"[tiers.{context.name}.options]: {error}") from error
    return store


def prepare(context: TierContext, kind: StoreKind) -> PreparedTier:
    """Open the leader's side of the tier, which looks up what the store holds.

    Raises ConfigError, UnsupportedError.
    """
    options = read_options(kind.options, context)
    geometry = context.geometry.guarded(guard_of(context, options.key_env, options.key_file))
    shards = Shard.all_of(geometry, options.prefix)
    store = _opened(context, kind, options, None)
    finder = StoreFinder(
        store,
        shards,
        name=context.name,
        registry=ShardRegistry(store, shards, every_s=options.splits_s, announces=True),
        lookup_s=options.lookup_s,
        absent_s=options.absent_s,
        pending_deletes=_pending_deletes(context, geometry.base, options),
    )
    return PreparedTier(
        max(context.num_slots, 1),
        rank_options={"cipher": geometry.cipher},
        release=finder.close,
        finder=finder,
        node=store.node(len(context.geometry.heads)),
    )


def _pending_deletes(
    context: TierContext, base: str, options: StoreOptions
) -> PendingDeletes | None:
    """Return the pending deletes of this model in this store, and in no other."""
    if not context.state_folders:
        return None
    kind = f"{type(options).__module__}.{type(options).__qualname__}"
    return PendingDeletes(context.state_folders, kind, base, options.place)


class StoreTier(Tier):
    """The blocks of ``shard`` in ``store``. Closing the tier closes the store.

    A block is written as one value. If a read does not find that value, the block is assembled from
    the values of deployments with another split, as ``registry`` lists them, or cut out of a larger
    value.

    A batch is divided into at most ``options.parallel`` requests. A request that does not reach the
    store is repeated after a pause with jitter, until ``options.retries`` or ``options.deadline_s``
    is used up. A call therefore returns at most one store timeout after that deadline. A value that
    is incomplete, or not what its name says, is deleted from the store. With a ``guard``, values
    are encrypted or have a MAC, and only such values are accepted.
    """

    def __init__(
        self,
        store: BlockStore,
        shard: Shard,
        options: StoreOptions,
        *,
        registry: ShardRegistry | None = None,
        slot_nbytes: int = 0,
        guard: BlockGuard | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.store = store
        self.slot_nbytes = slot_nbytes or shard.block_nbytes
        self._shard = shard
        self._guard = guard
        self._registry = registry
        self._own: _Layout = (ShardSlice(shard, shard),)
        self._layouts: Sequence[_Layout] = (self._own,)
        self._options = options
        self._clock = clock
        self._sleep = sleep
        # One thread does all saves and uses at most half of these, so loads do not wait for saves.
        self._pool = ThreadPoolExecutor(2 * options.parallel, thread_name_prefix="kvcore-store")

    # -- the contract -----------------------------------------------------------------------

    def attach(self, memory: memoryview) -> None:
        self.store.attach(memory)

    def write(self, requests: Sequence[BlockWrite]) -> list[TierError | None]:
        results: list[TierError | None] = [self._refuse(request.buffers) for request in requests]
        good = [i for i, error in enumerate(results) if error is None]
        until = self._clock() + self._options.deadline_s

        def put(batch: Sequence[BlockWrite]) -> list[TierError | None]:
            return self._persist(self.store.put, [self._value(request) for request in batch], until)

        for i, error in zip(good, self._each(put, [requests[i] for i in good]), strict=True):
            results[i] = error
        return results

    def read(self, requests: Sequence[BlockRead]) -> list[TierError | None]:
        results: list[TierError | None] = [self._refuse(request.buffers) for request in requests]
        left = [i for i, error in enumerate(results) if error is None]
        until, tried = self._clock() + self._options.deadline_s, set[_Layout]()
        while left and (layout := self._next_layout(tried)) is not None:
            tried.add(layout)
            found = self._read_in(layout, [requests[i] for i in left], until)
            for i, error in zip(left, found, strict=True):
                results[i] = error
            missing = [i for i in left if isinstance(results[i], BlockMissing)]
            if len(missing) < len(left):
                self._prefer(layout)
            left = missing
        return results

    def invalidate(self, slots: Iterable[int]) -> None:
        """Do nothing: values are found, and deleted by the leader, by key."""

    def scan(self) -> list[BlockRecord]:
        """Return nothing: the leader looks up what a store holds, prompt by prompt."""
        return []

    def close(self) -> None:
        self._pool.shutdown()
        self.store.close()

    def check_integrity(self) -> None:
        """Do nothing: every read is verified, and the rest is up to the store."""

    # -- stored layouts ---------------------------------------------------------------------

    def _next_layout(self, tried: Set[_Layout]) -> _Layout | None:
        """Return a layout that was not tried; None if there is none.

        If all known layouts were tried, reads from the registry what other deployments write.
        """
        for layout in self._layouts:
            if layout not in tried:
                return layout
        if self._registry is None:
            return None
        self._registry.refresh()
        wanted = {_shards(self._own)}
        made = {_shards(layout): layout for layout in self._layouts}
        for split in self._registry.others:
            layout = tuple(ShardSlice.all_of(split, self._shard))
            made.setdefault(_shards(layout), layout)
            wanted.add(_shards(layout))
        self._layouts = tuple(layout for shards, layout in made.items() if shards in wanted)
        return next((layout for layout in self._layouts if layout not in tried), None)

    def _prefer(self, layout: _Layout) -> None:
        """Try this layout first from now on: neighbouring blocks were probably written alike."""
        if self._layouts[0] is not layout:
            self._layouts = (layout, *(other for other in self._layouts if other is not layout))

    def _read_in(
        self, layout: _Layout, requests: Sequence[BlockRead], until: float
    ) -> list[TierError | None]:
        """Read blocks in one layout. A block gets the worst error of its values."""
        values = [_Value(part, request, self._guard) for request in requests for part in layout]

        def get(batch: Sequence[_Value]) -> list[TierError | None]:
            found = self._persist(self.store.get, [value.item for value in batch], until)
            return [
                value.verify() if error is None else error
                for value, error in zip(batch, found, strict=True)
            ]

        errors = self._each(get, values)
        self._remove(values, errors)
        step = len(layout)
        return [_worst(errors[first : first + step]) for first in range(0, len(errors), step)]

    # -- inside -----------------------------------------------------------------------------

    def _value(self, request: BlockWrite) -> Item:
        """Return the value to store: a header, and the block without the padding of its slot."""
        nbytes, shard = self._shard.block_nbytes, self._shard.digest
        block: Buffers = list(first_bytes(request.buffers, nbytes))
        header = Header(nbytes, *request[1:4], shard, bytes(16))
        header, block = seal(header, self._guard, block)
        return Item(self._shard.name(request.key), [memoryview(header.pack()), *block])

    def _each(
        self, act: Callable[[Sequence[T]], list[TierError | None]], what: Sequence[T]
    ) -> list[TierError | None]:
        """Call ``act`` on ``what``, divided into parallel requests."""
        step = max(1, -(-len(what) // self._options.parallel))
        batches = [what[i : i + step] for i in range(0, len(what), step)]
        if len(batches) < 2:
            return [error for batch in batches for error in act(batch)]
        with started(self._pool, act, batches) as running:
            pass
        return [error for future in running for error in future.result()]

    def _refuse(self, buffers: Buffers) -> TierError | None:
        nbytes = nbytes_of(buffers)
        if self._shard.block_nbytes <= nbytes <= self.slot_nbytes:
            return None
        return SlotError(
            f"given {nbytes} bytes; a block here has {self._shard.block_nbytes}, "
            f"or {self.slot_nbytes} with padding"
        )

    def _persist(self, call: _Call, items: Sequence[Item], until: float) -> list[TierError | None]:
        """Pass the items to ``call``, and repeat those that did not reach the store."""
        results = _attempt(call, items)
        for tried in range(self._options.retries):
            again = [i for i, error in enumerate(results) if isinstance(error, TierUnavailable)]
            pause = random.uniform(0.5, 1) * _BACKOFF_S * 2**tried
            if not again or self._clock() + pause >= until:
                break
            self._sleep(pause)
            for i, error in zip(again, _attempt(call, [items[i] for i in again]), strict=True):
                results[i] = error
        return results

    def _remove(self, values: Sequence[_Value], errors: Sequence[TierError | None]) -> None:
        """Delete corrupt values from the store, so that they are written again."""
        bad = [
            value.item.name
            for value, error in zip(values, errors, strict=True)
            if isinstance(error, CorruptBlock)
        ]
        if not bad:
            return
        try:
            self.store.delete(bad)
        except TierError as error:
            _log.warning("%d corrupt values could not be deleted: %s", len(bad), error)


def _shards(layout: _Layout) -> tuple[Shard, ...]:
    """Return the shards that a layout reads, which identify it."""
    return tuple(part.shard for part in layout)


class _Value:
    """A value being read: the wanted bytes go to the request's buffers, the rest to scratch."""

    def __init__(self, wanted: ShardSlice, request: BlockRead, guard: BlockGuard | None) -> None:
        self._wanted = wanted
        self._request = request
        self._guard = guard
        self._header = memoryview(bytearray(HEADER_NBYTES))
        self._parts = list(_value_parts(wanted, request.buffers))
        parts = [self._header, *self._parts]
        self.item = Item(wanted.shard.name(request.key), parts, request.nodes)

    def verify(self) -> CorruptBlock | None:
        """Return what is wrong with the value that was read; None if nothing is."""
        shard = self._wanted.digest
        return verify(self._header, self._request, shard, self._parts, self._guard)


def _value_parts(wanted: ShardSlice, buffers: Buffers) -> Iterator[memoryview]:
    """Yield memory for every byte of a value, in order."""
    spare, at = memoryview(bytearray(wanted.spare_nbytes)), 0
    for start, piece in places(wanted.runs, buffers):
        if start > at:
            yield spare[: start - at]
            spare = spare[start - at :]
        yield piece
        at = start + piece.nbytes
    if spare.nbytes:
        yield spare


def _worst(errors: Sequence[TierError | None]) -> TierError | None:
    """Return the worst error: corrupt, then unavailable, then missing, then None."""
    order = (CorruptBlock, TierUnavailable, TierError)
    for kind in order:
        for error in errors:
            if isinstance(error, kind):
                return error
    return None


def _attempt(call: _Call, items: Sequence[Item]) -> list[TierError | None]:
    try:
        return call(items)
    except TierUnavailable as error:
        return [error] * len(items)
