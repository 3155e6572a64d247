"""Commands that move bytes: a job takes one prompt after another, a few transfers at a time.

    begin ──▶ prompts wait ──step──▶ transfers in flight ──ended──▶ next prompt ... ──▶ finished

A job goes on while requests are served, and its transfers wait behind theirs. There is one job at
a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvcore.control.commands import MoveBlocks, PrefetchBlocks
from kvcore.control.selection import Selections
from kvcore.errors import CapacityError, ConfigError, UnsupportedError
from kvcore.manager import HOST, KVManager

__all__ = ["Job", "Jobs"]

GRAPHS = 4
"""Transfer graphs of a job in flight; more would only wait for the same media."""
CHAINS_A_STEP = 16
"""Prompts of a job handled in one step, which runs on the leader's thread."""


@dataclass
class Job:
    """A command that moves bytes, and how far it has come.

    ``todo`` are the last blocks of prompts. ``moved`` and ``kept`` count blocks, ``prompts`` and
    ``failed`` count prompts. ``open`` counts the prompts whose transfers are in flight.
    """

    command: MoveBlocks | PrefetchBlocks
    source: str | None
    to: str
    todo: deque[bytes]
    prompts: int
    on_end: Callable[[Job], object]
    on_abandon: Callable[[Job], object]
    open: int = 0
    moved: int = 0
    kept: int = 0
    failed: int = 0


class Jobs:
    """Runs one job over a manager. The manager's thread only; no call waits."""

    def __init__(self, manager: KVManager, selections: Selections, deadline_s: float) -> None:
        """``deadline_s`` bounds each load of a job."""
        self._manager = manager
        self._index = manager.index
        self._selections = selections
        self._deadline_s = deadline_s
        self._job: Job | None = None

    @property
    def busy(self) -> bool:
        """Return True if there is a job."""
        return self._job is not None

    def begin(
        self,
        command: MoveBlocks | PrefetchBlocks,
        on_end: Callable[[Job], object],
        on_abandon: Callable[[Job], object],
    ) -> None:
        """Begin a job; `step` calls ``on_end`` when it is finished, or `close` ``on_abandon``.

        Raises CapacityError while another job runs, ConfigError or UnsupportedError for tiers that
        cannot be combined.
        """
        if self._job is not None:
            raise CapacityError(
                "another move or prefetch is under way: ask again when it has ended"
            )
        selection = self._selections.resolve(command.where)
        source, to = command.where.tier, HOST
        if isinstance(command, MoveBlocks):
            source, to = self._tiers_of(command)
        elif source == HOST:
            raise ConfigError(
                "given a prefetch from host memory, which is where prefetches go; name a lower "
                "tier, or none"
            )
        tiers = [tier for tier in selection.tiers if tier != to]
        found = dict.fromkeys(
            end for tier in tiers for end in self._selections.ends(selection, tier)[0]
        )
        self._job = Job(command, source, to, deque(found), len(found), on_end, on_abandon)

    def step(self) -> None:
        """Begin with some of the job's prompts, and finish the job when none is left."""
        job = self._job
        if job is None:
            return
        for _ in range(CHAINS_A_STEP):
            if not job.todo or job.open >= GRAPHS or self._manager.flights.full:
                break
            self._start_prompt(job, job.todo.popleft())
        if not job.todo and not job.open:
            self._job = None
            job.on_end(job)

    def close(self) -> None:
        """Abandon an unfinished job. Its transfers in flight still end. Idempotent."""
        job, self._job = self._job, None
        if job is not None:
            job.on_abandon(job)

    def _tiers_of(self, command: MoveBlocks) -> tuple[str, str]:
        """Return the tiers to move from and to. Raises ConfigError or UnsupportedError."""
        tiers, source = self._index.tiers, command.where.tier
        if source is None or command.to not in tiers or source == command.to:
            raise ConfigError(
                f"a move from {source or 'every tier'} to {command.to!r}; give two of the tiers "
                f"{', '.join(tiers)}"
            )
        if HOST not in (source, command.to):
            raise UnsupportedError(
                f"a move from {source} to {command.to}; supported are moves to and from {HOST}: "
                "make two of it"
            )
        if source in self._manager.tiers.lookups:
            raise UnsupportedError(
                f"a move out of {source}, which other hosts read; prefetch it, or clear it"
            )
        return source, command.to

    def _start_prompt(self, job: Job, end: bytes) -> None:
        """Begin with one prompt. A prompt that was removed since it was selected is skipped."""
        if end not in self._index:
            return
        path, namespace = self._index.path(end), self._index.namespace_of(end)
        if job.to == HOST and job.moved >= self._index.num_slots(HOST):
            job.kept += len(path)  # more would evict what this job brought
            return
        before = self._depth(job.to, path)

        def ended() -> None:
            job.open -= 1
            self._settle(job, path, before)

        job.open += 1
        if not self._launch(job, path, namespace, ended):
            ended()

    def _launch(
        self, job: Job, path: list[bytes], namespace: bytes, ended: Callable[[], object]
    ) -> bool:
        if job.to != HOST:
            return self._manager.offloader.write(job.to, path, namespace, on_end=ended)
        hit = self._manager.get_match(path, namespace)
        return self._manager.loader.prefetch(hit, deadline_s=self._deadline_s, on_end=ended)

    def _settle(self, job: Job, path: list[bytes], before: int) -> None:
        """Count what arrived; a move then discards it from the tier it came from."""
        there = self._depth(job.to, path)
        job.moved += max(0, there - before)
        job.failed += there < len(path)
        if isinstance(job.command, MoveBlocks) and job.source is not None:
            held = self._depth(job.source, path)
            # A prompt that arrived in part stays whole: the missing blocks need those before them.
            job.kept += held - self._manager.invalidation.discard(job.source, path[:there])

    def _depth(self, tier: str, path: Sequence[bytes]) -> int:
        """Return how many leading blocks of a prompt a tier holds and publishes."""
        return self._index.match(path).depths[self._index.tiers.index(tier)]
