"""The index against a twin that keeps plain dicts and recomputes everything."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcore.errors import KVCoreError
from kvcore.index import BlockIndex, Event, Evicted, TierSpec
from kvcore.model.keys import ROOT_PARENT
from support.budget import examples
from support.index_paths import NAMESPACES, Path, key_of, keys_of, path_of, space_of


def split(packed: bytes) -> list[bytes]:
    return [packed[at : at + 16] for at in range(0, len(packed), 16)]


class Twin:
    """One tier: which blocks it has, which of them are filled, and what must not be evicted."""

    def __init__(self) -> None:
        self.filled: dict[Path, bool] = {}
        self.leaving: dict[Path, int] = {}  # path -> id of its eviction
        self.pins: dict[int, Path] = {}  # id of a pin -> the deepest block it still protects
        self.used: dict[Path, int] = {}  # time of last use of a block or anything below it

    def visible(self, path: Path) -> bool:
        return not path or (self.filled.get(path, False) and self.visible(path[:-1]))

    def depth(self, path: Path) -> int:
        return sum(1 for i in range(len(path)) if self.visible(path[: i + 1]))

    def held(self, path: Path) -> int:
        return sum(1 for i in range(len(path)) if path[: i + 1] in self.filled)

    def below(self, path: Path) -> list[Path]:
        return [other for other in self.filled if other[: len(path)] == path]

    def protected(self, path: Path) -> bool:
        return any(
            other in self.pins.values() or not self.visible(other) for other in self.below(path)
        )

    def leaves(self) -> list[Path]:
        return [p for p in self.filled if len(self.below(p)) == 1 and not self.protected(p)]

    def use(self, path: Path, now: int) -> None:
        for i in range(len(path)):
            self.used[path[: i + 1]] = now


class IndexMachine(RuleBasedStateMachine):
    policy = "lru"
    capacities = (5, 8)
    paths = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple)

    @initialize()
    def start(self) -> None:
        self.names = [f"t{i}" for i in range(len(self.capacities))]
        self.index = BlockIndex(
            [
                TierSpec(name, capacity, self.policy)
                for name, capacity in zip(self.names, self.capacities, strict=True)
            ]
        )
        self.told: dict[str, dict[bytes, bytes]] = {name: {} for name in self.names}
        self.index.watch(self.hear)
        self.twins = {name: Twin() for name in self.names}
        self.bytes: dict[str, dict[int, object]] = {name: {} for name in self.names}
        self.reservations: list[Any] = []
        self.dead: set[tuple[int, Path]] = set()  # (id of reservation, block) given up meanwhile
        self.pins: list[tuple[Any, str, list[tuple[int, Path]]]] = []
        self.evictions: list[Any] = []
        self.now = 0

    def hear(self, event: Event) -> None:
        """Every event is a change: nothing is told twice."""
        held = self.told[event.tier]
        if event.stored:
            assert not set(event.keys) & set(held)
            held.update(zip(event.keys, (event.parent, *event.keys), strict=False))
        else:
            for key in event.keys:
                del held[key]

    def tick(self) -> int:
        self.now += 1
        return self.now

    def tier_of(self, number: int) -> str:
        return self.names[number % len(self.names)]

    # -- checks of what the index reports

    def saw_evicted(self, tier: str, evicted: list[Evicted], keep: Path = ()) -> None:
        twin = self.twins[tier]
        for block in evicted:
            path = path_of(block.key)
            leaves = [p for p in twin.leaves() if p != keep[: len(p)]]
            assert path in leaves, "evicted a block with children, pins, or not published"
            assert block.parent == (key_of(path[:-1]) if len(path) > 1 else ROOT_PARENT)
            assert block.namespace == space_of(path)
            assert self.bytes[tier][block.slot] == path
            if self.policy == "lru" and len(self.names) == 1:
                assert twin.used[path] == min(twin.used[p] for p in leaves), "not the oldest"
            del twin.filled[path]

    def give_up(self, tier: str, paths: list[Path]) -> None:
        """Blocks that left while a reservation or a pin may still use their slots."""
        for path in paths:
            self.twins[tier].filled.pop(path, None)
            for reservation in self.reservations:
                if reservation.tier == tier and key_of(path) in reservation.keys:
                    self.dead.add((id(reservation), path))
        for pin, path in self.twins[tier].pins.items():
            while path in paths:
                path = path[:-1]
            self.twins[tier].pins[pin] = path

    # -- rules

    @rule(path=paths, touch=st.booleans())
    def match(self, path: Path, touch: bool) -> None:
        keys = keys_of(path)
        match = self.index.match(keys)
        assert match.depths == tuple(self.twins[name].depth(path) for name in self.names)
        for tier, depth in zip(self.names, match.depths, strict=True):
            slots = self.index.slots(tier, keys, 0, depth)
            assert [self.bytes[tier][s] for s in slots.tolist()] == [
                path[: i + 1] for i in range(depth)
            ], "a matched slot holds other bytes"
            assert self.index.held(tier, keys) == self.twins[tier].held(path)
            assert self.index.is_chain(keys, self.index.held(tier, keys), space_of(path))
            self.check_no_chain(tier, path)
        if touch:
            self.index.touch(match)
            now = self.tick()
            for tier, depth in zip(self.names, match.depths, strict=True):
                self.twins[tier].use(path[:depth], now)

    def check_no_chain(self, tier: str, path: Path) -> None:
        """What is held stands on no other block, and is in no other namespace."""
        keys = [b"another block   ", *keys_of(path)[1:]]
        parts = [path[: i + 1] for i in range(len(path))]
        held = [part for part in parts if any(part in twin.filled for twin in self.twins.values())]
        claimed = self.index.held(tier, keys)
        fits = self.index.is_chain(keys, claimed, space_of(path))
        assert fits == (len(held) < 2)
        keys, claimed = keys_of(path), self.twins[tier].held(path)
        if held:
            assert not self.index.is_chain(keys, claimed, NAMESPACES[(path[0] + 1) % 2])
        if claimed:
            assert not self.index.is_chain(keys[claimed - 1 :: -1], 1, space_of(path)) or (
                claimed == 1
            )

    @rule(number=st.integers(0, 1), path=paths)
    def reserve(self, number: int, path: Path) -> None:
        tier, keys = self.tier_of(number), keys_of(path)
        twin = self.twins[tier]
        begin, stop = twin.held(path), len(path)
        while begin < stop and path[: begin + 1] in twin.leaving and twin.visible(path[:begin]):
            del twin.leaving[path[: begin + 1]]
            twin.filled[path[: begin + 1]] = True
            begin += 1
        stop = next((i for i in range(begin, stop) if path[: i + 1] in twin.leaving), stop)
        spare = sum(
            not twin.protected(p) and p != path[: len(p)] for p in twin.filled
        )  # what is on the way to this prompt must stay
        expected = min(stop - begin, self.index.num_free(tier) + spare)
        reservation = self.index.lifecycle.reserve(tier, keys, 0, len(keys), space_of(path))
        if begin < stop:
            assert reservation.start == begin
        self.saw_evicted(tier, reservation.evicted, keep=path)
        assert len(reservation) == expected, "shorter than the room there was"
        for i, slot in enumerate(reservation.slots.tolist()):
            twin.filled[path[: begin + i + 1]] = False
            self.bytes[tier][slot] = "half written"
        if len(reservation):
            self.reservations.append(reservation)

    @precondition(lambda self: self.reservations)
    @rule(pick=st.integers(0, 99), failed=st.none() | st.none() | st.integers(0, 4))
    def commit(self, pick: int, failed: int | None) -> None:
        reservation = self.reservations.pop(pick % len(self.reservations))
        tier, twin = reservation.tier, self.twins[reservation.tier]
        before = {p for p in twin.filled if twin.visible(p)}
        for offset, (key, slot) in enumerate(
            zip(reservation.keys, reservation.slots.tolist(), strict=True)
        ):
            path = path_of(key)
            self.bytes[tier][slot] = path
            if (id(reservation), path) in self.dead:
                continue
            if failed is not None and reservation.start + offset >= failed:
                self.give_up(tier, twin.below(path))
            elif path in twin.filled:
                twin.filled[path] = True
        self.dead = {entry for entry in self.dead if entry[0] != id(reservation)}
        self.index.lifecycle.commit(reservation, failed)
        now = self.tick()
        for path in {p for p in twin.filled if twin.visible(p)} - before:
            twin.use(path, now)

    def choose(self, tier: str, path: Path, pick: int) -> Path:
        """One of the blocks there, so that rules meet; or any, if ``pick`` is 0."""
        there = sorted(self.twins[tier].filled)
        return there[pick % len(there)] if there and pick else path

    @rule(number=st.integers(0, 1), path=paths, pick=st.integers(0, 20))
    def pin(self, number: int, path: Path, pick: int) -> None:
        tier = self.tier_of(number)
        path = self.choose(tier, path, pick)
        if not self.twins[tier].visible(path):
            with pytest.raises(KVCoreError, match="not published"):
                self.index.pin(tier, key_of(path))
            return
        pin = self.index.pin(tier, key_of(path))
        slots = self.index.slots(tier, keys_of(path), 0, len(path)).tolist()
        held = [(slot, path[: i + 1]) for i, slot in enumerate(slots)]
        self.pins.append((pin, tier, held))
        self.twins[tier].pins[id(pin)] = path

    @precondition(lambda self: self.pins)
    @rule(pick=st.integers(0, 99))
    def unpin(self, pick: int) -> None:
        pin, tier, _ = self.pins.pop(pick % len(self.pins))
        del self.twins[tier].pins[id(pin)]
        self.index.unpin(pin)

    @rule(number=st.integers(0, 1), count=st.integers(1, 4))
    def evict(self, number: int, count: int) -> None:
        tier = self.tier_of(number)
        twin = self.twins[tier]
        spare = sum(not twin.protected(p) for p in twin.filled)
        evicted = self.index.evictions.evict(tier, count)
        self.saw_evicted(tier, evicted)
        assert len(evicted) == min(count, spare)

    @rule(number=st.integers(0, 1), count=st.integers(1, 3))
    def begin_eviction(self, number: int, count: int) -> None:
        tier = self.tier_of(number)
        eviction = self.index.evictions.begin(tier, count)
        self.saw_evicted(tier, eviction.blocks)
        self.evictions.append((eviction, list(eviction.blocks)))
        for block in eviction.blocks:
            self.twins[tier].leaving[path_of(block.key)] = id(eviction)

    @precondition(lambda self: self.evictions)
    @rule(pick=st.integers(0, 99), cancel=st.booleans())
    def end_eviction(self, pick: int, cancel: bool) -> None:
        eviction, blocks = self.evictions.pop(pick % len(self.evictions))
        twin = self.twins[eviction.tier]
        still = [b for b in blocks if twin.leaving.get(path_of(b.key)) == id(eviction)]
        for block in still:
            assert self.bytes[eviction.tier][block.slot] == path_of(block.key)
        if cancel:
            self.index.evictions.cancel(eviction)
            for block in reversed(still):
                path = path_of(block.key)
                del twin.leaving[path]
                if twin.visible(path[:-1]):
                    twin.filled[path] = True
        else:
            assert self.index.evictions.finish(eviction) == still
            for block in still:
                del twin.leaving[path_of(block.key)]

    @rule(number=st.integers(0, 1), path=paths, pick=st.integers(0, 20))
    def drop_subtree(self, number: int, path: Path, pick: int) -> None:
        tier = self.tier_of(number)
        path = self.choose(tier, path, pick)
        twin = self.twins[tier]
        doomed = twin.below(path) if path in twin.filled else []
        published = {key_of(p) for p in doomed if twin.visible(p)}
        gone = self.index.removal.invalidate(tier, key_of(path))
        assert {block.key for block in gone} == published
        self.give_up(tier, doomed)

    @rule(number=st.integers(0, 1), chosen=st.lists(paths, max_size=3))
    def drop_subtrees(self, number: int, chosen: list[Path]) -> None:
        tier = self.tier_of(number)
        twin = self.twins[tier]
        doomed = sorted({p for path in chosen if path in twin.filled for p in twin.below(path)})
        published = {key_of(p) for p in doomed if twin.visible(p)}
        gone = self.index.removal.delete(tier, map(key_of, chosen))
        assert {block.key for block in gone} == published
        self.give_up(tier, doomed)

    @rule(number=st.integers(0, 1), path=paths)
    def evict_blocks(self, number: int, path: Path) -> None:
        tier = self.tier_of(number)
        twin, expected = self.twins[tier], []
        for at in (path[:stop] for stop in range(len(path), 0, -1)):
            if at in twin.leaves():
                expected.append(at)
                del twin.filled[at]
            elif at in twin.filled:
                break
        evicted = self.index.evictions.evict_blocks(tier, keys_of(path))
        assert [path_of(block.key) for block in evicted] == expected

    @precondition(lambda self: self.now % 7 == 3)  # seldom: it ends what makes a state interesting
    @rule(which=st.sampled_from([None, *NAMESPACES]), number=st.none() | st.integers(0, 1))
    def clear(self, which: bytes | None, number: int | None) -> None:
        tier = None if number is None else self.tier_of(number)
        self.index.removal.clear(which, tier)
        for name in self.names if tier is None else [tier]:
            twin = self.twins[name]
            mine = [p for p in twin.filled if which in (None, space_of(p))]
            self.give_up(name, mine)
            twin.leaving = {
                p: e for p, e in twin.leaving.items() if which not in (None, space_of(p))
            }

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "index"):
            return
        self.index.check_integrity()
        published = {info.key: info.slots for info in self.index.admin.list_blocks()}
        for tier, twin in self.twins.items():
            mine = {key_of(p) for p in twin.filled if twin.visible(p)}
            assert mine == {key for key, slots in published.items() if tier in slots}
            keys, parents = map(split, self.index.admin.published(tier))
            assert mine == self.told[tier].keys(), "events say something else"
            assert self.told[tier] == dict(zip(keys, parents, strict=True))
            self.check_ends(tier, {path_of(key) for key in mine})
            for key in mine:
                assert self.bytes[tier][published[key][tier]] == path_of(key)
        for _, tier, held in self.pins:
            for slot, path in held:
                assert self.bytes[tier][slot] == path, "a pinned slot was written"

    def check_ends(self, tier: str, held: set[Path]) -> None:
        choices: list[tuple[Any, bytes]] = [(None, b""), (NAMESPACES[:1], b""), (None, bytes([1]))]
        for spaces, prefix in choices:
            mine = {p for p in held if spaces is None or space_of(p) in spaces}
            mine = {p for p in mine if key_of(p).startswith(prefix)}
            ends, count = self.index.admin.leaves(tier, spaces, prefix)
            assert count == len(mine)
            assert {path_of(key) for key in ends} == mine - {p[:-1] for p in mine}

    def teardown(self) -> None:
        if not hasattr(self, "index"):
            return
        for reservation in self.reservations:
            self.index.lifecycle.abort(reservation)
        for pin, *_ in self.pins:
            self.index.unpin(pin)
        for eviction, _ in self.evictions:
            self.index.evictions.finish(eviction)
        self.index.removal.clear()
        self.index.check_integrity()
        assert len(self.index) == 0
        assert all(self.index.num_used(name) == 0 for name in self.names), "slots leaked"


def machine_of(policy: str, capacities: tuple[int, ...], part: int = 4) -> type:
    machine = type("M", (IndexMachine,), {"policy": policy, "capacities": capacities})
    case: type = machine.TestCase  # type: ignore[attr-defined]
    case.settings = settings(  # type: ignore[attr-defined]
        max_examples=examples(40, part),
        stateful_step_count=50,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    return case


TestLRUOneTier = machine_of("lru", (6,))
TestLRU = machine_of("lru", (5, 8), 2)
TestLFU = machine_of("lfu", (5, 8))
TestARC = machine_of("arc", (5, 8))
TestS3FIFO = machine_of("s3fifo", (5, 8))
TestPriority = machine_of("priority", (5, 8))
