"""The interface between a leader and its manager, and the values that the two exchange.

The manager runs in the leader's process or behind a server. A leader treats both alike.
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
from kvcore.tiers.finder import Finder, Promise
from kvcore.tiers.spec import ClearRecord
from kvcore.transfer.graph import OpReport, Path, Span, TransferGraph, UnitTable

if TYPE_CHECKING:
    from kvcore.fusion.segments import SegmentBook
    from kvcore.model.points import PointRows

__all__ = [
    "HOST",
    "Backing",
    "Event",
    "Hit",
    "IndexView",
    "Lane",
    "Manager",
    "Planned",
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
    """When there are slots for a load."""

    READY = "ready"
    """There are slots now."""
    LATER = "later"
    """There are slots when loads in flight have ended."""
    NEVER = "never"
    """There are no slots, or their owners hang and free them too late."""


class Room(NamedTuple):
    """The room for the next load.

    Attributes:
        full: too many graphs are in flight.
        free: the number of free host slots.
        staging: staging slots are free.
        lent: loads in flight will give staging slots back.
        moving: some graph in flight makes progress.
    """

    full: bool
    free: int
    staging: bool
    lent: bool
    moving: bool = True

    def admits(self, below: int) -> Readiness:
        """Return when a load can be launched that reads ``below`` blocks from lower tiers."""
        if self.full:
            return Readiness.LATER if self.moving else Readiness.NEVER
        if not below or self.staging or self.free >= below:
            return Readiness.READY
        return Readiness.LATER if self.lent else Readiness.NEVER


class WritePolicy(str, Enum):
    """When a host block is written to a backing tier."""

    WRITE_THROUGH = "write_through"
    """At once, after the save."""
    SELECTIVE = "selective"
    """When the admission filter takes it: on its n-th use."""
    WRITE_BACK = "write_back"
    """When the host tier runs short of room, before the block is evicted from it."""


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
        clears: records clears durably (`kvcore.plugins.PreparedTier`).
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
    clears: ClearRecord | None = None
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
        copy_blocks: the most blocks that one operation copies between host memory and the device,
            in a save, and in a load that no step waits for; None for any number.
        max_in_flight: the most graphs in flight.
        write_through_in_save: if True, the graph of a save also writes to the first write-through
            tier. If False, the save ends in host memory, and separate graphs write to the tiers
            below: for workers that have no such tiers.
    """

    staging_slots: Sequence[int] = ()
    device_slots: int = 0
    batch_blocks: int = 16
    copy_blocks: int | None = None
    max_in_flight: int = 256
    write_through_in_save: bool = True


class Source(NamedTuple):
    """Blocks [start, stop) of a chain that ``tier`` holds."""

    tier: str
    start: int
    stop: int


@dataclass(frozen=True)
class Hit:
    """The leading blocks of a chain that the tiers hold together.

    ``sources`` are adjacent, host first, and cover blocks [0, depth). If the model keeps resume
    points, ``keys`` end in the ``point`` rows of the one that was found, which ``depth`` counts.
    ``beside`` is then the hit of the whole prompt, whose blocks may go on where no point is.
    """

    keys: Sequence[bytes]
    namespace: bytes
    sources: tuple[Source, ...]
    point: int = 0
    beside: Hit | None = None

    @property
    def depth(self) -> int:
        """The number of leading blocks that are held, and of rows of a resume point."""
        return self.sources[-1].stop if self.sources else 0

    @property
    def blocks(self) -> int:
        """The number of leading blocks with which the model can go on."""
        return self.depth - self.point

    @property
    def reached(self) -> int:
        """The number of leading blocks of the prompt that are held, with or without a point."""
        return self.held.depth

    @property
    def held(self) -> Hit:
        """The leading blocks of the prompt that are held, whether the model can go on or not."""
        return self if self.beside is None else self.beside

    @property
    def in_host(self) -> int:
        """The number of leading blocks that are in host memory."""
        return next((source.stop for source in self.sources if source.tier == HOST), 0)

    def blocks_by_tier(self, start: int = 0, stop: int | None = None) -> dict[str, int]:
        """Count the blocks of [start, stop) by tier; ``stop`` defaults to the depth."""
        end = self.depth if stop is None else stop
        counts = {s.tier: min(s.stop, end) - max(s.start, start) for s in self.sources}
        return {tier: count for tier, count in counts.items() if count > 0}


class Planned(NamedTuple):
    """A transfer that is planned and not sent: its blocks are kept, its pages are not known yet.

    A load has pinned its blocks, a save has reserved slots, and a fetch has done both. Give it to
    `Manager.launch` or to `Manager.drop`, exactly once. It is planned, sent or dropped as a whole.

    Attributes:
        graph: the copies, without unit tables.
        keys: the chain of its prompt, from the first block, with the rows of a resume point.
        blocks: the blocks and rows of the chain that are copied; row 0 of the graph is the first.
        tokens: the tokens of the chain from its first block on, if events publish them.
    """

    graph: TransferGraph
    keys: Sequence[bytes]
    blocks: Span
    tokens: Sequence[int] | None = None


Lane = Callable[[TransferGraph], object]
"""A queue that takes a launched graph instead of the transport's own.

With it, an adapter decides at the launch which part of its next message carries the graph.
"""


class Transport(Protocol):
    """Carries graphs to every worker of the engine, and their reports back."""

    def submit(self, graph: TransferGraph, lane: Lane | None = None) -> None:
        """Send a graph to every worker, or hand it to ``lane``, whose owner then sends it."""

    def cancel(self, graph_id: int) -> None:
        """Ask every worker to drop what it has not started of a graph."""

    def invalidate(self, tier: str, slots: Sequence[SlotRun]) -> None:
        """Make slots of a backing tier unreadable before any later graph runs."""

    def wait_report(self, timeout: float) -> bool:
        """Block until a report has come, at most ``timeout`` seconds; return False if none has."""
        ...

    def poll(self) -> Sequence[OpReport]:
        """Return the reports of ops that have ended on all workers since the last call."""
        ...


class IndexView(Protocol):
    """The part of the index that adapters use; `kvcore.index.BlockIndex` documents it."""

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
    """The control plane of one model, as a leader uses it.

    `kvcore.manager.KVManager` implements it in the leader's process, and
    `kvcore.server.client.RemoteManager` asks a server. The methods are documented here for both.

    One thread owns a manager. In the leader's process only `wait` and `wait_stores` block, and no
    call does I/O. With a server, every call may wait for its answer until the call's deadline.
    """

    index: IndexView
    transport: Transport
    points: PointRows | None = None
    """The resume points of the model; None if it goes on behind any block."""
    segments: SegmentBook | None = None
    """The server's tokens of stored blocks; None if the leader is to keep its own."""

    @property
    @abstractmethod
    def backings(self) -> tuple[Backing, ...]:
        """The tiers below the host arena, nearest first."""

    @property
    def node(self) -> str:
        """The address at which other engines find what this one, or its server, writes.

        Empty if all engines look in one place, or there is no server now.
        """
        return next((tier.node for tier in self.backings if tier.node), "")

    # -- lookup ---------------------------------------------------------------------------------

    @abstractmethod
    def get_match(self, keys: Sequence[bytes], namespace: bytes, limit: int | None = None) -> Hit:
        """Return the longest prefix of ``keys`` that the tiers hold together. O(log n), no I/O.

        If the model keeps resume points, it is the longest that ends in one, of at most ``limit``
        blocks (default: all). Without points, ``limit`` is not looked at.
        """

    def expected(self, keys: Sequence[bytes]) -> int:
        """Count the leading blocks that a tier holds or is receiving.

        If the model keeps resume points, they are those before the last point of which that is
        true. 0 if a server does not answer.
        """
        most = 0
        for tier in (HOST, *(tier.name for tier in self.backings)):
            if most < len(keys):
                most = max(most, self.expected_in(tier, keys))
        return most

    @abstractmethod
    def expected_in(self, tier: str, keys: Sequence[bytes]) -> int:
        """Count the blocks that `expected` counts of one tier."""

    def coming(self, hit: Hit, stop: int) -> bool:
        """Return True if blocks that are missing from host memory are being loaded there.

        Only the first ``stop`` blocks of ``hit`` count, whichever request loads them. Failed and
        cancelled loads do not count.
        """
        here = hit.in_host
        return here < stop and self.index.held(HOST, hit.keys[:stop]) > here

    @abstractmethod
    def ask_stores(self, hit: Hit, computed: int = 0, promise: Promise | None = None) -> bool:
        """Return True if a store may hold more of the prompt than ``hit`` and is being asked.

        Then look the prompt up again instead of computing it. ``computed`` leading blocks need no
        tier. An answer is waited for as long as the store's ``lookup_s`` says, and an answer about
        blocks of a ``promise`` as long as the promise says. Pass a promise with a prompt's first
        lookup only. The stores are asked in the background.
        """

    @abstractmethod
    def wait_stores(self, timeout: float) -> bool:
        """Block until a store has answered, at most ``timeout`` seconds.

        Returns False if none has.
        """

    @abstractmethod
    def can_load(self, hit: Hit, start: int, stop: int) -> Readiness:
        """Return when `plan_load` has slots for blocks [start, stop) of ``hit``."""

    # -- plans --------------------------------------------------------------------------------

    @property
    def certain(self) -> bool:
        """True if every worker can carry out a load from host memory once it is planned."""
        return True

    @abstractmethod
    def plan_load(
        self,
        hit: Hit,
        blocks: Span,
        *,
        layers: Sequence[Span] = (),
        deadline_s: float | None = None,
    ) -> Planned:
        """Plan a load of ``blocks`` of ``hit`` to the device.

        Blocks from a backing tier are kept in the host tier while it has room; otherwise they pass
        through the staging slots. If their tier is set up for it, they go past host memory instead.
        ``layers`` are the steps in which blocks from host memory arrive; empty: all at once.
        ``deadline_s`` is in seconds from the launch; None waits for ever.

        Raises CapacityError if there are neither host nor staging slots, and another KVCoreError
        if ``hit`` is no longer true, or a server does not answer. Nothing is pinned or reserved
        then.
        """

    @abstractmethod
    def plan_fetch(
        self,
        hit: Hit,
        stop: int | None = None,
        *,
        deadline_s: float | None = None,
        background: bool = False,
    ) -> Planned | None:
        """Plan a load of the first ``stop`` blocks of ``hit`` into host memory alone.

        Blocks that are there, or are coming, are left out. The last ones are left out if there is
        no room for them. A fetch in the ``background`` lets all other transfers pass.

        Returns None if nothing is left. Raises as `plan_load` does, but for room.
        """

    @abstractmethod
    def plan_save(
        self,
        keys: Sequence[bytes],
        namespace: bytes,
        stop: int,
        tokens: Sequence[int] | None = None,
        *,
        point: bool = False,
    ) -> Planned | None:
        """Plan a save of the blocks of ``keys[:stop]`` that the host tier lacks.

        With ``point``, the rows of the resume point behind them follow, all of them or the plan is
        None: without its point, no hit could end there. ``tokens`` are the tokens of the chain from
        the first block on, if events may publish them.

        Room is made now: if the engine turns out not to have the pages any more, and the plan is
        dropped, the blocks that were evicted for it stay evicted.

        Returns None if there is nothing to save, or no room.
        """

    @abstractmethod
    def launch(
        self,
        planned: Planned,
        units: Sequence[UnitTable] = (),
        *,
        lane: Lane | None = None,
        on_end: Callable[[], object] | None = None,
    ) -> TransferGraph:
        """Send a plan to the workers. Does not ask a server.

        ``units`` has a table for each layer group, with a row for each block; a fetch has none.
        ``lane`` takes the graph instead of the transport's own queue. ``on_end`` is called when the
        graph has ended on all workers. Until then it keeps what was planned.

        Raises TransferError if ``units`` do not fit. The plan is dropped then.
        """

    @abstractmethod
    def drop(self, planned: Planned) -> None:
        """Give back what a plan keeps. Does not wait for a server.

        A dropped save is counted as an aborted one.
        """

    @property
    def wants_tokens(self) -> bool:
        """True if the tokens of a save are published."""
        return False

    # -- graphs in flight -----------------------------------------------------------------------

    @property
    @abstractmethod
    def in_flight(self) -> int:
        """The number of graphs that were launched and have not ended."""

    @property
    def awaited(self) -> bool:
        """True if an engine without requests should go on with its steps, to hear of a graph's end.

        A graph that was given up, or that waits for a medium alone which has ended nothing for a
        while, does not count: it may hang forever.
        """
        return self.in_flight > 0

    def reads_before(self, blocks: int | None = None) -> Mapping[str, tuple[int, int]]:
        """Return (operations, blocks) that are read before a load of ``blocks``, by tier.

        They are read or queued already. Workers move the load with the fewest bytes left first, so
        of a longer one no more than ``blocks`` count. None counts all of them. Empty behind a
        server, which does not report them.
        """
        return {}

    @abstractmethod
    def is_in_flight(self, graph_id: int) -> bool:
        """Return True if the graph has not ended."""

    @abstractmethod
    def cancel(self, graph_id: int) -> None:
        """Ask the workers to drop what has not started; `complete` still sees every op end."""

    @abstractmethod
    def complete(self, report: OpReport) -> None:
        """Apply the outcome of one op on *all* workers: publish, quarantine, unpin."""

    def pump(self) -> None:
        """Apply every report that the transport has. Does not block."""
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

    # -- upkeep ---------------------------------------------------------------------------------

    @abstractmethod
    def maintain(self) -> None:
        """Do periodic work, such as keeping room in the host tier. Call once a step."""

    @abstractmethod
    def clear(self, namespace: bytes | None = None) -> int:
        """Remove every block of a namespace, or all blocks, from every tier.

        Blocks in flight are removed too. Returns the number of copies that were removed.

        Backing tiers also invalidate slots that the index does not know of, so nothing comes back
        with a restart. From a store, the blocks that this leader knew of are removed for everyone.
        """

    @abstractmethod
    def check_integrity(self) -> None:
        """Assert that the books are consistent; for tests."""
