"""Block events on NATS JetStream, with a server that is not there yet, and one that goes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from kvcore.errors import ConfigError, TierUnavailable
from kvcore.events import Feed, Pacing, Publisher, PublisherPlan, PublisherProcess, Subscriber
from kvcore.events.wire import SNAPSHOT, Message, number_bytes
from kvcore.index import Event
from kvcore.model.keys import ROOT_PARENT
from kvcore.testing.waiting import until
from kvcore_devtools.servers import Server, Start, nats, need_client

need_client("nats")

from kvcore.events import nats_bus  # noqa: E402
from kvcore.events.nats_bus import NUMBER, NatsOutlet, NatsSource, subject  # noqa: E402

LIMIT_S = 90


def key(n: int) -> bytes:
    return n.to_bytes(16, "big")


def stored(*numbers: int) -> Event:
    return Event(True, "host", tuple(map(key, numbers)), ROOT_PARENT)


class Telling:
    def __init__(self, outlet: NatsOutlet) -> None:
        pacing = Pacing(interval_s=0.005, batch_blocks=4, heartbeat_s=0.3)
        feed = Feed(pacing.queue_blocks, lambda: {"host": (b"", b"")})
        publisher = Publisher(feed.content(), feed.items, [outlet], 16, pacing=pacing)
        publisher.start()
        self.note, self.close = feed.note, publisher.close


@pytest.fixture
def server(start_server: Start) -> Iterator[Server]:
    made = start_server(nats())
    yield made
    made.kill()


def url(server: Server) -> str:
    return f"nats://127.0.0.1:{server.port}"


def source(server: Server, topic: str) -> NatsSource:
    """The stream is there a moment after the publisher is."""
    limit = time.monotonic() + LIMIT_S
    while True:
        try:
            return NatsSource(url(server), topic)
        except TierUnavailable:  # noqa: PERF203  a loop is the point
            assert time.monotonic() < limit
            time.sleep(0.1)


def holds(consumer: Subscriber, numbers: set[int]) -> Callable[[], bool]:
    def true() -> bool:
        consumer.poll(0.05)
        return consumer.synced and consumer.tiers().get("host", {}).keys() == set(map(key, numbers))

    return true


def test_a_consumer_follows_catches_up_and_survives_the_server(server: Server) -> None:
    telling = Telling(NatsOutlet(url(server), "KVCORE", "one"))
    telling.note(stored(1, 2, 3, 4, 5))
    consumer = Subscriber(source(server, "one"), retry_s=0.2, silence_s=2)
    until(holds(consumer, {1, 2, 3, 4, 5}), "a late consumer was not told what is held")
    telling.note(Event(False, "host", (key(2),)))
    until(holds(consumer, {1, 3, 4, 5}), "a removal did not come")
    server.kill()
    for n in range(10, 30):
        telling.note(stored(n))
    time.sleep(0.5)
    server.start()
    until(holds(consumer, {1, 3, 4, 5, *range(10, 30)}), "not in step after the server came back")
    telling.note(stored(99))
    until(holds(consumer, {1, 3, 4, 5, 99, *range(10, 30)}), "live news come no more")
    consumer.close()
    telling.close()


def test_the_stream_keeps_batches_in_order_for_who_was_away(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_bus, "_CLOSE_S", LIMIT_S)  # all of it goes out, however long it takes
    telling = Telling(NatsOutlet(url(server), "KVCORE", "two"))
    for n in range(20):
        telling.note(stored(n))
    telling.close()

    async def kept() -> list[int]:
        client = await nats_connect(url(server))
        messages = await client.jetstream().subscribe(subject("two"), ordered_consumer=True)
        numbers = []
        more = True
        while more:
            message = await messages.next_msg(LIMIT_S)
            numbers.append(int(message.headers[NUMBER]))
            more = bool(message.metadata.num_pending)
        await client.close()
        return numbers

    numbers = asyncio.run(kept())
    assert len(numbers) >= 5
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


async def nats_connect(address: str):  # type: ignore[no-untyped-def]
    import nats

    return await nats.connect(address)


def test_an_answer_that_is_not_whole_is_none(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    outlet = NatsOutlet(url(server), "KVCORE", "short")
    made = Telling(outlet)
    consumer = source(server, "short")
    until(lambda: bool(consumer.ask(SNAPSHOT, LIMIT_S)), "no answer came")

    async def nothing_but_the_count(client: Any, reply: str, messages: Sequence[Message]) -> None:
        await client.publish(reply, b"", headers={nats_bus.COUNT: str(len(messages))})

    monkeypatch.setattr(nats_bus, "_send_all", nothing_but_the_count)
    assert consumer.ask(SNAPSHOT, LIMIT_S) is None
    monkeypatch.undo()
    assert consumer.ask(SNAPSHOT, LIMIT_S)
    consumer.close()
    made.close()


def test_a_publisher_does_not_wait_for_a_server_that_is_not_there(server: Server) -> None:
    server.kill()
    telling = Telling(NatsOutlet(url(server), "KVCORE", "three", queue_batches=3))
    began = time.monotonic()
    for n in range(40):
        telling.note(stored(n))
        time.sleep(0.005)
    assert time.monotonic() - began < LIMIT_S, "the leader waited"
    server.start()
    consumer = Subscriber(source(server, "three"), retry_s=0.2)
    until(holds(consumer, set(range(40))), "what was published before the server came is unknown")
    consumer.close()
    telling.close()


@pytest.mark.parametrize("there", [True, False], ids=["dies", "comes later"])
def test_that_nothing_is_delivered_is_said_once_and_that_it_is_again(
    server: Server, there: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_bus, "_ACK_S", 0.5)
    caplog.set_level(logging.INFO, "kvcore.events")
    tries: list[bool] = []
    away = NatsOutlet._note_away

    def counted(self: NatsOutlet, error: Exception) -> None:
        tries.append(True)
        away(self, error)

    monkeypatch.setattr(NatsOutlet, "_note_away", counted)
    if not there:
        server.kill()
    outlet = NatsOutlet(url(server).replace("//", "//me:hush@"), "KVCORE", "said")
    outlet.send(Message(1, b"one"))
    if there:
        until(lambda: not outlet._waiting, "not taken")
        assert "do not reach" not in caplog.text
        server.kill()
        outlet.send(Message(2, b"two"))
    until(lambda: len(tries) > 3, "nothing was tried again")
    assert caplog.text.count("block events do not reach NATS") == 1
    server.start()
    until(lambda: "block events reach NATS again" in caplog.text, "nobody reads that it is back")
    outlet.close()
    assert "hush" not in caplog.text


def test_a_process_publishes_what_it_is_told_over_nats(server: Server) -> None:
    feed = Feed(1024, lambda: {"host": (key(1), ROOT_PARENT)})
    pacing = Pacing(interval_s=0.005, batch_blocks=4, heartbeat_s=0.3)
    plan = PublisherPlan(nats=url(server), topic="four", block_tokens=16, pacing=pacing)
    process = PublisherProcess(plan, feed, lambda _outcome, _blocks: None)
    assert process.start()
    consumer = Subscriber(source(server, "four"), retry_s=0.2)
    feed.note(stored(2, 3))
    until(holds(consumer, {1, 2, 3}), "not told")
    consumer.close()
    process.close()


def test_no_server_is_named() -> None:
    with pytest.raises(ConfigError, match="dots"):
        NatsOutlet("nats://127.0.0.1:1", "KVCORE", "a.b")


@pytest.mark.parametrize(
    "reply", ["kvcore.events.other", "kvcore.ask.other", "_INBOX.*", "INBOX.a"]
)
def test_an_answer_goes_to_an_inbox_and_nowhere_else(server: Server, reply: str) -> None:
    """An asker that names another publisher's topic would have its events forged by this one."""
    made = Telling(NatsOutlet(url(server), "KVCORE", "mine"))
    consumer = source(server, "mine")
    until(lambda: bool(consumer.ask(SNAPSHOT, LIMIT_S)), "no answer came")

    async def asked_for_others() -> list[Any]:
        client = await nats_connect(url(server))
        seen: list[Any] = []

        async def note(message: Any) -> None:
            seen.append(message.headers or {})

        for at in ("kvcore.events.other", "kvcore.ask.other", "_INBOX.>", "INBOX.a"):
            await client.subscribe(at, cb=note)
        for body in (SNAPSHOT, number_bytes(0), b"x" * 100_000):
            await client.publish(nats_bus.ask_subject("mine"), body, reply=reply)
        await client.flush()
        await asyncio.sleep(0.3)
        await client.close()
        return seen

    answers = [headers for headers in asyncio.run(asked_for_others()) if nats_bus.COUNT in headers]
    assert not answers, "it was sent"
    assert consumer.ask(SNAPSHOT, LIMIT_S), "and the next is answered"
    consumer.close()
    made.close()
