"""How a request asks for fusion on TensorRT-LLM: in its ``cache_salt``.

    kvcore:{"once": "9f2c...", "fusion": {"ratio": 0.3}, "salt": "tenant"}

TensorRT-LLM enters what a request computed into its own prefix cache and lets no connector keep
anything out. Under a salt that no other request has, approximate KV is found by nobody: so the
salt, which the engine passes on as it is, both asks for fusion and keeps it apart. ``salt`` inside
is the tenant's, under which kvcore looks things up; ``fusion`` is as in `kvcore.fusion.options`.
"""

from __future__ import annotations

import json
import secrets
from typing import Any, NamedTuple

import msgspec

from kvcore.errors import ConfigError
from kvcore.fusion.options import FusionOptions

__all__ = ["PREFIX", "Wish", "fusion_salt", "read_salt"]

PREFIX = "kvcore:"


class _Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    once: str
    fusion: FusionOptions = FusionOptions()
    salt: str = ""


class Wish(NamedTuple):
    """What a salt asks for, and the tenant's own salt."""

    options: FusionOptions
    salt: str | None


def fusion_salt(salt: str = "", **fusion: Any) -> str:
    """A ``cache_salt`` for one request that wants fusion; another one each time.

    ``salt`` is the tenant's, ``fusion`` are fields of `kvcore.fusion.options.FusionOptions`.
    """
    content = {"once": secrets.token_hex(16), "fusion": fusion, "salt": salt}
    return PREFIX + json.dumps(content, separators=(",", ":"))


def read_salt(cache_salt: str | None, tokens: int) -> Wish | None:
    """What a prompt of ``tokens`` tokens asks for; None for a salt that speaks of no fusion.

    Raises ConfigError for one that does and makes no sense.
    """
    if cache_salt is None or not cache_salt.startswith(PREFIX):
        return None
    try:
        content = msgspec.json.decode(cache_salt.removeprefix(PREFIX), type=_Content)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ConfigError(
            f"cache_salt {cache_salt[:80]!r}: {error}; supported after {PREFIX!r} is JSON with "
            "once, fusion and salt: make one with kvcore_trtllm.salt.fusion_salt"
        ) from error
    if not content.once:
        raise ConfigError(f"cache_salt {cache_salt[:80]!r}: give once a value used once")
    content.fusion.check(tokens)
    return Wish(content.fusion, content.salt or None)
