"""The ``cache_salt`` by which a request asks for fusion on TensorRT-LLM.

    kvcore:{"once": "9f2c...", "fusion": {"ratio": 0.3}, "salt": "tenant"}

TensorRT-LLM puts everything that a request computes into its own prefix cache, and a connector
cannot prevent it. Approximate KV must not be found by another request. The salt therefore does two
things: it asks for fusion, and it is used by one request only, so that the cache entries are found
by no other. The engine passes it on unchanged. ``salt`` inside it is the tenant's own, which kvcore
looks up under. ``fusion`` is as in `kvcore.fusion.options`.
"""

from __future__ import annotations

import json
import secrets
from typing import Any, NamedTuple

import msgspec

from kvcore._util.outside import decode_json
from kvcore.errors import ConfigError, FormatError
from kvcore.fusion.options import FusionOptions

__all__ = ["PREFIX", "Wish", "fusion_salt", "read_salt"]

PREFIX = "kvcore:"


class _Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    once: str
    fusion: FusionOptions = FusionOptions()
    salt: str = ""


class Wish(NamedTuple):
    """The fusion options that a salt asks for, and the tenant's own salt."""

    options: FusionOptions
    salt: str | None


def fusion_salt(salt: str = "", **fusion: Any) -> str:
    """Return a new ``cache_salt`` for one request that wants fusion.

    ``salt`` is the tenant's. ``fusion`` are fields of `kvcore.fusion.options.FusionOptions`.
    """
    content = {"once": secrets.token_hex(16), "fusion": fusion, "salt": salt}
    return PREFIX + json.dumps(content, separators=(",", ":"))


def read_salt(cache_salt: str | None, tokens: int) -> Wish | None:
    """Return what a prompt of ``tokens`` tokens asks for; None if its salt does not ask for fusion.

    Raises ConfigError if the salt asks for fusion and is malformed. The error goes to logs, so it
    does not repeat the salt.
    """
    if cache_salt is None or not cache_salt.startswith(PREFIX):
        return None
    try:
        content: _Content = decode_json(cache_salt.removeprefix(PREFIX), _Content)
    except FormatError as error:
        raise ConfigError(
            f"a cache_salt of {len(cache_salt)} characters: {error}; supported after {PREFIX!r} is "
            "JSON with once, fusion and salt: make one with kvcore_trtllm.salt.fusion_salt"
        ) from error
    if not content.once:
        raise ConfigError(
            "cache_salt: the field `once` is empty; make the salt with "
            "kvcore_trtllm.salt.fusion_salt(), which draws a fresh nonce"
        )
    content.fusion.check(tokens)
    return Wish(content.fusion, content.salt or None)
