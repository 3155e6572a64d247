"""What the protection of stored blocks costs: a checksum, a MAC, encryption.

`python -m benchmarks.protection`. The first table is one thread: the time of a core to verify a
block that was read, by its size, beside XXH3 of the same bytes.

The second is wall time: the disk tier reads 128 blocks, in calls of 16 by two threads, as a worker
does. A part of the verification hides behind the reads of other blocks.

The third is time to first token of real vLLM from host memory and from disk, with
`namespace.secret` (blocks on disk have a MAC) and without it (a checksum). Both engines are up and
take turns. Two engines differ by more than a MAC costs, so the bars are held against the column
"share": what the second table says that the blocks of the prompt cost more, of the time to first
token without a secret. Blocks in host memory are not verified: there, the share is 0. The bars are
2% of a disk hit and 1% of a host hit.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from benchmarks._report import Report
from benchmarks._ttft import fast_dtype
from kvcore.harness.engine_process import EngineProcess
from kvcore.harness.models import smollm2
from kvcore.harness.prompts import windows
from kvcore.memory.arena import HostArena, slot_bytes
from kvcore.memory.hugepages import Pages
from kvcore.model.shape import BlockShape
from kvcore.tiers.base import BlockRead, BlockWrite
from kvcore.tiers.checksum import checksum
from kvcore.tiers.disk import DiskAccess, DiskTier, Geometry, prepare_store
from kvcore.tiers.disk.format import Record
from kvcore.tiers.guard import BlockCipher, BlockGuard, BlockMac

BARS = {"disk": 0.02, "host": 0.01}
KIB = (64, 180, 360, 720, 1024, 2048, 4096)
PASS_NBYTES = 64 << 20
"""More than the caches hold."""
CALLS = ("KiB", "way", "us", "GB/s", "of XXH3")
HITS = ("from", "tokens", "without s", "with secret s", "ratio", "share", "bar")
READS = ("way", "us a block", "of XXH3")
TOKENS = 16
SHAPE = BlockShape(30, 3, 64, TOKENS, fast_dtype())
"""A block of SmolLM2, in the type that the engines use here."""
BLOCKS, BATCH = 128, 16
HOST_NBYTES = 64 << 20
"""The host memory of an engine that reads from disk."""


def ways() -> dict[str, BlockGuard | None]:
    return {
        "XXH3": None,
        "AES-256-GMAC": BlockMac(os.urandom(32)),
        "AES-256-GCM": BlockCipher(os.urandom(32)),
    }


def checks(guard: BlockGuard | None, nbytes: int, memory: memoryview) -> Callable[[], None]:
    """Return a call that verifies every block of ``memory``, as a read from disk does.

    A cipher decrypts in place: after the first pass its blocks are not whole, which takes as long.
    """
    name = b"0" * 32 + b" (0, 3)"
    stored = []
    for at in range(0, memory.nbytes - nbytes + 1, nbytes):
        block = memory[at : at + nbytes]
        flags = 0 if guard is None else guard.flag
        record = Record(b"k" * 16, b"p" * 16, b"n" * 16, bytes(16), nbytes, 7, flags=flags)
        if guard is not None:
            into = memoryview(bytearray(nbytes))
            made = guard.seal([block], nbytes, record.associated_data(name), into)
            block[:] = into if guard.encrypts else block
            record = record._replace(nonce=made.nonce, tag=made.tag)
        digest = checksum(record.key, [block], nbytes)
        stored.append((record._replace(checksum=digest), block))

    def run() -> None:
        for record, block in stored:
            record.mismatch(guard, [block], name)

    return run


def time_calls(report: Report, rounds: int) -> None:
    """Report a row for each size and way."""
    plain, ciphered = Pages(PASS_NBYTES), Pages(PASS_NBYTES)
    plain.view[:] = ciphered.view[:] = os.urandom(1 << 20) * (PASS_NBYTES >> 20)
    for kib in KIB:
        nbytes = kib << 10
        count = PASS_NBYTES // nbytes
        runs = {
            name: checks(guard, nbytes, (ciphered if guard and guard.encrypts else plain).view)
            for name, guard in ways().items()
        }
        taken: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(rounds):
            for name, run in runs.items():
                started = time.thread_time()
                run()
                taken[name].append((time.thread_time() - started) / count)
        best = {name: statistics.median(times) for name, times in taken.items()}
        for name, each in best.items():
            pairs = zip(taken[name], taken["XXH3"], strict=True)
            ratio = statistics.median(ours / theirs for ours, theirs in pairs)
            numbers = (round(x, 2) for x in (1e6 * each, nbytes / each / 1e9, ratio))
            report.add(**dict(zip(CALLS, (kib, name, *numbers), strict=True)))
    plain.close()
    ciphered.close()


class Stored:
    """`BLOCKS` blocks on disk, in a store of their own, and host memory to read them into."""

    def __init__(self, folder: Path, guard: BlockGuard | None) -> None:
        geometry = Geometry(SHAPE, b"m" * 16, ((0, 3),), cipher=guard.name if guard else "")
        store = prepare_store(folder, geometry, 1 << 30, guard=guard)
        nbytes = slot_bytes(SHAPE)
        self._tier = DiskTier(store.mounted, geometry, shard=0, slot_nbytes=nbytes, guard=guard)
        self._arena = HostArena(SHAPE, BLOCKS)
        self._arena.memory[:] = os.urandom(self._arena.nbytes)
        self._keys = [os.urandom(16) for _ in range(BLOCKS)]
        self._pool = ThreadPoolExecutor(2)
        writes = [
            BlockWrite(slot, key, b"p" * 16, b"n" * 16, self._arena.slot_buffers(slot))
            for slot, key in enumerate(self._keys)
        ]
        assert not any(self._tier.write(writes))

    def read(self) -> float:
        """Return the seconds of a read of all blocks."""
        started = time.perf_counter()
        for results in self._pool.map(self._read, range(0, BLOCKS, BATCH)):
            assert not any(results)
        return time.perf_counter() - started

    def _read(self, first: int) -> Sequence[object]:
        reads = [
            BlockRead(
                slot, self._keys[slot], self._arena.slot_buffers(slot), (), b"p" * 16, b"n" * 16
            )
            for slot in range(first, first + BATCH)
        ]
        return self._tier.read(reads)


def time_reads(report: Report, rounds: int, folder: Path | None) -> float:
    """Report a row for each way. Return the seconds that a block with a MAC takes longer."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        stored = {name: Stored(Path(place) / name, guard) for name, guard in ways().items()}
        time.sleep(2 * DiskAccess().sync_interval_s)  # what was written is on its way to the medium
        taken: dict[str, list[float]] = {name: [] for name in stored}
        for turn in range(4 * rounds):
            for name in sorted(stored, reverse=bool(turn % 2)):
                taken[name].append(stored[name].read())
    each = {name: statistics.median(times) / BLOCKS for name, times in taken.items()}
    for name, seconds in each.items():
        pairs = zip(taken[name], taken["XXH3"], strict=True)
        ratio = statistics.median(ours / theirs for ours, theirs in pairs)
        report.add(
            **dict(zip(READS, (name, round(1e6 * seconds, 1), round(ratio, 3)), strict=True))
        )
    return each["AES-256-GMAC"] - each["XXH3"]


def settings(folder: Path, secret: bool, host: str) -> Mapping[str, object]:
    space = {"namespace": {"secret": "a secret of the benchmark"}} if secret else {}
    disk = {"path": str(folder / f"disk-{secret}"), "capacity": "4GiB"}
    return {"host": {"capacity": host}, "disk": disk, **space}


def time_hits(
    report: Report, source: str, host: str, more_s: float, options: argparse.Namespace
) -> None:
    """Report the time to first token from ``source``. ``host`` is the capacity of host memory."""
    model, longest = smollm2(), max(options.tokens)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, ExitStack() as stack:
        engines = [
            stack.enter_context(
                EngineProcess(
                    model,
                    kvcore=settings(Path(folder), secret, host),
                    env={"VLLM_CPU_KVCACHE_SPACE": "1"},
                    max_model_len=longest + 512,
                    max_num_seqs=4,
                    dtype=fast_dtype(),
                )
            )
            for secret in (False, True)
        ]
        for size in options.tokens:
            # From disk: three times as many as host memory holds, or some stay in it.
            fill = 0 if source == "host" else 3 * HOST_NBYTES // (size // TOKENS * SHAPE.nbytes)
            prompts = windows(model, max(options.prompts, fill), size, size, seed=size)
            times = list(_in_turns(engines, prompts, source, options.turns))
            without, ours = (statistics.median(one[which] for one in times) for which in (0, 1))
            ratio = statistics.median(one[1] / one[0] for one in times)
            share = more_s * (size // TOKENS) / without if source == "disk" else 0.0
            row = (source, size, round(without, 4), round(ours, 4), round(ratio, 3))
            report.add(**dict(zip(HITS, (*row, round(share, 4), BARS[source]), strict=True)))


def _in_turns(
    engines: list[EngineProcess], prompts: list[list[int]], source: str, turns: int
) -> Iterator[tuple[float, float]]:
    """Yield the times to first token of both engines for one prompt, again and again."""
    for engine in engines:
        for prompt in prompts:
            engine.generate([prompt], 8)
    for turn in range(turns):
        for i, prompt in enumerate(prompts):
            pair = [0.0, 0.0]
            for which in (0, 1) if (turn + i) % 2 else (1, 0):
                engines[which].reset_prefix_cache()
                [answer] = engines[which].generate([prompt], 8)
                if answer.tiers.get(source, 0) < 0.9 * answer.cached_tokens:
                    raise SystemExit(f"not a {source} hit: {answer}")
                pair[which] = answer.ttft_s
            yield pair[0], pair[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.protection")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, nargs="*", default=[512, 2048])
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--folder", type=Path, help="folder on the disk to measure (temporary)")
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    calls = Report("protection", CALLS, baseline="XXH3 of the same bytes, in turns")
    time_calls(calls, options.rounds)
    calls.finish(options.out)
    reads = Report("protection_reads", READS, baseline="the same reads with a checksum, in turns")
    more_s = time_reads(reads, options.rounds, options.folder)
    reads.finish(options.out)
    if options.tokens:
        hits = Report("protection_ttft", HITS, baseline="the same vLLM without namespace.secret")
        time_hits(hits, "host", "1GiB", more_s, options)
        time_hits(hits, "disk", str(HOST_NBYTES), more_s, options)
        hits.finish(options.out)


if __name__ == "__main__":
    main()
