"""Disaggregated prefill on vLLM: promises of KV in ``kv_transfer_params``.

A prefill instance (``kv_role`` is ``kv_producer``) returns a promise for every prompt. Any other
instance does so for a request that says ``do_remote_decode``, as vLLM's own proxies do. A client or
proxy sends the promise on to an instance that shares a store with the first. That instance answers
the prompt without computing it again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcore.connector.clients import Clients
from kvcore.connector.control import FREE, RequestControl
from kvcore.connector.disagg import accepted, promised
from kvcore.manager.base import Manager, Promise
from kvcore.model.keys import KeyChain
from kvcore.telemetry.metrics import Metrics
from kvcore_vllm.requests import asked_of

if TYPE_CHECKING:
    from vllm.v1.request import Request

_PRODUCER = "kv_producer"


class Handover:
    """Reads promises from requests, and adds them to what a client gets back.

    ``role`` is vLLM's ``kv_role``. Promised KV is waited for up to ``wait_s`` seconds. ``clients``
    says who may have what. ``metrics`` count the promises that cannot be read.
    """

    def __init__(
        self,
        role: str | None,
        wait_s: float,
        manager: Manager,
        clients: Clients,
        metrics: Metrics,
    ) -> None:
        self._metrics = metrics
        self._produces = role == _PRODUCER
        self._clients = clients
        self._wait_s = wait_s
        self._manager = manager

    def accepted(self, request: Request, chain: KeyChain) -> Promise | None:
        """Return what another engine has promised of the request's prompt, or None.

        A promise that does not fit is logged and ignored.
        """
        if not self._clients.rights(chain.namespace).promises:
            return None
        asked = asked_of(request)
        told = asked.get("promise") if isinstance(asked, dict) else None
        name, points = request.request_id, self._manager.points
        return accepted(told, chain, self._wait_s, name, self._metrics, points)

    def reply(
        self,
        request: Request,
        chain: KeyChain,
        saved_blocks: int,
        reused: dict[str, int],
        fusion: dict[str, Any],
        record: dict[str, Any] | None,
        control: RequestControl = FREE,
    ) -> dict[str, Any] | None:
        """Return the ``kv_transfer_params`` for the client of a request that has ended, or None.

        They hold the report that the client asked for, and a promise of the first ``saved_blocks``
        of the prompt, as far as the client may have them. What its ``control`` was understood to be
        is always told: it is about nobody else.
        """
        rights = self._clients.rights(chain.namespace)
        shown = control.shown()
        answer: dict[str, Any] = {"asked": shown} if shown else {}
        if rights.tokens and asked_of(request):
            answer |= {"reused_tokens": sum(reused.values()), "tiers": reused}
            answer |= {"explain": record} if rights.explain and record is not None else {}
            answer |= {"fusion": fusion} if fusion else {}
        if rights.promises and self._is_promised(request):
            blocks = min(saved_blocks, request.num_prompt_tokens // chain.block_tokens)
            promise = promised(chain, blocks, self._manager)
            answer |= {} if promise is None else {"promise": promise}
        return {"kvcore": answer} if answer else None

    def _is_promised(self, request: Request) -> bool:
        params = request.kv_transfer_params or {}
        return self._produces or bool(params.get("do_remote_decode"))
