"""Time to first token of real SGLang: cold, its radix cache, kvcore's and HiCache's tiers.

    python -m benchmarks.sglang_ttft [--tokens 512 4096] [--prompts 5]

`benchmarks._ttft` says what is measured and how. HiCache is SGLang's own tiered cache, here with
its file backend. It has the same host memory and page size as kvcore, and waits for the disk as
kvcore does.

- A flush would empty HiCache's host memory too. So before each request that kvcore or HiCache is to
  answer from host memory, a long prompt pushes the others out of a token pool that is hardly
  larger. The radix cache is asked after a prompt of the same length.
- HiCache reads its files through the page cache, unlike kvcore. The page cache is dropped before
  each of these requests, if this process may do that.
- A host hit is also measured in turns with a radix hit, in one engine that is flushed.

On a CPU, HiCache runs with `kvcore_sglang.testing.hicache`. SGLang's attention there computes the
whole square of a prompt, however much of it was found: `--attention kvcore_rows` gives every
contender one that computes only the rows that are left (`kvcore_sglang.attention`). SGLang's
overlap schedule prepares a step while another is computed. On a CPU it sends the first token only
when the second is computed: `--no-overlap` removes that step from every contender's times.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks._ttft import (
    DISK,
    HOST,
    MISSES,
    Bar,
    Contest,
    Cost,
    Forget,
    measure,
    parse,
    parser,
    shown,
)
from kvcore.harness.engine_process import EngineProcess, Generation
from kvcore.harness.prompts import windows

PEER_MISS, PEER_HOST, PEER_FILE = "hicache miss", "hicache host", "hicache file"
HITS = "TTFT of a host hit, of the radix hit"
ROUNDS = 4
"""Turns of each kind of hit, for each prompt."""
PAGE_CACHE = Path("/proc/sys/vm/drop_caches")
FILES_SETTLED_S = 3.0
"""Seconds without a new file after which HiCache has written everything."""
FILES_TIMEOUT_S = 300.0


class SGLangContest(Contest):
    """SGLang, and HiCache as a peer."""

    engine = "sglang"

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        page = options.page_size
        shortest = min(options.tokens)
        if shortest < 4 * page:
            raise SystemExit(f"--tokens {shortest} with --page-size {page}: at least {4 * page}")
        pool = _up(self.longest + shortest // 2, page)
        """Tokens of the pool: the long prompt fits and leaves no room for another."""
        [self._crowd] = windows(self.model, 1, self.longest, self.longest, seed=99)
        self._crowd[0] = 999
        total = sum(options.prompts * (n + 2 * page) for n in options.tokens)
        self.gigabytes = 1 + 2 * (total + pool) * 46_080 // 10**9
        """About twice what all prompts need with SmolLM2 in float32."""
        self.engine_args: dict[str, Any] = {
            "context_length": max(2048, self.longest + 512),
            "max_running_requests": 8,
            "max_total_tokens": _up(2 * total + 2048, page),
            "page_size": page,
            "random_seed": 0,
            "dtype": options.dtype,
            "sleep_on_idle": True,
            "start_method": "fork",
            "forked": options.dry_run,  # an engine's start is not measured
        }
        if options.attention:
            self.engine_args["attention_backend"] = options.attention
        if options.no_overlap:
            self.engine_args["disable_overlap_schedule"] = True
        self._pool = pool

    def kvcore(self, folder: str) -> dict[str, Any]:
        return {**super().kvcore(folder), "sglang": {"prefetch": "wait", "keep_on_flush": True}}

    def tier_args(self) -> dict[str, Any]:
        return {"max_total_tokens": self._pool}

    def forget(self, process: EngineProcess) -> None:
        process.generate([self._crowd], 1)

    @property
    def disturb(self) -> Forget:
        return self.forget

    def side_by_side(self) -> list[Cost]:
        return [*super().side_by_side(), *self._hits()]

    def _hits(self) -> Iterator[Cost]:
        """Measure host hits and radix hits of the same prompts in turns, in one engine."""
        with (
            tempfile.TemporaryDirectory(prefix="kvcore-bench-") as folder,
            self.running(self.kvcore(folder)) as process,
        ):
            for size, prompts in self.prompts.items():
                times: dict[str, list[float]] = {"device": [], "host": []}
                for prompt in prompts:
                    process.generate([prompt], 8)
                    time.sleep(self.settle_s)
                    for source in ["host", "device"] * ROUNDS:
                        if source == "host":
                            process.reset_prefix_cache(timeout_s=FILES_TIMEOUT_S)
                        [answer] = process.generate([prompt], 8)
                        if (found := _source(answer)) != source:
                            raise SystemExit(f"a {source} hit came from {found or 'nowhere'}")
                        times[source].append(answer.ttft_s)
                radix, host = median(times["device"]), median(times["host"])
                yield shown(Cost(f"{HITS}, {size} tokens", "s", radix, host))

    def compare_peers(self) -> None:
        with tempfile.TemporaryDirectory(prefix="hicache-bench-") as folder:
            with self._hicache(folder) as process:
                self.ask(process, PEER_MISS)
                self.forget(process)
                _await_files(Path(folder))
                self.ask(process, PEER_HOST, self.forget)
            with self._hicache(folder) as process:
                # A dry run leaves the memory of whatever else runs here alone.
                self.ask(process, PEER_FILE, None if self.options.dry_run else _drop_page_cache)

    @contextmanager
    def _hicache(self, folder: str) -> Iterator[EngineProcess]:
        with self.running(
            None,
            env={"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": folder},
            enable_hierarchical_cache=True,
            hicache_size=self.gigabytes,
            hicache_write_policy="write_through",
            hicache_storage_backend="file",
            hicache_storage_prefetch_policy="wait_complete",
            **self.tier_args(),
        ) as process:
            yield process

    def bars(self, costs: Sequence[Cost]) -> list[Bar]:
        limits = {MISSES: 1.02, HITS: 1.15}
        found = [
            Bar(cost.what, None, cost.ratio, limit)
            for cost in costs
            for name, limit in limits.items()
            if cost.what.startswith(f"{name}, ")
        ]
        for size in self.options.tokens if self.seconds else []:
            host, disk = self.seconds[HOST, size], self.seconds[DISK, size]
            found += [
                Bar("host hit, of HiCache's", size, host / self.seconds[PEER_HOST, size], 1.0),
                Bar("disk hit, of HiCache's", size, disk / self.seconds[PEER_FILE, size], 0.667),
            ]
        return found


def _up(tokens: int, page: int) -> int:
    return -(-tokens // page) * page


def _source(answer: Generation) -> str:
    """Return the sources of the prompt's tokens, in words."""
    sources = answer.tiers or answer.sources
    return " ".join(name for name, tokens in sources.items() if tokens)


def _drop_page_cache(process: EngineProcess) -> None:
    """Drop the page cache, so that files come from the disk, if this process may do that."""
    os.sync()
    if os.access(PAGE_CACHE, os.W_OK):
        PAGE_CACHE.write_text("3")
    else:
        print(f"{PAGE_CACHE} is not writable: HiCache reads its files from memory")


def _await_files(folder: Path) -> None:
    """Block until HiCache's storage has stopped growing."""
    limit = time.monotonic() + FILES_TIMEOUT_S
    count, since = -1, time.monotonic()
    while time.monotonic() - since < FILES_SETTLED_S:
        now = sum(1 for _ in folder.rglob("*.bin"))
        if now != count:
            count, since = now, time.monotonic()
        if time.monotonic() > limit:
            raise SystemExit(f"HiCache still wrote files after {FILES_TIMEOUT_S:.0f} s")
        time.sleep(0.2)
    if not count:
        raise SystemExit("HiCache stored no file: its file hits would be misses")


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__)
    made.add_argument(
        "--page-size",
        type=int,
        default=64,
        help="SGLang's page size, for every contender (%(default)s)",
    )
    made.add_argument(
        "--attention", help="SGLang's attention backend, for every contender (kvcore_rows: above)"
    )
    made.add_argument(
        "--no-overlap",
        action="store_true",
        help="every contender without SGLang's overlap schedule",
    )
    measure(SGLangContest(parse(made, arguments)))


if __name__ == "__main__":
    main()
