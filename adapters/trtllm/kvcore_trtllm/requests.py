"""Who a request is: its keys, and what TensorRT-LLM's request object tells of it by version."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcore.block import Extra, KeyChain, Namespace, fingerprint_files
from kvcore.config import Config
from kvcore.index import Pin

NAMESPACES_KEPT = 4096


@dataclass
class Promise:
    """Tokens [start_token, stop_token) that the engine counts on, and the pin that keeps them.

    ``parked`` tells whether the request waits for them outside the batch.
    """

    start_token: int
    stop_token: int
    parked: bool
    pin: Pin


@dataclass
class Tracked:
    """A request the leader knows. ``pages`` is its page table, a list for each layer group.

    ``device_tokens`` are those the engine held itself. ``bound`` counts tokens whose KV is certain
    once the forwards planned so far have run. ``seen`` is the step in which the engine last spoke
    of it.
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
    reused: dict[str, int] = field(default_factory=dict)

    def receive(self, new_tokens: Sequence[int]) -> None:
        """Take in tokens the engine tells of; those known already are not hashed again."""
        self.received += len(new_tokens)
        fresh = self.received - self.chain.num_tokens
        if fresh > 0:
            self.chain.extend(new_tokens[len(new_tokens) - fresh :])


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


class Namespaces:
    """Namespaces by LoRA and tenant. The engine knows LoRA weights by a number that means nothing
    to another process: without their folder, their KV is found by this engine only."""

    def __init__(self, config: Config, fingerprint: bytes) -> None:
        self._config = config.namespace
        self._fingerprint = fingerprint
        self._epoch = secrets.token_hex(16)
        self._known: dict[tuple[str, str], Namespace] = {}

    def of(self, request: Any) -> Namespace:
        lora, salt = self._lora(request), self._salt(request)
        found = self._known.get((lora, salt))
        if found is None:
            if len(self._known) >= NAMESPACES_KEPT:
                self._known.clear()
            secret = self._config.secret
            found = self._known[lora, salt] = Namespace(
                self._fingerprint,
                lora=lora,
                cache_salt=salt,
                secret=secret.encode() if secret else b"",
            )
        return found

    def _lora(self, request: Any) -> str:
        path = getattr(request, "py_lora_path", None)
        if path:
            return lora_identity(str(path))
        number = getattr(request, "lora_task_id", None)
        return "" if number is None else f"{self._epoch}:{number}"

    def _salt(self, request: Any) -> str:
        salt = getattr(request, "cache_salt", None)
        if salt is None:
            number = getattr(request, "cache_salt_id", None)
            salt = None if number is None else f"id:{number}"
        return salt or self._config.salt or ""


@functools.lru_cache(maxsize=256)
def lora_identity(path: str) -> str:
    """Stable name of LoRA weights: the digest of the adapter's files where they are local."""
    folder = Path(path)
    content = fingerprint_files(folder).hex() if folder.is_dir() else path
    return f"{folder.name}:{content}"
