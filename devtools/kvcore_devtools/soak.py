"""Soak: mixed traffic at saturation, with faults that come and go, for as long as you like.

    python -m kvcore_devtools.soak --minutes 30 --seed 3

Time is divided into epochs. Each has other faults at other seams, and more requests queued than can
run: prompts with common prefixes, aborts, preemptions, resets of the engine's cache and clears of
the tiers. At the end of an epoch the faults stop, the engine becomes idle, and the soak checks that

    every answer      equals that of an engine without kvcore (all requests that ended)
    nothing is held   no slots, pins, reservations, transfers, ops, threads or open files
    memory            has not grown since the first epochs

Every few epochs the engine is closed and opened again over its disk.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import logging
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kvcore.config import load_config
from kvcore.testing.engine import EngineArgs, Llama, ReferenceEngine, Request, State, random_llama
from kvcore.testing.faults import FITS, Fault, Faults, FaultyStore, Rule, Seam
from kvcore.testing.faults.engine import faulty_engine, held, nothing_left
from kvcore.tiers.remote import memory
from kvcore.tiers.remote.memory import MemoryStore

__all__ = ["GROWTH", "Outcome", "growth", "soak"]

POOL = 160
ANSWER = 6
QUEUED = 16
"""Number of requests in the engine: twice as many as it runs at once."""
EPOCH_S = 3.0
EPOCHS_LEAST = 6
"""Least number of epochs: the shortest soak opens the engine again, on a slow machine too."""
REOPEN = 4
"""Number of epochs after which the engine is closed and opened again."""
WARM = 4
"""Number of first epochs whose memory is not compared, because caches fill."""
GROWTH = 1.05
SLACK = 8 << 20
"""Bytes by which memory may grow, for what the allocator keeps."""
STORE = "kvcore-soak"
_ARENA_MAX = -8
"""M_ARENA_MAX of glibc's malloc.h."""

_APART = {Fault.KILL, Fault.LOST, Fault.CLOCK_JUMP}
"""Faults that the soak leaves out.

`kvcore_devtools.crash` covers killed processes. Messages within a process are never lost. A clock
that jumps again and again is beyond every deadline.
"""
CELLS = [(seam, fault) for seam in Seam for fault in Fault if fault in FITS[seam] - _APART]


@dataclass
class Outcome:
    """What a soak saw. ``memory`` is the resident set at the end of each epoch, in bytes."""

    epochs: int = 0
    answers: int = 0
    aborted: int = 0
    preemptions: int = 0
    reused: Counter[str] = field(default_factory=Counter)
    struck: int = 0
    memory: list[int] = field(default_factory=list)

    def grown(self) -> float:
        """Return how much memory has grown (`growth`)."""
        return growth(self.memory, SLACK)


def growth(memory: Sequence[int], slack: int) -> float:
    """Return memory at the end over memory after the first epochs; 1.0 if they are too few.

    ``memory`` has the bytes at the end of each epoch, of which ``slack`` are not counted.
    """
    counted = memory[WARM:]
    if len(counted) < 2 * WARM:
        return 1.0
    first, last = counted[: len(counted) // 3], counted[-len(counted) // 3 :]
    return max(statistics.median(last) - slack, 1) / statistics.median(first)


def soak(
    folder: Path, seconds: float, seed: int, progress: Callable[[str], None] = lambda line: None
) -> Outcome:
    """Run for about ``seconds``, or longer until there were `EPOCHS_LEAST` epochs.

    Raises AssertionError on a wrong answer or a leak.
    """
    torch.set_num_threads(1)
    model, outcome = random_llama(), Outcome()
    until = time.monotonic() + seconds

    def ended() -> bool:
        return time.monotonic() >= until and outcome.epochs >= EPOCHS_LEAST

    while not ended():
        with nothing_left(), _store(folder) as faults:
            run = _Soak(model, folder, faults, random.Random(f"{seed}.{outcome.epochs}"), outcome)
            try:
                for _ in range(REOPEN):
                    run.epoch(min(EPOCH_S, seconds / EPOCHS_LEAST))
                    progress(f"{max(until - time.monotonic(), 0):.0f} s left: {run.line()}")
                    if ended():
                        break
            finally:
                run.close()
    assert outcome.grown() <= GROWTH, f"memory grew by a factor of {outcome.grown():.3f}"
    return outcome


@contextmanager
def _store(folder: Path) -> Iterator[Faults]:
    """Yield faults, and register a remote store that has them."""
    faults = Faults()
    before = dict(memory._stores)
    memory._stores[STORE] = FaultyStore(MemoryStore(), faults)  # type: ignore[assignment]
    try:
        yield faults
    finally:
        memory._stores.clear()
        memory._stores.update(before)


def _settings(folder: Path) -> dict[str, Any]:
    return {
        "host": {"capacity": "512KiB", "huge_pages": False},
        "disk": {"path": str(folder / "kv"), "capacity": "2MiB", "sync_interval_s": 0.1},
        "tiers": {
            "shelf": {
                "plugin": "memory-store",
                "capacity": "8MiB",
                "options": {"name": STORE, "lookup_s": 0.1, "deadline_s": 0.3, "retries": 1},
            }
        },
        "transfer": {"load_deadline_s": 0.5, "batch_blocks": 4},
        "log": {"level": "error"},
    }


class _Soak:
    """An engine under load, from its start to its end."""

    def __init__(
        self, model: Llama, folder: Path, faults: Faults, picks: random.Random, outcome: Outcome
    ) -> None:
        self._faults = faults
        self._picks = picks
        self._outcome = outcome
        self._prompts = pool()
        self._right: dict[int, list[int]] = {}
        args = EngineArgs(num_pages=60, ranks=picks.choice((1, 2)), max_num_tokens=128)
        self._plain = ReferenceEngine(model, EngineArgs(num_pages=32, prefix_cache=False))
        self._engine = faulty_engine(model, args, load_config(None, _settings(folder), {}), faults)
        self._open: dict[Request, int] = {}

    def close(self) -> None:
        self._faults.clear()
        self._engine.close()
        self._plain.close()

    def line(self) -> str:
        last = self._outcome.memory[-1] >> 20
        return f"{self._outcome.answers} answers, {self._outcome.struck} faults, {last} MiB"

    def epoch(self, seconds: float) -> None:
        """Run traffic with some faults, then without, and check what must hold at rest."""
        rules = [_rule(self._picks, cell) for cell in self._picks.sample(CELLS, 3)]
        self._faults.set(*rules)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._fill()
            self._disturb()
            self._engine.step()
            self._collect()
        self._faults.clear()
        self._engine.run()
        self._collect()
        self._engine.settle()
        self._engine.check_integrity()
        left = held(self._engine)
        assert not left, f"left over after {rules}: {left}"
        self._count()

    def _fill(self) -> None:
        while len(self._open) < QUEUED:
            number = min(self._picks.randrange(POOL), self._picks.randrange(POOL))
            request = self._engine.submit(self._prompts[number], ANSWER)
            self._open[request] = number

    def _disturb(self) -> None:
        """Abort, reset and clear, as users and engines do."""
        chance = self._picks.random()
        if chance < 0.03:
            victim = self._picks.choice(list(self._open))
            self._engine.abort(victim)
            del self._open[victim]
            self._outcome.aborted += 1
        elif chance < 0.05:
            self._engine.forget()
        elif chance < 0.0515:
            assert self._engine.leader is not None
            self._engine.leader.clear()
            self._engine.forget()

    def _collect(self) -> None:
        """Check the answers of the requests that have ended."""
        for request in [request for request in self._open if request.state is State.DONE]:
            number = self._open.pop(request)
            if number not in self._right:
                [self._right[number]] = self._plain.generate([self._prompts[number]], ANSWER)
            right = self._right[number]
            assert request.answer == right, (
                f"prompt {number}: {request.answer} for {right}, reused {request.reused}, "
                f"faults {self._faults.rules}"
            )
            self._outcome.answers += 1
            self._outcome.reused.update(request.reused)

    def _count(self) -> None:
        outcome = self._outcome
        outcome.epochs += 1
        outcome.struck += self._faults.struck.total()
        self._faults.struck.clear()
        outcome.preemptions += self._engine.preemptions
        self._engine.preemptions = 0
        gc.collect()
        outcome.memory.append(_resident())


def pool(seed: int = 0) -> list[list[int]]:
    """Return prompts of up to 300 tokens. Most begin like another one."""
    picks = random.Random(seed)
    made: list[list[int]] = []
    for _ in range(POOL):
        begin: list[int] = picks.choice(made) if made and picks.random() < 0.7 else []
        begin = begin[: picks.randrange(0, 180)]
        made.append(begin + [picks.randrange(1, 512) for _ in range(picks.randrange(8, 120))])
    return made


def _rule(picks: random.Random, cell: tuple[Seam, Fault]) -> Rule:
    """Return a rule for a cell. Rates vary, and hangs outlast the deadline of a load."""
    seam, fault = cell
    if fault is Fault.HANG:
        return Rule(fault, seam, rate=0.02, limit=2, seconds=picks.uniform(0.2, 1.0))
    rate = picks.choice((0.02, 0.2, 1.0 if fault is not Fault.LATENCY else 0.4))
    return Rule(fault, seam, rate=rate, seconds=picks.uniform(0.001, 0.01))


def _allocate_compactly() -> None:
    """Let glibc use one heap for all threads.

    Heaps per thread leave holes that are never filled, 1 MB every 12 s here, while the memory in
    use stays constant (`mallinfo2`).
    """
    tune = getattr(ctypes.CDLL(None), "mallopt", None)
    if tune is not None:
        tune(_ARENA_MAX, 1)


def _resident() -> int:
    """Return the resident bytes, without what glibc's allocator keeps of freed memory."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--folder", type=Path, help="folder on the disk to use; default: a temporary one"
    )
    options = parser.parse_args(arguments)
    _allocate_compactly()
    logging.getLogger("kvcore").setLevel(logging.CRITICAL)  # it would log every fault
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found = soak(Path(folder), 60 * options.minutes, options.seed, _progress)
    mib = [nbytes >> 20 for nbytes in found.memory]
    print(f"\nseed {options.seed}: {found.epochs} epochs, {found.answers} answers, all right")
    print(f"{found.aborted} aborts, {found.preemptions} preemptions, {found.struck} faults")
    print(f"tokens reused by tier: {dict(found.reused)}")
    print(f"memory in MiB: first {mib[:3]}, last {mib[-3:]}, grown to {found.grown():.3f}")


def _progress(line: str) -> None:
    print(f"\r{line}    ", end="", file=sys.stderr)


if __name__ == "__main__":
    main()
