"""An engine's own pages, under keys of its own, in one backing tier.

For an engine that has tiers of its own and uses kvcore only for storage. The engine defines what a
page is and what a key is. Unlike in `KVManager`, there are no chains and there is no host memory:
every page is independent, and reads and writes are done when the call returns.

    put   reserve ──▶ tier.write ──▶ publish       a page is found only when it is whole
    get   pin ──▶ tier.read, checked ──▶ unpin     a bad page is dropped, and not found again
    ask   a store's finder ──▶ publish             pages that other engines have written

An engine calls it through an adapter: HiCache's storage on SGLang, a tier below vLLM's offloading
(`kvcore.runtime.page_jobs`).
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from kvcore import log
from kvcore._util.circuit_breaker import Breaker
from kvcore.config import Config, load_config
from kvcore.config.fields import DEFAULT
from kvcore.config.schema_tiers import DiskConfig, HostConfig, TierConfig
from kvcore.errors import BlockMissing, ConfigError, CorruptBlock, TierError, TierUnavailable
from kvcore.index import BlockIndex, Pin, Reservation
from kvcore.memory.buffers import Buffers
from kvcore.model.keys import KEY_BYTES, ROOT_PARENT
from kvcore.plugins import PluginManager
from kvcore.runtime.tiers import BackingOpener, prepare_backings
from kvcore.tiers.base import BlockRead, BlockWrite, Tier
from kvcore.tiers.finder import Finder
from kvcore.tiers.geometry import Geometry

__all__ = [
    "PageCounts",
    "PageStore",
    "Pages",
    "ignored_settings",
    "named_backings",
    "oldest_first",
    "open_pages",
    "page_key",
    "page_settings",
    "page_space",
    "renewed",
]

_log = logging.getLogger("kvcore.pages")
_Request = TypeVar("_Request")
_Table = TypeVar("_Table", DiskConfig, HostConfig, TierConfig)


class PageCounts(NamedTuple):
    """Pages since the store was opened, except ``held``, which is the number now."""

    held: int
    written: int
    read: int
    corrupt: int


class Pages(ABC):
    """Pages of one size under an engine's own keys. Thread-safe.

    `PageStore` keeps them in a tier of this process, `kvcore.server.pages.ServedPages` in a server.
    """

    @property
    @abstractmethod
    def shared(self) -> bool:
        """True if others write to the medium, so that `ask` may find what `holds` does not know."""

    @property
    @abstractmethod
    def lookup_s(self) -> float:
        """Seconds that are worth waiting for an answer of a shared medium."""

    @property
    @abstractmethod
    def absent_s(self) -> float:
        """Seconds for which a shared medium need not be asked again about what it lacks."""

    @property
    @abstractmethod
    def space(self) -> bytes:
        """What the keys mean now: `renew` changes it.

        `ask`, `put` and `get` take one, for pages that an engine made or wanted at an earlier time.
        """

    @abstractmethod
    def holds(self, key: str) -> bool:
        """Return True if a page is known to be held. No I/O."""

    @abstractmethod
    def ask(self, keys: Sequence[str], space: bytes = b"") -> list[bool]:
        """Return True for each page that is held, whoever has written it.

        Blocks for a round trip if the medium is shared and a page is not known. If the medium does
        not answer, the page counts as not held.
        """

    @abstractmethod
    def leading(self, keys: Sequence[str]) -> int:
        """Return how many of ``keys``, from the first on, are held. Blocks as `ask` does."""

    @abstractmethod
    def use(self, keys: Sequence[str]) -> None:
        """Count a use of the pages that are held. No I/O."""

    @abstractmethod
    def put(self, keys: Sequence[str], pages: Sequence[Buffers], space: bytes = b"") -> list[bool]:
        """Store pages; return True for each that is held now. Blocks until they are written.

        A page that is held already is left as it is. A page that finds no room is not stored.
        """

    @abstractmethod
    def get(self, keys: Sequence[str], pages: Sequence[Buffers], space: bytes = b"") -> list[bool]:
        """Read pages; return True for each that is intact. Blocks until all are read.

        The buffers of the others have undefined content.
        """

    @abstractmethod
    def renew(self) -> None:
        """Stop finding the pages that are held now: from now on their keys mean other pages.

        Other engines still find them. Pages that are put from now on are found until `close`.
        """

    @abstractmethod
    def clear(self) -> None:
        """Forget every page, on the medium too. Blocks."""

    @abstractmethod
    def late(self) -> None:
        """Count a failure of the medium that no operation reports: one did not end in time."""

    @abstractmethod
    def counts(self) -> PageCounts:
        """Return what was counted. No I/O."""

    @abstractmethod
    def close(self) -> None:
        """Release everything. No `put` or `get` may be in flight. Idempotent."""


class PageStore(Pages):
    """Pages of one size in ``tier``. Thread-safe: I/O is done without the lock.

    Args:
        index: of one tier, with the blocks that the medium holds already.
        identity: everything that must be equal for pages of equal keys to be the same page, and a
            secret if there is one.
        release: called once, when the store has closed.
        finder: asks a medium that others write to which pages it holds.
    """

    def __init__(
        self,
        index: BlockIndex,
        tier: Tier,
        identity: bytes,
        release: Callable[[], None] = lambda: None,
        finder: Finder | None = None,
    ) -> None:
        [self._name] = index.tiers
        self._index = index
        self._tier = tier
        self._finder = finder
        self._space = page_space(identity)
        self._release = release
        self._lock = threading.Lock()
        self._breaker = Breaker(self._name)
        self._written = self._read = self._corrupt = 0
        self._closed = False

    @property
    def shared(self) -> bool:
        return self._finder is not None

    @property
    def lookup_s(self) -> float:
        return self._finder.lookup_s if self._finder is not None else 0.0

    @property
    def absent_s(self) -> float:
        return self._finder.absent_s if self._finder is not None else 0.0

    @property
    def space(self) -> bytes:
        with self._lock:
            return self._space

    def holds(self, key: str) -> bool:
        with self._lock:
            return self._serves and self._has(self._key(key))

    def ask(self, keys: Sequence[str], space: bytes = b"") -> list[bool]:
        with self._lock:
            if not self._serves:
                return [False] * len(keys)
            space = space or self._space
            blocks = [page_key(key, space) for key in keys]
            unknown = [block for block in blocks if not self._has(block)]
            finder = self._finder if unknown else None
            if finder is not None:
                self._breaker.started()
        there = self._found(finder, unknown) if finder is not None else None
        with self._lock:
            if there is not None:
                self._adopt([block for block in unknown if block in there], space[:KEY_BYTES])
            return [self._has(block) for block in blocks]

    def _found(self, finder: Finder, blocks: Sequence[bytes]) -> set[bytes]:
        """Return what the medium holds. A lookup that works does not say that reads do."""
        try:
            there = finder.held(blocks)
        except Exception as error:  # noqa: BLE001 - a third party's store
            unfit = TierUnavailable(f"a lookup in the tier {self._name} failed: {error!r}")
            with self._lock:
                self._heed([error if isinstance(error, TierUnavailable) else unfit])
            return set()
        with self._lock:
            self._breaker.undecided()
        return there

    def leading(self, keys: Sequence[str]) -> int:
        count = self._known(keys)
        if count < len(keys) and self.shared:
            self.ask(keys[count:])
            count = self._known(keys)
        return count

    def _known(self, keys: Sequence[str]) -> int:
        with self._lock:
            if not self._serves:
                return 0
            for count, key in enumerate(map(self._key, keys)):
                if not self._has(key):
                    return count
        return len(keys)

    def use(self, keys: Sequence[str]) -> None:
        with self._lock:
            self._use([self._key(key) for key in keys])

    def put(self, keys: Sequence[str], pages: Sequence[Buffers], space: bytes = b"") -> list[bool]:
        with self._lock:
            if not self._serves:
                return [False] * len(keys)
            space = space or self._space
            blocks = [page_key(key, space) for key in keys]
            self._use(blocks)  # so that these pages are not evicted for the new ones
            reserved = self._reserve(blocks, space[:KEY_BYTES])
            if reserved:
                self._breaker.started()
        writes = [
            BlockWrite(int(taken.slots[0]), blocks[i], ROOT_PARENT, space[:KEY_BYTES], pages[i])
            for i, taken in reserved.items()
        ]
        errors = self._attempt(self._tier.write, writes)
        with self._lock:
            self._publish(list(zip(reserved.values(), writes, errors, strict=True)))
            self._heed(errors)
            self._written += errors.count(None)
            return [self._has(block) for block in blocks]

    def get(self, keys: Sequence[str], pages: Sequence[Buffers], space: bytes = b"") -> list[bool]:
        with self._lock:
            if not self._serves:
                return [False] * len(keys)
            space = space or self._space
            blocks = [page_key(key, space) for key in keys]
            pins = self._pin(blocks)
            slots = {i: int(self._index.slots(self._name, [blocks[i]], 0, 1)[0]) for i in pins}
            if pins:
                self._breaker.started()
        reads = [
            BlockRead(slot, blocks[i], pages[i], (), ROOT_PARENT, space[:KEY_BYTES])
            for i, slot in slots.items()
        ]
        errors = self._attempt(self._tier.read, reads)
        found = [False] * len(keys)
        with self._lock:
            self._heed(errors)
            for (i, pin), error in zip(pins.items(), errors, strict=True):
                found[i] = error is None
                if isinstance(error, (CorruptBlock, BlockMissing)):
                    self._invalidate(blocks[i], error)
                self._index.unpin(pin)
            self._read += errors.count(None)
        return found

    def renew(self) -> None:
        """Stop finding the pages that are held now: from now on their keys mean other pages.

        Other stores of the medium still find it. Pages that are put from now on are found until
        this store closes.
        """
        with self._lock:
            self._space = renewed(self._space)

    def clear(self) -> None:
        """Forget every page, on the medium too.

        On a shared medium those that this store knows are deleted, and this store finds no other
        one of before. Raises TierUnavailable if the medium does not invalidate them; its pages may
        then be found after a restart.
        """
        with self._lock:
            if self._closed:
                return
            gone = self._index.removal.clear()[self._name]
            self._tier.invalidate(page.slot for page in gone)
        if self._finder is not None:
            self._finder.delete([page.key for page in gone])
            self.renew()

    def late(self) -> None:
        with self._lock:
            self._breaker.failed()

    def counts(self) -> PageCounts:
        with self._lock:
            held = self._index.num_used(self._name)
            return PageCounts(held, self._written, self._read, self._corrupt)

    def close(self) -> None:
        """Flush the tier and release everything. No `put` or `get` may be in flight. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            self._tier.close()
        finally:
            self._release()

    def check_integrity(self) -> None:
        """Assert that the index is consistent, and read every page of the tier."""
        with self._lock:
            self._index.check_integrity()
        self._tier.check_integrity()

    def _attempt(
        self, operate: Callable[[Sequence[_Request]], list[TierError | None]], asked: list[_Request]
    ) -> list[TierError | None]:
        """Carry out a batch; if the tier raises, all of the batch has failed."""
        try:
            return operate(asked) if asked else []
        except Exception as error:  # noqa: BLE001 - a third party's tier
            _log.exception("the tier %s raised", self._name)
            return [TierUnavailable(f"the tier {self._name} raised {error!r}")] * len(asked)

    # -- with the lock held -------------------------------------------------------------------

    @property
    def _serves(self) -> bool:
        """True if the store is open, and its medium is not left alone."""
        return not self._closed and self._breaker.allows()

    def _has(self, block: bytes) -> bool:
        return bool(self._index.match([block]).depths[0])

    def _adopt(self, blocks: Sequence[bytes], space: bytes) -> None:
        """Publish pages that the medium holds already."""
        for taken in reversed(self._reserve(blocks, space).values()):
            self._index.lifecycle.commit(taken, failed_from=None)

    def _reserve(self, blocks: Sequence[bytes], space: bytes) -> dict[int, Reservation]:
        """Return slots by position for the pages that are not held.

        If room is short, the first pages get it.
        """
        taken = (
            self._index.lifecycle.reserve(self._name, [block], 0, 1, space) for block in blocks
        )
        return {i: found for i, found in enumerate(taken) if len(found)}

    def _publish(self, wrote: list[tuple[Reservation, BlockWrite, TierError | None]]) -> None:
        """End reservations, the first page's last, so that it is evicted last."""
        gone = []
        for taken, write, error in reversed(wrote):
            self._index.lifecycle.commit(taken, failed_from=None if error is None else 0)
            if error is None and not self._has(write.key):
                gone.append(write.slot)  # cleared meanwhile
        if gone:
            self._tier.invalidate(gone)

    def _use(self, blocks: Sequence[bytes]) -> list[int]:
        """Count a use of the pages that are held, the first as the latest.

        Returns their positions, last first.
        """
        found = []
        for i in reversed(range(len(blocks))):
            match = self._index.match([blocks[i]])
            if match.depths[0]:
                self._index.touch(match)
                found.append(i)
        return found

    def _pin(self, blocks: Sequence[bytes]) -> dict[int, Pin]:
        """Count a use of the pages that are held, and pin them; return the pins by position."""
        return {i: self._index.pin(self._name, blocks[i]) for i in self._use(blocks)}

    def _invalidate(self, block: bytes, error: TierError) -> None:
        """Forget a page that is corrupt, or that a shared medium does not hold any more."""
        self._index.removal.invalidate(self._name, block)
        if not isinstance(error, CorruptBlock):
            return
        _log.warning("a stored page is corrupt and was dropped: %s", error)
        self._corrupt += 1
        if self._finder is not None:
            self._finder.delete([block])

    def _heed(self, errors: Sequence[TierError | None]) -> None:
        """Tell the circuit breaker how a batch went."""
        broken = [error for error in errors if isinstance(error, TierUnavailable)]
        if broken:
            _log.warning("the tier %s failed: %s", self._name, broken[0])
            self._breaker.failed()
        elif errors:
            self._breaker.succeeded()

    def _key(self, key: str) -> bytes:
        return page_key(key, self._space)


def page_space(identity: bytes) -> bytes:
    """Return 32 bytes that tell pages of ``identity`` from others under the same keys."""
    return hashlib.sha256(b"kvcore pages" + identity).digest()


def renewed(space: bytes) -> bytes:
    """Return a space that nobody has had before."""
    return hashlib.sha256(space + secrets.token_bytes(32)).digest()


def page_key(key: str, space: bytes) -> bytes:
    """Return the block key of an engine's key."""
    return hashlib.blake2b(key.encode(), key=space, digest_size=KEY_BYTES).digest()


def open_pages(config: Config, geometry: Geometry, identity: bytes, share: int = 1) -> PageStore:
    """Open the pages in the one backing tier of ``config``, with those it holds. Scans the tier.

    ``geometry`` has one shard: a page. ``share`` stores, one for each rank, divide the tier's
    capacity among them. Raises ConfigError unless there is exactly one backing tier, and
    TierUnavailable if it cannot be used.
    """
    named = named_backings(config)
    if len(named) != 1:
        raise ConfigError(
            f"given {', '.join(named) or 'no backing tier'}; supported is exactly one: set "
            "disk.path, or one [tiers.NAME], or server.address"
        )
    config = oldest_first(config)
    plugins = PluginManager(disable=config.plugins.disable, strict=config.plugins.strict)
    plugins.check(config)
    prepared = prepare_backings(config, geometry, plugins, share)
    if not prepared:
        raise TierUnavailable(f"the tier {named[0]} cannot be used: see the log")
    [found] = prepared
    index = BlockIndex([found.spec])
    try:
        opener = BackingOpener(config, geometry, 0, plugins, share)
        tier = opener(found.spec.name, found.rank_options)
        lost = index.admin.restore(found.spec.name, found.prepared.records)
    except BaseException:
        found.prepared.release()
        raise
    _log.info("pages found=%d dropped=%d", index.num_used(found.spec.name), len(lost))
    return PageStore(index, tier, identity, found.prepared.release, found.prepared.finder)


def named_backings(config: Config) -> list[str]:
    """Return the names of the backing tiers that are set."""
    return [*(["disk"] if config.disk.path is not None else []), *config.tiers]


def oldest_first(config: Config) -> Config:
    """Return the settings with LRU as the policy of tiers whose policy was left at its default.

    Nothing is known of how pages hang together but that those of a prompt come one after another.
    The default policy takes any of equals, and would leave holes in every prompt.
    """

    def chosen(table: _Table, *path: str) -> _Table:
        given = config.source((*path, "policy")) is not DEFAULT or table.policy_options
        return table if given else table.model_copy(update={"policy": "lru"})

    tiers = {name: chosen(table, "tiers", name) for name, table in config.tiers.items()}
    return config.model_copy(
        update={
            "host": chosen(config.host, "host"),
            "disk": chosen(config.disk, "disk"),
            "tiers": tiers,
        }
    )


def page_settings(given: Mapping[str, Any], given_in: str) -> Config:
    """Return the settings of an engine's pages, and set kvcore's log up. Raises ConfigError.

    ``given`` is what the engine was told, and ``given_in`` says where. Settings that pages have no
    use for are named in the log.
    """
    config = load_config(overrides=dict(given), overrides_from=given_in)
    log.configure(config.log.level, config.log.format)
    if ignored := ignored_settings(given):
        _log.warning("settings that pages have no use for are ignored: %s", ", ".join(ignored))
    return config


_WHOLE = {"cluster", "engine", "log", "namespace", "plugins", "server", "sglang", "vllm"}
"""Tables that such a store has a use for, or that say how the engine runs."""
_BACKING = {"admit_after", "to_device", "write"}
"""What a backing tier has no use for where every page goes to it at once."""


def ignored_settings(given: Mapping[str, Any]) -> list[str]:
    """Return the names of settings, as an engine gives them, that a store of pages ignores."""
    found = []
    for table, settings in given.items():
        if table in _WHOLE:
            continue
        named: dict[str, Any] = dict(settings) if isinstance(settings, Mapping) else {"": settings}
        if table == "disk":
            found += [f"disk.{name}" for name in named if name in _BACKING]
        elif table == "tiers":
            found += [
                f"tiers.{tier}.{name}"
                for tier, options in named.items()
                for name in options
                if name in _BACKING
            ]
        elif table == "transfer":
            found += [f"transfer.{name}" for name in named if name != "load_deadline_s"]
        else:
            found += [f"{table}.{name}".rstrip(".") for name in named]
    return sorted(found)
