"""Block events over ZMQ: real sockets, and vLLM's own classes at the other end."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from kvcore.testing.waiting import until

zmq = pytest.importorskip("zmq")

from kvcore.errors import ConfigError  # noqa: E402
from kvcore.events import Feed, Pacing, Publisher, Subscriber  # noqa: E402
from kvcore.events.wire import END, number, number_bytes  # noqa: E402
from kvcore.events.zmq_bus import ZmqOutlet, ZmqSource  # noqa: E402
from kvcore.index import Event  # noqa: E402
from kvcore.model.keys import ROOT_PARENT  # noqa: E402

LIMIT_S = 60


def key(n: int) -> bytes:
    return n.to_bytes(16, "big")


def stored(*numbers: int) -> Event:
    return Event(True, "host", tuple(map(key, numbers)), ROOT_PARENT)


class ZmqRig:
    def __init__(self, folder: Path) -> None:
        self.outlet = ZmqOutlet(f"ipc://{folder}/pub", f"ipc://{folder}/ask", "kvcore")
        pacing = Pacing(interval_s=0.005, batch_blocks=4, heartbeat_s=0.2)
        self.feed = Feed(pacing.queue_blocks, lambda: {"host": (b"", b"")})
        self.publisher = Publisher(
            self.feed.content(), self.feed.items, [self.outlet], 16, pacing=pacing
        )
        self.publisher.start()

    def source(self) -> ZmqSource:
        assert self.outlet.replay_endpoint is not None
        return ZmqSource(self.outlet.endpoint, self.outlet.replay_endpoint, "kvcore")


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[ZmqRig]:
    made = ZmqRig(tmp_path)
    yield made
    made.publisher.close()


def holds(consumer: Subscriber, numbers: set[int]) -> Callable[[], bool]:
    def true() -> bool:
        consumer.poll(0.05)
        return consumer.synced and consumer.tiers().get("host", {}).keys() == set(map(key, numbers))

    return true


def test_a_consumer_follows_and_catches_up(rig: ZmqRig) -> None:
    rig.feed.note(stored(1, 2, 3, 4, 5))
    consumer = Subscriber(rig.source(), answer_s=LIMIT_S)
    until(holds(consumer, {1, 2, 3, 4, 5}), "a late consumer was not told what is held")
    rig.feed.note(Event(False, "host", (key(2),)))
    until(holds(consumer, {1, 3, 4, 5}), "a removal did not come")
    consumer.close()


def test_one_that_lost_its_connection_for_a_while(rig: ZmqRig) -> None:
    source = rig.source()
    consumer = Subscriber(source, answer_s=LIMIT_S)
    rig.feed.note(stored(1))
    until(holds(consumer, {1}), "not told")
    source._sub.disconnect(rig.outlet.endpoint)
    while source.receive(0.3):
        pass
    for n in range(2, 40):
        rig.feed.note(stored(n))
    time.sleep(0.1)
    source._sub.connect(rig.outlet.endpoint)
    until(holds(consumer, set(range(1, 40))), "what was missed was not asked for")
    assert consumer.resyncs == 1, "everything was asked for where some batches would do"
    consumer.close()


@pytest.mark.slow
def test_a_publisher_that_went_and_one_that_came(tmp_path: Path) -> None:
    first = ZmqRig(tmp_path)
    source = first.source()
    consumer = Subscriber(source, answer_s=1, retry_s=0.1, silence_s=0.5)
    first.feed.note(stored(1))
    until(holds(consumer, {1}), "not told")
    first.publisher.close()

    def knows() -> bool:
        consumer.poll(0.05)
        return not consumer.synced

    until(knows, "the publisher is gone and this is not known")
    second = ZmqRig(tmp_path)
    second.feed.note(stored(7))
    until(holds(consumer, {7}), "what the second holds is not known")
    consumer.close()
    second.publisher.close()


@pytest.mark.parametrize(("sent", "told", "taken"), [(2, 2, True), (1, 2, False), (2, None, True)])
def test_an_answer_that_is_not_whole_is_none(
    tmp_path: Path, sent: int, told: int | None, taken: bool
) -> None:
    """vLLM's publisher does not count; there nobody can tell."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(f"ipc://{tmp_path}/ask")

    def answer() -> None:
        client, empty, _ = router.recv_multipart()
        for n in range(sent):
            router.send_multipart([client, empty, b"kvcore", number_bytes(n), b"payload"])
        count = b"" if told is None else number_bytes(told)
        router.send_multipart([client, empty, b"", END, count])

    thread = threading.Thread(target=answer)
    thread.start()
    source = ZmqSource(f"ipc://{tmp_path}/pub", f"ipc://{tmp_path}/ask")
    found = source.ask(number_bytes(0), LIMIT_S)
    thread.join()
    assert (found is not None) == taken
    assert not taken or [message.number for message in found or ()] == list(range(sent))
    source.close()
    context.destroy(linger=0)


def test_a_consumer_of_vllm_reads_it_and_asks_again_as_it_does(rig: ZmqRig) -> None:
    """As its documentation has it: a SUB socket, and a request with the first number wanted."""
    kv_events = pytest.importorskip("vllm.distributed.kv_events")
    decode = msgspec.msgpack.Decoder(kv_events.KVEventBatch).decode
    context = zmq.Context()
    subscriber = context.socket(zmq.SUB)
    subscriber.subscribe(b"kvcore")
    subscriber.connect(rig.outlet.endpoint)
    assert subscriber.poll(LIMIT_S * 1000), "no heartbeat came"
    rig.feed.note(stored(1, 2))
    hashes: list[bytes] = []
    while not hashes:
        assert subscriber.poll(LIMIT_S * 1000)
        topic, at, payload = subscriber.recv_multipart()
        assert topic == b"kvcore"
        hashes += [h for e in decode(payload).events for h in e.block_hashes]
    assert hashes == [key(1), key(2)]

    dealer = context.socket(zmq.DEALER)
    dealer.connect(rig.outlet.replay_endpoint)
    dealer.send_multipart([b"", at])
    replayed = []
    while dealer.poll(LIMIT_S * 1000):
        _, topic, again, payload = dealer.recv_multipart()
        if again == kv_events.ZmqEventPublisher.END_SEQ:
            break
        replayed.append((number(again), decode(payload).events))
    assert again == END
    first = number(at)
    assert [n for n, _ in replayed] == list(range(first, first + len(replayed)))
    assert replayed[0][1][0].block_hashes == [key(1), key(2)]
    context.destroy(linger=0)


def test_our_consumer_reads_vllms_publisher(tmp_path: Path) -> None:
    """It has no snapshot: what is missed is asked for by number, the rest stays unknown."""
    kv_events = pytest.importorskip("vllm.distributed.kv_events")
    publisher = kv_events.ZmqEventPublisher(
        0, f"ipc://{tmp_path}/pub", f"ipc://{tmp_path}/ask", topic="t"
    )
    stored_there = kv_events.BlockStored(
        block_hashes=[key(1), 77],
        parent_block_hash=None,
        token_ids=[1, 2],
        block_size=1,
        lora_id=None,
        medium=kv_events.MEDIUM_GPU,
        lora_name=None,
        group_idx=0,
    )
    source = ZmqSource(f"ipc://{tmp_path}/pub", f"ipc://{tmp_path}/ask", "t")
    publisher.publish(kv_events.KVEventBatch(ts=1.0, events=[stored_there]))
    until(lambda: bool(source.ask(number_bytes(0), 1)), "vLLM does not answer")
    consumer = Subscriber(source, answer_s=1)
    consumer._number = -1  # nothing is held before the first batch
    consumer.synced = True

    def removed(medium: str) -> None:
        event = kv_events.BlockRemoved(block_hashes=[key(1)], medium=medium)
        publisher.publish(kv_events.KVEventBatch(ts=2.0, events=[event]))

    def hears() -> bool:
        removed(kv_events.MEDIUM_CPU)
        return consumer.poll(0.05)

    until(hears, "the subscription did not reach vLLM")
    removed(kv_events.MEDIUM_GPU)

    def knows() -> bool:
        consumer.poll(0.05)
        return consumer.tiers() == {"GPU": {77: key(1)}}

    until(knows, "what was missed was not asked for")
    consumer.close()
    publisher.shutdown()


FORGOTTEN = """
import gc

def forget(made):
    made.itself = made

{make}
gc.collect()
"""


@pytest.mark.parametrize(
    "make",
    [
        "from kvcore.events.zmq_bus import ZmqSource\nforget(ZmqSource('ipc://pub', 'ipc://ask'))",
        "from kvcore.events.zmq_bus import ZmqOutlet\n"
        "forget(ZmqOutlet('ipc://pub', 'ipc://ask', 't'))",
        "from kvcore._util.zmq_socket import Context, make_socket, zmq\n"
        "socket = make_socket(Context(), zmq.DEALER)\n"
        "socket.connect('ipc://nobody')\n"
        "socket.send(b'x' * 100)\n"
        "cycle = [socket]\n"
        "cycle.append(cycle)\n"
        "del socket, cycle",
    ],
    ids=["source", "outlet", "socket"],
)
def test_what_is_forgotten_unclosed_does_not_stop_the_process(tmp_path: Path, make: str) -> None:
    """pyzmq's own context waits for ever, in a garbage collection, for sockets it forgot."""
    code = FORGOTTEN.format(make=make)
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=LIMIT_S)


@pytest.mark.parametrize("endpoint", ["tcp://*:notaport", "nowhere", "ipc:///no/such/folder/x"])
def test_an_endpoint_that_cannot_be_had_is_named(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="supported"):
        ZmqOutlet(endpoint, None, "t")
