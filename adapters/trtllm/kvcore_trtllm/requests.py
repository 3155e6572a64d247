"""The identity of a request: its keys, and the fields of TensorRT-LLM's request by version."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcore._util.log_limit import LogLimit
from kvcore.connector.control import FREE, ControlReader, RequestControl
from kvcore.connector.fusion_scheduler import FusionRequest
from kvcore.errors import ConfigError, KVCoreError
from kvcore.fusion.options import FusionOptions
from kvcore.manager.base import HOST, Hit, Manager, Planned, Source
from kvcore.model.adapter_files import AdapterFiles
from kvcore.model.identity import Namespaces
from kvcore.model.keys import KeyChain, Namespace
from kvcore.telemetry.metrics import MissReason
from kvcore.transfer.graph import Span
from kvcore_trtllm.salt import Wish, open_salt, read_salt

_log = logging.getLogger("kvcore.trtllm.scheduler")


@dataclass
class Promise:
    """Tokens [start_token, stop_token) that the engine counts on, and their planned load.

    ``parked`` is True if the request waits for them outside the batch.
    """

    start_token: int
    stop_token: int
    parked: bool
    load: Planned


@dataclass
class Use:
    """The request whose pages a graph in flight reads, or writes if ``writes`` is True."""

    request_id: int
    writes: bool


@dataclass
class Tracked:
    """The leader's state of one request.

    Attributes:
        device_tokens: the tokens that the engine held itself.
        seen: the step in which the engine last reported the request.
        promise: tokens that were promised and whose load is not launched yet.
        load: the graph of a parked request's load in flight.
        pages: the page table, a list for each layer group.
        received: the tokens that the engine has reported since the request joined a batch.
        bound: the tokens whose KV is complete once the forwards planned so far have run.
        sources: the blocks found, by tier, before any was staged in host memory.
        reused: the promised tokens, by tier.
        blend: a blend that was promised and not ordered yet.
        approximate_from: the first token whose KV may be approximate; None if all is exact.
        tokens: all tokens, kept if fusion or the manager needs them.
        learned: the blocks whose tokens fusion has learned.
        lost: its promised tokens did not come, and were counted as failed.
        control: what it asks of kvcore.
    """

    request_id: int
    chain: KeyChain
    prompt_tokens: int
    device_tokens: int
    seen: int
    promise: Promise | None = None
    load: int | None = None
    pages: list[list[int]] = field(default_factory=list)
    received: int = 0
    bound: int = 0
    sources: dict[str, int] = field(default_factory=dict)
    reused: dict[str, int] = field(default_factory=dict)
    blend: FusionRequest | None = None
    approximate_from: int | None = None
    tokens: list[int] | None = None
    learned: int = 0
    lost: bool = False
    control: RequestControl = FREE

    def receive(self, new_tokens: Sequence[int]) -> None:
        """Append the tokens that the engine reports, except those that are known already."""
        self.received += len(new_tokens)
        fresh = self.received - self.chain.num_tokens
        if fresh > 0:
            self.extend(new_tokens[len(new_tokens) - fresh :])

    def extend(self, fresh: Sequence[int]) -> None:
        """Append tokens that follow the known ones, and hash them."""
        self.chain.extend(fresh)
        if self.tokens is not None:
            self.tokens.extend(fresh)

    def savable_tokens(self, tokens: int) -> int:
        """Return how many of the first ``tokens`` have exact KV and may be saved."""
        known = self.approximate_from
        return self.control.savable(tokens if known is None else min(tokens, known))


def keep(
    manager: Manager, chain: KeyChain, blocks: tuple[int, int], layers: Sequence[Span]
) -> Planned | None:
    """Plan the load of blocks [first, last) of a chain from host memory for a promise.

    Returns None if the blocks are not there, or if a worker has not mapped a server's memory.
    """
    if not manager.certain:
        return None
    first, last = blocks
    hit = Hit(chain.keys, chain.namespace.digest, (Source(HOST, 0, last),))
    try:
        return manager.plan_load(hit, Span(first, last), layers=layers)
    except KVCoreError as error:
        _log.debug("nothing is promised: %s", error)
        return None


_EMBEDDED = (
    "prompt_embedding_table",
    "encoder_input_features",
    "encoder_tokens",
    "multimodal_embedding",
)
"""Fields of a request whose tokens do not determine its KV."""

_POSITIONS = frozenset({"mrope_config"})
"""Multimodal data that every request of some models has, a text as well."""


def is_dummy(request: Any) -> bool:
    """Return True for a request that the engine made itself."""
    return any(
        getattr(request, name, False) is True
        for name in ("is_dummy_request", "is_attention_dp_dummy", "is_cuda_graph_dummy")
    )


def excluded(request: Any) -> bool:
    """Return True if the request's KV must not be stored or looked up.

    That is so if its tokens do not determine its KV, or if it is a dummy. Requests with media are
    left alone: some versions tell a connector no digest of them, and the digest that others tell
    leaves out shapes, the processor's arguments and the sampling of frames.
    """
    if is_dummy(request):
        return True
    if any(getattr(request, name, None) is not None for name in _EMBEDDED):
        return True
    if getattr(request, "multimodal_hashes", None):
        return True
    return bool(set(getattr(request, "py_multimodal_data", None) or ()) - _POSITIONS)


def control_of(request: Any, controls: ControlReader) -> RequestControl:
    """Return what a request asks of kvcore in its salt. Call once a request: it is counted."""
    name = request.request_id
    try:
        return controls.read(name, open_salt(getattr(request, "cache_salt", None)))
    except ConfigError as error:
        return controls.refuse(name, "kvcore", str(error))


def wish_of(request: Any, tokens: int) -> Wish | None:
    """Return the fusion options in the request's salt, or None if there are none.

    A request with malformed options is answered exactly, under the salt as it is.
    """
    salt: str | None = getattr(request, "cache_salt", None)
    try:
        wish = read_salt(salt, tokens)
    except ConfigError as error:
        _log.warning("request %s is answered without fusion: %s", request.request_id, error)
        return None
    if wish is not None and wish.options is not None and _has_lora(request):
        _log.debug("request %s has an adapter: no fusion", request.request_id)
        return wish._replace(options=FusionOptions(enabled=False))
    return wish


def _has_lora(request: Any) -> bool:
    names = ("py_lora_path", "lora_task_id")
    return any(getattr(request, name, None) is not None for name in names)


class RequestNamespaces:
    """The namespaces of requests, by LoRA and tenant. The executor's thread owns it.

    The engine's number of a LoRA adapter means nothing to another process. If the adapter's folder
    is not known or cannot be read, only this engine finds its KV again. ``files`` look at adapters.
    TensorRT-LLM asks about a request once, which therefore waits up to ``wait_s`` seconds for them.
    """

    def __init__(
        self, namespaces: Namespaces, wait_s: float, files: AdapterFiles | None = None
    ) -> None:
        self._namespaces = namespaces
        self._wait_s = wait_s
        self._files = files or AdapterFiles()
        self._epoch = secrets.token_hex(16)
        self._adapters: dict[int | str, str] = {}
        self._late: dict[str, int] = {}  # folders that did not answer in time: the look
        self._limit = LogLimit(600)

    def of(self, request: Any, wish: Wish | None = None) -> Namespace | MissReason:
        """Return the namespace of a request, or why its adapter cannot be told from others."""
        lora = self._lora(request)
        if isinstance(lora, MissReason):
            return lora
        return self._namespaces.of(lora, _salt(request) if wish is None else wish.salt)

    def _lora(self, request: Any) -> str | MissReason:
        path = getattr(request, "py_lora_path", None)
        number = getattr(request, "lora_task_id", None)
        if not path:
            return "" if number is None else f"{self._epoch}:{number}"
        now = self._adapter(number, str(path))
        if now is None:
            self._warn(f"the files of LoRA adapter {path} are not read in time")
            return MissReason.UNAVAILABLE
        first = self._adapters.setdefault(str(path) if number is None else number, now)
        if first == now:
            return first
        self._warn(
            f"the files of LoRA adapter {path} have changed, or its number was another adapter's; "
            "load a changed adapter under a new number"
        )
        return MissReason.UNSUPPORTED

    def _warn(self, why: str) -> None:
        if self._limit.admit(why) is not None:
            _log.warning("requests are answered without kvcore: %s", why)

    def _adapter(self, number: int | None, path: str) -> str | None:
        """Return what an adapter is now; None if its files are not read in time.

        The engine keeps an adapter by its number, whatever its folder and its files are later. If
        they have changed, it is not known which of them computes.
        """
        name = Path(path).name
        if path in self._late and self._files.told(name, path, self._late[path]) is None:
            return None  # it hangs still: one request has waited for it
        look = self._files.ask(name, path)
        found = self._files.wait(name, path, look, self._wait_s)
        if found is None:
            self._late[path] = look
            return None
        self._late.pop(path, None)
        return found if isinstance(found, str) else f"{self._epoch}:{number}:{path}"


def _salt(request: Any) -> str | None:
    salt: str | None = getattr(request, "cache_salt", None)
    if salt is not None:
        return salt
    number = getattr(request, "cache_salt_id", None)
    return None if number is None else f"id:{number}"
