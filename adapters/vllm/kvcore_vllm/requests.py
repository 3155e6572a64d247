"""The requests of vLLM that kvcore serves, from their first lookup until vLLM is done with them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcore._util.log_limit import LogLimit
from kvcore.connector.control import ControlReader
from kvcore.connector.patience import Patience
from kvcore.errors import UnsupportedError
from kvcore.model.keys import KeyChain
from kvcore.telemetry.metrics import MissReason
from kvcore_vllm.fusion_scheduler import VllmFusionScheduler
from kvcore_vllm.request_identity import LateError, RequestIdentities
from kvcore_vllm.tracked import Tracked

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

__all__ = ["TrackedRequests", "asked_of"]

_log = logging.getLogger("kvcore.vllm.scheduler")


class _Unserved(NamedTuple):
    """A request that is computed without kvcore, and why."""

    request: Request
    reason: MissReason


class TrackedRequests(dict[str, Tracked]):
    """The leader's state of each request that it serves, by the request's id.

    A request is served if its tokens, its media and its adapter determine its KV. ``identities``
    tell these apart, blocks have ``block_tokens`` tokens, and ``fusion`` is None if nothing is
    blended. ``controls`` read what a request asks of kvcore. A request waits for ``deadline_s``
    seconds, of which it may have waited for its identity. The scheduling thread owns it.
    """

    def __init__(
        self,
        identities: RequestIdentities,
        block_tokens: int,
        fusion: VllmFusionScheduler | None,
        controls: ControlReader,
        deadline_s: float,
    ) -> None:
        super().__init__()
        self._identities = identities
        self._block = block_tokens
        self._fusion = fusion
        self._controls = controls
        self._deadline_s = deadline_s
        self._unserved: dict[str, _Unserved] = {}
        self._log_limit = LogLimit(every_s=600.0)

    def track(self, request: Request) -> Tracked | MissReason | None:
        """Return the state of a request, which is new if it was not known.

        Returns the reason if it is not served, and None if that is not known yet: ask again in a
        later step. Hashes the media of a new request.
        """
        tracked = self.get(request.request_id)
        if tracked is not None and tracked.request is request:
            return tracked
        unserved = self._unserved.get(request.request_id)
        if unserved is not None and unserved.request is request:
            return unserved.reason
        if not _is_supported(request):
            return self._leave(request, MissReason.UNSUPPORTED)
        try:
            identity = self._identities.of(request)
        except UnsupportedError as error:
            if self._log_limit.admit(str(error)) is not None:
                _log.warning("requests are answered without kvcore: %s", error)
            late = isinstance(error, LateError)
            return self._leave(request, MissReason.UNAVAILABLE if late else MissReason.UNSUPPORTED)
        if identity is None:
            return None
        chain = KeyChain(identity.namespace, self._block)
        patience = Patience(self._deadline_s, identity.waited_s)
        tracked = Tracked(request, chain, identity.extras, patience)
        self[request.request_id] = tracked
        tracked.control = self._controls.read(request.request_id, asked_of(request))
        if self._fusion is not None and tracked.control.load:
            tracked.fusing = self._fusion.track(request)
        return tracked

    def _leave(self, request: Request, reason: MissReason) -> MissReason:
        self._unserved[request.request_id] = _Unserved(request, reason)
        return reason

    def end(self, request: Request) -> Tracked | None:
        """Forget a request that has ended. Return its state if it was served."""
        self._unserved.pop(request.request_id, None)
        self._identities.forget(request)
        return self.pop(request.request_id, None)

    def may_save(self, tracked: Tracked) -> bool:
        """Return True if the request may be saved now.

        Its adapter's files are looked at before each save. While that is under way it may not, and
        if they were changed it never may again.
        """
        if not tracked.may_save:
            return False
        unchanged = self._identities.unchanged(tracked.request, tracked.chain.namespace)
        tracked.may_save = unchanged is not False
        return bool(unchanged)

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


def asked_of(request: Request) -> Any:
    """Return what the request has for kvcore, of any type; None if it has nothing."""
    params = request.kv_transfer_params
    return params.get("kvcore") if isinstance(params, Mapping) else None


def _is_supported(request: Request) -> bool:
    """Return True unless the tokens of a request do not determine its KV."""
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return False  # prompt embeddings have no token ids to make keys of
    # A session: vLLM adds media and drops tokens after its keys were made.
    return request.pooling_params is None and not request.resumable
