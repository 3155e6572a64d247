"""Cost of block events to the thread that stores: the same work with and without a publisher.

    python -m benchmarks.events [--blocks 50000] [--rate 100000] [--rounds 9] [--out results]

One thread acts as the leader. It reserves and commits prompts of 16 blocks in a full index, so that
each prompt evicts as many blocks, at ``rate`` blocks a second (stored and removed together) or as
fast as possible. Measured is the time that the thread works, without the waits between two prompts:
by the clock, and on a core, which leaves out other work on the machine. The kinds:

    none                      without events
    published by a process    by a publisher (ZMQ) in a process of its own, the default
    published                 by a publisher in a thread of this process
    followed                  by a thread, with a consumer in this process too

All four take turns on one index, in another order each round. Results are medians of the rounds.
"more" is the microseconds on a core for each block, beyond those of no events in the same round. At
100,000 blocks a second, 0.1 of it is 1% of the thread.
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
from statistics import median
from typing import NamedTuple

from benchmarks._report import Report
from kvcore.config import load_config
from kvcore.events import Subscriber
from kvcore.events.open import open_events
from kvcore.events.zmq_bus import ZmqSource
from kvcore.index import BlockIndex, TierSpec
from kvcore.telemetry.metrics import Metrics

CHAIN = 16
HELD = 65536
NAMESPACE = b"n" * 16
KINDS = ("none", "published by a process", "published", "followed")


def prompts(count: int, seed: int) -> list[list[bytes]]:
    """Return the keys of ``count`` unrelated prompts."""
    return [
        [hashlib.sha256(b"%d.%d.%d" % (seed, n, i)).digest()[:16] for i in range(CHAIN)]
        for n in range(count)
    ]


@contextmanager
def publishing(kind: str, index: BlockIndex, metrics: Metrics) -> Iterator[None]:
    """Publish the events of ``index`` as ``kind`` says, within the block."""
    if kind == "none":
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        ends = f"ipc://{folder}/pub", f"ipc://{folder}/ask"
        who = "process" if kind == "published by a process" else "thread"
        events = {
            "endpoint": ends[0],
            "replay_endpoint": ends[1],
            "topic": "bench",
            "publisher": who,
        }
        telling = open_events(load_config(overrides={"events": events}, env={}), index, metrics)
        assert telling is not None
        index.watch(telling.feed.note)
        with following(*ends) if kind == "followed" else nothing():
            yield
        index.watch(None)
        telling.close()


@contextmanager
def nothing() -> Iterator[None]:
    yield None


@contextmanager
def following(endpoint: str, replay_endpoint: str) -> Iterator[None]:
    """Run a consumer in a thread of this process, which shares the interpreter's lock."""
    consumer = Subscriber(ZmqSource(endpoint, replay_endpoint, "bench"))
    ended = threading.Event()

    def follow() -> None:
        while not ended.is_set():
            consumer.poll(0.05)

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        consumer.close()


class Times(NamedTuple):
    """Seconds of the storing thread: working by the clock, on a core, and in total with waits."""

    busy: float
    core: float
    total: float
    dropped: int = 0


def store(index: BlockIndex, work: Sequence[list[bytes]], rate: float) -> Times:
    """Store prompts at ``rate`` blocks in events a second; 0 is as fast as possible."""
    busy = core = 0.0
    started = due = time.perf_counter()
    for keys in work:
        if rate:
            due += 2 * CHAIN / rate
            wait = due - time.perf_counter()
            if wait > 0:
                time.sleep(wait)
        began, ran = time.perf_counter(), time.thread_time()
        index.lifecycle.commit(index.lifecycle.reserve("host", keys, 0, CHAIN, NAMESPACE))
        core += time.thread_time() - ran
        busy += time.perf_counter() - began
    return Times(busy, core, time.perf_counter() - started)


def measure(kind: str, index: BlockIndex, blocks: int, rate: float, seed: int) -> Times:
    metrics = Metrics()
    work = prompts(blocks // (2 * CHAIN), seed)
    with publishing(kind, index, metrics):
        times = store(index, work, rate)
    told = metrics.snapshot().get("kvcore_event_blocks_total", {})
    return times._replace(dropped=int(told.get("dropped", 0)))


def rounds(count: int, blocks: int, rate: float) -> dict[str, list[Times]]:
    """Return for each kind the times of each round."""
    index = BlockIndex([TierSpec("host", HELD)])
    store(index, prompts(HELD // CHAIN, 0), 0)
    found: dict[str, list[Times]] = {kind: [] for kind in KINDS}
    for n in range(count):
        turn = n % len(KINDS)
        for m, kind in enumerate([*KINDS[turn:], *KINDS[:turn]]):
            seed = 1 + n * len(KINDS) + m
            found[kind].append(measure(kind, index, blocks, rate, seed))
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=50_000)
    parser.add_argument("--rate", type=float, default=100_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    columns = ["pace", "events", "blocks/s", "us a block", "on a core", "more", "dropped"]
    report = Report("events", columns, "the same work without events", {"blocks": options.blocks})
    for pace, rate in (("as fast as can be", 0.0), (f"{options.rate:,.0f} a second", options.rate)):
        found = rounds(options.rounds, options.blocks, rate)
        for kind in KINDS:
            taken = found[kind]
            pairs = zip(taken, found["none"], strict=True)
            report.add(
                **{
                    "pace": pace,
                    "events": kind,
                    "blocks/s": options.blocks / median(times.total for times in taken),
                    "us a block": median(times.busy for times in taken) / options.blocks * 1e6,
                    "on a core": median(times.core for times in taken) / options.blocks * 1e6,
                    "more": median(t.core - none.core for t, none in pairs) / options.blocks * 1e6,
                    "dropped": sum(times.dropped for times in taken),
                }
            )
    report.finish(options.out)


if __name__ == "__main__":
    main()
