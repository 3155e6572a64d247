"""Decides which blocks and resume points of vLLM's requests are saved, and in which step.

    a step is planned     blocks that it completes, points that it reaches (`Saves.of_step`)
    a request has ended   its last full blocks (`Saves.rest`)

A request that decodes is looked at again when it may have completed something: `DueRequests`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kvcore.config.schema_engines import VllmConfig
from kvcore.connector.page_table import PageTables, Paging
from kvcore.manager.base import Lane
from kvcore.model.points import PointShape
from kvcore.model.spec import ModelDescription
from kvcore.transfer.graph import TransferGraph
from kvcore_vllm.due import RUN_TOKENS, DueRequests, decode_run
from kvcore_vllm.points import (
    Candidates,
    of_states,
    of_windows,
    states_page_tokens,
    whole_points,
)
from kvcore_vllm.requests import TrackedRequests
from kvcore_vllm.tracked import Tracked

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

__all__ = ["Saves"]


class Saves:
    """Saves the requests of one engine. Called from vLLM's scheduling loop only.

    ``save`` and ``choose`` are `LeaderCore._save` and `LeaderCore._wanted_points`. ``drafts`` is
    True if the KV of a draft model depends on tokens behind its own.
    """

    def __init__(
        self,
        model: ModelDescription,
        settings: VllmConfig,
        block_tokens: int,
        paging: Paging,
        requests: TrackedRequests,
        save: Callable[..., TransferGraph | None],
        choose: Callable[..., list[int]],
        *,
        drafts: bool,
    ) -> None:
        self._model = model
        self._decode = settings.save_decode
        self._block = block_tokens
        self._paging = paging
        self._requests = requests
        self._save = save
        self._choose = choose
        # vLLM keeps the states of the boundary a page before, as its own cache resumes there.
        self._pages_back = 2 if drafts else 1
        self._due = DueRequests()
        self._decode_run = decode_run(block_tokens, model.single_group)

    def of_step(self, output: SchedulerOutput, lane: Lane) -> None:
        """Save what a step completes. The graphs go to ``lane``."""
        due, point = self._due.take(output), self._model.point
        if point is not None and point.states:
            self._states(output, lane)
            return
        for request_id in due:
            tracked = self._requests.get(request_id)
            if tracked is None or not tracked.may_save:
                continue
            if point is None:
                self._computed(tracked, output, lane)
            else:
                self._windows(tracked, output, point, lane)

    def rest(self, tracked: Tracked, pages: PageTables, lane: Lane) -> None:
        """Save the last full blocks of a request that has ended. The graph goes to ``lane``.

        Of a model with resume points this is the last one of windows. The others were saved with
        the steps that reached them.
        """
        request = tracked.request
        computed = min(request.num_computed_tokens, request.num_tokens)
        in_flight = getattr(request, "num_in_flight_tokens", 0)
        computed = min(computed, request.num_computed_tokens - in_flight)
        if not self._decode:
            computed = min(computed, request.num_prompt_tokens)
        reached = blocks = tracked.exact_blocks(computed, self._block)
        point = self._model.point
        states: dict[int, int] | None = None
        if point is not None:
            # vLLM offers no state at the end of an answer, and may have dropped a window's page.
            # Where it zeroes pages for other layers, it may do so before this save is told.
            states, zeroed = {}, bool(point.states or point.page_windows)
            if zeroed or not blocks or not self._paging.sees(pages, blocks):
                blocks = 0
        if blocks > tracked.saved_blocks and tracked.may_save:
            self._blocks(tracked, blocks, pages, lane, states)
        if point is not None and self._requests.may_save(tracked):
            tracked.saved_blocks = max(tracked.saved_blocks, reached)  # as far as there are points

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._due.forget(request_id)

    def _computed(self, tracked: Tracked, output: SchedulerOutput, lane: Lane) -> None:
        """Save the blocks that a request completes in this step, and note when it is due again.

        While a request decodes, it is saved whenever another `_decode_run` of its blocks is
        complete. The rest is saved when the request ends.
        """
        request = tracked.request
        reached = request.num_computed_tokens + output.num_scheduled_tokens[request.request_id]
        # Positions that are computed when this step ends, up to the last token whose id is known:
        # with speculation and async scheduling the ids trail the positions.
        computed = min(reached, request.num_tokens)
        if not self._decode and computed > request.num_prompt_tokens:
            return
        blocks = tracked.exact_blocks(computed, self._block)
        state = output.kv_connector_block_state
        run = self._decode_run if computed > request.num_prompt_tokens else 1
        if blocks // run > tracked.saved_blocks // run and state is not None:
            pages = state.get_block_ids(request.request_id)
            if pages is not None:
                self._blocks(tracked, blocks, pages, lane)
        if tracked.exact_blocks(reached, self._block) < reached // self._block:
            return  # what follows is approximate, and is never saved
        run = self._decode_run if reached >= request.num_prompt_tokens else 1
        missing = (tracked.saved_blocks // run + 1) * run * self._block - reached
        self._due.again(request.request_id, max(missing, 1))

    def _windows(
        self, tracked: Tracked, output: SchedulerOutput, point: PointShape, lane: Lane
    ) -> None:
        """Save the resume points that a request reaches in this step, and their blocks.

        vLLM drops the pages that a window has left after the step, so what the step reaches is
        saved with it. `rest` saves the last point.
        """
        request, state, block = tracked.request, output.kv_connector_block_state, self._block
        reached = request.num_computed_tokens + output.num_scheduled_tokens[request.request_id]
        computed = min(reached, request.num_tokens)  # see `_computed`
        most = tracked.control.savable(self._most_saved(request))
        prompt = min(most, request.num_prompt_tokens) // block
        span = range(tracked.saved_blocks + 1, min(computed, most) // block + 1)
        step = max(point.most_rows, RUN_TOKENS // block)
        pages: Any = None if state is None else state.get_block_ids(request.request_id)
        found = of_windows(
            span, prompt, tracked.hit, step, block,
            lambda blocks: pages is not None and self._paging.sees(pages, blocks),
        )  # fmt: skip
        self._wanted(tracked, pages, found, {at: {} for at in found.offered}, lane)
        ahead = [*found.ends, *found.junctions, (reached // (step * block) + 1) * step * block]
        self._due.again(request.request_id, min(at - reached for at in ahead if at > reached))

    def _states(self, output: SchedulerOutput, lane: Lane) -> None:
        """Save the resume points whose states this step leaves in a page, and their blocks.

        vLLM names the page of each state that it keeps at a boundary. Blocks behind the last point
        are of no use to anybody, and are not saved.
        """
        state = output.kv_connector_block_state
        if state is None:
            return
        groups = self._model.groups
        back = self._pages_back * states_page_tokens(groups)
        for request_id, offered in state.boundary_state_offloads.items():
            tracked = self._requests.get(request_id)
            pages = state.get_block_ids(request_id)
            if tracked is None or not tracked.may_save or pages is None:
                continue
            most = tracked.control.savable(self._most_saved(tracked.request))
            points = whole_points(offered, groups, self._block)
            found = of_states(
                sorted(at for at in points if at <= most),
                tracked.request, tracked.hit, back, self._block,
            )  # fmt: skip
            self._wanted(tracked, pages, found, points, lane)

    def _wanted(
        self,
        tracked: Tracked,
        pages: PageTables,
        found: Candidates,
        states: Mapping[int, Mapping[int, int]],
        lane: Lane,
    ) -> None:
        """Save those of the candidates that ``points.policy`` wants.

        ``states`` has the pages of the states at each of them.
        """
        if not found.offered:
            return
        kept = 0 if tracked.hit is None else tracked.hit.blocks * self._block
        for boundary in self._choose(*found, kept=max(tracked.last_point, kept)):
            blocks = boundary // self._block
            if self._blocks(tracked, blocks, pages, lane, states[boundary]):
                tracked.last_point = max(tracked.last_point, boundary)

    def _most_saved(self, request: Request) -> int:
        """Return how many tokens of a request may be saved at most."""
        return request.num_tokens if self._decode else request.num_prompt_tokens

    def _blocks(
        self,
        tracked: Tracked,
        blocks: int,
        pages: PageTables,
        lane: Lane,
        states: Mapping[int, int] | None = None,
    ) -> bool:
        """Save the first blocks of a request that no tier holds. Return True if a save began."""
        if not self._requests.may_save(tracked):
            return False
        tracked.make_keys()
        blocks = min(blocks, len(tracked.chain.keys))
        tokens = None if tracked.extras else tracked.request._all_token_ids
        known = tracked.saved_blocks
        graph = self._save(tracked.chain, blocks, pages, tokens, lane, known=known, states=states)
        tracked.saved_blocks = max(blocks, known)
        return graph is not None
