"""Who a request is: its keys, and what TensorRT-LLM's request object tells of it by version."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcore.connector.fusion_scheduler import FusionRequest
from kvcore.errors import ConfigError, KVCoreError
from kvcore.fusion.options import FusionOptions
from kvcore.manager.base import HOST, Hit, Manager, PreparedLoad, Source
from kvcore.model.identity import Namespaces, lora_identity
from kvcore.model.keys import Extra, KeyChain, Namespace
from kvcore.transfer.graph import Span
from kvcore_trtllm.salt import Wish, read_salt

_log = logging.getLogger("kvcore.trtllm.scheduler")


@dataclass
class Promise:
    """Tokens [start_token, stop_token) that the engine counts on, and the load that keeps them.

    ``parked`` tells whether the request waits for them outside the batch.
    """

    start_token: int
    stop_token: int
    parked: bool
    load: PreparedLoad


@dataclass
class Use:
    """The request whose pages a graph in flight reads, or ``writes``."""

    request_id: int
    writes: bool


@dataclass
class Tracked:
    """A request the leader knows. ``pages`` is its page table, a list for each layer group.

    ``device_tokens`` are those the engine held itself. ``bound`` counts tokens whose KV is certain
    once the forwards planned so far have run. ``seen`` is the step in which the engine last spoke
    of it. ``sources`` are the blocks by tier that were found, before any came to host memory.
    ``plan`` is a blend that was promised and not ordered yet, and from ``approximate_from``
    on its KV is approximate. ``tokens`` are kept where fusion learns what they are stored as, of
    which it was told ``learned`` blocks.
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

    def receive(self, new_tokens: Sequence[int]) -> None:
        """Take in tokens the engine tells of; those known already are not hashed again."""
        self.received += len(new_tokens)
        fresh = self.received - self.chain.num_tokens
        if fresh > 0:
            self.extend(new_tokens[len(new_tokens) - fresh :])

    def extend(self, fresh: Sequence[int]) -> None:
        """Take in tokens that follow those known."""
        self.chain.extend(fresh)
        if self.tokens is not None:
            self.tokens.extend(fresh)

    def exact_tokens(self, tokens: int) -> int:
        """How many of the first ``tokens`` have exact KV."""
        known = self.approximate_from
        return tokens if known is None else min(tokens, known)


def keep(
    manager: Manager, chain: KeyChain, blocks: tuple[int, int], layers: Sequence[Span]
) -> PreparedLoad | None:
    """Keep blocks [first, last) of a chain in host memory, for a promise; None where a server does
    not see to it, or not every worker has its memory."""
    if not manager.certain:
        return None
    first, last = blocks
    hit = Hit(chain.keys, chain.namespace.digest, (Source(HOST, 0, last),))
    try:
        return manager.prepare_load(hit, first, last, layers=layers)
    except KVCoreError as error:
        _log.debug("nothing is promised: %s", error)
        return None


def excluded(request: Any) -> bool:
    """Whether tokens do not tell this request's KV, so that it must not be kept or found."""
    if any(
        getattr(request, name, False) is True
        for name in ("is_dummy_request", "is_attention_dp_dummy", "is_cuda_graph_dummy")
    ):
        return True
    if any(
        getattr(request, name, None) is not None
        for name in ("prompt_embedding_table", "encoder_input_features", "encoder_tokens")
    ):
        return True
    embedded = getattr(request, "multimodal_embedding", None) is not None
    return embedded and not getattr(request, "multimodal_hashes", None)


def extras(request: Any) -> list[Extra]:
    """Digests of the request's pictures and the like, where the version tells them."""
    hashes = getattr(request, "multimodal_hashes", None) or []
    positions = getattr(request, "multimodal_positions", None) or []
    lengths = getattr(request, "multimodal_lengths", None) or []
    return [
        Extra(int(position), int(length), ",".join(map(str, digest)).encode())
        for digest, position, length in zip(hashes, positions, lengths, strict=True)
    ]


def wish_of(request: Any, tokens: int) -> Wish | None:
    """What the request's salt asks of fusion; None where it does not speak of it.

    One that makes no sense is answered exactly, under the salt as it is.
    """
    salt: str | None = getattr(request, "cache_salt", None)
    try:
        wish = read_salt(salt, tokens)
    except ConfigError as error:
        _log.warning("request %s is answered without fusion: %s", request.request_id, error)
        return None
    if wish is not None and (_has_lora(request) or extras(request)):
        _log.debug("request %s has an adapter or pictures: no fusion", request.request_id)
        return wish._replace(options=FusionOptions(enabled=False))
    return wish


def _has_lora(request: Any) -> bool:
    names = ("py_lora_path", "lora_task_id")
    return any(getattr(request, name, None) is not None for name in names)


class RequestNamespaces:
    """Namespaces by LoRA and tenant. The engine knows LoRA weights by a number that means nothing
    to another process: without their folder, their KV is found by this engine only."""

    def __init__(self, namespaces: Namespaces) -> None:
        self._namespaces = namespaces
        self._epoch = secrets.token_hex(16)

    def of(self, request: Any, wish: Wish | None = None) -> Namespace:
        salt = _salt(request) if wish is None else wish.salt
        return self._namespaces.of(self._lora(request), salt)

    def _lora(self, request: Any) -> str:
        path = getattr(request, "py_lora_path", None)
        if path:
            return lora_identity(Path(path).name, str(path))
        number = getattr(request, "lora_task_id", None)
        return "" if number is None else f"{self._epoch}:{number}"


def _salt(request: Any) -> str | None:
    salt: str | None = getattr(request, "cache_salt", None)
    if salt is not None:
        return salt
    number = getattr(request, "cache_salt_id", None)
    return None if number is None else f"id:{number}"
