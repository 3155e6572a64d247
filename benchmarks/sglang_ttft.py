"""Time to first token of real SGLang: cold, its radix cache, kvcore and HiCache, each tier.

    python -m benchmarks.sglang_ttft [--tokens 512 4096] [--prompts 5]

`benchmarks._ttft` says what is measured and how. HiCache is SGLang's own cache of tiers, here with
its file backend; it contends with the same host memory, page size and waiting for the disk as
kvcore. A flush would empty its host memory too, so before each request that is to be answered from
host memory, of kvcore as of HiCache, a long prompt crowds the others out of a pool of tokens that
is hardly larger. HiCache's files are read through the page cache, unlike kvcore's.

On a CPU HiCache runs with `kvcore.testing.sglang.hicache`.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks._ttft import DISK, HOST, OWN, Bar, Contest, Cost, measure, parse, parser
from kvcore.testing.engine_process import EngineProcess
from kvcore.testing.prompts import windows

PEER_MISS, PEER_HOST, PEER_FILE = "hicache miss", "hicache host", "hicache file"
FILES_SETTLED_S = 3.0
"""No new file for so long: HiCache has written what it was going to."""
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
        """The long prompt fits, and leaves no room for another."""
        [self._crowd] = windows(self.model, 1, self.longest, self.longest, seed=99)
        self._crowd[0] = 999
        total = sum(options.prompts * (n + 2 * page) for n in options.tokens)
        self.gigabytes = 1 + 2 * (total + pool) * 46_080 // 10**9
        """About twice what all prompts need in SmolLM2's widest type."""
        self.engine_args: dict[str, Any] = {
            "context_length": max(2048, self.longest + 512),
            "max_running_requests": 8,
            "max_total_tokens": _up(2 * total + 2048, page),
            "page_size": page,
            "random_seed": 0,
            "dtype": options.dtype,
            "start_method": "fork",
        }
        self._pool = pool

    def kvcore(self, folder: str) -> dict[str, Any]:
        return {**super().kvcore(folder), "sglang": {"prefetch": "wait"}}

    def tier_args(self) -> dict[str, Any]:
        return {"max_total_tokens": self._pool}

    def forget(self, process: EngineProcess) -> None:
        process.generate([self._crowd], 1)

    def compare_peers(self) -> None:
        with tempfile.TemporaryDirectory(prefix="hicache-bench-") as folder:
            with self._hicache(folder) as process:
                self.ask(process, PEER_MISS)
                self.forget(process)
                _await_files(Path(folder))
                self.ask(process, PEER_HOST, self.forget)
            with self._hicache(folder) as process:
                self.ask(process, PEER_FILE)

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
        found = [Bar(c.what, None, c.ratio, 1.02) for c in costs if c.unit == "s"]
        for size in self.options.tokens if self.seconds else []:
            host, disk = self.seconds[HOST, size], self.seconds[DISK, size]
            radix, peer_host = self.seconds[OWN, size], self.seconds[PEER_HOST, size]
            found += [
                Bar("host hit, of the radix hit", size, host / radix, 1.15),
                Bar("host hit, of HiCache's", size, host / peer_host, 1.0),
                Bar("disk hit, of HiCache's", size, disk / self.seconds[PEER_FILE, size], 0.667),
            ]
        return found


def _up(tokens: int, page: int) -> int:
    return -(-tokens // page) * page


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
        "--page-size", type=int, default=64, help="of SGLang, for every contender (%(default)s)"
    )
    measure(SGLangContest(parse(made, arguments)))


if __name__ == "__main__":
    main()
