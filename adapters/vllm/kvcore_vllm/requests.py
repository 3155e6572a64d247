"""The requests of vLLM that kvcore serves, from their first lookup until vLLM is done with them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvcore._util.log_limit import LogLimit
from kvcore.errors import UnsupportedError
from kvcore.model.keys import KeyChain
from kvcore_vllm.fusion_scheduler import VllmFusionScheduler
from kvcore_vllm.request_identity import RequestIdentities
from kvcore_vllm.tracked import Tracked

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

__all__ = ["TrackedRequests"]

_log = logging.getLogger("kvcore.vllm.scheduler")


class TrackedRequests(dict[str, Tracked]):
    """The leader's state of each request that it serves, by the request's id.

    A request is served if its tokens, its media and its adapter determine its KV. ``identities``
    tell these apart, blocks have ``block_tokens`` tokens, and ``fusion`` is None if nothing is
    blended. The scheduling thread owns it.
    """

    def __init__(
        self, identities: RequestIdentities, block_tokens: int, fusion: VllmFusionScheduler | None
    ) -> None:
        super().__init__()
        self._identities = identities
        self._block = block_tokens
        self._fusion = fusion
        self._log_limit = LogLimit(every_s=600.0)

    def track(self, request: Request) -> Tracked | None:
        """Return the state of a request, which is new if it was not known; None if not served.

        Hashes the media of a new request.
        """
        tracked = self.get(request.request_id)
        if tracked is not None and tracked.request is request:
            return tracked
        if request.prompt_token_ids is None or request.prompt_embeds is not None:
            return None  # prompt embeddings have no token ids to make keys of
        if request.pooling_params is not None:
            return None
        if request.resumable:
            return None  # a session: vLLM adds media and drops tokens after its keys were made
        try:
            identity = self._identities.of(request)
        except UnsupportedError as error:
            if self._log_limit.admit(str(error)) is not None:
                _log.warning("requests are answered without kvcore: %s", error)
            return None
        chain = KeyChain(identity.namespace, self._block)
        tracked = Tracked(request, chain, identity.extras)
        self[request.request_id] = tracked
        if self._fusion is not None:
            tracked.fusing = self._fusion.track(request)
        return tracked

    def may_still_save(self, tracked: Tracked) -> bool:
        """Return True unless the files of the request's adapter were changed. Then it never is."""
        if not self._identities.unchanged(tracked.request, tracked.chain.namespace):
            tracked.may_save = False
        return tracked.may_save

    def scheduled(self, output: SchedulerOutput) -> list[tuple[int, Request]]:
        """Return (tokens of this step, request) for each request that is scheduled and served."""
        found = ((self.get(name), n) for name, n in output.num_scheduled_tokens.items())
        return [(tokens, tracked.request) for tracked, tokens in found if tracked is not None]

    def computed_tokens(self, request_id: str) -> int:
        """Return how many tokens vLLM has computed of a request; 0 if it is not served."""
        tracked = self.get(request_id)
        return 0 if tracked is None else tracked.request.num_computed_tokens

    def stop(self) -> None:
        """Load and save nothing more for the requests that are known now."""
        for tracked in self.values():
            tracked.may_load = tracked.may_save = False
