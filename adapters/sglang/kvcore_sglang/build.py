"""Puts the parts of a rank together from a config: the only place that knows every part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvcore_sglang.describe import Served
from kvcore_sglang.leader import Leader
from kvcore_sglang.ranks import Follower, Lines, NoLines, join, open_lines
from kvcore_sglang.worker import Fence, RankWorker

from kvcore.adapting.build import build_leader, build_worker
from kvcore.config import Config
from kvcore.metrics import Data


@dataclass
class Parts:
    """One rank: a leader and lines to the others, or a follower."""

    served: Served
    worker: RankWorker
    lines: Lines
    leader: Leader | None
    follower: Follower | None

    def close(self) -> None:
        """Finish what is under way, then let go. Blocks."""
        self.worker.close()
        if self.follower is not None:
            self.follower.close()
        if self.leader is not None:
            self.leader.close()


def build(
    config: Config, served: Served, fence: Fence, publish: Callable[[Data], None] | None = None
) -> Parts:
    """This rank's parts. Blocks until all ranks are there. ``publish`` as `Leader` has it."""
    rank, model = served.rank, served.model
    parts = build_worker(config, model, rank.number, [served.pool.view])
    worker = RankWorker(parts.worker, parts.open_tier, fence)
    if rank.number:
        follower = join(rank)(worker, parts.metrics)
        return Parts(served, worker, NoLines(), None, follower)
    lines: Lines = NoLines() if rank.group is None else open_lines(rank)
    leader = Leader(
        config,
        model,
        worker,
        lines,
        lambda outbox: build_leader(config, model, outbox),
        parts.metrics,
        publish,
    )
    return Parts(served, worker, lines, leader, None)
