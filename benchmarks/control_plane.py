"""Cost of the control plane: keys, match, reserve, commit, evict, restore, and memory.

    python -m benchmarks.control_plane [--blocks 1000000] [--tokens 131072] [--out results]

Everything runs in one process against one index, so that rows can be compared. The machine's speed
changes by the minute, so lookups also have a ratio to a plain-Python chain of SHA-256 that is timed
in turn with them (best of ``--rounds`` each).
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import os
import random
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks._report import Report, Row
from kvcore.index import BlockIndex, TierSpec
from kvcore.model.keys import ROOT_PARENT, KeyChain, Namespace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMESPACE = Namespace("benchmark")
CHAIN = 128  # blocks of each prompt that fills the index
COLUMNS = ["what", "block tokens", "milliseconds", "us per block", "to plain chain", "bar (ms)"]
BARS = {("first", 16): 5.0, ("again", 16): 0.5, ("first", 256): 1.5}


class Record(NamedTuple):
    """A record as a disk tier's scan gives it."""

    slot: int
    key: bytes
    parent: bytes
    namespace: bytes
    stamp: int


def plain_chain(tokens: Sequence[int], block_tokens: int) -> list[bytes]:
    """Return keys made the simplest way: SHA-256 of the previous key and the packed tokens."""
    data, step, key, keys = array("I", tokens).tobytes(), 4 * block_tokens, b"", []
    for start in range(0, len(data), step):
        key = hashlib.sha256(key + data[start : start + step]).digest()[:16]
        keys.append(key)
    return keys


def best(rounds: int, *functions: Callable[[], object]) -> list[float]:
    """Return the seconds of each function: the best of ``rounds``, taken in turn."""
    times = [float("inf")] * len(functions)
    for _ in range(rounds):
        for i, function in enumerate(functions):
            start = time.perf_counter()
            function()
            times[i] = min(times[i], time.perf_counter() - start)
    return times


def resident() -> int:
    """Return the resident set of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def prompts(blocks: int, seed: int) -> Iterator[list[bytes]]:
    """Yield the keys of unrelated prompts of `CHAIN` blocks each."""
    for i in range(blocks // CHAIN):
        yield [hashlib.sha256(b"%d.%d.%d" % (seed, i, j)).digest()[:16] for j in range(CHAIN)]


def fill(index: BlockIndex, blocks: int) -> tuple[float, float]:
    """Store ``blocks`` blocks in both tiers. Return the seconds a block for reserve and commit."""
    reserving = committing = 0.0
    for keys in prompts(blocks, 0):
        for tier in index.tiers:
            start = time.perf_counter()
            reservation = index.lifecycle.reserve(tier, keys, 0, CHAIN, NAMESPACE.digest)
            middle = time.perf_counter()
            index.lifecycle.commit(reservation)
            reserving += middle - start
            committing += time.perf_counter() - middle
    count = len(index.tiers) * (blocks // CHAIN) * CHAIN
    return reserving / count, committing / count


def store(index: BlockIndex, keys: Sequence[bytes]) -> None:
    for tier in index.tiers:
        index.lifecycle.commit(index.lifecycle.reserve(tier, keys, 0, len(keys), NAMESPACE.digest))


def lookups(report: Report, index: BlockIndex, tokens: list[int], rounds: int) -> None:
    for size in (16, 32, 64, 128, 256):
        chain = KeyChain(NAMESPACE, size)
        chain.extend(tokens)
        store(index, chain.keys)
        blocks = len(chain.keys)

        def first(size: int = size, blocks: int = blocks) -> None:
            match = index.match(KeyChain(NAMESPACE, size).extend(tokens))
            assert match.depths == (blocks, blocks)

        def again(chain: KeyChain = chain) -> None:
            index.match(chain.extend(()))

        def plain(size: int = size) -> None:
            plain_chain(tokens, size)

        def resolve(keys: list[bytes] = chain.keys) -> None:
            index.slots("host", keys, 0, len(keys))

        base, *times = best(rounds, plain, first, again, resolve)
        names = ("hash and match, first", "match, hashed before", "resolve all slots")
        for name, seconds, bar in zip(names, times, ("first", "again", ""), strict=True):
            add(report, name, size, seconds, blocks, seconds / base, BARS.get((bar, size)))
        add(report, "plain-Python chain, no match", size, base, blocks, 1.0)


def add(
    report: Report,
    what: str,
    size: int | None,
    seconds: float,
    blocks: int,
    ratio: float | None = None,
    bar: float | None = None,
) -> None:
    report.add(
        **{
            "what": what,
            "block tokens": size,
            "milliseconds": seconds * 1e3,
            "us per block": seconds * 1e6 / blocks,
            "to plain chain": ratio,
            "bar (ms)": bar,
        }
    )


def churn(report: Report, index: BlockIndex, blocks: int) -> None:
    """Measure a full tier, in which every stored prompt evicts as many blocks."""
    fresh = list(prompts(blocks, 1))
    count = len(fresh) * CHAIN
    spare = index.num_free("host")
    index.lifecycle.commit(
        index.lifecycle.reserve("host", next(prompts(CHAIN, 2)), 0, CHAIN, NAMESPACE.digest)
    )
    assert spare < CHAIN, "the host tier must be full for this"
    start = time.perf_counter()
    for keys in fresh:
        index.lifecycle.commit(index.lifecycle.reserve("host", keys, 0, CHAIN, NAMESPACE.digest))
    seconds = time.perf_counter() - start
    add(report, "store in a full tier (evict, reserve, commit)", None, seconds, count)
    start = time.perf_counter()
    evicted = index.evictions.evict("host", count)
    add(report, "evict", None, time.perf_counter() - start, len(evicted))


def restore(report: Report, blocks: int) -> None:
    """Measure the rebuilding of a disk tier of ``blocks`` blocks from records in random order."""
    records: list[Record] = []
    for keys in prompts(blocks, 3):
        parents = [ROOT_PARENT, *keys[:-1]]
        for key, parent in zip(keys, parents, strict=True):
            stamp = len(records)
            records.append(Record(stamp, key, parent, NAMESPACE.digest, stamp))
    random.Random(0).shuffle(records)
    index = BlockIndex([TierSpec("disk", blocks)])
    start = time.perf_counter()
    dropped = index.admin.restore("disk", records)
    seconds = time.perf_counter() - start
    assert not dropped
    add(report, "restore after restart", None, seconds, len(records), bar=10_000.0)


def draw(figure: Figure, rows: Sequence[Row]) -> None:
    axes = figure.subplots()
    for name in dict.fromkeys(row["what"] for row in rows if row["block tokens"]):
        points = [row for row in rows if row["what"] == name]
        axes.loglog(
            [row["block tokens"] for row in points],
            [row["milliseconds"] for row in points],
            marker="o",
            label=name,
        )
    sizes = [row["block tokens"] for row in rows if row["what"].startswith("plain")]
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xlabel("tokens a block")
    axes.set_ylabel("milliseconds for the whole prompt")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()

    room = options.tokens // 16 * 2  # for the prompts looked up below, at five block sizes
    before = resident()
    index = BlockIndex(
        [
            TierSpec("host", options.blocks + room),
            TierSpec("disk", options.blocks + room, foreign=True),
        ]
    )
    reserving, committing = fill(index, options.blocks)
    gc.collect()
    held = len(index)
    report = Report(
        "control_plane",
        COLUMNS,
        baseline="a plain-Python chain of SHA-256 over packed tokens, timed in turn with each row",
        notes={
            "blocks in the index": held,
            "tiers": 2,
            "tokens of the prompt": options.tokens,
            "bytes a block (resident set, two tiers)": (resident() - before) / held,
            "bar, bytes a block": 200,
        },
    )
    rng = random.Random(1)
    tokens = [rng.randrange(150_000) for _ in range(options.tokens)]
    lookups(report, index, tokens, options.rounds)
    add(report, "reserve", None, reserving * held, held)
    add(report, "commit", None, committing * held, held)
    index.lifecycle.commit(
        index.lifecycle.reserve(
            "host",
            [hashlib.sha256(b"pad%d" % i).digest()[:16] for i in range(index.num_free("host"))],
            0,
            options.blocks,
            NAMESPACE.digest,
        )
    )
    churn(report, index, options.blocks // 50)
    del index
    restore(report, options.blocks)
    report.finish(options.out, draw)
    print(
        f"bytes a block, two tiers: {report.notes['bytes a block (resident set, two tiers)']:.0f}"
    )


if __name__ == "__main__":
    main()
