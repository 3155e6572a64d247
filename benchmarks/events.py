"""What block events cost the thread that stores: the same work with and without a publisher.

    python -m benchmarks.events [--blocks 200000] [--rate 100000] [--out results]

One thread plays the leader: it reserves and commits prompts of 16 blocks in a full index, so that
each evicts as many, at ``rate`` blocks a second (stored and removed together) or as fast as it can.
What is measured is the time that thread is at work, by the clock and on a core (other work on the
machine is in the first and not in the second), waits between two prompts left out: without events,
with a publisher (ZMQ) that nobody listens to, and with a consumer in this process. Rounds of all
three are taken in turn, the best of each counts. "more" is in microseconds on a core a block beyond
no events: at 100,000 blocks a second, 0.1 of it is one hundredth of the thread.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks._report import Report
from kvcore.events import Pacing, Publisher, Subscriber
from kvcore.events.zmq_bus import ZmqOutlet, ZmqSource
from kvcore.index import BlockIndex, TierSpec
from kvcore.metrics import Metrics

CHAIN = 16
HELD = 65536
NAMESPACE = b"n" * 16
KINDS = ("none", "published", "followed")


def prompts(count: int, seed: int) -> list[list[bytes]]:
    """Keys of unrelated prompts."""
    return [
        [hashlib.sha256(b"%d.%d.%d" % (seed, n, i)).digest()[:16] for i in range(CHAIN)]
        for n in range(count)
    ]


@contextmanager
def publishing(kind: str, index: BlockIndex, metrics: Metrics) -> Iterator[Subscriber | None]:
    """Events of ``index`` as ``kind`` has it."""
    if kind == "none":
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        outlet = ZmqOutlet(f"ipc://{folder}/pub", f"ipc://{folder}/ask", "bench")
        publisher = Publisher(
            lambda: {tier: index.published(tier) for tier in index.tiers},
            [outlet],
            16,
            pacing=Pacing(),
            metrics=metrics,
        )
        index.watch(publisher.note)
        publisher.start()
        with following(outlet) if kind == "followed" else nothing() as consumer:
            yield consumer
        index.watch(None)
        publisher.close()


@contextmanager
def nothing() -> Iterator[None]:
    yield None


@contextmanager
def following(outlet: ZmqOutlet) -> Iterator[Subscriber]:
    """A consumer in a thread of this process: its work is on the same interpreter's lock."""
    assert outlet.replay_endpoint is not None
    consumer = Subscriber(ZmqSource(outlet.endpoint, outlet.replay_endpoint, "bench"))
    ended = threading.Event()

    def follow() -> None:
        while not ended.is_set():
            consumer.poll(0.05)

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        yield consumer
    finally:
        ended.set()
        thread.join()
        consumer.close()


class Times(NamedTuple):
    """Seconds of the storing thread: at work by the clock, on a core, and in all."""

    busy: float
    core: float
    total: float
    dropped: int = 0


def store(index: BlockIndex, work: Sequence[list[bytes]], rate: float) -> Times:
    """``rate`` is in blocks told a second, 0 for as fast as can be."""
    busy = core = 0.0
    started = due = time.perf_counter()
    for keys in work:
        if rate:
            due += 2 * CHAIN / rate
            wait = due - time.perf_counter()
            if wait > 0:
                time.sleep(wait)
        began, ran = time.perf_counter(), time.thread_time()
        index.commit(index.reserve("host", keys, 0, CHAIN, NAMESPACE))
        core += time.thread_time() - ran
        busy += time.perf_counter() - began
    return Times(busy, core, time.perf_counter() - started)


def measure(kind: str, blocks: int, rate: float, seed: int) -> Times:
    index, metrics = BlockIndex([TierSpec("host", HELD)]), Metrics()
    store(index, prompts(HELD // CHAIN, 0), 0)
    work = prompts(blocks // (2 * CHAIN), seed)
    with publishing(kind, index, metrics):
        times = store(index, work, rate)
    told = metrics.snapshot().get("kvcore_event_blocks_total", {})
    return times._replace(dropped=int(told.get("dropped", 0)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=200_000)
    parser.add_argument("--rate", type=float, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    columns = ["pace", "events", "blocks/s", "us a block", "on a core", "more", "dropped"]
    report = Report("events", columns, "the same work without events", {"blocks": options.blocks})
    for pace, rate in (("as fast as can be", 0.0), (f"{options.rate:,.0f} a second", options.rate)):
        best: dict[str, Times] = {}
        for seed in range(1, options.rounds + 1):
            for kind in KINDS:
                found = measure(kind, options.blocks, rate, seed)
                best[kind] = min(found, best.get(kind, found), key=lambda times: times.core)
        for kind in KINDS:
            times = best[kind]
            report.add(
                **{
                    "pace": pace,
                    "events": kind,
                    "blocks/s": options.blocks / times.total,
                    "us a block": times.busy / options.blocks * 1e6,
                    "on a core": times.core / options.blocks * 1e6,
                    "more": (times.core - best["none"].core) / options.blocks * 1e6,
                    "dropped": times.dropped,
                }
            )
    report.finish(options.out)


if __name__ == "__main__":
    main()
