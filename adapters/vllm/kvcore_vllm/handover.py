"""vLLM's prefill and decode instances: promises in ``kv_transfer_params``.

A prefill instance promises the KV of every prompt to who sent it; any other does so for a request
that says ``do_remote_decode``, as vLLM's own proxies do. Who sends the promise on, to an instance
that shares a store with it, has the prompt answered there without computing it again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcore.connector.disagg import accepted, promised
from kvcore.manager.base import Manager, Promise
from kvcore.model.keys import KeyChain

if TYPE_CHECKING:
    from vllm.v1.request import Request

_PRODUCER = "kv_producer"


class Handover:
    """``role`` is vLLM's ``kv_role``; what is promised is waited for ``wait_s`` seconds."""

    def __init__(self, role: str | None, wait_s: float, manager: Manager) -> None:
        self._produces = role == _PRODUCER
        self._wait_s = wait_s
        self._manager = manager

    def accepted(self, request: Request, chain: KeyChain) -> Promise | None:
        """What another engine has promised of the request's prompt."""
        asked = _asked(request)
        told = asked.get("promise") if isinstance(asked, dict) else None
        return accepted(told, chain, self._wait_s, request.request_id)

    def told(
        self,
        request: Request,
        chain: KeyChain,
        saved_blocks: int,
        reused: dict[str, int],
        fusion: dict[str, Any],
        record: dict[str, Any] | None,
    ) -> dict[str, Any] | None:
        """What the client of a request that has ended is told: what it asked for, and what is
        promised of its prompt."""
        said: dict[str, Any] = {}
        if _asked(request):
            said |= {"reused_tokens": sum(reused.values()), "tiers": reused}
            said |= {} if record is None else {"explain": record}
            said |= {"fusion": fusion} if fusion else {}
        if self._produces or (request.kv_transfer_params or {}).get("do_remote_decode"):
            blocks = min(saved_blocks, request.num_prompt_tokens // chain.block_tokens)
            promise = promised(chain, blocks, self._manager)
            said |= {} if promise is None else {"promise": promise}
        return {"kvcore": said} if said else None


def _asked(request: Request) -> Any:
    """What the request says to kvcore, whatever that is."""
    return (request.kv_transfer_params or {}).get("kvcore")
