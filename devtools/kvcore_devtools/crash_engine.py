"""Crash rounds of an engine: SIGKILL at random points, then a check of its disk tier.

    python -m kvcore_devtools.crash --rounds 200 --seed 7

A round is a process (leader and workers in one) that asks prompts of a pool and is killed: from
inside at a seeded point of a seam, which may be in the middle of a write, or from outside after a
seeded time. Through a pipe it reports what its leader published on the disk and what it evicted.
The next process opens the same folder and checks:

    every readable block            has the bytes that prefill gives, and a complete record
    every published block           is in the index
    every answer                    equals that of the engine without kvcore

The folder is kept from round to round and is too small for the pool, so that slots are rewritten.
Processes are forked before torch computes anything, so that a round takes a fraction of a second.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvcore.config import Config, load_config
from kvcore.manager import Event
from kvcore.memory.hugepages import Pages
from kvcore.testing.engine import EngineArgs, Llama, ReferenceEngine, random_llama
from kvcore.testing.faults import Fault, Faults, Rule, Seam
from kvcore.testing.faults.engine import embedded, faulty_engine
from kvcore.tiers.base import BlockRead, Tier

__all__ = [
    "ANSWER",
    "POOL",
    "Bench",
    "Outcome",
    "become_child",
    "compare_blocks",
    "compute_oracle",
    "crash_rounds",
    "pick_rule",
    "pool",
    "published_keys",
    "teller",
]

POOL = 24
CHECKED = 5
"""Number of prompts to ask after each restart."""
ANSWER = 3
BLOCK = 16
SLOTS = 96
BLOCK_NBYTES = 16384
SEAMS = (
    Seam.FILE_WRITE, Seam.FILE_WRITE, Seam.RECORD, Seam.RECORD, Seam.SYNC, Seam.FILE_READ,
    Seam.SAVE, Seam.LOAD, Seam.REPORT, Seam.SUBMIT,
)  # fmt: skip
OUTSIDE = 4
"""One round in this many is killed from outside."""
TOLERANCE = 1e-4
"""Most difference of a block's values.

Another batch size changes the last bits. Another block's KV, or zeros, differ 1000 times as much.
"""
FAILED = 3
ROUND_S = 300.0

Say = Callable[[str], object]
Array = npt.NDArray[np.float32]
_log = logging.getLogger("kvcore_devtools.crash")


@dataclass
class Outcome:
    """What the rounds saw. ``killed`` counts by seam, "outside" and "not" (it ended first)."""

    killed: Counter[str] = field(default_factory=Counter)
    read: int = 0
    published: int = 0
    reused: int = 0


@dataclass(frozen=True)
class Bench:
    """The folder of the rounds with one number of ranks."""

    folder: Path
    ranks: int

    def config(self, **tables: Any) -> Config:
        """Return the config of an engine over the folder, with ``tables`` added."""
        disk = {
            "path": str(self.folder / "kv"),
            "capacity": f"{SLOTS * (BLOCK_NBYTES + 512) + 65536}",
            "sync_interval_s": 0.05,
        }
        tables = {
            **tables,
            "block": {"tokens": BLOCK},
            "host": {"capacity": "512KiB", "huge_pages": False},
            "transfer": {"batch_blocks": 2, **tables.get("transfer", {})},
            "disk": disk,
            "log": {"level": "error"},
        }
        return load_config(None, tables, {})

    def engine(self, model: Llama, faults: Faults) -> ReferenceEngine:
        return faulty_engine(model, self.args, self.config(), faults)

    @property
    def args(self) -> EngineArgs:
        return EngineArgs(ranks=self.ranks, num_pages=128, prefix_cache=False)

    @property
    def oracle(self) -> Path:
        return self.folder / "oracle.npz"


def crash_rounds(
    folder: Path, rounds: int, seed: int, progress: Callable[[str], None] = lambda line: None
) -> Outcome:
    """Crash ``rounds`` times in ``folder``, alternating between one rank and two.

    Call it in a process in which torch has computed nothing, because it forks. Raises
    AssertionError, with the round and the seed, if a restart finds wrong blocks or lacks published
    ones.
    """
    torch.set_num_threads(1)
    benches = [Bench(folder / f"ranks-{ranks}", ranks) for ranks in (1, 2)]
    outcome = Outcome()
    for bench in benches[:rounds]:
        (bench.folder / "kv").mkdir(parents=True)
        code, _ = _forked(lambda _, bench=bench: compute_oracle(bench))  # type: ignore[misc]
        assert code == 0, f"the oracle ended with {code}"
    for number in range(rounds):
        _round(benches[number % 2], f"{seed}.{number}", outcome)
        progress(f"{number + 1} of {rounds}: {outcome}")
    return outcome


def _round(bench: Bench, seed: str, outcome: Outcome) -> None:
    picks = random.Random(seed)
    rule = pick_rule(picks, SEAMS)
    delay = picks.uniform(0.05, 1.0) if picks.randrange(OUTSIDE) == 0 else None
    rules = () if delay is not None else (rule,)
    code, lines = _forked(lambda say: _traffic(bench, seed, rules, say), kill_after=delay)
    assert code in (0, -signal.SIGKILL), f"round {seed}: the process ended with {code}"
    how = "not" if code == 0 else "outside" if delay is not None else rule.seam.value
    outcome.killed[how] += 1
    published = published_keys(lines)
    code, lines = _forked(lambda say: _look(bench, seed, published, say))
    assert code == 0, f"round {seed}, killed at {how}: {lines[-1] if lines else code}"
    read, reused = map(int, lines[-1].split())
    outcome.read += read
    outcome.reused += reused
    outcome.published += len(published)


def pick_rule(picks: random.Random, seams: Sequence[Seam]) -> Rule:
    """Pick a rule that strikes early or late, because the number of points is unknown."""
    skip = int(2 ** picks.uniform(0, 8)) - 1
    return Rule(Fault.KILL, picks.choice(seams), skip=skip)


def published_keys(lines: Sequence[str]) -> set[str]:
    """Return the keys that the disk tier held at the end, from the lines of its leader."""
    held: set[str] = set()
    for line in lines:
        sign, key = line[0], line[1:]
        (held.add if sign == "+" else held.discard)(key)
    return held


# -- processes ------------------------------------------------------------------------------


def _forked(run: Callable[[Say], None], kill_after: float | None = None) -> tuple[int, list[str]]:
    """Run ``run`` in a child, and return (exit code, complete lines that it reported).

    With ``kill_after``, the child is killed that many seconds after its first line.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        become_child(run, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.readline()
        if kill_after is not None:
            time.sleep(kill_after)
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        text += pipe.read()
    _, status = os.waitpid(child, 0)
    *lines, _ = text.decode().split("\n")
    return os.waitstatus_to_exitcode(status), lines


def become_child(run: Callable[[Say], None], writer: int) -> None:
    """Run ``run`` and end the process without the parent's exit handlers. Does not return."""
    signal.alarm(int(ROUND_S))
    code = 0
    try:
        run(lambda line: os.write(writer, f"{line}\n".encode()))
    except BaseException as error:  # noqa: BLE001 - process boundary; the parent gets the exit code
        _log.exception("a child of the crash rounds failed")
        os.write(writer, f"{type(error).__name__}: {error}".replace("\n", " ").encode() + b"\n")
        code = FAILED
    finally:
        os._exit(code)


# -- code of the child processes ------------------------------------------------------------


def pool(seed: int = 0) -> list[list[int]]:
    """Return the prompts. Half of them begin like another one."""
    picks = random.Random(seed)

    def some(count: int) -> list[int]:
        return [picks.randrange(1, 512) for _ in range(count)]

    made: list[list[int]] = []
    for i in range(POOL):
        begin = picks.choice(made)[: BLOCK * 4] if made and i % 2 else []
        made.append(begin + some(picks.randrange(40, 200)))
    return made


def compute_oracle(bench: Bench) -> None:
    """Compute the right answers and all blocks of every rank, with an engine that reads nothing."""
    model = random_llama()
    with ReferenceEngine(model, bench.args) as plain:
        answers = [plain.generate([prompt], ANSWER)[0] for prompt in pool()]
    fresh = load_config(None, {"host": {"capacity": "32MiB", "huge_pages": False}}, {})
    keys, blocks = [], []
    with ReferenceEngine(model, bench.args, fresh) as engine:
        for prompt in pool():
            engine.generate([prompt], ANSWER)
        engine.settle()
        for info in embedded(engine).index.admin.list_blocks():
            keys.append(np.frombuffer(info.key, np.uint8))
            arenas = [made.worker.arena for made in engine.workers]
            parts = [_floats(arena.slot_buffers(info.slots["host"])) for arena in arenas]
            blocks.append(np.stack([part[: arenas[0].shape.nbytes // 4] for part in parts]))
    np.savez(bench.oracle, answers=answers, keys=keys, blocks=blocks)


def _floats(parts: Sequence[memoryview]) -> Array:
    joined: Array = np.concatenate([np.frombuffer(part, np.float32) for part in parts])
    return joined


def _traffic(bench: Bench, seed: str, rules: Sequence[Rule], say: Say) -> None:
    """Ask prompts of the pool until this process is killed or no prompts are left."""
    picks = random.Random(seed)
    faults = Faults(seed=picks.getrandbits(32))
    with bench.engine(random_llama(), faults) as engine:
        index = embedded(engine).index
        for info in index.admin.list_blocks():
            say(f"+{info.key.hex()}")
        index.watch(teller(say))
        faults.set(*rules)
        for prompt in picks.sample(pool(), POOL):
            engine.submit(prompt, ANSWER)
            engine.run()
        engine.settle()


def teller(say: Say) -> Callable[[Event], None]:
    """Return a listener that reports what the disk tier stores and evicts, without delay."""

    def note(event: Event) -> None:
        for key in event.keys if event.tier == "disk" else ():
            say(f"{'+' if event.stored else '-'}{key.hex()}")

    return note


def _look(bench: Bench, seed: str, published: set[str], say: Say) -> None:
    """Restart over the folder, and check it. Reports "blocks read, tokens reused"."""
    known = np.load(bench.oracle)
    places = {key.tobytes(): i for i, key in enumerate(known["keys"])}
    with bench.engine(random_llama(), Faults()) as engine:
        index = embedded(engine).index
        lost = [key for key in published if bytes.fromhex(key) not in index]
        assert not lost, f"{len(lost)} of {len(published)} published blocks are gone"
        index.check_integrity()
        read = 0
        for rank, made in enumerate(engine.workers):
            read += compare_blocks(made.worker.tiers["disk"], places, known["blocks"][:, rank])
        reused = _ask(engine, known["answers"].tolist(), random.Random(seed))
    say(f"{read} {reused}")


def compare_blocks(tier: Tier, places: dict[bytes, int], right: Array) -> int:
    """Compare every block of a rank's tier to ``right``, and return their number."""
    memory = Pages(tier.slot_nbytes, huge=False).view
    records = tier.scan()
    for record in records:
        [error] = tier.read([BlockRead(record.slot, record.key, [memory])])
        assert error is None, f"slot {record.slot} has a record but no valid block: {error}"
        assert record.key in places, f"block {record.key.hex()} was never asked for"
        got = np.frombuffer(memory, np.float32)[: right.shape[1]]
        apart = float(np.abs(got - right[places[record.key]]).max())
        assert apart < TOLERANCE, f"block {record.key.hex()} differs by {apart}: wrong KV"
    return len(records)


def _ask(engine: ReferenceEngine, right: list[list[int]], picks: random.Random) -> int:
    prompts, reused = pool(), 0
    for i in picks.sample(range(POOL), CHECKED):
        request = engine.submit(prompts[i], ANSWER)
        engine.run()
        assert request.answer == right[i], f"prompt {i}: {request.answer} for {right[i]}"
        reused += request.reused.get("disk", 0)
    engine.settle()
    engine.check_integrity()
    return reused
