"""Block events: what is queued, numbered, asked for again, bounded, and told of tokens."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvcore.errors import FormatError
from kvcore.events import Content, Feed, Message, Pacing, Publisher, Subscriber
from kvcore.events.feed import Lost
from kvcore.events.token_cache import TokenCache
from kvcore.events.wire import SNAPSHOT, BlockStored, decode, encode, number_bytes, wire_events
from kvcore.model.keys import ROOT_PARENT, pack_tokens
from kvcore.telemetry.metrics import Metrics
from support.events import Bus, key, removed, stored


class FeedRig:
    """A publisher over an index that the test plays."""

    def __init__(self, now: float = 100.0, **pacing: Any) -> None:
        self.held: Content = {"host": (b"", b"")}
        self.bus = Bus()
        self.metrics = Metrics()
        self.now = now
        kept = Pacing(**pacing)
        self.feed = Feed(kept.queue_blocks, lambda: self.held, count=self.metrics.told)
        self.publisher = Publisher(
            self.held,
            self.feed.items,
            [self.bus],
            16,
            pacing=kept,
            count=self.metrics.told,
            clock=lambda: self.now,
        )
        self.bus.publisher = self.publisher

    @property
    def numbers(self) -> list[int]:
        return [message.number for message in self.bus.queue]


def test_a_full_queue_drops_what_is_in_it_counts_it_and_leaves_a_gap() -> None:
    rig = FeedRig(queue_blocks=4)
    rig.feed.note(stored(9))
    rig.publisher.step()
    [first] = rig.numbers
    rig.feed.note(stored(1, 2, 3))
    rig.held = {"host": (key(1) + key(2), ROOT_PARENT + key(1))}
    rig.feed.note(removed(3, 9))
    rig.publisher.step()
    assert rig.numbers[1] == first + 2, "no gap where events were dropped"
    assert rig.metrics.snapshot()["kvcore_event_blocks_total"]["dropped"] == 3
    consumer = Subscriber(rig.bus)
    while consumer.poll(0):
        pass
    assert consumer.tiers() == {"host": {key(1): None, key(2): key(1)}}


def test_events_that_fit_are_not_dropped_and_a_queue_is_bounded() -> None:
    looks: list[int] = []
    metrics = Metrics()

    def content() -> Content:
        looks.append(1)
        return {}

    def dropped() -> int:
        return int(metrics.snapshot().get("kvcore_event_blocks_total", {}).get("dropped", 0))

    feed = Feed(3, content, count=metrics.told)
    feed.note(stored(1, 2))
    feed.note(stored(3))
    assert dropped() == 0
    feed.note(stored(4))
    assert dropped() == 3
    for n in range(5, 7):
        feed.note(stored(n))
    assert dropped() == 3, "the one that did not fit is in the queue with two more"
    feed.note(stored(8))
    assert dropped() == 6, "dropped blocks are counted once"
    [lost, last] = feed.items()
    assert isinstance(lost, Lost)
    assert lost.blocks == 6
    assert last == stored(8)
    assert len(looks) == 2
    assert feed.items() == []


def test_a_queue_gives_some_of_what_it_has_and_keeps_count() -> None:
    dropped: list[int] = []
    feed = Feed(8, dict, count=lambda _, blocks: dropped.append(blocks))
    for n in range(0, 8, 2):
        feed.note(stored(n, n + 1))
    assert feed.items(3) == [stored(0, 1), stored(2, 3)]
    feed.note(stored(9, 10, 11, 12))
    assert not dropped
    feed.note(stored(13))
    assert dropped == [8]
    [lost, last] = feed.items(1)
    assert isinstance(lost, Lost)
    assert last == stored(13)


def test_a_leader_renews_what_is_known_with_its_next_call() -> None:
    dropped: list[int] = []
    looks: list[int] = []
    held = {"host": (key(1), ROOT_PARENT)}

    def content() -> Content:
        looks.append(1)
        return held

    feed = Feed(8, content, count=lambda _, blocks: dropped.append(blocks))
    feed.note(stored(1, 2))
    feed.tick()
    assert not looks
    feed.renew()
    assert not feed.renewed
    feed.note(stored(3))
    assert feed.renewed
    assert feed.items() == [Lost(2, held), stored(3)]
    feed.renew()
    feed.tick()
    assert feed.renewed
    assert feed.items() == [Lost(0, held)]
    feed.note(stored(4))
    assert feed.items() == [stored(4)]
    assert dropped == [2]
    assert len(looks) == 2, "the index is looked at again and again"


def test_a_queue_that_nobody_takes_from_any_more_counts_all_as_dropped() -> None:
    dropped: list[int] = []
    feed = Feed(8, dict, count=lambda _, blocks: dropped.append(blocks))
    feed.note(stored(1, 2))
    feed.close()
    feed.note(stored(3, 4, 5))
    feed.tick()
    assert dropped == [2, 3]
    assert feed.items() == []


def test_a_consumer_that_missed_little_is_told_that_alone() -> None:
    rig = FeedRig(batch_blocks=1)
    consumer = Subscriber(rig.bus)
    rig.feed.note(stored(1))
    rig.publisher.step()
    assert consumer.poll(0)
    assert consumer.resyncs == 1
    rig.bus.losing = 2
    for n in (2, 3, 4):
        rig.feed.note(stored(n))
    rig.publisher.step()
    assert consumer.poll(0)
    assert consumer.resyncs == 1, "everything was asked for where two batches would do"
    assert consumer.tiers()["host"].keys() == set(map(key, (1, 2, 3, 4)))


def test_an_idle_publisher_lets_a_consumer_find_that_it_missed_the_last_batch() -> None:
    rig = FeedRig(heartbeat_s=5)
    consumer = Subscriber(rig.bus)
    rig.publisher.step()
    rig.now += 5
    rig.publisher.step()
    assert consumer.poll(0), "no heartbeat"
    rig.bus.losing = 1
    rig.feed.note(stored(1))
    rig.publisher.step()
    assert not consumer.poll(0)
    rig.now += 5
    rig.publisher.step()
    assert consumer.poll(0)
    assert consumer.tiers() == {"host": {key(1): None}}


def test_a_publisher_that_falls_silent_is_asked() -> None:
    rig = FeedRig()
    now = [0.0]
    consumer = Subscriber(rig.bus, silence_s=30, clock=lambda: now[0])
    rig.feed.note(stored(1))
    rig.publisher.step()
    consumer.poll(0)
    rig.bus.up = False
    now[0] = 31
    consumer.poll(0)
    assert not consumer.synced, "the publisher is gone and this is not known"
    assert consumer.tiers(), "what is known stays"
    rig.bus.up = True
    now[0] = 33
    consumer.poll(0)
    assert consumer.synced


def test_a_restarted_publisher_never_goes_on_where_a_consumer_left_off() -> None:
    rig, later = FeedRig(), FeedRig(now=100.002)
    for each in (rig, later):
        for n in range(3):
            each.feed.note(stored(n))
            each.publisher.step()
    assert not set(rig.numbers) & set(later.numbers)
    assert max(rig.numbers) - min(rig.numbers) == 2


def test_a_publisher_that_comes_back_with_an_earlier_clock_is_asked_for_everything() -> None:
    rig, back = FeedRig(), FeedRig(now=50.0)
    consumer = Subscriber(rig.bus, retry_s=0)
    for each, first in ((rig, 1), (back, 10)):
        consumer._source = each.bus  # one address, then another process behind it
        each.feed.note(stored(first))
        each.publisher.step()
        while consumer.poll(0):
            pass
        assert consumer.synced
        assert consumer.tiers() == {"host": {key(first): None}}


def test_history_is_bounded_in_bytes() -> None:
    rig = FeedRig(batch_blocks=1, history_bytes=2000)
    for n in range(200):
        rig.feed.note(stored(n))
    rig.publisher.step()
    kept = rig.bus.ask(number_bytes(0), 1)
    assert kept
    assert sum(len(message.payload) for message in kept) <= 2000
    assert kept[-1].number == rig.numbers[-1]


def test_a_large_snapshot_comes_in_batches_of_one_number() -> None:
    rig = FeedRig(batch_blocks=10, queue_blocks=1000)
    chain = stored(*range(95))
    rig.feed.note(chain)
    rig.feed.note(stored(*range(200, 203), tier="disk"))
    rig.publisher.step()
    messages = rig.bus.ask(SNAPSHOT, 1)
    assert messages is not None
    assert {message.number for message in messages} == {rig.numbers[-1]}
    runs = [e for m in messages for e in decode(m.payload) if isinstance(e, BlockStored)]
    assert max(len(run.block_hashes) for run in runs) == 10
    assert [h for run in runs if run.ownership == "host" for h in run.block_hashes] == [*chain.keys]


@pytest.mark.parametrize("body", [b"", b"12345", b"123456789"])
def test_a_request_that_makes_no_sense_is_left_alone(body: bytes) -> None:
    rig = FeedRig()
    assert rig.bus.ask(body, 1) is None


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", msgspec.msgpack.encode([1.0]), msgspec.msgpack.encode([1.0, [{"type": "No"}]])],
)
def test_a_payload_that_is_none_is_refused_and_asked_for_again(payload: bytes) -> None:
    with pytest.raises(FormatError):
        decode(payload)
    rig = FeedRig()
    consumer = Subscriber(rig.bus, retry_s=0)
    rig.feed.note(stored(1))
    rig.publisher.step()
    consumer.poll(0)
    rig.bus.queue.append(Message(rig.publisher._number + 1, payload))
    consumer.poll(0)
    assert consumer.synced
    assert consumer.resyncs == 2


def test_runs_that_continue_each_other_become_one() -> None:
    merged = wire_events(
        [
            stored(1, 2),
            stored(3, parent=key(2)),
            stored(5, parent=key(4)),
            stored(6, parent=key(5), tier="disk"),
            removed(1),
            removed(2),
            removed(3, tier="disk"),
        ],
        16,
    )
    assert [list(event.block_hashes) for event in merged] == [  # type: ignore[union-attr]
        [key(1), key(2), key(3)],
        [key(5)],
        [key(6)],
        [key(1), key(2)],
        [key(3)],
    ]


def test_vllm_reads_what_is_sent() -> None:
    kv_events = pytest.importorskip("vllm.distributed.kv_events")
    events = wire_events([stored(1, 2), stored(7, parent=key(2), tier="far"), removed(2)], 16)
    payload = encode(events, 12.5, rank=3)
    batch = msgspec.msgpack.decode(payload, type=kv_events.KVEventBatch)
    host = {"block_size": 16, "lora_id": None, "lora_name": None, "token_ids": []}
    assert batch.ts == 12.5
    assert batch.data_parallel_rank == 3
    assert batch.events == [
        kv_events.BlockStored(
            block_hashes=[key(1), key(2)],
            parent_block_hash=None,
            medium=kv_events.MEDIUM_CPU,
            ownership="host",
            **host,
        ),
        kv_events.BlockStored(
            block_hashes=[key(7)],
            parent_block_hash=key(2),
            medium=kv_events.MEDIUM_STORAGE,
            ownership="far",
            **host,
        ),
        kv_events.BlockRemoved(
            block_hashes=[key(2)], medium=kv_events.MEDIUM_CPU, ownership="host"
        ),
    ]
    again = msgspec.msgpack.encode(batch)
    assert again == payload, "the bytes differ from those of vLLM's own encoder"
    assert decode(again) == events


# -- tokens -----------------------------------------------------------------------------------


def text(n: int) -> bytes:
    """The tokens of a block of two."""
    return pack_tokens([10 * n, 10 * n + 1])


def telling(bus: Bus, queue_blocks: int = 64, content: Content | None = None) -> Feed:
    feed = Feed(queue_blocks, lambda: content or {"host": (b"", b"")}, token_ids=True)
    bus.publisher = Publisher(feed.content(), feed.items, [bus], 2, token_ids=True)
    return feed


def said(bus: Bus) -> list[tuple[list[Any], Any, list[int]]]:
    """Hashes, parent and tokens of what was told as stored since the last call."""
    events = [event for message in bus.queue for event in decode(message.payload)]
    bus.queue.clear()
    runs = [event for event in events if isinstance(event, BlockStored)]
    return [(list(run.block_hashes), run.parent_block_hash, run.token_ids) for run in runs]


def test_tokens_are_told_of_the_blocks_whose_tokens_are_known() -> None:
    bus = Bus()
    feed = telling(bus)
    feed.publish_tokens([key(1), key(2)], text(1) + text(2))
    feed.note(stored(1, 2, 3))
    feed.publish_tokens([key(4)], text(4))
    feed.note(stored(4, parent=key(3)))
    bus.step()
    assert said(bus) == [
        ([key(1), key(2)], None, [10, 11, 20, 21]),
        ([key(3)], key(2), []),
        ([key(4)], key(3), [40, 41]),
    ]
    feed.note(removed(2))
    bus.step()
    feed.note(stored(2, parent=key(1), tier="disk"))
    bus.step()
    assert said(bus) == [([key(2)], key(1), [20, 21])], "on its way to the next tier it is kept"
    [one, *_] = bus.ask(SNAPSHOT, 1.0) or []
    told = {
        token
        for event in decode(one.payload)
        if isinstance(event, BlockStored)
        for token in event.token_ids
    }
    assert told == {10, 11, 20, 21, 40, 41}


def test_a_publisher_that_tells_no_tokens_keeps_none() -> None:
    bus = Bus()
    feed = Feed(64, lambda: {"host": (b"", b"")})
    bus.publisher = Publisher(feed.content(), feed.items, [bus], 2)
    feed.publish_tokens([key(1)], text(1))
    feed.note(stored(1))
    bus.step()
    assert not feed.wants_tokens
    assert said(bus) == [([key(1)], None, [])]


def test_tokens_that_do_not_fit_their_blocks_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    bus = Bus()
    feed = telling(bus)
    feed.publish_tokens([key(1), key(2)], text(1))
    feed.note(stored(1, 2))
    bus.step()
    assert said(bus) == [([key(1), key(2)], None, [])]
    assert "left out of events" in caplog.text


def test_tokens_outlive_a_full_queue_where_their_blocks_are_held() -> None:
    bus = Bus()
    held = b"".join(map(key, (1, 2)))
    feed = telling(bus, 2, {"host": (held, bytes(16) + key(1))})
    feed.publish_tokens([key(1)], text(1))
    bus.step()
    feed.note(stored(1, 2))
    feed.note(stored(3))
    bus.step()
    bus.queue.clear()
    answer = bus.ask(SNAPSHOT, 1.0)
    assert answer is not None
    bus.queue.extend(answer)
    assert said(bus) == [([key(1)], None, [10, 11]), ([key(2)], key(1), []), ([key(3)], None, [])]


def test_what_no_tier_holds_is_bounded() -> None:
    texts = TokenCache(8, spare_blocks=3)
    texts.add([key(n) for n in range(3)], b"".join(map(text, range(3))))
    texts.stored([key(0), key(1)])
    texts.add([key(n) for n in range(3, 6)], b"".join(map(text, range(3, 6))))
    assert [texts.get(key(n)) is None for n in range(6)] == [
        False,
        False,
        True,
        False,
        False,
        False,
    ]
    texts.removed([key(0)], {key(0)}.__contains__)
    texts.removed([key(1)], set[bytes]().__contains__)
    assert len(texts) == 4
    assert texts.get(key(0)) == text(0), "another tier holds it"
    assert texts.get(key(3)) is None, "the oldest goes first"
    with pytest.raises(FormatError, match="a block has 8"):
        texts.add([key(9)], b"1234")
