"""Values in memory that other nodes read under leases.

    put ──▶ value ──lease──▶ leased ──end or expiry──▶ value ──▶ evicted (LRU) or removed

The bytes of a leased value stay in place until all its leases have ended, even if the value is
removed meanwhile. A reader that dies cannot end its lease, which then expires.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvcore.errors import CapacityError
from kvcore.memory.buffers import Buffers, nbytes_of
from kvcore.tiers.remote.peer.messages import folder_of

MAX_LEASES = 1024
"""Most leases at a time; a reader holds one per request in flight."""
PEER_LEASES = 512
"""Most leases of one node."""
PEER_SHARE = 0.75
"""Share of the memory that one node may lease; a value beyond it is absent for that node."""

_ALIGN = 64


class Span(NamedTuple):
    """Bytes [start, start + nbytes) of the memory."""

    start: int
    nbytes: int


class SpanAllocator:
    """A first-fit allocator of spans in [0, nbytes), which merges adjacent free spans.

    Values of one size, such as the blocks of a model, leave no gaps. Not thread-safe.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes // _ALIGN * _ALIGN
        self._starts = [0] if self.nbytes else []
        self._sizes = {0: self.nbytes}

    def allocate(self, nbytes: int) -> Span | None:
        """Allocate ``nbytes``, rounded up for alignment; None if no free span is large enough."""
        size = max(1, -(-nbytes // _ALIGN)) * _ALIGN
        for i, start in enumerate(self._starts):
            have = self._sizes[start]
            if have < size:
                continue
            del self._sizes[start]
            if have == size:
                del self._starts[i]
            else:
                self._starts[i] = start + size
                self._sizes[start + size] = have - size
            return Span(start, size)
        return None

    def free(self, span: Span) -> None:
        """Free a span that `allocate` returned."""
        start, size = span
        i = bisect_left(self._starts, start)
        if i < len(self._starts) and self._starts[i] == start + size:
            size += self._sizes.pop(self._starts.pop(i))
        if i and (before := self._starts[i - 1]) + self._sizes[before] == start:
            self._sizes[before] += size
        else:
            insort(self._starts, start)
            self._sizes[start] = size

    @property
    def gaps(self) -> list[Span]:
        """The free spans, sorted by start."""
        return [Span(start, self._sizes[start]) for start in self._starts]


@dataclass(eq=False)
class _Value:
    span: Span
    nbytes: int
    readers: int = 0
    gone: bool = False


class _Lease(NamedTuple):
    until: float
    values: list[_Value]
    peer: str | None


class LeaseGrant(NamedTuple):
    """The number of a lease, and the place of each requested value, or None if it is absent.

    If all values are absent, the number is 0 and there is no lease.
    """

    lease: int
    places: list[Span | None]


class LentMemory:
    """Values in ``memory``, each under a name that identifies its content.

    Thread-safe. No call blocks for longer than it takes to copy one value. A lease expires after
    ``lease_s`` seconds.
    """

    def __init__(
        self,
        memory: memoryview,
        *,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lease_s = lease_s
        self._memory = memory
        self._clock = clock
        self._lock = threading.Lock()
        self._spans = SpanAllocator(memory.nbytes)
        self._values: OrderedDict[str, _Value] = OrderedDict()  # least recently used first
        self._leases: dict[int, _Lease] = {}  # sorted by expiry
        self._folders: dict[str, int] = {}
        self._next = 1
        self._held: Counter[str] = Counter()  # leases by node
        self._pinned: Counter[str] = Counter()  # bytes leased by node; shared ones count for each

    # -- the owner --------------------------------------------------------------------------

    def put(self, name: str, parts: Buffers) -> bool:
        """Store a value, and evict values that nobody reads if space is short.

        A value that is already there is kept. Returns False if there is no space.
        """
        nbytes = nbytes_of(parts)
        with self._lock:
            if name in self._values:
                self._values.move_to_end(name)
                return True
            span = self._make_room(nbytes)
        if span is None:
            return False
        start = span.start
        for part in parts:
            self._memory[start : start + part.nbytes] = part.cast("B")
            start += part.nbytes
        with self._lock:
            if name in self._values:  # another thread was faster
                self._spans.free(span)
            else:
                self._values[name] = _Value(span, nbytes)
                folder = folder_of(name)
                self._folders[folder] = self._folders.get(folder, 0) + 1
        return True

    def remove(self, names: Sequence[str]) -> None:
        """Remove values. The bytes of leased values stay in place until their leases end."""
        with self._lock:
            for name in names:
                if name in self._values:
                    self._drop(name)

    # -- readers ----------------------------------------------------------------------------

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Return True for each value that is there, and mark it as used.

        The first name counts as used most recently, so that the first block of a chain is not
        evicted before the blocks that depend on it.
        """
        with self._lock:
            self._use(names)
            return [name in self._values for name in names]

    def lease(self, names: Sequence[str], peer: str | None = None) -> LeaseGrant:
        """Keep values in place until `end`, at most for ``lease_s`` seconds.

        ``peer`` is the reader, None for this node itself, which is not bounded. Raises
        CapacityError if it holds too many leases, or all do.
        """
        with self._lock:
            self._expire()
            self._use(names)
            found = self._within_share([self._values.get(name) for name in names], peer)
            values = [value for value in found if value is not None]
            if not values:
                return LeaseGrant(0, [None] * len(names))
            if peer is not None:
                self._check_count(peer)
            for value in values:
                value.readers += 1
            number, self._next = self._next, self._next + 1
            self._leases[number] = _Lease(self._clock() + self.lease_s, values, peer)
            if peer is not None:
                self._held[peer] += 1
                self._pinned[peer] += sum(value.span.nbytes for value in values)
            return LeaseGrant(
                number, [None if v is None else Span(v.span.start, v.nbytes) for v in found]
            )

    def end(self, lease: int, peer: str | None = None) -> bool:
        """End a lease of this reader. Returns True if it was valid until now."""
        with self._lock:
            self._expire()
            held = self._leases.get(lease)
            if held is None or held.peer != peer:
                return False
            self._release(self._leases.pop(lease))
            return True

    def view(self, place: Span) -> memoryview:
        """Return the bytes of a value. The caller must hold a lease of it."""
        return self._memory[place.start : place.start + place.nbytes]

    @property
    def folders(self) -> list[str]:
        """The folders of the names of all values."""
        with self._lock:
            return list(self._folders)

    @property
    def leased(self) -> int:
        """The number of leases that have not ended."""
        with self._lock:
            self._expire()
            return len(self._leases)

    def check_integrity(self) -> None:
        """Assert that each byte is free or belongs to one value, and that reader counts match."""
        with self._lock:
            held = [value for lease in self._leases.values() for value in lease.values]
            values = {id(v): v for v in (*self._values.values(), *held)}.values()
            for value in values:
                assert value.readers == sum(v is value for v in held), "readers"
            spans = sorted([value.span for value in values] + self._spans.gaps)
            end = 0
            for span in spans:
                assert span.start == end, "bytes of two values, or of none"
                end += span.nbytes
            assert end == self._spans.nbytes
            assert sum(self._folders.values()) == len(self._values)
            theirs = [lease for lease in self._leases.values() if lease.peer is not None]
            assert self._held == Counter(lease.peer for lease in theirs), "leases by node"

    # -- inside, with the lock ----------------------------------------------------------------

    def _within_share(self, found: list[_Value | None], peer: str | None) -> list[_Value | None]:
        """Return the values without those beyond what this reader may lease.

        One that holds nothing may lease one value of any size.
        """
        if peer is None:
            return found
        share, pinned = self._spans.nbytes * PEER_SHARE, self._pinned[peer]
        granted: list[_Value | None] = []
        for value in found:
            nbytes = 0 if value is None else value.span.nbytes
            fits = pinned == 0 or pinned + nbytes <= share
            granted.append(value if fits else None)
            pinned += nbytes if fits else 0
        return granted

    def _check_count(self, peer: str) -> None:
        if self._held[peer] >= PEER_LEASES or self._held.total() >= MAX_LEASES:
            raise CapacityError(
                f"{self._held[peer]} leases of this node and {self._held.total()} in all are held; "
                f"the limits are {PEER_LEASES} and {MAX_LEASES}"
            )

    def _use(self, names: Sequence[str]) -> None:
        for name in reversed(names):
            if name in self._values:
                self._values.move_to_end(name)

    def _make_room(self, nbytes: int) -> Span | None:
        if nbytes > self._spans.nbytes:
            return None
        self._expire()
        while (span := self._spans.allocate(nbytes)) is None:
            idle = next((name for name, v in self._values.items() if not v.readers), None)
            if idle is None:
                return None
            self._drop(idle)
        return span

    def _drop(self, name: str) -> None:
        value, folder = self._values.pop(name), folder_of(name)
        self._folders[folder] -= 1
        if not self._folders[folder]:
            del self._folders[folder]
        value.gone = True
        if not value.readers:
            self._spans.free(value.span)

    def _expire(self) -> None:
        now = self._clock()
        while self._leases:
            first = next(iter(self._leases))
            if self._leases[first].until > now:
                return
            self._release(self._leases.pop(first))

    def _release(self, lease: _Lease) -> None:
        if lease.peer is not None:
            self._held -= Counter({lease.peer: 1})
            self._pinned -= Counter({lease.peer: sum(v.span.nbytes for v in lease.values)})
        for value in lease.values:
            value.readers -= 1
            if value.gone and not value.readers:
                self._spans.free(value.span)
