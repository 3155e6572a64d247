"""A store as a tier of a rank: frames, retries, and nothing but whole blocks that were asked for.

A block is found by its key, wherever it was written. Slots are only the leader's count of what it
believes to be there, and mean nothing here.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcore.errors import CorruptBlock, TierError, TierUnavailable
from kvcore.plugins.hookspecs import PreparedTier
from kvcore.tiers.base import (
    BlockRead,
    BlockRecord,
    BlockWrite,
    Buffers,
    SlotError,
    Tier,
    nbytes_of,
)
from kvcore.tiers.disk.format import checksum
from kvcore.tiers.remote.base import BlockStore, Item
from kvcore.tiers.remote.finder import Finder
from kvcore.tiers.remote.frame import HEADER_NBYTES, Header, verify
from kvcore.tiers.remote.names import Shard
from kvcore.tiers.remote.options import StoreOptions, read_options

if TYPE_CHECKING:
    from kvcore.plugins import TierContext

_log = logging.getLogger("kvcore.tiers.remote")

_BACKOFF_S = 0.05
_Call = Callable[[Sequence[Item]], list[TierError | None]]


class StoreKind(NamedTuple):
    """A kind of store: what it can be told, and how it is opened with that (a ``StoreOptions``).

    ``open`` raises ConfigError for settings that cannot be right, and UnsupportedError where its
    client is not installed. It is called in every rank, and with None for a rank in the leader,
    who only asks.
    """

    options: type[StoreOptions]
    open: Callable[[Any, int | None], BlockStore]


def open_tier(context: TierContext, kind: StoreKind) -> StoreTier:
    """A rank's tier over a store of ``kind``. Raises ConfigError, UnsupportedError."""
    options = read_options(kind.options, context)
    shard = Shard.of(context.geometry, context.rank, options.prefix)
    store = kind.open(options, context.rank)
    return StoreTier(store, shard, options, slot_nbytes=context.slot_nbytes)


def prepare(context: TierContext, kind: StoreKind) -> PreparedTier:
    """The leader's part: one that asks what the store holds. Raises ConfigError,
    UnsupportedError."""
    options = read_options(kind.options, context)
    shards = Shard.all_of(context.geometry, options.prefix)
    finder = Finder(
        kind.open(options, None),
        lambda key: [shard.name(key) for shard in shards],
        name=context.name,
        lookup_s=options.lookup_s,
        absent_s=options.absent_s,
    )
    return PreparedTier(max(context.num_slots, 1), release=finder.close, finder=finder)


class StoreTier(Tier):
    """Blocks of ``shard`` in ``store``, which is closed with it.

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
        slot_nbytes: int = 0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.store = store
        self.slot_nbytes = slot_nbytes or shard.block_nbytes
        self._shard = shard
        self._options = options
        self._clock = clock
        self._sleep = sleep
        # Saves have one thread, which fills half of these at most: a load does not wait for saves.
        self._pool = ThreadPoolExecutor(2 * options.parallel, thread_name_prefix="kvcore-store")

    # -- the contract -----------------------------------------------------------------------

    def attach(self, memory: memoryview) -> None:
        self.store.attach(memory)

    def write(self, requests: Sequence[BlockWrite]) -> list[TierError | None]:
        return self._each(
            self.store.put, requests, lambda i, block: [self._header(requests[i], block), *block]
        )

    def read(self, requests: Sequence[BlockRead]) -> list[TierError | None]:
        headers = [memoryview(bytearray(HEADER_NBYTES)) for _ in requests]
        results = self._each(self.store.get, requests, lambda i, block: [headers[i], *block])
        for i, request in enumerate(requests):
            if results[i] is None:
                block = self._block(request.buffers)
                results[i] = verify(headers[i], request.key, self._shard.digest, block)
        self._remove(requests, results)
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

    # -- inside -----------------------------------------------------------------------------

    def _block(self, buffers: Buffers) -> list[memoryview]:
        """The block's own bytes, without the padding of its slot."""
        left, parts = self._shard.block_nbytes, []
        for part in buffers:
            if left:
                flat = part.cast("B")
                parts.append(flat[: min(left, flat.nbytes)])
                left -= parts[-1].nbytes
        return parts

    def _header(self, request: BlockWrite, block: list[memoryview]) -> memoryview:
        nbytes, shard = self._shard.block_nbytes, self._shard.digest
        digest = checksum(request.key, block, nbytes)
        header = Header(nbytes, request.key, request.parent, request.namespace, shard, digest)
        return memoryview(header.pack())

    def _each(
        self,
        call: _Call,
        requests: Sequence[BlockRead] | Sequence[BlockWrite],
        parts: Callable[[int, list[memoryview]], list[memoryview]],
    ) -> list[TierError | None]:
        """``call`` for those requests that are of a block's size, cut into parallel ones.

        ``parts`` makes the value's of a request's position and the bytes of its block."""
        results: list[TierError | None] = [self._refuse(request.buffers) for request in requests]
        good = [i for i, error in enumerate(results) if error is None]
        items = [
            Item(self._shard.name(requests[i].key), parts(i, self._block(requests[i].buffers)))
            for i in good
        ]
        step = max(1, -(-len(items) // self._options.parallel))
        cuts = [items[i : i + step] for i in range(0, len(items), step)]
        until = self._clock() + self._options.deadline_s
        if len(cuts) < 2:
            answers = [self._persist(call, cut, until) for cut in cuts]
        else:
            answers = list(self._pool.map(lambda cut: self._persist(call, cut, until), cuts))
        for i, error in zip(good, (error for part in answers for error in part), strict=True):
            results[i] = error
        return results

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

    def _remove(self, requests: Sequence[BlockRead], results: Sequence[TierError | None]) -> None:
        """Take bad values out of the store, so that they are written anew."""
        bad = [
            self._shard.name(request.key)
            for request, error in zip(requests, results, strict=True)
            if isinstance(error, CorruptBlock)
        ]
        if not bad:
            return
        try:
            self.store.delete(bad)
        except TierError as error:
            _log.warning("%d bad values stay in the store: %s", len(bad), error)


def _attempt(call: _Call, items: Sequence[Item]) -> list[TierError | None]:
    try:
        return call(items)
    except TierUnavailable as error:
        return [error] * len(items)
