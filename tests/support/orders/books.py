"""A small leader: it gives pages and slots away, and plans steps with kvcore's own planning code.

It is random, and promises the worker only what the real leaders promise:

- a page is given away at once when its request ends; the step's fence names the graphs that may
  still use it, among them early saves of this same step
- a slot of the arena is free for others when the graphs that use it were reported
- a block can be loaded when the report of its save has arrived
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvcore.connector.fusion_messages import BlendOrder
from kvcore.transfer.graph import OpReport, Path, Span, TransferGraph
from kvcore.transfer.plan import Chain, TierRows, build_load, build_save, build_spill, layer_steps
from kvcore_devtools.gpu import GpuRank

__all__ = ["Books", "Request", "Step"]

NAMESPACE = b"n" * 16


@dataclass(eq=False)
class Request:
    """A request, with its blocks by page in their order. A parked one waits for a load."""

    name: str
    pages: dict[int, int] = field(default_factory=dict)
    unsaved: list[tuple[int, int]] = field(default_factory=list)
    parked: bool = False


@dataclass
class Step:
    """What happens in one step. ``reads`` and ``writes`` are the forward's: blocks by page.

    The blends of the requests in ``failing`` fail.
    """

    fence: list[int] = field(default_factory=list)
    early_saves: list[TransferGraph] = field(default_factory=list)
    late_saves: list[TransferGraph] = field(default_factory=list)
    sync_loads: list[TransferGraph] = field(default_factory=list)
    async_loads: list[tuple[str, TransferGraph]] = field(default_factory=list)
    blend_loads: list[tuple[str, TransferGraph]] = field(default_factory=list)
    spills: list[TransferGraph] = field(default_factory=list)
    blends: list[BlendOrder] = field(default_factory=list)
    failing: set[str] = field(default_factory=set)
    reads: dict[int, int] = field(default_factory=dict)
    writes: dict[int, int] = field(default_factory=dict)
    given: set[int] = field(default_factory=set)

    @property
    def empty(self) -> bool:
        return not (self.reads or self.writes)


@dataclass
class _Flight:
    graph: TransferGraph
    pages: set[int]
    slots: set[int]
    left: set[int]
    publishes: dict[int, int] = field(default_factory=dict)  # block -> slot
    stores: dict[int, int] = field(default_factory=dict)  # block -> slot of the tier


class Books:
    """The leader of a rank.

    ``layerwise`` cuts loads into steps of layers. ``sync`` and ``parks`` say which loads there are.
    SGLang's leader ``locks`` pages until no graph uses them any more, and loads from host memory
    only (``host_only``).
    """

    def __init__(
        self,
        rank: GpuRank,
        seed: int,
        *,
        layerwise: bool = True,
        sync: bool = True,
        parks: bool = True,
        locks: bool = False,
        host_only: bool = False,
        most: int = 3,
    ) -> None:
        self.rank = rank
        self._random = random.Random(seed)
        self._layers = layer_steps(rank.shape.layers) if layerwise else ()
        self._sync, self._parks, self._most = sync, parks, most
        self._locks, self._host_only = locks, host_only
        self._free = list(range(rank.caches[0].shape[0]))
        self._room = list(range(rank.arena.num_slots))
        self._tier_room = list(range(rank.arena.num_slots))
        self.published: dict[int, int] = {}
        self.stored: dict[int, int] = {}
        self.flights: dict[int, _Flight] = {}
        self.requests: list[Request] = []
        self._locked: list[int] = []
        self._ended: list[tuple[int, int]] = []  # blocks by page whose request has ended
        self._graphs = self._blocks = self._names = 0

    def name_of(self, block: int) -> bytes:
        return block.to_bytes(16, "big")

    # -- a step -----------------------------------------------------------------------------

    def plan(self, *, drain: bool = False) -> Step:
        """Plan a step. With ``drain``, nothing new is begun."""
        step = Step()
        self._random.shuffle(self._free)
        self._end_some(every=drain)
        for page, block in self._ended:
            if block not in self.published:
                self._save({block: page}, step.early_saves)
        self._ended.clear()
        self._release()
        if not drain:
            for request in self.requests:
                self._go_on(request, step)
            while len(self.requests) < self._most and self._random.random() < 0.6:
                if not self._begin(step):
                    break
            if self._random.random() < 0.2:
                self._spill(step)
        step.fence = self._fence(step)
        return step

    def _fence(self, step: Step) -> list[int]:
        """Return the graphs that use pages which a step gives away, but for its own later ones."""
        later = {graph.graph_id for graph in self._of(step)}
        later -= {graph.graph_id for graph in step.early_saves}
        using = {name for name, flight in self.flights.items() if flight.pages & step.given}
        return sorted(using - later)

    def _of(self, step: Step) -> Iterable[TransferGraph]:
        yield from step.early_saves
        yield from step.late_saves
        yield from step.sync_loads
        yield from (graph for _, graph in (*step.async_loads, *step.blend_loads))
        yield from step.spills

    def _go_on(self, request: Request, step: Step) -> None:
        if request.parked:
            return
        step.reads.update(request.pages)
        if self._random.random() < 0.6:
            self._compute(request, step)
        if request.unsaved and self._random.random() < 0.6:
            self._save({block: page for page, block in request.unsaved}, step.late_saves)
            request.unsaved.clear()

    def _begin(self, step: Step) -> bool:
        """Begin a request, with or without blocks to load."""
        self._names += 1
        request = Request(f"request {self._names}")
        below = [] if self._host_only else sorted(self.stored.keys() - self.published)
        found = self._choose([*self.published, *below])
        if len(self._free) < len(found) + 1:
            return False
        modes = [parks for parks, there in ((True, self._parks), (False, self._sync)) if there]
        if found and modes:
            request.parked = self._random.choice(modes)
            pages = [self._give(step) for _ in found]
            graph = self._load(found, pages)
            if graph is not None:
                request.pages = dict(zip(pages, found, strict=True))
                if request.parked:
                    step.async_loads.append((request.name, graph))
                else:
                    step.sync_loads.append(graph)
            else:
                request.parked = False
                self._free += pages
                step.given -= set(pages)
        self.requests.append(request)
        if not request.parked:
            step.reads.update(request.pages)
            self._compute(request, step)
            if request.unsaved and self._random.random() < 0.5:
                self._save({block: page for page, block in request.unsaved}, step.late_saves)
                request.unsaved.clear()
        return True

    def _choose(self, blocks: list[int]) -> list[int]:
        count = min(len(blocks), self._random.choice([0, 1, 2, 3]))
        return self._random.sample(blocks, count)

    def _give(self, step: Step) -> int:
        page = self._free.pop()
        step.given.add(page)
        return page

    def _compute(self, request: Request, step: Step) -> None:
        if not self._free:
            return
        self._blocks += 1
        page = self._give(step)
        step.writes[page] = self._blocks
        request.pages[page] = self._blocks
        request.unsaved.append((page, self._blocks))

    def _end_some(self, *, every: bool) -> None:
        for request in [one for one in self.requests if not one.parked]:
            if every or self._random.random() < 0.25:
                self._end(request)

    def _end(self, request: Request) -> None:
        """End a request. Its pages are free at once; blocks not saved are saved with the step."""
        self.requests.remove(request)
        self._locked += request.pages
        self._ended += request.unsaved
        if not self._locks:
            self._release()

    def _release(self) -> None:
        """Give away the pages of ended requests; the locked ones when no graph uses them."""
        busy: set[int] = set()
        if self._locks:
            busy = busy.union(*(flight.pages for flight in self.flights.values()))
        self._free += [page for page in self._locked if page not in busy]
        self._locked = [page for page in self._locked if page in busy]

    # -- graphs -----------------------------------------------------------------------------

    def _fly(self, graph: TransferGraph, pages: Iterable[int], slots: Iterable[int]) -> _Flight:
        left = {op.op_id for op in graph.ops}
        flight = _Flight(graph, set(pages), set(slots), left)
        self.flights[graph.graph_id] = flight
        return flight

    def _number(self) -> int:
        self._graphs += 1
        return self._graphs

    def _chain(self, blocks: Iterable[int]) -> Chain:
        return Chain(NAMESPACE, b"", tuple(self.name_of(block) for block in blocks))

    def busy_slots(self) -> set[int]:
        """Return the slots that graphs use."""
        return set().union(*(flight.slots for flight in self.flights.values()))

    def _take_slot(self, keep: Iterable[int] = ()) -> int | None:
        if not self._room:
            busy = self.busy_slots().union(keep)
            idle = [block for block, slot in self.published.items() if slot not in busy]
            if not idle:
                return None
            self._room.append(self.published.pop(self._random.choice(idle)))
        return self._room.pop(self._random.randrange(len(self._room)))

    def _save(self, pages: dict[int, int], into: list[TransferGraph]) -> None:
        """Plan a save of blocks by their pages, with or without a write to the tier."""
        slots = {}
        for block in pages:
            taken = self._take_slot()
            if taken is not None:
                slots[block] = taken
        if not slots:
            return
        sink, stores = None, dict[int, int]()
        if self._random.random() < 0.4 and len(self._tier_room) >= len(slots):
            stores = {block: self._tier_room.pop() for block in slots}
            rows = Span(0, len(slots))
            sink = TierRows(self.rank.tier, Path.H2DISK, rows, list(stores.values()))
        units = self.rank.units([pages[block] for block in slots])
        graph = build_save(
            self._number(),
            self._chain(slots),
            list(slots.values()),
            sink,
            batch_rows=2,
            copy_rows=self._random.choice([None, 1]),
        ).bind(units)
        flight = self._fly(graph, [pages[block] for block in slots], slots.values())
        flight.publishes, flight.stores = slots, stores
        into.append(graph)

    def _load(self, blocks: list[int], pages: list[int]) -> TransferGraph | None:
        """Plan a load of blocks, those in host memory first, in this order."""
        held = [block for block in blocks if block in self.published]
        blocks[:] = held + [block for block in blocks if block not in self.published]
        slots, new = [self.published[block] for block in held], dict[int, int]()
        for block in blocks[len(held) :]:
            taken = self._take_slot(keep=slots)
            if taken is None:
                break
            new[block] = taken
        if len(held) + len(new) < len(blocks):
            self._room += new.values()
            return None
        sources = []
        if new:
            rows = Span(len(held), len(blocks))
            places = [self.stored[block] for block in blocks[len(held) :]]
            sources = [TierRows(self.rank.tier, Path.DISK2H, rows, places)]
        every = [*slots, *new.values()]
        graph = build_load(
            self._number(),
            self._chain(blocks),
            every,
            sources,
            batch_rows=2,
            copy_rows=1,
            layers=self._layers,
        ).bind(self.rank.units(pages))
        self._fly(graph, pages, every).publishes = new
        return graph

    def _spill(self, step: Step) -> None:
        some = [block for block in self.published if block not in self.stored]
        if some and self._tier_room:
            block = self._random.choice(some)
            place = self._tier_room.pop()
            sink = TierRows(self.rank.tier, Path.H2DISK, Span(0, 1), [place])
            slot = self.published[block]
            graph = build_spill(self._number(), self._chain([block]), [slot], sink, batch_rows=2)
            self._fly(graph, (), [slot]).stores = {block: place}
            step.spills.append(graph)

    # -- reports ----------------------------------------------------------------------------

    def take(self, reports: Iterable[OpReport]) -> None:
        """Take in the reports of a step."""
        for report in reports:
            flight = self.flights[report.graph_id]
            flight.left.discard(report.op_id)
            assert not report.failed, report
            if not flight.left:
                del self.flights[report.graph_id]
                self._publish(flight)

    def _publish(self, flight: _Flight) -> None:
        for block, slot in flight.publishes.items():
            if block in self.published:
                self._room.append(slot)
            else:
                self.published[block] = slot
        self.stored.update(flight.stores)

    def arrived(self, names: Iterable[str], failed: Iterable[str] = ()) -> None:
        """Let the requests go on whose loads or blends have ended; a ``failed`` one cannot."""
        for request in self.requests:
            if request.name in names:
                request.parked = False

    @property
    def idle(self) -> bool:
        return not (self.flights or self.requests or self._ended or self._locked)

    def check(self) -> None:
        """Read every published block in the arena: the reports have said that it is there."""
        for block, slot in self.published.items():
            self.rank.expect_slot(slot, block)
