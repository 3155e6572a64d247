"""Whatever blocks go through and whatever is lost: a consumer holds what the index holds."""

from __future__ import annotations

import hashlib
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvcore.events import Content, Feed, Pacing, Publisher, Subscriber
from kvcore.index import BlockIndex, TierSpec
from kvcore.model.keys import ROOT_PARENT
from support.budget import examples
from support.events import Bus

NAMESPACE = b"n" * 16
TIERS = {"host": 5, "disk": 8}
Path = tuple[int, ...]
paths: st.SearchStrategy[Path] = st.lists(st.integers(1, 2), min_size=1, max_size=5).map(tuple)


def keys_of(path: Path) -> list[bytes]:
    return [hashlib.sha256(bytes(path[: i + 1])).digest()[:16] for i in range(len(path))]


def content_of(index: BlockIndex) -> Content:
    return {tier: index.admin.published(tier) for tier in index.tiers}


class EventMachine(RuleBasedStateMachine):
    """One index, one publisher, a bus that loses, one consumer."""

    @initialize()
    def build(self) -> None:
        self.now = 1e6
        self.index = BlockIndex([TierSpec(name, size) for name, size in TIERS.items()])
        self.bus = Bus()
        self.open: list[Any] = []
        self.leaving: list[Any] = []
        self.restart()
        self.consumer = Subscriber(self.bus, retry_s=0, clock=lambda: self.now)

    def clock(self) -> float:
        self.now += 0.01
        return self.now

    # -- what the index goes through

    @rule(tier=st.sampled_from([*TIERS]), path=paths, wait=st.booleans())
    def store(self, tier: str, path: Path, wait: bool) -> None:
        keys = keys_of(path)
        start = self.index.held(tier, keys)
        reservation = self.index.lifecycle.reserve(tier, keys, start, len(keys), NAMESPACE)
        if not len(reservation):
            return
        if wait:
            self.open.append(reservation)
        else:
            self.index.lifecycle.commit(reservation)

    @precondition(lambda self: self.open)
    @rule(pick=st.integers(0, 9), failed=st.none() | st.integers(0, 4))
    def commit(self, pick: int, failed: int | None) -> None:
        reservation = self.open.pop(pick % len(self.open))
        self.index.lifecycle.commit(reservation, failed)

    @rule(tier=st.sampled_from([*TIERS]), count=st.integers(1, 3), slowly=st.booleans())
    def evict(self, tier: str, count: int, slowly: bool) -> None:
        if slowly:
            self.leaving.append(self.index.evictions.begin(tier, count))
        else:
            self.index.evictions.evict(tier, count)

    @precondition(lambda self: self.leaving)
    @rule(pick=st.integers(0, 9), cancel=st.booleans())
    def end_eviction(self, pick: int, cancel: bool) -> None:
        eviction = self.leaving.pop(pick % len(self.leaving))
        if cancel:
            self.index.evictions.cancel(eviction)
        else:
            self.index.evictions.finish(eviction)

    @rule(tier=st.sampled_from([*TIERS]), path=paths)
    def drop(self, tier: str, path: Path) -> None:
        self.index.removal.invalidate(tier, keys_of(path)[-1])

    @rule()
    def clear(self) -> None:
        self.index.removal.clear()

    # -- what the events go through

    @rule()
    def publish(self) -> None:
        self.publisher.step()

    @rule()
    def poll(self) -> None:
        self.consumer.poll(0)

    @rule(count=st.integers(1, 4))
    def lose(self, count: int) -> None:
        self.bus.losing = count

    @rule(up=st.booleans())
    def connect(self, up: bool) -> None:
        self.bus.up = up

    @rule()
    def restart(self) -> None:
        """Another publisher takes over; what the first had queued is gone."""
        pacing = Pacing(batch_blocks=3, queue_blocks=6, history_bytes=200, heartbeat_s=60)
        feed = Feed(pacing.queue_blocks, lambda: content_of(self.index))
        self.publisher = Publisher(
            feed.content(), feed.items, [self.bus], 16, pacing=pacing, clock=self.clock
        )
        self.index.watch(feed.note)
        self.bus.publisher = self.publisher

    @rule()
    def settle(self) -> None:
        """All is well again for as long as it takes to say so once."""
        self.bus.up, self.bus.losing = True, 0
        self.now += 61
        self.publisher.step()
        while self.consumer.poll(0):
            pass
        assert self.consumer.synced
        for tier in TIERS:
            keys, parents = self.index.admin.published(tier)
            held = {
                keys[at : at + 16]: None if parent == ROOT_PARENT else parent
                for at in range(0, len(keys), 16)
                for parent in [parents[at : at + 16]]
            }
            assert self.consumer.tiers().get(tier, {}) == held

    def teardown(self) -> None:
        if hasattr(self, "consumer"):
            self.settle()


TestConvergence = EventMachine.TestCase
TestConvergence.settings = settings(
    max_examples=examples(60),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
