"""What a leader asks of a manager, and the values that the two exchange.

The manager is in the leader's process, or behind a server: the leader does not care which.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvcore.index import Event, Pin
from kvcore.index.policy.admission import AdmissionFilter, Always
from kvcore.index.slots import SlotRun
from kvcore.tiers.remote.lookup import Finder, Promise
from kvcore.transfer.graph import OpReport, Path, Span, TransferGraph, UnitTable

if TYPE_CHECKING:
    from kvcore.fusion.segments import SegmentBook

__all__ = [
    "HOST",
    "Backing",
    "Event",
    "Hit",
    "IndexView",
    "Lane",
    "Manager",
    "PreparedLoad",
    "Promise",
    "Readiness",
    "Room",
    "Source",
    "TransferOptions",
    "Transport",
    "WritePolicy",
]

HOST = "host"


class Readiness(Enum):
    """Whether there are slots for a load."""

    READY = "ready"
    LATER = "later"
    """When loads in flight have ended."""
    NEVER = "never"
    """Or too late: what has the slots hangs."""


class Room(NamedTuple):
    """What there is for the next load: whether too many graphs are in flight, free host slots,
    whether there are staging slots here or lent to others, and whether any graph gets on."""

    full: bool
    free: int
    staging: bool
    lent: bool
    moving: bool = True

    def admits(self, below: int) -> Readiness:
        """Whether a load with ``below`` blocks from beneath the host tier can be launched."""
        if self.full:
            return Readiness.LATER if self.moving else Readiness.NEVER
        if not below or self.staging or self.free >= below:
            return Readiness.READY
        return Readiness.LATER if self.lent else Readiness.NEVER


class WritePolicy(str, Enum):
    """When a host block is written to a backing tier."""

    WRITE_THROUGH = "write_through"
    """At once, behind the save."""
    SELECTIVE = "selective"
    """When the admission filter takes it: on its n-th use."""
    WRITE_BACK = "write_back"
    """When the host tier runs short, before the block is evicted from it."""


@dataclass(frozen=True)
class Backing:
    """How a manager reads and writes a tier below the host arena.

    Args:
        name: the tier's name in the index.
        read_path, write_path: the transfer paths from and to host memory.
        write: when a host block is written to the tier.
        admission: which blocks a SELECTIVE tier takes.
        finder: asks a store that other hosts write to what it holds. The index only believes the
            answer: a block can be gone when it is read.
        node: the address at which other engines find what this one has written to the tier.
        record_clear: writes down that a namespace (None: all) was cleared
            (`kvcore.plugins.PreparedTier`).
        to_device: loads go past host memory (DISK2D) while the staging on the device has room.
            Blocks that are to be kept in host memory take ``read_path``.
    """

    name: str
    read_path: Path = Path.DISK2H
    write_path: Path = Path.H2DISK
    write: WritePolicy = WritePolicy.WRITE_THROUGH
    admission: AdmissionFilter = field(default_factory=Always)
    finder: Finder | None = None
    node: str = ""
    record_clear: Callable[[bytes | None], None] | None = None
    to_device: bool = False

    @property
    def load_path(self) -> Path:
        """The path of reads for a load to the device."""
        return Path.DISK2D if self.to_device else self.read_path


@dataclass(frozen=True)
class TransferOptions:
    """How a manager plans transfers, and what they may occupy.

    Args:
        staging_slots: slots of the host arena outside the index, for loads whose blocks cannot be
            kept in the host tier.
        device_slots: blocks in every worker's staging on the device, for loads past host memory.
        batch_blocks: the most blocks of one operation of a backing tier.
        max_in_flight: the most graphs in flight.
        write_through_in_save: if True, the graph of a save also writes to the first write-through
            tier. If False, the save ends in host memory, and separate graphs write to the tiers
            below: for workers that have no such tiers.
    """

    staging_slots: Sequence[int] = ()
    device_slots: int = 0
    batch_blocks: int = 16
    max_in_flight: int = 256
    write_through_in_save: bool = True


class Source(NamedTuple):
    """Blocks [start, stop) of a chain that ``tier`` holds."""

    tier: str
    start: int
    stop: int


@dataclass(frozen=True)
class Hit:
    """What is held of a chain: ``sources`` are adjacent, host first, and cover [0, depth)."""

    keys: Sequence[bytes]
    namespace: bytes
    sources: tuple[Source, ...]

    @property
    def depth(self) -> int:
        """Blocks held, from the start of the chain."""
        return self.sources[-1].stop if self.sources else 0

    @property
    def in_host(self) -> int:
        """Leading blocks that lie in host memory."""
        return next((source.stop for source in self.sources if source.tier == HOST), 0)

    def blocks_by_tier(self, start: int = 0, stop: int | None = None) -> dict[str, int]:
        """How many of the blocks [start, stop) each tier answers."""
        end = self.depth if stop is None else stop
        counts = {s.tier: min(s.stop, end) - max(s.start, start) for s in self.sources}
        return {tier: count for tier, count in counts.items() if count > 0}


@dataclass(frozen=True)
class PreparedLoad:
    """A load out of host memory that was promised, and whose places are not known yet. Its blocks
    stay there until it is launched or dropped: by a ``pin`` of the leader's own index, or by the
    ``graph`` that a server planned."""

    hit: Hit
    start: int
    stop: int
    layers: tuple[Span, ...]
    pin: Pin | None = None
    graph: TransferGraph | None = None


Lane = Callable[[TransferGraph], object]
"""Takes a graph that was launched, in place of its transport's own queue: an adapter decides at the
launch which part of its next message carries the graph."""


class Transport(Protocol):
    """Carries graphs to every worker of the engine and their reports back."""

    def submit(self, graph: TransferGraph, lane: Lane | None = None) -> None:
        """Send a graph to every worker, or hand it to ``lane``, whose owner then sends it."""

    def cancel(self, graph_id: int) -> None: ...

    def forget(self, tier: str, slots: Sequence[SlotRun]) -> None:
        """Make slots of a backing tier unreadable, before any graph submitted later runs."""

    def wait_report(self, timeout: float) -> bool: ...

    def poll(self) -> Sequence[OpReport]: ...


class IndexView(Protocol):
    """What an adapter may ask of the index. `kvcore.index.BlockIndex` says what each means."""

    @property
    def tiers(self) -> tuple[str, ...]: ...

    def num_slots(self, tier: str) -> int: ...

    def num_used(self, tier: str) -> int: ...

    def held(self, tier: str, keys: Sequence[bytes]) -> int: ...

    def path(self, key: bytes) -> list[bytes]: ...

    def namespace_of(self, key: bytes) -> bytes: ...

    def pin(self, tier: str, key: bytes) -> Pin: ...

    def unpin(self, pin: Pin) -> None: ...

    def __contains__(self, key: bytes) -> bool: ...


class Manager(ABC):
    """What a leader asks: answered in its own process by `kvcore.manager.KVManager`, whose methods
    say what each means, or by a server (`kvcore.server.client.RemoteManager`).

    One thread owns it. No call does I/O but `wait` and `wait_stores`; with a server every call is
    bounded by its deadline.
    """

    index: IndexView
    transport: Transport
    segments: SegmentBook | None = None
    """The server's tokens of stored blocks; None where the leader is to have its own."""

    @property
    @abstractmethod
    def backings(self) -> tuple[Backing, ...]: ...

    @property
    def node(self) -> str:
        """Where other engines find what this one, or its server, writes; "" where all look in one
        place, and while there is no server."""
        return next((tier.node for tier in self.backings if tier.node), "")

    def expected(self, keys: Sequence[bytes]) -> int:
        """Leading blocks that a tier holds or is receiving; 0 where a server does not answer."""
        most = 0
        for tier in (HOST, *(tier.name for tier in self.backings)):
            if most < len(keys):
                most = max(most, self.index.held(tier, keys))
        return most

    def coming(self, hit: Hit, stop: int) -> bool:
        """Whether of the first ``stop`` blocks of ``hit`` some that host memory lacks are on their
        way there, for whomever. What fails to come, or is given up, is not coming any more."""
        here = hit.in_host
        return here < stop and self.index.held(HOST, hit.keys[:stop]) > here

    @property
    @abstractmethod
    def in_flight(self) -> int: ...

    @property
    def reads_in_flight(self) -> Mapping[str, tuple[int, int]]:
        """(operations, blocks) being read, or waiting for it, by the tier they come from, as far
        as they are known here."""
        return {}

    @abstractmethod
    def is_in_flight(self, graph_id: int) -> bool: ...

    @abstractmethod
    def get_match(self, keys: Sequence[bytes], namespace: bytes) -> Hit: ...

    @abstractmethod
    def ask_stores(self, hit: Hit, computed: int = 0, promise: Promise | None = None) -> bool: ...

    @abstractmethod
    def wait_stores(self, timeout: float) -> bool: ...

    @abstractmethod
    def can_load(self, hit: Hit, start: int, stop: int) -> Readiness: ...

    @abstractmethod
    def launch_load(
        self,
        hit: Hit,
        start: int,
        stop: int,
        units: Sequence[UnitTable],
        *,
        layers: Sequence[Span] = (),
        deadline_s: float | None = None,
        on_end: Callable[[], object] | None = None,
        lane: Lane | None = None,
    ) -> TransferGraph: ...

    @property
    def certain(self) -> bool:
        """Whether a load out of host memory, once prepared, can be had by every worker."""
        return True

    def prepare_load(
        self, hit: Hit, start: int, stop: int, *, layers: Sequence[Span] = ()
    ) -> PreparedLoad:
        """Keep blocks [start, stop) of ``hit`` in host memory until `launch_prepared` or
        `drop_prepared`, of which one must be called once.

        Raises a KVCoreError where they are not there (any more); nothing is kept then.
        """
        pin = self.index.pin(HOST, hit.keys[stop - 1])
        return PreparedLoad(hit, start, stop, tuple(layers), pin=pin)

    def launch_prepared(
        self,
        prepared: PreparedLoad,
        units: Sequence[UnitTable],
        *,
        on_end: Callable[[], object] | None = None,
        lane: Lane | None = None,
    ) -> TransferGraph:
        """The load, to the device places in ``units``; raises as `launch_load` does. From then on
        its flight keeps the blocks; where it raises, nothing does."""
        assert prepared.pin is not None
        try:
            return self.launch_load(
                prepared.hit,
                prepared.start,
                prepared.stop,
                units,
                layers=prepared.layers,
                on_end=on_end,
                lane=lane,
            )
        finally:
            self.index.unpin(prepared.pin)

    def drop_prepared(self, prepared: PreparedLoad) -> None:
        """It will not be launched."""
        assert prepared.pin is not None
        self.index.unpin(prepared.pin)

    @abstractmethod
    def launch_save(
        self,
        keys: Sequence[bytes],
        namespace: bytes,
        stop: int,
        units_of: Callable[[int, int], Sequence[UnitTable] | None],
        tokens: Sequence[int] | None = None,
        *,
        lane: Lane | None = None,
    ) -> TransferGraph | None: ...

    @property
    def wants_tokens(self) -> bool:
        """Whether ``tokens`` of a save are told to anybody."""
        return False

    @abstractmethod
    def cancel(self, graph_id: int) -> None: ...

    @abstractmethod
    def complete(self, report: OpReport) -> None: ...

    @abstractmethod
    def maintain(self) -> None: ...

    @abstractmethod
    def clear(self, namespace: bytes | None = None) -> int: ...

    @abstractmethod
    def check_integrity(self) -> None: ...

    def pump(self) -> None:
        """Take in every report the transport has. Does not block."""
        for report in self.transport.poll():
            self.complete(report)

    def wait(self, graph_id: int, timeout: float | None = None) -> bool:
        """Block until the graph has ended on all workers; False after ``timeout`` seconds."""
        limit = None if timeout is None else time.monotonic() + timeout
        self.pump()
        while self.is_in_flight(graph_id):
            left = 1.0 if limit is None else limit - time.monotonic()
            if left <= 0:
                return False
            self.transport.wait_report(min(left, 1.0))
            self.pump()
        return True
