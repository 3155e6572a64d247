"""Resume points under random traffic, against sets of keys: what can be gone on from, and where.

The media check every byte moved (`support.manager`). The twin knows of each tier the set of keys
that events told of, and tries every boundary of a prompt one by one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcore.errors import CapacityError
from kvcore.manager import HOST, Hit, WritePolicy
from kvcore.manager.base import Planned
from kvcore.model.points import PointShape, StateGroup, WindowGroup, point_keys
from kvcore.model.shape import BlockShape
from kvcore.transfer.graph import RowError
from support.budget import examples
from support.manager import NAMESPACE, ManagerRig, chain

Names = list[int]
names_ = st.lists(st.integers(0, 1), min_size=1, max_size=6)
limits = st.none() | st.integers(0, 7)


class Twin:
    """What tiers hold, by the events of the index alone."""

    def __init__(self, rig: ManagerRig, rows: Callable[[int], int], every: int) -> None:
        self.rig, self.rows, self.every = rig, rows, every
        self.seen = 0
        self.held: dict[str, set[bytes]] = {HOST: set(), "disk": set()}

    def listen(self) -> None:
        for event in self.rig.events[self.seen :]:
            keys = set(event.keys)
            held = self.held[event.tier]
            assert keys <= held if not event.stored else not keys & held
            self.held[event.tier] = held | keys if event.stored else held - keys
        self.seen = len(self.rig.events)

    def readable(self) -> list[set[bytes]]:
        reads = self.rig.manager.tiers.breakers.reads
        return [keys for tier, keys in self.held.items() if tier == HOST or reads[tier].allows()]

    def has(self, keys: list[bytes]) -> bool:
        return any(set(keys) <= held for held in self.readable())

    def reached(self, keys: list[bytes]) -> int:
        return max(n for n in range(len(keys) + 1) if self.has(keys[:n]))

    def longest(self, keys: list[bytes], limit: int | None) -> int:
        """Return the last boundary whose blocks and point are held."""
        most = len(keys) if limit is None else min(len(keys), limit)
        boundaries = [
            n
            for n in range(1, most + 1)
            if n % self.every == 0 and self.has([*keys[:n], *point_keys(keys[n - 1], self.rows(n))])
        ]
        return max(boundaries, default=0)


class PointsMachine(RuleBasedStateMachine):
    """Random saves and losses of points of prompts that share prefixes."""

    write = WritePolicy.WRITE_THROUGH
    host, rows, every, window = 12, 2, 1, 0

    def count(self, blocks: int) -> int:
        """The rows of a point: the states, and two a block of the window."""
        return self.rows + 2 * min(blocks, self.window)

    def __init__(self) -> None:
        super().__init__()
        states = (StateGroup(1, ("s",), 10 * self.rows),) if self.rows else ()
        layer = BlockShape(1, 1, 2, block_tokens=2, dtype="uint8")
        windows = ()
        if self.window:
            windows = (WindowGroup(2, ("a", "b"), layer, before=2 * self.window - 1),)
        point = PointShape(states, 10, self.every, windows)
        self.rig = ManagerRig(
            self.host, 20, write=self.write, staging=3, batch=3, admit=2, points=point
        )
        self.twin = Twin(self.rig, self.count, self.every)
        self.planned: list[Planned] = []

    @rule(names=names_, whole=st.booleans())
    def save(self, names: Names, whole: bool) -> None:
        """Save a point, or blocks alone."""
        manager, keys = self.rig.manager, chain(*names)
        before, used = manager.in_flight, manager.index.num_used(HOST)
        graph = self.rig.save_point(keys, len(keys)) if whole else self.rig.save(keys)
        if graph is not None and whole:
            assert graph.keys[-1] == point_keys(keys[-1], self.count(len(keys)))[-1], (
                "a part of a point"
            )
        if graph is None and manager.in_flight == before:
            assert manager.index.num_used(HOST) <= used

    @rule(names=names_)
    def plan(self, names: Names) -> None:
        planned = self.rig.manager.plan_save(chain(*names), NAMESPACE, len(names), point=True)
        if planned is not None:
            self.planned.append(planned)

    @precondition(lambda self: self.planned)
    @rule(pick=st.integers(0, 10), launch=st.booleans())
    def go_on(self, pick: int, launch: bool) -> None:
        planned = self.planned.pop(pick % len(self.planned))
        if launch:
            units = self.rig.computed(planned.keys, *planned.blocks)
            self.rig.manager.launch(planned, units)
        else:
            self.rig.manager.drop(planned)

    @rule(names=names_, limit=limits)
    def look_up(self, names: Names, limit: int | None) -> None:
        self.twin.listen()
        keys = chain(*names)
        hit = self.rig.manager.get_match(keys, NAMESPACE, limit)
        blocks = self.twin.longest(keys, limit)
        assert (hit.blocks, hit.reached) == (blocks, self.twin.reached(keys[:limit]))
        assert hit.point == (self.count(blocks) if blocks else 0)
        self.check_sources(hit, keys)

    def look_everything_up(self, turn: int) -> None:
        """Look up every prompt, each with the next of three limits."""
        for size in range(1, 7):
            for number in range(2**size):
                limit = (None, size - 1, 1)[(number + turn) % 3]
                self.look_up([number >> bit & 1 for bit in range(size)], limit)

    def check_sources(self, hit: Hit, keys: list[bytes]) -> None:
        """Each source holds what it is said to, and they are adjacent."""
        if not hit.sources:
            return
        blocks = hit.blocks
        assert list(hit.keys) == [*keys[:blocks], *point_keys(keys[blocks - 1], self.count(blocks))]
        reached = 0
        for tier, start, stop in hit.sources:
            assert start == reached < stop
            assert set(hit.keys[:stop]) <= self.twin.held[tier]
            reached = stop
        assert reached == len(hit.keys)

    @rule(names=names_, limit=limits, start=st.integers(0, 3))
    def load(self, names: Names, limit: int | None, start: int) -> None:
        keys = chain(*names)
        with contextlib.suppress(CapacityError):
            graph = self.rig.load_point(keys, start, limit)
            assert graph is None or graph.point is not None

    @rule(names=names_)
    def fetch(self, names: Names) -> None:
        self.rig.fetch(chain(*names), lambda: None)

    @rule(names=names_, tier=st.sampled_from([HOST, "disk"]), point=st.booleans())
    def evict(self, names: Names, tier: str, point: bool) -> None:
        """Leave out the end of a chain, or of the point behind it."""
        keys = chain(*names)
        lost = list(point_keys(keys[-1], self.count(len(keys))))[-1:] if point else keys
        self.rig.manager.invalidation.evict(tier, lost)

    @rule(names=names_, tier=st.sampled_from([HOST, "disk"]), point=st.booleans())
    def delete(self, names: Names, tier: str, point: bool) -> None:
        keys = chain(*names)
        lost = point_keys(keys[-1], self.count(len(keys)))[0] if point else keys[-1]
        self.rig.manager.invalidation.delete(tier, [lost])

    @rule(pick=st.integers(0, 50), count=st.integers(1, 6))
    def run(self, pick: int, count: int) -> None:
        for _ in range(count):
            self.rig.media.step(pick)
        self.rig.manager.pump()

    @rule(error=st.sampled_from([RowError.IO, RowError.INTERNAL]))
    def fail(self, error: RowError) -> None:
        self.rig.media.fail_next = error

    @precondition(lambda self: self.rig.media.tiers["disk"])
    @rule(pick=st.integers(0, 50))
    def rot(self, pick: int) -> None:
        slots = self.rig.media.tiers["disk"]
        slot = sorted(slots)[pick % len(slots)]
        slots[slot] = (slots[slot][0], b"rot")

    @rule(seconds=st.sampled_from([1.0, 400.0]))
    def later(self, seconds: float) -> None:
        self.rig.now += seconds
        self.rig.manager.maintain()

    @rule()
    def silence(self) -> None:
        """The disk fails, and is not read for a while."""
        for _ in range(3):
            self.rig.manager.tiers.breakers.reads["disk"].failed()

    @rule()
    def clear(self) -> None:
        self.rig.manager.clear()

    @invariant()
    def sound(self) -> None:
        self.rig.manager.check_integrity()
        self.twin.listen()

    def teardown(self) -> None:
        rig = self.rig
        for planned in self.planned:
            rig.manager.drop(planned)
        rig.drain(1)
        assert rig.manager.in_flight == 0
        assert len(rig.manager.flights.staging) == 3, "a staging slot leaked"
        self.look_everything_up(0)
        self.silence()
        self.look_everything_up(1)
        rig.manager.clear()
        rig.manager.check_integrity()
        assert rig.manager.index.num_used(HOST) == 0, "a pin or a reservation leaked"


class EverySecondMachine(PointsMachine):
    every = 2
    host = 9


class WriteBackMachine(PointsMachine):
    write = WritePolicy.WRITE_BACK
    host = 16  # an eighth of it is kept free


class SelectiveMachine(PointsMachine):
    write = WritePolicy.SELECTIVE
    rows = 1


class WindowsMachine(PointsMachine):
    """Points without states, of more rows behind more blocks."""

    rows, window = 0, 2


TestPoints = PointsMachine.TestCase
TestEverySecond = EverySecondMachine.TestCase
TestWriteBack = WriteBackMachine.TestCase
TestSelective = SelectiveMachine.TestCase
TestWindows = WindowsMachine.TestCase
for case in (TestPoints, TestEverySecond, TestWriteBack, TestSelective, TestWindows):
    case.settings = settings(
        max_examples=examples(40, 2 if case is TestPoints else 4),
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
del case  # else pytest finds the last one twice
