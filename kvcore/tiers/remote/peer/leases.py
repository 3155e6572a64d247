"""Values in a piece of memory that other nodes read: who holds which bytes, and for how long.

    put ──▶ value ──lease──▶ leased ──end, or its time is over──▶ value ──▶ evicted, removed
                                                            (the least recently used first)

The bytes of a value that is leased stay where they are, removed or not, until every lease of it has
ended; a reader that dies lets go of nothing, and its lease ends by itself.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvcore.errors import CapacityError
from kvcore.memory.buffers import Buffers, nbytes_of
from kvcore.tiers.remote.peer.messages import folder_of

MAX_LEASES = 1024
"""Leases at once: a reader has as many as it has requests under way."""

_ALIGN = 64


class Span(NamedTuple):
    """Bytes [start, start + nbytes) of the memory."""

    start: int
    nbytes: int


class SpanAllocator:
    """Which bytes of [0, nbytes) are free: first fit, neighbours are joined. Values of one size,
    which a model's blocks are, leave no gaps. Not thread-safe."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes // _ALIGN * _ALIGN
        self._starts = [0] if self.nbytes else []
        self._sizes = {0: self.nbytes}

    def allocate(self, nbytes: int) -> Span | None:
        """So many bytes, rounded up; None where there is no such gap."""
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
        """Bytes that `allocate` gave are free again."""
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
        """What is free, in order."""
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


class LeaseGrant(NamedTuple):
    """A lease, and where each value that was asked for lies; None where it is not there. Where none
    is, the lease is 0 and none is held."""

    lease: int
    places: list[Span | None]


class LentMemory:
    """Values in ``memory``, each under a name that stands for its content.

    Thread-safe; nothing blocks longer than a copy of a value takes. A lease holds for ``lease_s``.
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
        self._leases: dict[int, _Lease] = {}  # in the order in which they end
        self._folders: dict[str, int] = {}
        self._next = 1

    # -- the owner --------------------------------------------------------------------------

    def put(self, name: str, parts: Buffers) -> bool:
        """Hold a value, in the place of those that nobody uses; one that is there is let be.
        False where there is no room."""
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
        """Values are there no more; the bytes of those that are leased stay as long."""
        with self._lock:
            for name in names:
                if name in self._values:
                    self._drop(name)

    # -- readers ----------------------------------------------------------------------------

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Which there are. Counts as a use; of a chain, its first block is used last of all, so
        that it is not evicted before those that stand on it."""
        with self._lock:
            self._use(names)
            return [name in self._values for name in names]

    def lease(self, names: Sequence[str]) -> LeaseGrant:
        """Keep values where they are until `end`, for ``lease_s`` at most. Raises CapacityError
        where too many leases are held."""
        with self._lock:
            self._expire()
            self._use(names)
            found = [self._values.get(name) for name in names]
            values = [value for value in found if value is not None]
            if not values:
                return LeaseGrant(0, [None] * len(names))
            if len(self._leases) >= MAX_LEASES:
                raise CapacityError(f"{MAX_LEASES} leases are held: no more at a time")
            for value in values:
                value.readers += 1
            number, self._next = self._next, self._next + 1
            self._leases[number] = _Lease(self._clock() + self.lease_s, values)
            return LeaseGrant(
                number, [None if v is None else Span(v.span.start, v.nbytes) for v in found]
            )

    def end(self, lease: int) -> bool:
        """Whether the lease was held until now; it is not any longer."""
        with self._lock:
            self._expire()
            held = self._leases.pop(lease, None)
            if held is not None:
                self._let_go(held)
            return held is not None

    def view(self, place: Span) -> memoryview:
        """The bytes of a value, for who holds a lease of it."""
        return self._memory[place.start : place.start + place.nbytes]

    @property
    def folders(self) -> list[str]:
        """Folders of the names of all values."""
        with self._lock:
            return list(self._folders)

    @property
    def leased(self) -> int:
        """Leases that have not ended."""
        with self._lock:
            self._expire()
            return len(self._leases)

    def check_integrity(self) -> None:
        """Assert that every byte is free or one value's, and every count of readers is right."""
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

    # -- inside, with the lock ----------------------------------------------------------------

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
            self._let_go(self._leases.pop(first))

    def _let_go(self, lease: _Lease) -> None:
        for value in lease.values:
            value.readers -= 1
            if value.gone and not value.readers:
                self._spans.free(value.span)
