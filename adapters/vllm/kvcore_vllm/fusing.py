"""Fusion in the leader: finds what can be reused in a prompt, and writes the orders for it.

    prompt  ├── exact prefix ──┼─ gap ─┼── chunk ──┼── chunk ──┼─ question ─┤
            0               exact                           stop
                               └── made by the blend ──────────┘ └ by vLLM's own forward

The engine is told that [0, stop) is computed externally. The KV of [exact, stop) is approximate
from the first chunk on: it is not saved under any key, and vLLM's own prefix cache gets hashes for
it that nobody else's prompt has (`mark`).
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcore.config import Config
from kvcore.connector.fusion_messages import BlendOrder, BlendReport, told
from kvcore.connector.fusion_policy import Pace
from kvcore.connector.fusion_scheduler import BlendPlan, Chunks
from kvcore.errors import ConfigError, KVCoreError
from kvcore.fusion.controller import Decision, Mode
from kvcore.fusion.options import FusionOptions, fusion_options
from kvcore.fusion.segments import Reusable, SegmentBook
from kvcore.manager import HOST, Hit, Manager
from kvcore.model.keys import Namespace, pack_tokens
from kvcore.model.shape import BlockShape
from kvcore.telemetry.metrics import Metrics
from kvcore.transfer.graph import SKIP, Span, TransferGraph, UnitTable

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

_log = logging.getLogger("kvcore.vllm.fusion")

MAX_FETCH = 8
"""Blocks brought to host memory for one block of a chunk, at most."""


@dataclass
class Fusing:
    """A request as fusion sees it. ``found`` is None until its prompt was searched.

    ``fetching`` are its own loads into host memory, and ``joined`` chains, each with its namespace,
    that another request is bringing there.
    ``due`` says that ``plan`` was answered to vLLM in this step and waits for its pages.
    ``approximate_from`` is the first position whose KV may be approximate; ``hashes`` are vLLM's
    own while those of a planned blend stand in their place.
    """

    options: FusionOptions
    found: list[Reusable] | None = None
    plan: BlendPlan | None = None
    due: bool = False
    fetching: set[int] = field(default_factory=set)
    joined: list[tuple[Sequence[bytes], bytes]] = field(default_factory=list)
    fetched: bool = False
    give_up_at: float | None = None
    approximate_from: int | None = None
    hashes: list[Any] | None = None
    hasher: Any = None
    report: BlendReport | None = None
    decision: Decision | None = None
    refused: str = ""

    @property
    def declined(self) -> str | None:
        """Why its chunks were not worth a blend; None where they were, or nobody asked."""
        found = self.decision
        return found.reason if found is not None and found.mode is Mode.PREFIX else None

    @property
    def ratio(self) -> float:
        """The share that was ordered."""
        return self.plan.ratio if self.plan is not None else 0.0

    def exact_tokens(self, tokens: int) -> int:
        """How many of the first ``tokens`` have exact KV."""
        known = self.approximate_from
        return tokens if known is None else min(tokens, known)

    def result(self) -> dict[str, Any]:
        """What the client is told."""
        if self.refused:
            return {"error": self.refused}
        if self.plan is None or self.approximate_from is None:
            return {} if self.declined is None else {"declined": self.declined}
        return told(self.plan, self.report)


class FusionLeader:
    """One per engine core. Called from vLLM's scheduling loop only; no call does I/O."""

    def __init__(
        self,
        config: Config,
        shape: BlockShape,
        manager: Manager,
        segments: SegmentBook,
        layer_steps: Sequence[Span],
        page_tokens: int,
        pace: Pace | None = None,
    ) -> None:
        self._settings = config.fusion
        self._block = config.block.tokens
        self._shape = shape
        self._manager = manager
        self.chunks = Chunks(config.fusion, config.block.tokens, shape.nbytes, manager, segments)
        self._layer_steps = tuple(layer_steps)
        self._page_tokens = page_tokens
        self._pace = pace
        self._staged = 0
        self._marked: list[tuple[Request, Fusing]] = []

    # -- what was measured ------------------------------------------------------------------

    def judge(self, report: BlendReport, plan: BlendPlan | None) -> None:
        """Take in what became of a blend."""
        if self._pace is not None and plan is not None:
            self._pace.blended(report, plan.exact)
        self.chunks.judge(report)

    # -- a request comes --------------------------------------------------------------------

    def track(self, request: Request) -> Fusing:
        """Read what the request says of fusion; wishes that make no sense keep it exact."""
        given = (request.kv_transfer_params or {}).get("kvcore")
        try:
            fusing = Fusing(fusion_options(given, request.num_tokens))
        except ConfigError as error:
            _log.warning("request=%s is answered without fusion: %s", request.request_id, error)
            return Fusing(FusionOptions(enabled=False), refused=str(error))
        if request.mm_features:  # positions of a picture are more than a number
            fusing.options = FusionOptions(enabled=False)
        return fusing

    def plan(
        self, request: Request, fusing: Fusing, namespace: Namespace, exact: int, hit: Hit
    ) -> BlendPlan | None:
        """What to blend of a prompt whose first ``exact`` tokens are held exactly, and of them
        those of ``hit`` by the tiers; None where it is not worth it."""
        if not fusing.options.enabled or self.chunks.given_up:
            return None
        if fusing.report is not None and not fusing.report.ok:
            return None
        if fusing.found is None:
            tokens = request._all_token_ids
            fusing.found = self.chunks.find(tokens, fusing.options, namespace, exact)
        limit, ratio = request.num_tokens - 1, self._settings.ratio
        plan = self.chunks.plan(fusing.found, exact, limit, ratio, self._staged)
        if plan is None:
            return None
        if fusing.options.ratio is not None:  # as was asked, whatever it costs
            return replace(plan, ratio=fusing.options.ratio)
        if self._pace is None:
            return plan
        if fusing.decision is None:
            fusing.decision = self._decide(self._pace, request, plan, hit)
        if fusing.decision.mode is Mode.PREFIX:
            return None
        return replace(plan, ratio=fusing.decision.ratio)

    def _decide(self, pace: Pace, request: Request, plan: BlendPlan, hit: Hit) -> Decision:
        exact = {tier: n * self._shape.nbytes for tier, n in hit.blocks_by_tier().items()}
        chunks = self.chunks.nbytes(plan)
        decision = pace.decide(request.num_tokens, plan.exact, plan.reused, exact, chunks)
        _log.debug("request=%s %s: %s", request.request_id, decision.mode.value, decision.reason)
        return decision

    # -- bringing blocks to host memory ---------------------------------------------------------

    def fetches(
        self, fusing: Fusing, plan: BlendPlan, exact_hit: Hit, computed: int, deadline_s: float
    ) -> list[TransferGraph]:
        """Loads into host memory of what the plan needs and is on a slower tier.

        Done once a request, and anew where another was joined in vain; what has not arrived then is
        computed. The host tier keeps a block only behind all those before it, so these come along:
        a chunk that stands far behind in a chain which is not in host memory is left alone.
        """
        if fusing.fetched:
            return []
        fusing.fetched = True
        if fusing.give_up_at is None:
            fusing.give_up_at = time.monotonic() + deadline_s
        wanted = [(exact_hit, computed // self._block, -(-plan.exact // self._block))]
        wanted += [source for _, source in self.chunks.sources(plan)]
        graphs = []
        for hit, start, stop in wanted:
            if start >= stop or set(hit.blocks_by_tier(start, stop)) <= {HOST}:
                continue
            low = hit.in_host
            if stop - low > MAX_FETCH * (stop - start):
                continue
            if self._manager.coming(hit, stop):
                fusing.joined.append((hit.keys[:stop], hit.namespace))
                continue
            start = low
            skip = UnitTable.of(np.full((stop - start, 1), SKIP), self._block)
            ended: list[int] = []

            def end(ended: list[int] = ended) -> None:
                fusing.fetching.difference_update(ended)  # empty where the launch was refused

            try:
                graph = self._manager.launch_load(
                    hit, start, stop, [skip], deadline_s=deadline_s, on_end=end
                )
            except KVCoreError as error:  # no room, or an earlier fetch has moved its blocks
                _log.info("chunk stays where it is: %s", error)
                continue
            ended.append(graph.graph_id)
            fusing.fetching.add(graph.graph_id)
            graphs.append(graph)
        return graphs

    def waits(self, fusing: Fusing) -> bool:
        """Whether blocks are on their way to host memory, and not hopelessly late."""
        left = []
        for keys, namespace in fusing.joined:
            hit = self._manager.get_match(keys, namespace)
            if self._manager.coming(hit, len(keys)):
                left.append((keys, namespace))
            elif hit.in_host < len(keys):
                fusing.fetched = False  # it did not come: then this request brings it up itself
        fusing.joined = left
        late = fusing.give_up_at is not None and time.monotonic() > fusing.give_up_at
        if late:
            fusing.fetched = True
            if fusing.fetching or left:
                _log.warning("chunks have not arrived from their tier in time, computing instead")
            fusing.fetching.clear()
            fusing.joined.clear()
        return bool(fusing.fetching or fusing.joined)

    # -- vLLM's own prefix cache ------------------------------------------------------------------

    def mark(self, request: Request, fusing: Fusing, plan: BlendPlan) -> None:
        """Give the pages from the first chunk on, and all that follow, hashes of their own.

        vLLM enters pages into its prefix cache as soon as they are allocated, so this comes before.
        Undone by `settle` for a request that was not scheduled after all.
        """
        first = plan.chunks[0].prompt_start
        fusing.plan, fusing.due = plan, True
        self._marked.append((request, fusing))
        if fusing.hashes is None:
            fusing.hashes, fusing.hasher = list(request.block_hashes), request._block_hasher
        if fusing.hasher is None:
            return
        nonce = secrets.token_bytes(32)
        start = first // self._page_tokens
        hashes: list[Any] = request.block_hashes
        hashes[start:] = [_own_hash(nonce, known) for known in hashes[start:]]
        request._block_hasher = partial(_hash_apart, fusing.hasher, nonce)

    def settle(self) -> None:
        """End of a step's planning: requests that were not scheduled get their hashes back."""
        for request, fusing in self._marked:
            if fusing.due:
                fusing.plan, fusing.due = None, False
            if fusing.approximate_from is None and fusing.hashes is not None:
                request.block_hashes[: len(fusing.hashes)] = fusing.hashes
                request._block_hasher = fusing.hasher
                fusing.hashes = None
        self._marked.clear()
        self._staged = 0

    # -- orders ---------------------------------------------------------------------------------

    def order(
        self, request: Request, fusing: Fusing, pages: Sequence[int], submit: Callable[..., Any]
    ) -> BlendOrder:
        """The order for a plan whose pages are allocated; ``submit`` takes each chunk's graph.

        The tokens are promised: a chunk that cannot be had any more is computed with the rest.
        """
        plan = fusing.plan
        assert plan is not None
        fusing.due = False
        chunks, row = self.chunks.launch(plan, self._layer_steps, submit)
        self._staged += row * self._shape.nbytes
        first_chunk = plan.chunks[0].prompt_start
        known = fusing.approximate_from
        fusing.approximate_from = first_chunk if known is None else min(known, first_chunk)
        lora = request.lora_request
        return BlendOrder(
            request.request_id,
            pack_tokens(request._all_token_ids),
            plan.exact,
            plan.exact,
            plan.stop,
            list(pages),
            plan.ratio,
            chunks,
            row,
            lora.lora_int_id if lora is not None else 0,
        )


def count_blend(metrics: Metrics, fusing: Fusing, report: BlendReport) -> None:
    """Count what became of a request's blend."""
    metrics.blend("blended" if report.ok else "failed")
    for verdict in report.verdicts:
        metrics.judged(verdict)
    if report.ratio > fusing.ratio:
        _log.info("gate request=%s ratio=%s: %s", report.request_id, report.ratio, report.reason)
    if report.ok and fusing.plan is not None:
        seconds = {"wait": report.wait_s, "compute": report.compute_s, "look": report.look_s}
        metrics.blended(fusing.plan.reused, report.ratio, seconds)


def _own_hash(nonce: bytes, known: bytes) -> bytes:
    return hashlib.sha256(nonce + known).digest()


def _hash_apart(hasher: Callable[[Any], list[Any]], nonce: bytes, request: Any) -> list[Any]:
    """vLLM's hashes of a request's new pages, as nobody else's."""
    return [_own_hash(nonce, known) for known in hasher(request)]


def limit_reading(
    blends: Sequence[BlendOrder],
    output: SchedulerOutput,
    page_tokens: int,
    computed: Callable[[str], int],
) -> None:
    """Keep blends off pages that this very step computes; ``computed`` tells how many tokens a
    request has before it.

    vLLM shares a page as soon as it is allocated; its own forward writes before it reads, layer
    by layer, but a blend runs before the forward.
    """
    if not blends:
        return
    state = output.kv_connector_block_state
    written: set[int] = set()
    for request_id, scheduled in output.num_scheduled_tokens.items():
        pages = state.get_block_ids(request_id) if state is not None else None
        if pages is None:
            continue
        start = computed(request_id)
        written.update(pages[0][start // page_tokens : -(-(start + scheduled) // page_tokens)])
    for order in blends:
        own = order.pages[: -(-order.exact // page_tokens)]
        for index, page in enumerate(own):
            if page in written and (index + 1) * page_tokens <= order.stop:
                order.readable = min(order.exact, index * page_tokens)
                break
