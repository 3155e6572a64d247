"""Events in vLLM's own format, read as strictly as the routers that are made for it read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvcore.config import load_config
from kvcore.errors import ConfigError
from kvcore.events import Feed, Pacing, Publisher
from kvcore.events.feed import Content
from kvcore.events.open import endpoints, open_events
from kvcore.events.vllm_format import hash_of
from kvcore.events.wire import END, number_bytes
from kvcore.index import BlockIndex, Event, TierSpec
from kvcore.model.keys import ROOT_PARENT, pack_tokens
from kvcore.telemetry.metrics import Metrics
from kvcore.testing.waiting import until
from support.events import Ask, Bus, key, removed, stored

EMPTY: Content = {"host": (b"", b"")}
BIG = bytes(range(240, 256))
"""A key whose last 8 bytes are no signed number."""


def text(n: int) -> bytes:
    """The tokens of a block of two."""
    return pack_tokens([10 * n, 10 * n + 1])


class Router:
    """A publisher, and what a router made for vLLM's events makes of its messages.

    ``held`` maps (medium, hash) to the tokens of the block.
    """

    def __init__(self, **options: Any) -> None:
        self.bus = Bus()
        self.feed = Feed(64, lambda: EMPTY, token_ids=True)
        self.publisher = self.bus.publisher = Publisher(
            EMPTY, self.feed.items, [self.bus], 2, token_ids=True, as_vllm=True, **options
        )
        self.held: dict[tuple[str, int], list[int]] = {}
        self.ranks: list[int] = []

    def save(self, *numbers: int, tier: str = "host", parent: bytes = ROOT_PARENT) -> None:
        for n in numbers:
            self.feed.publish_tokens([key(n)], text(n))
        self.feed.note(stored(*numbers, tier=tier, parent=parent))

    def step(self) -> None:
        self.bus.step()
        while self.bus.queue:
            self.read(self.bus.queue.popleft().payload)

    def read(self, payload: bytes) -> None:
        # A tuple of three: Dynamo's router reads nothing else.
        _, events, rank = msgspec.msgpack.decode(payload, type=tuple[float, list[Any], int])
        self.ranks.append(rank)
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self.held.clear()
                continue
            assert "ownership" not in event, "Dynamo's router leaves such an event alone"
            hashes = event["block_hashes"]
            assert all(isinstance(each, int) and 0 <= each < 1 << 64 for each in hashes)
            if event["type"] == "BlockRemoved":
                for each in hashes:
                    self.held.pop((event["medium"], each), None)
                continue
            parent, tokens = event["parent_block_hash"], event["token_ids"]
            assert parent is None or isinstance(parent, int)
            size = event["block_size"]
            assert len(tokens) == len(hashes) * size
            for at, each in enumerate(hashes):
                self.held[event["medium"], each] = tokens[size * at : size * (at + 1)]

    def numbers(self, medium: str = "CPU") -> set[int]:
        return {each for where, each in self.held if where == medium}


def test_blocks_are_numbers_with_their_tokens_and_a_rank() -> None:
    router = Router()
    router.save(1, 2)
    router.step()
    assert router.held == {("CPU", 1): [10, 11], ("CPU", 2): [20, 21]}
    assert set(router.ranks) == {0}
    router.feed.note(removed(2))
    router.step()
    assert router.numbers() == {1}


def test_a_rank_is_told_as_it_is() -> None:
    router = Router(rank=3)
    router.save(1)
    router.step()
    assert set(router.ranks) == {3}


def test_a_block_is_gone_when_no_tier_of_its_medium_holds_it() -> None:
    router = Router()
    router.save(1, tier="disk")
    router.save(1, tier="far")
    router.save(1)
    router.step()
    assert router.numbers("STORAGE") == {1}
    router.feed.note(removed(1, tier="disk"))
    router.step()
    assert router.numbers("STORAGE") == {1}, "the other storage tier holds it"
    router.save(2, tier="disk")  # all in one batch, in which the last tier counts
    router.feed.note(removed(1, tier="far"))
    router.feed.note(stored(2, tier="far"))
    router.feed.note(removed(2, tier="disk"))
    router.step()
    assert router.numbers("STORAGE") == {2}
    assert router.numbers() == {1}
    router.feed.note(removed(2, tier="far"))
    router.step()
    assert router.numbers("STORAGE") == set()


def test_blocks_without_known_tokens_are_left_out() -> None:
    router = Router()
    router.save(1)
    router.feed.note(stored(2, parent=key(1)))
    router.step()
    assert router.numbers() == {1}
    router.feed.note(removed(2))
    router.step()
    assert router.numbers() == {1}


def asked(router: Router, first: int) -> list[int]:
    """Have a router ask for the messages from ``first`` on, and return their numbers."""
    ask = Ask(number_bytes(first))
    router.bus.asked.append(ask)
    router.bus.step()
    router.bus.queue.clear()
    assert ask.messages is not None
    for message in ask.messages:
        router.read(message.payload)
    return [message.number for message in ask.messages]


def test_one_that_comes_late_is_told_everything_held() -> None:
    """Dynamo's router asks for 0, and knows no snapshot."""
    router = Router(pacing=Pacing(history_bytes=600, batch_blocks=2))
    for n in range(1, 20):
        router.save(n)
        router.bus.step()
    last = router.bus.queue[-1].number
    router.bus.queue.clear()
    router.held["CPU", 77] = []  # of an engine that ran before at this address
    numbers = asked(router, 0)
    assert router.numbers() == set(range(1, 20)), "what is no longer kept is told, too"
    assert numbers == list(range(last - len(numbers) + 1, last + 1)), "the last is the live one's"
    assert len(numbers) > 5
    router.save(20)
    router.bus.step()
    router.bus.queue.clear()
    numbers = asked(router, 0)
    assert numbers[-1] == last + 1
    assert router.numbers() == set(range(1, 21)), "the snapshot is shared; what came since follows"
    assert asked(router, last + 1) == [last + 1], "what is kept is sent again as it was"
    assert asked(router, last + 2) == []


@pytest.mark.parametrize("who", ["thread", "process"])
def test_the_setting_reaches_the_bus_and_an_answer_ends_with_an_empty_payload(
    tmp_path: Path, who: str
) -> None:
    """Dynamo's router waits for ever for that payload."""
    zmq = pytest.importorskip("zmq")
    ends = {"endpoint": f"ipc://{tmp_path}/pub", "replay_endpoint": f"ipc://{tmp_path}/ask"}
    events = {**ends, "format": "vllm", "token_ids": True, "publisher": who, "interval_s": 0.005}
    config = load_config(None, {"events": events, "block": {"tokens": 16}}, {})
    made = open_events(config, BlockIndex([TierSpec("host", 8)]), Metrics())
    assert made is not None
    made.feed.publish_tokens([BIG], pack_tokens(range(16)))
    made.feed.note(Event(True, "host", (BIG,), ROOT_PARENT))
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(ends["replay_endpoint"])
    router = Router()

    def answered() -> bool:
        dealer.send_multipart([b"", number_bytes(0)])
        while dealer.poll(60_000):
            _, _, number, payload = dealer.recv_multipart()
            if number == END:
                assert payload == b""
                return bool(router.held)
            router.read(payload)
        return False

    until(answered, "the block is not told")
    assert router.held == {("CPU", hash_of(BIG)): [*range(16)]}
    made.close()
    context.destroy(linger=0)


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({}, "kvcore"),
        ({"topic": "engine-3"}, "engine-3"),
        ({"format": "vllm", "token_ids": True}, ""),
        ({"format": "vllm", "token_ids": True, "topic": "kv@pod"}, "kv@pod"),
    ],
)
def test_no_topic_unless_one_is_set(tmp_path: Path, given: dict[str, Any], sent: str) -> None:
    """vLLM's router asks for messages without a topic, and hears only those."""
    zmq = pytest.importorskip("zmq")
    ends = {"endpoint": f"ipc://{tmp_path}/pub", "replay_endpoint": f"ipc://{tmp_path}/ask"}
    config = load_config(None, {"events": {**ends, "publisher": "thread", **given}}, {})
    made = open_events(config, BlockIndex([TierSpec("host", 8)]), Metrics())
    assert made is not None
    made.feed.note(stored(1))
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(ends["replay_endpoint"])
    dealer.send_multipart([b"", number_bytes(0)])
    assert dealer.poll(60_000)
    _, topic, number, _ = dealer.recv_multipart()
    assert number != END
    assert topic.decode() == sent
    assert endpoints(config)["topic"] == sent
    made.close()
    context.destroy(linger=0)


def test_it_needs_the_tokens() -> None:
    given = {"events": {"format": "vllm", "endpoint": "@tcp://127.0.0.1:5657"}}
    with pytest.raises(ConfigError, match=r"events\.token_ids"):
        load_config(None, given, {})
    given["events"]["token_ids"] = True  # type: ignore[assignment]
    assert load_config(None, given, {}).events.format == "vllm"
