"""Identity of KV: fingerprints of weights, LoRA adapters and hooks, and tenants' namespaces.

Every engine computes these in the same way, so that each finds what the others stored.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvcore.config import NamespaceConfig
from kvcore.model.keys import Namespace, fingerprint_files

__all__ = [
    "NAMESPACES_KEPT",
    "Namespaces",
    "hooked",
    "lora_identity",
    "rope_length",
    "settings_digest",
    "weights_identity",
]

_log = logging.getLogger("kvcore.connector")

NAMESPACES_KEPT = 4096
"""Namespaces cached before the cache is cleared, because the number of tenants is unbounded."""


@functools.lru_cache(maxsize=4)
def weights_identity(model: str, revision: str | None) -> bytes:
    """Return a digest of the weights: the content of a folder, or name and revision on the hub.

    Reads the folder once per process with `kvcore.model.keys.fingerprint_files`, and passes on its
    errors.
    """
    folder = Path(model)
    if folder.is_dir():
        return fingerprint_files(folder)
    if revision is None:
        _log.warning(
            "model %s has no pinned revision: KV kept on disk is reused for whatever weights the "
            "hub serves under that name; give the engine a revision or a local folder",
            model,
        )
    return f"{model}@{revision or 'main'}".encode()


def settings_digest(config: NamespaceConfig) -> bytes:
    """Return 16 bytes that are equal in two processes with the same secret and default salt.

    They reveal neither, because a secret is long.
    """
    secret = (config.secret or "").encode()
    return Namespace("kvcore settings", cache_salt=config.salt or "", secret=secret).digest


@functools.lru_cache(maxsize=256)
def lora_identity(name: str, path: str) -> str:
    """Return a stable name for LoRA weights, with a digest of the adapter's files if local.

    Reads the folder once per process.
    """
    folder = Path(path)
    content = fingerprint_files(folder).hex() if folder.is_dir() else path
    return f"{name}:{content}"


def rope_length(config: Mapping[str, Any], served_length: int | None) -> int | None:
    """Return ``served_length`` (tokens) if the rope's frequencies depend on it, otherwise None.

    ``config`` is the text model's configuration, as Hugging Face writes it.
    """
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    return served_length if kind in ("dynamic", "longrope") else None


def hooked(fingerprint: bytes, hooks: Iterable[str]) -> bytes:
    """Return the fingerprint of a model whose attention plugins may change.

    Without hooks it is unchanged. What a hook changes in one layer affects the KV of all later
    layers, so engines with other hooks, or none, must not find that KV. ``hooks`` names each hook
    with its plugin and version, in any order (`kvcore.plugins.manager.Offer.identity`).
    """
    names = sorted(hooks)
    if not names:
        return fingerprint
    return hashlib.blake2b(
        "\0".join(names).encode(), key=fingerprint[:64], digest_size=len(fingerprint)
    ).digest()


class Namespaces:
    """The namespaces of one model, by LoRA and tenant. Not thread-safe: the leader owns it."""

    def __init__(self, config: NamespaceConfig, fingerprint: bytes) -> None:
        self._config = config
        self._fingerprint = fingerprint
        self._extra: dict[str, object] = {}
        self._known: dict[tuple[str, str], Namespace] = {}

    def of(self, lora: str = "", salt: str | None = None) -> Namespace:
        """Return the namespace of a request.

        ``lora`` names its adapter weights (`lora_identity`), ``salt`` its tenant. Without a salt
        the request belongs to the configured tenant.
        """
        salt = salt or self._config.salt or ""
        found = self._known.get((lora, salt))
        if found is None:
            if len(self._known) >= NAMESPACES_KEPT:
                self._known.clear()
            secret = self._config.secret
            found = self._known[lora, salt] = Namespace(
                self._fingerprint,
                lora=lora,
                cache_salt=salt,
                extra=self._extra,
                secret=secret.encode() if secret else b"",
            )
        return found

    def renew(self) -> None:
        """Separate KV computed from now on from all earlier KV, by a random mark.

        For weights that may have been changed in place, which the fingerprints of files do not
        reveal. This process finds such KV again; a restarted one does not.
        """
        self._known.clear()
        self._extra = {"epoch": secrets.token_hex(16)}
