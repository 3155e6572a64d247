"""The splits of other deployments, so that blocks are found whatever their ranks and stages were.

    <prefix>/<base>/splits/0 .. 15       one value per split: the parts that its ranks keep

A leader stores its own split there, unless it is there already, and reads the others. A store may
drop these values like any other; then they are stored again.

A store with nodes has no such values, because a leader cannot store any. Instead, each answer of a
node lists the folders of its values. The folders name the parts that the node keeps, and the splits
are derived from the parts.

A split only says where to look for blocks. Each value that is found is verified by its own header.

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
"""Most splits of one model's blocks at a time."""

Split = tuple[Part, ...]
"""The distinct parts of a block, sorted."""

_HEAD = struct.Struct("<4sHH")
_SEAL = struct.Struct("<Q")
_TEXT = slice(_HEAD.size, NBYTES - _SEAL.size)


def pack(base: str, split: Split) -> bytes | None:
    """Return the value that describes a split; None if its parts do not fit into one value."""
    text = json.dumps({"base": base, "parts": split}, separators=(",", ":")).encode()
    if len(text) > _TEXT.stop - _TEXT.start:
        return None
    body = _HEAD.pack(MAGIC, VERSION, 0) + text.ljust(_TEXT.stop - _TEXT.start, b"\0")
    return body + _SEAL.pack(xxhash.xxh3_64_intdigest(body))


def unpack(data: bytes, shard: Shard) -> Split | None:
    """Return the split that a value describes.

    None if the value is damaged, has another version, or is not about the blocks of ``shard``.
    """
    magic, version, _ = _HEAD.unpack_from(data)
    (seal,) = _SEAL.unpack_from(data, _TEXT.stop)
    if (magic, version) != (MAGIC, VERSION) or xxhash.xxh3_64_intdigest(data[: _TEXT.stop]) != seal:
        return None
    try:
        text = json.loads(data[_TEXT].rstrip(b"\0"))
        parts = sorted(Part((int(a), int(b)), (int(c), int(d))) for (a, b), (c, d) in text["parts"])
        ours = text["base"] == shard.base
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    return tuple(parts) if ours and is_tiling(parts, shard.shape) else None


class ShardRegistry:
    """The splits in which other deployments store the same blocks as this one's ``shards``.

    ``others`` are these splits as of the last `refresh`. It reads the store at most once every
    ``every_s`` seconds and, if this object ``announces``, stores its own split. In a store with
    nodes, they are what the nodes reported last. Any thread may call.
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
        """True once the splits have been read."""
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
        """Read the splits again if that is due, and return True if there are new ones.

        Blocks. A failure of the store is logged once until the store works again.
        """
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
                    _log.warning("the splits of other engines cannot be read: %s", error)
                self._fails = True
            return not set(self.others) <= before

    def _listen(self) -> bool:
        """Derive the splits from what the nodes report."""
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
        unpacked = {
            i: unpack(bytes(value), self._any)
            for i, (value, error) in enumerate(zip(values, errors, strict=True))
            if error is None
        }
        found = {split for split in unpacked.values() if split is not None}
        known = found | set(self.others)  # a split that the store dropped will be stored again
        self.others = tuple(sorted((known if len(known) <= PLACES else found) - {self._own}))
        for error in errors:
            if isinstance(error, TierUnavailable):
                raise error
        if self._announces and self._own not in found:
            self._announce(free)

    def _announce(self, free: Sequence[int]) -> None:
        """Store the own split in the first free place, starting at the place its hash selects.

        If another engine writes the same place at the same time, one of the two splits is missing
        at the next refresh, and is stored again.
        """
        value = pack(self._any.base, self._own)
        if value is None or not free:
            _log.warning(
                "only engines with as many ranks and stages find what this one stores: %s",
                f"all {PLACES} places are taken; use another prefix" if value else "too many parts",
            )
            return
        home = xxhash.xxh3_64_intdigest(value) % PLACES
        place = min(free, key=lambda i: (i - home) % PLACES)
        (error,) = self._store.put([Item(self._names[place], [memoryview(value)])])
        if error is not None:
            raise error
