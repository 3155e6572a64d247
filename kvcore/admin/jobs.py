"""Commands that move bytes: a job takes one prompt after another, a few transfers at a time.

    begin ──▶ prompts wait ──step──▶ transfers in flight ──ended──▶ next prompt ... ──▶ finished
                                     └─ none ends for SILENT_S ──────────────────────▶ given up

A job goes on while requests are served, and its transfers wait behind theirs. There is one job at
a time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvcore.admin.commands import MoveBlocks, PrefetchBlocks
from kvcore.admin.selection import Selections
from kvcore.errors import (
    CapacityError,
    ConfigError,
    KVCoreError,
    TierUnavailable,
    UnsupportedError,
)
from kvcore.manager import HOST, KVManager

__all__ = ["Job", "Jobs"]

GRAPHS = 4
"""Transfer graphs of a job in flight; more would only wait for the same media."""
SILENT_S = 120.0
"""Seconds without the end of any op of a job, after which the job is given up: an op that hangs in
a tier may never end, not even at the deadline of its load."""
CHAINS_A_STEP = 16
"""Prompts of a job handled in one step, which runs on the leader's thread."""


@dataclass
class Job:
    """A command that moves bytes, and how far it has come.

    ``todo`` are the last blocks of prompts. ``moved`` and ``kept`` count blocks, ``prompts`` and
    ``failed`` count prompts. ``graphs`` are the transfers in flight. ``left`` is how many prompts
    wait and how many ops are in flight, and has been so since ``since``, in seconds.
    """

    command: MoveBlocks | PrefetchBlocks
    source: str | None
    to: str
    todo: deque[bytes]
    prompts: int
    on_end: Callable[[Job], object]
    on_abandon: Callable[[Job, KVCoreError], object]
    since: float
    left: tuple[int, int] = (-1, -1)
    graphs: set[int] = field(default_factory=set)
    moved: int = 0
    kept: int = 0
    failed: int = 0


class Jobs:
    """Runs one job over a manager. The manager's thread only; no call waits."""

    def __init__(
        self,
        manager: KVManager,
        selections: Selections,
        deadline_s: float,
    ) -> None:
        """``deadline_s`` bounds each load of a job."""
        self._manager = manager
        self._clock = time.monotonic
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
        on_abandon: Callable[[Job, KVCoreError], object],
    ) -> None:
        """Begin a job.

        One of the two is called once: ``on_end`` when the job is finished, or ``on_abandon`` with
        the reason when it is given up. Raises CapacityError while another job runs, and
        ConfigError or UnsupportedError for tiers that cannot be combined.
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
        self._job = Job(
            command, source, to, deque(found), len(found), on_end, on_abandon, self._clock()
        )

    def step(self) -> None:
        """Begin with some of the job's prompts, and finish the job when none is left.

        Gives the job up if none of its transfers goes on.
        """
        job = self._job
        if job is None:
            return
        for _ in range(CHAINS_A_STEP):
            if not job.todo or len(job.graphs) >= GRAPHS or self._manager.flights.full:
                break
            self._start_prompt(job, job.todo.popleft())
        if not job.todo and not job.graphs:
            self._job = None
            job.on_end(job)
        elif self._is_silent(job):
            self._abandon(
                TierUnavailable(
                    f"no transfer of it has ended in {SILENT_S:g} s, so {job.source or 'a tier'} "
                    f"or {job.to} hangs; {job.moved} blocks have arrived: look at the tiers and "
                    "ask again"
                )
            )

    def close(self) -> None:
        """Abandon an unfinished job. Its transfers in flight still end. Idempotent."""
        self._abandon(UnsupportedError("the process ends; a part of it was done"))

    def _abandon(self, why: KVCoreError) -> None:
        """Answer the job, if there is one, and drop what has not started of its transfers."""
        job, self._job = self._job, None
        if job is not None:
            for graph_id in job.graphs:
                self._manager.flights.cancel(graph_id)
            job.on_abandon(job, why)

    def _is_silent(self, job: Job) -> bool:
        """Return True if nothing of a job has ended for a long time."""
        left = len(job.todo), self._manager.flights.num_ops(job.graphs)
        now = self._clock()
        if left != job.left:
            job.left, job.since = left, now
        return now - job.since >= SILENT_S

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
        graph_id: int | None = None

        def ended() -> None:
            if self._job is job:  # else it was given up, and nobody counts on what came late
                job.graphs.discard(graph_id)
                self._settle(job, path, before)

        graph_id = self._launch(job, path, namespace, ended)
        if graph_id is None:
            ended()
        else:
            job.graphs.add(graph_id)

    def _launch(
        self, job: Job, path: list[bytes], namespace: bytes, ended: Callable[[], object]
    ) -> int | None:
        """Launch the transfer of one prompt. Return the id of its graph; None if there is none."""
        if job.to != HOST:
            return self._manager.offloader.write(job.to, path, namespace, on_end=ended)
        hit = self._manager.get_match(path, namespace)
        planned = self._manager.plan_fetch(hit, deadline_s=self._deadline_s, background=True)
        if planned is None:
            return None
        return self._manager.launch(planned, on_end=ended).graph_id

    def _settle(self, job: Job, path: list[bytes], before: int) -> None:
        """Count what arrived; a move then discards it from the tier it came from."""
        there = self._depth(job.to, path)
        job.moved += max(0, there - before)
        job.failed += there < len(path)
        if isinstance(job.command, MoveBlocks) and job.source is not None:
            held = self._depth(job.source, path)
            # A prompt that arrived in part stays whole: the missing blocks need those before them.
            job.kept += held - self._manager.invalidation.evict(job.source, path[:there])

    def _depth(self, tier: str, path: Sequence[bytes]) -> int:
        """Return how many leading blocks of a prompt a tier holds and publishes."""
        return self._index.match(path).depths[self._index.tiers.index(tier)]
