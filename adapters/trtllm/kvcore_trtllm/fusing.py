"""Fusion in the leader: what of a prompt can be reused elsewhere, and the orders for it.

    prompt  ├── exact prefix ──┼─ gap ─┼── chunk ──┼── chunk ──┼─ question ─┤
            0               exact                           stop
                               └── made before the forward ────┘ └ by the engine

The engine is told that [0, stop) comes from kvcore. It keeps what it computes on top under the
request's own salt (`kvcore_trtllm.salt`), and kvcore keeps nothing from the first chunk on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from kvcore.config import Config
from kvcore.connector.fusion_messages import BlendOrder, BlendReport
from kvcore.connector.fusion_scheduler import BlendPlan, Chunks
from kvcore.errors import KVCoreError
from kvcore.fusion.options import FusionOptions
from kvcore.fusion.segments import SegmentBook
from kvcore.manager import HOST, Hit, Manager
from kvcore.model.keys import Namespace, pack_tokens
from kvcore.model.shape import BlockShape
from kvcore.telemetry.metrics import Metrics
from kvcore.transfer.graph import Span, TransferGraph

_log = logging.getLogger("kvcore.trtllm.fusion")

MAX_FETCH = 8
"""Blocks brought to host memory for one block of a chunk, at most."""


class FusionLeader:
    """One per engine, on rank 0. Called from the executor's thread only; only `in_host` waits."""

    def __init__(
        self,
        config: Config,
        shape: BlockShape,
        manager: Manager,
        segments: SegmentBook,
        layer_steps: Sequence[Span],
        metrics: Metrics,
    ) -> None:
        self.chunks = Chunks(config.fusion, config.block.tokens, shape.nbytes, manager, segments)
        self._settings = config.fusion
        self._nbytes = shape.nbytes
        self._layer_steps = tuple(layer_steps)
        self._metrics = metrics
        self._staged = 0
        self._ordered: dict[str, int] = {}  # tokens of chunks by request, until it is reported

    def plan(
        self, tokens: Sequence[int], options: FusionOptions, namespace: Namespace, exact: int
    ) -> BlendPlan | None:
        """What to blend of a prompt whose first ``exact`` tokens are held exactly."""
        if not options.enabled or self.chunks.given_up:
            return None
        found = self.chunks.find(tokens, options, namespace, exact)
        ratio = self._settings.ratio if options.ratio is None else options.ratio
        # The last token is always computed: its logits are wanted.
        return self.chunks.plan(found, exact, len(tokens) - 1, ratio, self._staged)

    def in_host(
        self, plan: BlendPlan, bring: Callable[[list[tuple[Hit, int]]], object]
    ) -> BlendPlan | None:
        """What of a plan is in host memory, after ``bring`` was told which blocks of which chains
        are not, as far as these are not many more than the plan needs: host memory keeps a block
        only behind all those before it. None where too little is left."""
        wanted = []
        for _, (hit, start, stop) in self.chunks.sources(plan):
            held = hit.in_host
            below = set(hit.blocks_by_tier(start, stop)) - {HOST}
            if below and stop - held <= MAX_FETCH * (stop - start):
                wanted.append((hit, stop))
        try:
            bring(wanted)
        except KVCoreError as error:  # bringing one has pushed another out
            _log.debug("no blend, a chunk has gone: %s", error)
            return None
        return self.chunks.in_host(plan)

    def promised(self, plan: BlendPlan) -> None:
        """The engine counts on the plan: its chunks will take room in this step's staging."""
        blocks = (len(self.chunks.blocks(c.source_start, c.length)) for c in plan.chunks)
        self._staged += sum(blocks) * self._nbytes

    def step_ends(self) -> None:
        """The step is planned: its staging is gone when the next one is."""
        self._staged = 0

    def order(
        self,
        request_id: int,
        tokens: Sequence[int],
        plan: BlendPlan,
        pages: Sequence[int],
        submit: Callable[[TransferGraph], object],
    ) -> BlendOrder:
        """The order for a plan whose pages are allocated; ``submit`` takes each chunk's graph."""
        chunks, blocks = self.chunks.launch(plan, self._layer_steps, submit)
        self._ordered[str(request_id)] = plan.reused
        return BlendOrder(
            str(request_id),
            pack_tokens(tokens),
            plan.exact,
            plan.exact,
            plan.stop,
            list(pages),
            plan.ratio,
            chunks,
            blocks,
        )

    def hear(self, report: BlendReport) -> None:
        """Take in what became of a blend."""
        tokens = self._ordered.pop(report.request_id, 0)
        self._metrics.blend("blended" if report.ok else "failed")
        for verdict in report.verdicts:
            self._metrics.judged(verdict)
        if report.ok:
            seconds = {"wait": report.wait_s, "compute": report.compute_s, "look": report.look_s}
            self._metrics.blended(tokens, report.ratio, seconds)
        self.chunks.judge(report)
