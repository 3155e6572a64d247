"""Identity of KV: fingerprints of weights, LoRA adapters and hooks, and tenants' namespaces.

Every engine computes these in the same way, so that each finds what the others stored.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvcore._util.outside import decode_json, printable, read_regular
from kvcore.config import NamespaceConfig
from kvcore.errors import UnsupportedError
from kvcore.model.ingredients import kv_fields
from kvcore.model.keys import KEY_BYTES, Namespace, canonical_bytes
from kvcore.model.weights import fingerprint_files

__all__ = [
    "NAMESPACES_KEPT",
    "Namespaces",
    "Weights",
    "hooked",
    "lora_identity",
    "lora_stamp",
    "rope_rule",
    "settings_digest",
    "weights_identity",
]

NAMESPACES_KEPT = 4096
"""Namespaces cached before the cache is cleared, because the number of tenants is unbounded."""


class Weights(NamedTuple):
    """A digest of weights. ``alone`` says why it does not tell them from others, if it does not."""

    digest: bytes
    alone: str = ""


_COMMIT = re.compile(r"[0-9a-f]{40}")


@functools.lru_cache(maxsize=4)
def weights_identity(model: str, revision: str | None, commit: str | None) -> Weights:
    """Return a digest of the weights: content of a folder or file, or name and commit on a hub.

    ``commit`` is that of the configuration, where the engine knows it. Reads a folder once per
    process (`kvcore.model.weights`). Raises UnsupportedError if it has no weights to read.
    """
    if Path(model).exists():
        return Weights(fingerprint_files(model))
    pinned = next((name for name in (commit, revision) if name and _COMMIT.fullmatch(name)), None)
    alone = (
        ""
        if pinned
        else f"the weights of {model} have no commit that kvcore can see: give a local folder, or "
        "a commit as the revision"
    )
    return Weights(f"{model}@{pinned or revision or 'main'}".encode(), alone)


_MAX_CONFIG = 1 << 20
"""Bytes of an adapter's configuration. Usual ones have one or two thousand."""

_Stamp = tuple[tuple[str, int, int, int, int], ...]


def lora_identity(name: str, path: str) -> str:
    """Return a stable name for a LoRA adapter, with a digest of its weights and its configuration.

    Reads the folder again when one of its files has changed. Raises UnsupportedError if it is not a
    local folder with weights and an ``adapter_config.json``, or if a file is cut off.
    """
    return f"{name}:{_adapter(path, lora_stamp(path)).hex()}"


def lora_stamp(path: str) -> _Stamp:
    """Return name, inode, size and times of an adapter's files, which any rewrite changes.

    Raises UnsupportedError if the folder cannot be read.
    """
    try:
        found = [(entry.name, entry.stat()) for entry in os.scandir(path)]
    except OSError as error:
        raise UnsupportedError(
            f"cannot read the LoRA adapter {path}: {error}; give a local folder"
        ) from error
    return tuple(sorted((n, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for n, s in found))


def settings_digest(config: NamespaceConfig) -> bytes:
    """Return 16 bytes that are equal in two processes with the same secret and default salt.

    They reveal neither, because a secret is long.
    """
    secret = (config.secret or "").encode()
    return Namespace("kvcore settings", cache_salt=config.salt or "", secret=secret).digest


@functools.lru_cache(maxsize=256)
def _adapter(path: str, stamp: _Stamp) -> bytes:
    try:
        told = read_regular(Path(path) / "adapter_config.json", _MAX_CONFIG)
        config = kv_fields(decode_json(told, dict[str, Any]))
        content = canonical_bytes([config, fingerprint_files(path)])
    except UnsupportedError:
        raise
    except Exception as error:
        raise UnsupportedError(
            f"cannot read the LoRA adapter {path}: {printable(error)}"
        ) from error
    return hashlib.sha256(content).digest()[:KEY_BYTES]


_FIXED_ROPES = frozenset({"default", "linear", "llama3", "yarn", "mrope"})
"""Types of rope whose frequencies the configuration alone decides, in every engine alike."""


def rope_rule(config: Mapping[str, Any], engine: str, served_length: int | None) -> object | None:
    """Return what decides the rope's frequencies beside the configuration; None if nothing does.

    ``config`` is the text model's, as Hugging Face writes it; its ropes may be nested by type of
    layer. ``engine`` enters because engines choose by different rules: vLLM between the factors of
    a longrope by the length that it serves (``served_length``, in tokens), SGLang by position.
    """
    kinds = _ropes(config.get("rope_scaling")) | _ropes(config.get("rope_parameters"))
    odd = sorted(kinds - _FIXED_ROPES)
    return [engine, odd, served_length] if odd else None


def _ropes(told: Any) -> set[str]:
    if not isinstance(told, Mapping):
        return set()
    kind = told.get("rope_type", told.get("type"))
    inner = {found for item in told.values() for found in _ropes(item)}
    return inner | ({str(kind)} if kind is not None else set())


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
