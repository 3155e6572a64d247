"""Who made KV, so that it is never taken for another's: weights, LoRA, tenant.

Every engine computes these the same way: what one of them stored is found by the others.
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
    "weights_identity",
]

_log = logging.getLogger("kvcore.connector")

NAMESPACES_KEPT = 4096
"""Namespaces remembered before all are made anew: tenants may come without end."""


@functools.lru_cache(maxsize=4)
def weights_identity(model: str, revision: str | None) -> bytes:
    """Digest of the weights: their content for a folder, name and revision for a hub model.

    Reads the folder (see `kvcore.model.keys.fingerprint_files`, whose errors pass) once a process.
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


@functools.lru_cache(maxsize=256)
def lora_identity(name: str, path: str) -> str:
    """Stable name of LoRA weights: the digest of the adapter's files where they are local.

    Reads the folder once a process.
    """
    folder = Path(path)
    content = fingerprint_files(folder).hex() if folder.is_dir() else path
    return f"{name}:{content}"


def rope_length(config: Mapping[str, Any], served_length: int | None) -> int | None:
    """``served_length`` (tokens) where the rope's frequencies depend on it, else None.

    ``config`` is the text model's, as Hugging Face writes it.
    """
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    return served_length if kind in ("dynamic", "longrope") else None


def hooked(fingerprint: bytes, hooks: Iterable[str]) -> bytes:
    """The fingerprint of a model whose attention plugins may change; the model's own without any.

    What a hook changes in one layer is in the KV of all that follow, so engines with other hooks,
    or none, must not find it. ``hooks`` names each with its plugin and version, in any order
    (`kvcore.plugins.manager.Offer.identity`).
    """
    names = sorted(hooks)
    if not names:
        return fingerprint
    return hashlib.blake2b(
        "\0".join(names).encode(), key=fingerprint[:64], digest_size=len(fingerprint)
    ).digest()


class Namespaces:
    """Namespaces by LoRA and tenant, of one model. Not thread-safe: the leader's."""

    def __init__(self, config: NamespaceConfig, fingerprint: bytes) -> None:
        self._config = config
        self._fingerprint = fingerprint
        self._extra: dict[str, object] = {}
        self._known: dict[tuple[str, str], Namespace] = {}

    def of(self, lora: str = "", salt: str | None = None) -> Namespace:
        """The namespace of a request: ``lora`` names its adapter weights (`lora_identity`),
        ``salt`` its tenant. Without a salt of its own it is the configured tenant's."""
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
        """Keep KV made from now on apart by a random mark, from all made before.

        For weights that may have been changed in place, which no fingerprint of files tells: this
        process finds such KV again, a restarted one does not.
        """
        self._known.clear()
        self._extra = {"epoch": secrets.token_hex(16)}
