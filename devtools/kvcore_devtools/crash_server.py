"""Crash rounds with a server: SIGKILL to the server, or to an engine that is its client.

    python -m kvcore_devtools.crash --server --rounds 200 --seed 7

    server   over a disk tier ◀──── engine A     one of the two is killed, from inside at a seeded
                                                 point of a seam, or from outside
             if it lives      ◀──── engine B     reads what A left behind
             killed now
    restart  over the same disk ◀── engine C     checks every block, published key and answer

An engine is its leader and its workers in one process; rounds alternate between one rank and two.
Every answer must equal that of an engine without kvcore, even while the server dies. B must not
find blocks that A was saving when it was killed, because other blocks take their slots. A server
that opens the disk again checks it as `crash_engine` does.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvcore.config import Config
from kvcore.server.messages import Model
from kvcore.server.model_cache import ModelCache
from kvcore.server.server import Server
from kvcore.testing.engine import ReferenceEngine, random_llama
from kvcore.testing.faults import Faults, Rule, Seam
from kvcore.testing.faults.engine import faulty_engine
from kvcore.testing.faults.worker import into_worker
from kvcore.testing.waiting import until
from kvcore_devtools.crash_engine import (
    ANSWER,
    CHECKED,
    OUTSIDE,
    POOL,
    Bench,
    Outcome,
    Say,
    become_child,
    compare_blocks,
    compute_oracle,
    pick_rule,
    pool,
    published_keys,
    teller,
)
from kvcore_devtools.server_fixture import RunningServer

__all__ = ["server_rounds"]

SEAMS = {
    "server": (Seam.FILE_WRITE, Seam.FILE_WRITE, Seam.RECORD, Seam.SYNC, Seam.FILE_READ),
    "engine": (Seam.SAVE, Seam.SAVE, Seam.LOAD, Seam.REPORT, Seam.SUBMIT),
}
DEADLINE_S = 2.0
"""Seconds that an engine waits for a killed server: once for a reply, and once for a load."""
PATIENT_S = 30.0
READY = "ready"


def server_rounds(
    folder: Path, rounds: int, seed: int, progress: Callable[[str], None] = lambda line: None
) -> Outcome:
    """Crash ``rounds`` times in ``folder``, as `crash_engine.crash_rounds` does."""
    torch.set_num_threads(1)
    outcome = Outcome()
    benches = [Bench(folder / "s", ranks) for ranks in (1, 2)]
    (folder / "s" / "kv").mkdir(parents=True)
    oracle = _Child(folder / "s", lambda say: compute_oracle(benches[0]))
    assert oracle.wait() == 0, f"the oracle failed: {oracle.said()}"
    for number in range(rounds):
        _round(benches[number % 2], f"{seed}.{number}", outcome)
        progress(f"{number + 1} of {rounds}: {outcome}")
    return outcome


def _round(bench: Bench, seed: str, outcome: Outcome) -> None:
    picks = random.Random(seed)
    victim = picks.choice(sorted(SEAMS))
    rule = pick_rule(picks, SEAMS[victim])
    delay = picks.uniform(0.05, 1.0) if picks.randrange(OUTSIDE) == 0 else None
    rules = {name: (rule,) if name == victim and delay is None else () for name in SEAMS}
    with contextlib.ExitStack() as ends:

        def child(run: Callable[[Say], None]) -> _Child:
            made = _Child(bench.folder, run)
            ends.callback(made.kill)
            made.ready()
            return made

        server = child(lambda say: _serve(bench, seed, rules["server"], say))
        engine = child(lambda say: _traffic(bench, seed, rules["engine"], POOL, say))
        if delay is not None:
            time.sleep(delay)
            (server if victim == "server" else engine).kill()
        code = engine.wait()
        died = code == -signal.SIGKILL
        assert code == 0 or (died and victim == "engine"), f"round {seed}: {engine.said()}"
        if died:
            after = child(lambda say: _traffic(bench, f"{seed}.after", (), CHECKED, say))
            assert after.wait() == 0, f"round {seed}, behind a killed engine: {after.said()}"
        died = died or server.ended
        server.kill()
        published = published_keys(server.said()[1:])
        look = child(lambda say: _look(bench, seed, published, say))
        assert look.wait() == 0, f"round {seed}, {victim} killed at {rule.seam}: {look.said()}"
    where = "outside" if delay is not None else rule.seam.value
    outcome.killed[f"{victim}, {where}" if died else "not"] += 1
    read, reused = map(int, look.said()[-1].split())
    outcome.read += read
    outcome.reused += reused
    outcome.published += len(published)


class _Child:
    """A forked process. What it reports goes to a file, so that it never blocks on a reader."""

    _count = 0

    def __init__(self, folder: Path, run: Callable[[Say], None]) -> None:
        _Child._count += 1
        self._file = folder / f"said-{_Child._count}"
        self._code: int | None = None
        writer = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._id = os.fork()
        if self._id == 0:
            become_child(run, writer)
        os.close(writer)

    def ready(self) -> None:
        """Block until it has reported something, or ended."""
        until(lambda: self.ended or self.said(), seconds=10 * PATIENT_S)

    def said(self) -> list[str]:
        """Return the complete lines that it has reported."""
        return self._file.read_text().split("\n")[:-1]

    @property
    def ended(self) -> bool:
        if self._code is None:
            found, status = os.waitpid(self._id, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if found else None
        return self._code is not None

    def wait(self) -> int:
        """Wait for its end and return the exit code."""
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self._id, 0)[1])
        return self._code

    def kill(self) -> None:
        """Kill it with SIGKILL, if it still runs."""
        if not self.ended:
            os.kill(self._id, signal.SIGKILL)
            self.wait()


# -- code of the child processes --------------------------------------------------------------


def _settings(bench: Bench, deadline_s: float) -> Config:
    """Return the config of the server and its clients."""
    shared = {"address": "local", "folder": str(bench.folder / "in")}
    return bench.config(
        server={**shared, "deadline_s": deadline_s, "lease_s": PATIENT_S},
        transfer={"load_deadline_s": deadline_s},
    )


class _Watched(Server):
    """A server that reports what its disk tier holds, and has faults in its worker."""

    def __init__(self, config: Config, faults: Faults, say: Say) -> None:
        super().__init__(config)
        self._faults = faults
        self._say = say

    def open(self) -> str:
        address = super().open()
        get = self.models.get

        def watched(model: Model) -> ModelCache:
            known = set(self.models)
            cache = get(model)
            if cache not in known:
                self._watch(cache)
            return cache

        self.models.get = watched  # type: ignore[method-assign]
        return address

    def _watch(self, cache: ModelCache) -> None:
        for info in cache.manager.index.admin.list_blocks():
            self._say(f"+{info.key.hex()}")
        cache.manager.index.watch(teller(self._say))
        into_worker(cache._transport.worker, self._faults)


def _serve(bench: Bench, seed: str, rules: Sequence[Rule], say: Say) -> None:
    """Serve until this process is killed."""
    faults = Faults(seed=random.Random(seed).getrandbits(32))
    server = _Watched(_settings(bench, DEADLINE_S), faults, say)
    server.open()
    faults.set(*rules)
    say(READY)
    server.run()


def _traffic(bench: Bench, seed: str, rules: Sequence[Rule], prompts: int, say: Say) -> None:
    """Ask prompts of the pool until this process is killed. Every answer must be right."""
    picks = random.Random(seed)
    faults = Faults(seed=picks.getrandbits(32))
    right = np.load(bench.oracle)["answers"].tolist()
    config = _settings(bench, DEADLINE_S)
    with faulty_engine(random_llama(), bench.args, config, faults) as engine:
        faults.set(*rules)
        say(READY)
        _ask(engine, picks.sample(range(POOL), prompts), right)


def _ask(engine: ReferenceEngine, numbers: Sequence[int], right: Sequence[Any]) -> int:
    """Ask prompts one after another, and return the number of reused tokens."""
    prompts, reused = pool(), 0
    for number in numbers:
        request = engine.submit(prompts[number], ANSWER)
        engine.run()
        answer = request.answer
        assert answer == right[number], f"prompt {number}: {answer} for {right[number]}"
        reused += sum(request.reused.values())
    engine.settle()
    engine.check_integrity()
    return reused


def _look(bench: Bench, seed: str, published: set[str], say: Say) -> None:
    """Open the disk with a server, and read it through an engine. Reports "blocks read, tokens"."""
    known = np.load(bench.oracle)
    places = {key.tobytes(): i for i, key in enumerate(known["keys"])}
    config = _settings(bench, PATIENT_S)
    server = RunningServer(config)
    with faulty_engine(random_llama(), bench.args, config, Faults()) as engine:
        [space] = server.server.models
        index = space.manager.index
        lost = [key for key in published if bytes.fromhex(key) not in index]
        assert not lost, f"{len(lost)} of {len(published)} published blocks are gone"
        tier = space._transport.worker.tiers["disk"]
        read = compare_blocks(tier, places, known["blocks"][:, 0])
        numbers = random.Random(seed).sample(range(POOL), CHECKED)
        reused = _ask(engine, numbers, known["answers"].tolist())
        until(lambda: server.idle)
    server.close()
    server.server.check_integrity()
    say(f"{read} {reused}")
