"""At which sizes others write: a block is found however its ranks and stages shared it.

    <prefix>/<base>/splits/0 .. 15       a value each: the parts that the ranks of a deployment keep

A leader puts its own split there, if nobody has, and reads what the others put. A store may drop
these values like any other: they are put again.

In a store of nodes a leader keeps nothing, and nothing is put there: each answer of a node says in
which folders its values lie, which are the parts that it keeps, and splits are made of these.

Splits decide where blocks are looked for, nothing else; each value that is found is verified by its
own header.

    0      4        6      8                                   4088  4096
    magic  version  flags  text: {"base": ..., "parts": ...}, zeros  seal
"""

from __future__ import annotations

import json
import logging
import struct
import threading
import time
from collections.abc import Callable, Collection, Sequence

import xxhash

from kvcore.errors import BlockMissing, TierError, TierUnavailable
from kvcore.model.parts import Part
from kvcore.tiers.remote.base import BlockStore, Item
from kvcore.tiers.remote.object_keys import Shard
from kvcore.tiers.sharding import is_tiling, splits_of

_log = logging.getLogger("kvcore.tiers.remote")

MAGIC = b"KVS1"
VERSION = 1
NBYTES = 4096
PLACES = 16
"""Splits that one model's blocks may have at once."""

Split = tuple[Part, ...]
"""The parts of a block, each once, in order."""

_HEAD = struct.Struct("<4sHH")
_SEAL = struct.Struct("<Q")
_TEXT = slice(_HEAD.size, NBYTES - _SEAL.size)


def pack(base: str, split: Split) -> bytes | None:
    """A value that tells of a split; None for one of so many parts that they do not fit."""
    text = json.dumps({"base": base, "parts": split}, separators=(",", ":")).encode()
    if len(text) > _TEXT.stop - _TEXT.start:
        return None
    body = _HEAD.pack(MAGIC, VERSION, 0) + text.ljust(_TEXT.stop - _TEXT.start, b"\0")
    return body + _SEAL.pack(xxhash.xxh3_64_intdigest(body))


def unpack(data: bytes, shard: Shard) -> Split | None:
    """The split that a value tells of; None when it is none of this version, damaged, or not one of
    ``shard``'s blocks."""
    magic, version, _ = _HEAD.unpack_from(data)
    (seal,) = _SEAL.unpack_from(data, _TEXT.stop)
    if (magic, version) != (MAGIC, VERSION) or xxhash.xxh3_64_intdigest(data[: _TEXT.stop]) != seal:
        return None
    try:
        told = json.loads(data[_TEXT].rstrip(b"\0"))
        parts = sorted(Part((int(a), int(b)), (int(c), int(d))) for (a, b), (c, d) in told["parts"])
        ours = told["base"] == shard.base
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    return tuple(parts) if ours and is_tiling(parts, shard.shape) else None


class ShardRegistry:
    """The splits of the blocks that ``shards``, a deployment's own, are of.

    ``others`` are those of other deployments, as of the last `refresh`, which reads them at most
    every ``every_s`` seconds, and where this one ``announces`` puts its own. Of a store of nodes
    they are what the nodes have said last. Any thread may call.
    """

    def __init__(
        self,
        store: BlockStore,
        shards: Sequence[Shard],
        *,
        every_s: float,
        announces: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.others: tuple[Split, ...] = ()
        self.known = False
        """Whether they have been read at all."""
        self._store = store
        self._any = shards[0]
        self._own: Split = tuple(sorted(shard.part for shard in shards))
        self._every_s = every_s
        self._announces = announces
        self._clock = clock
        self._lock = threading.Lock()
        self._read_at: float | None = None
        self._heard: Collection[str] = ()
        self._fails = False
        folder = f"{self._any.prefix}/{self._any.base}/splits"
        self._names = [f"{folder}/{i}" for i in range(PLACES)]

    def refresh(self) -> bool:
        """Read the splits again if that is due; whether there are any that were not known. Blocks;
        a store that fails is named in the log, once until it works again."""
        with self._lock:
            if self._store.has_nodes:
                return self._listen()
            now = self._clock()
            if self._read_at is not None and now - self._read_at < self._every_s:
                return False
            self._read_at = now
            before = set(self.others)
            try:
                self._read()
                self._fails, self.known = False, True
            except TierError as error:
                if not self._fails:
                    _log.warning("at which sizes others write is not known: %s", error)
                self._fails = True
            return not set(self.others) <= before

    def _listen(self) -> bool:
        """Make them of what nodes say they hold."""
        heard, before = self._store.folders, set(self.others)
        self.known = True
        if heard != self._heard:
            self._heard = heard
            shards = map(self._any.sibling_in, heard)
            parts = {shard.part for shard in shards if shard is not None}
            made = splits_of(parts, self._any.shape, PLACES)
            self.others = tuple(split for split in made if split != self._own)
        return not set(self.others) <= before

    def _read(self) -> None:
        values = [bytearray(NBYTES) for _ in self._names]
        items = [
            Item(name, [memoryview(value)]) for name, value in zip(self._names, values, strict=True)
        ]
        errors = self._store.get(items)
        free = [i for i, error in enumerate(errors) if isinstance(error, BlockMissing)]
        told = {
            i: unpack(bytes(value), self._any)
            for i, (value, error) in enumerate(zip(values, errors, strict=True))
            if error is None
        }
        found = {split for split in told.values() if split is not None}
        known = found | set(self.others)  # what a store has dropped is put again one day
        self.others = tuple(sorted((known if len(known) <= PLACES else found) - {self._own}))
        for error in errors:
            if isinstance(error, TierUnavailable):
                raise error
        if self._announces and self._own not in found:
            self._announce(free)

    def _announce(self, free: Sequence[int]) -> None:
        """Put the own split into the first free place from its own on. Should another be put there
        at the same time, one of them is missing at the next refresh, and put again."""
        value = pack(self._any.base, self._own)
        if value is None or not free:
            _log.warning(
                "what this engine writes is found by engines of its size only: %s",
                f"all {PLACES} splits are taken; use another prefix" if value else "too many parts",
            )
            return
        home = xxhash.xxh3_64_intdigest(value) % PLACES
        place = min(free, key=lambda i: (i - home) % PLACES)
        (error,) = self._store.put([Item(self._names[place], [memoryview(value)])])
        if error is not None:
            raise error
