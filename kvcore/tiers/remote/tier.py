"""A store as a tier of a rank: frames, retries, and nothing but whole blocks that were asked for.

A block is found by its key, wherever it was written. Slots are only the leader's count of what it
believes to be there, and mean nothing here.
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
from kvcore.tiers.checksum import checksum
from kvcore.tiers.remote.base import BlockStore, Item
from kvcore.tiers.remote.format import HEADER_NBYTES, Header, verify
from kvcore.tiers.remote.lookup import Finder
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
_Way = tuple[ShardSlice, ...]
"""What a rank's part of a block is made of, where it was written in a certain split."""


class StoreKind(NamedTuple):
    """A kind of store: what it can be told, and how it is opened with that (a ``StoreOptions``).

    ``open`` raises ConfigError for settings that cannot be right, and UnsupportedError where its
    client is not installed. It is called in every rank, and with None for a rank in the leader,
    who only asks. ``join`` is called with what was opened, and raises ConfigError: for stores that
    need more than their own settings.
    """

    options: type[StoreOptions]
    open: Callable[[Any, int | None], BlockStore]
    join: Callable[[Any, TierContext], None] | None = None


def open_tier(context: TierContext, kind: StoreKind) -> StoreTier:
    """A rank's tier over a store of ``kind``. Raises ConfigError, UnsupportedError."""
    options = read_options(kind.options, context)
    shard = Shard.of(context.geometry, context.rank, options.prefix)
    store = _opened(context, kind, options, context.rank)
    shards = Shard.all_of(context.geometry, options.prefix)
    registry = ShardRegistry(store, shards, every_s=options.splits_s)
    return StoreTier(store, shard, options, registry=registry, slot_nbytes=context.slot_nbytes)


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
    """The leader's part: one that asks what the store holds. Raises ConfigError,
    UnsupportedError."""
    options = read_options(kind.options, context)
    shards = Shard.all_of(context.geometry, options.prefix)
    store = _opened(context, kind, options, None)
    finder = Finder(
        store,
        shards,
        name=context.name,
        registry=ShardRegistry(store, shards, every_s=options.splits_s, announces=True),
        lookup_s=options.lookup_s,
        absent_s=options.absent_s,
        note=_note(context, options) if context.notes else None,
    )
    return PreparedTier(
        max(context.num_slots, 1),
        release=finder.close,
        finder=finder,
        node=store.node(len(context.geometry.heads)),
    )


def _note(context: TierContext, options: StoreOptions) -> PendingDeletes:
    """What this store is still to remove of this model. Another store owes nothing of it."""
    kind = f"{type(options).__module__}.{type(options).__qualname__}"
    return PendingDeletes(context.notes, kind, context.geometry.base, options.place)


class StoreTier(Tier):
    """Blocks of ``shard`` in ``store``, which is closed with it.

    A block is written as one value. One that is not there is put together from the values of other
    deployments that ``registry`` knows, or taken out of a larger one.

    A batch is cut into up to ``options.parallel`` requests. A request that finds no store is
    repeated, after a pause with jitter, until ``options.retries`` or ``options.deadline_s`` are
    used up: a call returns at the latest one store timeout after that deadline. A value that is
    not whole, or not what its name says, is removed.
    """

    def __init__(
        self,
        store: BlockStore,
        shard: Shard,
        options: StoreOptions,
        *,
        registry: ShardRegistry | None = None,
        slot_nbytes: int = 0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.store = store
        self.slot_nbytes = slot_nbytes or shard.block_nbytes
        self._shard = shard
        self._registry = registry
        self._own: _Way = (ShardSlice(shard, shard),)
        self._ways: Sequence[_Way] = (self._own,)
        self._options = options
        self._clock = clock
        self._sleep = sleep
        # Saves have one thread, which fills half of these at most: a load does not wait for saves.
        self._pool = ThreadPoolExecutor(2 * options.parallel, thread_name_prefix="kvcore-store")

    # -- the contract -----------------------------------------------------------------------

    def attach(self, memory: memoryview) -> None:
        self.store.attach(memory)

    def write(self, requests: Sequence[BlockWrite]) -> list[TierError | None]:
        results: list[TierError | None] = [self._refuse(request.buffers) for request in requests]
        good = [i for i, error in enumerate(results) if error is None]
        until = self._clock() + self._options.deadline_s

        def put(cut: Sequence[BlockWrite]) -> list[TierError | None]:
            return self._persist(self.store.put, [self._value(request) for request in cut], until)

        for i, error in zip(good, self._each(put, [requests[i] for i in good]), strict=True):
            results[i] = error
        return results

    def read(self, requests: Sequence[BlockRead]) -> list[TierError | None]:
        results: list[TierError | None] = [self._refuse(request.buffers) for request in requests]
        left = [i for i, error in enumerate(results) if error is None]
        until, tried = self._clock() + self._options.deadline_s, set[_Way]()
        while left and (way := self._next_way(tried)) is not None:
            tried.add(way)
            found = self._read_by(way, [requests[i] for i in left], until)
            for i, error in zip(left, found, strict=True):
                results[i] = error
            missing = [i for i in left if isinstance(results[i], BlockMissing)]
            if len(missing) < len(left):
                self._prefer(way)
            left = missing
        return results

    def invalidate(self, slots: Iterable[int]) -> None:
        """Nothing: what a store holds is found by key. The leader removes values by theirs."""

    def scan(self) -> list[BlockRecord]:
        """Nothing: what a store holds is asked for, prompt by prompt."""
        return []

    def close(self) -> None:
        self._pool.shutdown()
        self.store.close()

    def check_integrity(self) -> None:
        """Nothing to check: every read is verified, and the rest belongs to the store."""

    # -- ways to a block --------------------------------------------------------------------

    def _next_way(self, tried: Set[_Way]) -> _Way | None:
        """One that was not tried; where all were, what others have begun to write is asked for."""
        for way in self._ways:
            if way not in tried:
                return way
        if self._registry is None:
            return None
        self._registry.refresh()
        wanted = {_shards(self._own)}
        made = {_shards(way): way for way in self._ways}
        for split in self._registry.others:
            way = tuple(ShardSlice.all_of(split, self._shard))
            made.setdefault(_shards(way), way)
            wanted.add(_shards(way))
        self._ways = tuple(way for shards, way in made.items() if shards in wanted)
        return next((way for way in self._ways if way not in tried), None)

    def _prefer(self, way: _Way) -> None:
        """Begin with this one: what lies together was written together."""
        if self._ways[0] is not way:
            self._ways = (way, *(other for other in self._ways if other is not way))

    def _read_by(
        self, way: _Way, requests: Sequence[BlockRead], until: float
    ) -> list[TierError | None]:
        """Read blocks in one way. The worst that befell a value of a block befell the block."""
        values = [_Value(cut, request) for request in requests for cut in way]

        def get(cut: Sequence[_Value]) -> list[TierError | None]:
            found = self._persist(self.store.get, [value.item for value in cut], until)
            return [
                value.verify() if error is None else error
                for value, error in zip(cut, found, strict=True)
            ]

        errors = self._each(get, values)
        self._remove(values, errors)
        return [
            _worst(errors[first : first + len(way)]) for first in range(0, len(errors), len(way))
        ]

    # -- inside -----------------------------------------------------------------------------

    def _value(self, request: BlockWrite) -> Item:
        """What is stored of a block: a header, and its bytes without the padding of its slot."""
        nbytes, shard = self._shard.block_nbytes, self._shard.digest
        block = list(_first(request.buffers, nbytes))
        digest = checksum(request.key, block, nbytes)
        header = Header(nbytes, request.key, request.parent, request.namespace, shard, digest)
        return Item(self._shard.name(request.key), [memoryview(header.pack()), *block])

    def _each(
        self, act: Callable[[Sequence[T]], list[TierError | None]], what: Sequence[T]
    ) -> list[TierError | None]:
        """``act`` on ``what``, cut into parallel requests."""
        step = max(1, -(-len(what) // self._options.parallel))
        cuts = [what[i : i + step] for i in range(0, len(what), step)]
        if len(cuts) < 2:
            return [error for cut in cuts for error in act(cut)]
        with started(self._pool, act, cuts) as running:
            pass
        return [error for cut in running for error in cut.result()]

    def _refuse(self, buffers: Buffers) -> TierError | None:
        nbytes = nbytes_of(buffers)
        if self._shard.block_nbytes <= nbytes <= self.slot_nbytes:
            return None
        return SlotError(
            f"{nbytes} bytes; blocks here have {self._shard.block_nbytes}, "
            f"{self.slot_nbytes} with padding"
        )

    def _persist(self, call: _Call, items: Sequence[Item], until: float) -> list[TierError | None]:
        """``call`` the items, and again those that found no store."""
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
        """Take bad values out of the store, so that they are written anew."""
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
            _log.warning("%d bad values stay in the store: %s", len(bad), error)


def _shards(way: _Way) -> tuple[Shard, ...]:
    """What tells a way from others."""
    return tuple(cut.shard for cut in way)


class _Value:
    """A value on its way to a rank: what of it is wanted goes to its place, the rest to memory of
    its own."""

    def __init__(self, cut: ShardSlice, request: BlockRead) -> None:
        self._cut = cut
        self._key = request.key
        self._header = memoryview(bytearray(HEADER_NBYTES))
        self._parts = list(_laid(cut, request.buffers))
        parts = [self._header, *self._parts]
        self.item = Item(cut.shard.name(request.key), parts, request.nodes)

    def verify(self) -> CorruptBlock | None:
        """What is wrong with it, now that it has come."""
        return verify(self._header, self._key, self._cut.digest, self._parts)


def _laid(cut: ShardSlice, buffers: Buffers) -> Iterator[memoryview]:
    """Memory for all bytes of a value, in their order."""
    spare, at = memoryview(bytearray(cut.spare_nbytes)), 0
    for start, piece in places(cut.runs, buffers):
        if start > at:
            yield spare[: start - at]
            spare = spare[start - at :]
        yield piece
        at = start + piece.nbytes
    if spare.nbytes:
        yield spare


def _first(buffers: Buffers, nbytes: int) -> Iterator[memoryview]:
    """The first ``nbytes`` bytes, buffer by buffer."""
    for buffer in buffers:
        if nbytes:
            flat = buffer.cast("B")[:nbytes]
            yield flat
            nbytes -= flat.nbytes


def _worst(errors: Sequence[TierError | None]) -> TierError | None:
    """Corrupt before unavailable before missing before none."""
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
