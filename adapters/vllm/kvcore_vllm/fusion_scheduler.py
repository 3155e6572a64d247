"""Fusion in vLLM's scheduler: the engine's part of `kvcore.connector.fusion_scheduler`.

vLLM may ask again in a later step, so chunks on lower tiers are fetched into host memory first. If
another request is already loading them, the request waits for that load. The pages from the first
chunk on get hashes of their own (`mark`), so that vLLM's prefix cache never shares approximate KV.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from kvcore.connector.fusion_chunks import worth_fetching
from kvcore.connector.fusion_messages import BlendOrder, BlendPlan
from kvcore.connector.fusion_scheduler import FusionRequest, FusionScheduler
from kvcore.errors import KVCoreError
from kvcore.fusion.options import FusionOptions, fusion_options
from kvcore.manager import Hit
from kvcore.manager.base import Lane

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

_log = logging.getLogger("kvcore.vllm.fusion")


@dataclass
class VllmFusionRequest(FusionRequest):
    """A vLLM request as fusion sees it.

    Attributes:
        due: `mark` was called in this step, and the plan waits for its pages.
        fetching: this request's own loads into host memory.
        joined: chains, each with its namespace, that another request is loading there.
        give_up_at: the monotonic time after which the request no longer waits for its chunks.
        hashes: vLLM's page hashes of the request from before `mark` replaced them.
        hasher: vLLM's hasher from before `mark` replaced it.
    """

    due: bool = False
    fetching: set[int] = field(default_factory=set)
    joined: list[tuple[Sequence[bytes], bytes]] = field(default_factory=list)
    give_up_at: float | None = None
    hashes: list[Any] | None = None
    hasher: Any = None


@dataclass(eq=False)
class VllmFusionScheduler(FusionScheduler):
    """The fusion scheduler of one engine core. Called from vLLM's scheduling loop only."""

    _marked: list[tuple[Request, VllmFusionRequest]] = field(default_factory=list, init=False)

    # -- a request comes --------------------------------------------------------------------

    def track(self, request: Request) -> VllmFusionRequest:
        """Read the fusion options of a request. Requests with images are answered exactly."""
        name, given = request.request_id, (request.kv_transfer_params or {}).get("kvcore")
        options, error = self.read_options(name, lambda: fusion_options(given, request.num_tokens))
        if request.mm_features and not error:  # an image's positions are more than one number
            options = FusionOptions(enabled=False)
        return VllmFusionRequest(name, options, error=error)

    # -- fetching blocks into host memory -----------------------------------------------------

    def fetch(
        self,
        fusing: VllmFusionRequest,
        plan: BlendPlan,
        exact_hit: Hit,
        computed: int,
        deadline_s: float,
        lane: Lane,
    ) -> None:
        """Launch loads of the plan's blocks on lower tiers into host memory.

        Each request does this once, and again if a load that it joined failed. Blocks that have not
        arrived after ``deadline_s`` seconds are computed. ``lane`` receives the graphs.
        """
        if fusing.fetched:
            return
        fusing.fetched = True
        if fusing.give_up_at is None:
            fusing.give_up_at = time.monotonic() + deadline_s
        block = self.config.block.tokens
        wanted = [(exact_hit, computed // block, -(-plan.exact // block))]
        wanted += [source for _, source in self.chunks.sources(plan)]
        for hit, start, stop in wanted:
            if not worth_fetching(hit, start, stop):
                continue
            if self.manager.coming(hit, stop):
                fusing.joined.append((hit.keys[:stop], hit.namespace))
                continue
            ended: list[int] = []

            def end(ended: list[int] = ended) -> None:
                fusing.fetching.difference_update(ended)

            try:
                planned = self.manager.plan_fetch(hit, stop, deadline_s=deadline_s)
            except KVCoreError as error:  # an earlier fetch evicted its blocks
                _log.info("a chunk is not fetched into host memory: %s", error)
                continue
            if planned is not None:
                graph = self.manager.launch(planned, on_end=end, lane=lane)
                ended.append(graph.graph_id)
                fusing.fetching.add(graph.graph_id)

    def waits(self, fusing: VllmFusionRequest) -> bool:
        """Return True if blocks are being loaded into host memory and the deadline is ahead."""
        left = []
        for keys, namespace in fusing.joined:
            hit = self.manager.get_match(keys, namespace)
            if self.manager.coming(hit, len(keys)):
                left.append((keys, namespace))
            elif hit.in_host < len(keys):
                fusing.fetched = False  # the other load failed: this request fetches it itself
        fusing.joined = left
        late = fusing.give_up_at is not None and time.monotonic() > fusing.give_up_at
        if late:
            fusing.fetched = True
            if fusing.fetching or left:
                _log.warning("chunks did not arrive from their tier in time, computing instead")
            fusing.fetching.clear()
            fusing.joined.clear()
        return bool(fusing.fetching or fusing.joined)

    # -- vLLM's own prefix cache ------------------------------------------------------------------

    def mark(self, request: Request, fusing: VllmFusionRequest, plan: BlendPlan) -> None:
        """Give the pages from the first chunk on hashes that no other prompt has.

        vLLM enters pages into its prefix cache when it allocates them, so call this before.
        `end_step` restores the hashes of a request that was not scheduled after all.
        """
        first = plan.chunks[0].prompt_start
        fusing.plan, fusing.due = plan, True
        self._marked.append((request, fusing))
        if fusing.hashes is None:
            fusing.hashes, fusing.hasher = list(request.block_hashes), request._block_hasher
        if fusing.hasher is None:
            return
        nonce = secrets.token_bytes(32)
        start = first // self.traits.page_tokens
        hashes: list[Any] = request.block_hashes
        hashes[start:] = [_own_hash(nonce, known) for known in hashes[start:]]
        request._block_hasher = partial(_hash_apart, fusing.hasher, nonce)

    def end_step(self) -> None:
        """Restore the hashes of requests that were planned in this step but not scheduled."""
        for request, fusing in self._marked:
            if fusing.due:
                fusing.plan, fusing.due = None, False
            if fusing.approximate_from is None and fusing.hashes is not None:
                request.block_hashes[: len(fusing.hashes)] = fusing.hashes
                request._block_hasher = fusing.hasher
                fusing.hashes = None
        self._marked.clear()

    # -- orders ---------------------------------------------------------------------------------

    def order_marked(
        self,
        request: Request,
        fusing: VllmFusionRequest,
        pages: Sequence[int],
    ) -> BlendOrder:
        """`FusionScheduler.order` for a marked request whose ``pages`` are allocated."""
        assert fusing.plan is not None
        fusing.due = False
        lora = request.lora_request
        number = lora.lora_int_id if lora is not None else 0
        return self.order(fusing, request._all_token_ids, fusing.plan, pages, number)


def _own_hash(nonce: bytes, known: bytes) -> bytes:
    return hashlib.sha256(nonce + known).digest()


def _hash_apart(hasher: Callable[[Any], list[Any]], nonce: bytes, request: Any) -> list[Any]:
    """Return vLLM's hashes of a request's new pages, made unique by ``nonce``."""
    return [_own_hash(nonce, known) for known in hasher(request)]


def limit_reading(
    blends: Sequence[BlendOrder],
    output: SchedulerOutput,
    page_tokens: int,
    computed: Callable[[str], int],
) -> None:
    """Keep blends from reading pages that this very step computes.

    ``computed`` returns the number of tokens of a request that were computed before the step. vLLM
    shares a page as soon as it is allocated. Its own forward writes before it reads, layer by
    layer, but a blend runs before the forward.
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
