"""The ``cache_salt`` by which a request asks something of kvcore on TensorRT-LLM.

    kvcore:{"once": "9f2c...", "fusion": {"ratio": 0.3}, "salt": "tenant"}
    kvcore:{"save": false, "salt": "tenant"}

The salt is the only field of a request that TensorRT-LLM passes on unchanged. ``salt`` inside it is
the tenant's own, which kvcore looks up under. ``load``, ``save`` and ``save_tokens`` are as in
`kvcore.connector.control`, and ``fusion`` as in `kvcore.fusion.options`.

TensorRT-LLM puts everything that a request computes into its own prefix cache, and a connector
cannot prevent it. Approximate KV must not be found by another request. A salt that asks for fusion
is therefore used by one request only (``once``), so that the cache entries are found by no other.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from kvcore._util.outside import converted
from kvcore.connector.control import CONTROLS, opened
from kvcore.errors import ConfigError, FormatError
from kvcore.fusion.options import FusionOptions

__all__ = ["PREFIX", "Wish", "fusion_salt", "open_salt", "read_salt", "request_salt"]

PREFIX = "kvcore:"


class _Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    once: str = ""
    fusion: FusionOptions | None = None
    salt: str = ""


class Wish(NamedTuple):
    """The fusion options that a salt asks for, None without fusion, and the tenant's own salt."""

    options: FusionOptions | None
    salt: str | None


def fusion_salt(salt: str = "", **fusion: Any) -> str:
    """Return a new ``cache_salt`` for one request that wants fusion.

    ``salt`` is the tenant's. ``fusion`` are fields of `kvcore.fusion.options.FusionOptions`.
    """
    return request_salt(salt, fusion=fusion)


def request_salt(salt: str = "", fusion: Mapping[str, Any] | None = None, **asked: Any) -> str:
    """Return a ``cache_salt`` for a request that asks something of kvcore.

    ``salt`` is the tenant's. ``asked`` are keys of `kvcore.connector.control`. With ``fusion``, the
    salt is new each time, and for one request only.
    """
    content: dict[str, Any] = {**asked, "salt": salt}
    if fusion is not None:
        content = {"once": secrets.token_hex(16), "fusion": dict(fusion), **content}
    return PREFIX + json.dumps(content, separators=(",", ":"))


def open_salt(cache_salt: str | None) -> Mapping[str, Any] | None:
    """Return the table in a salt, or None if the salt asks nothing of kvcore.

    Raises ConfigError if it cannot be read. The error goes to logs, so it does not repeat the salt.
    """
    if cache_salt is None or not cache_salt.startswith(PREFIX):
        return None
    try:
        return opened(cache_salt.removeprefix(PREFIX))
    except FormatError:
        raise ConfigError(
            f"a cache_salt of {len(cache_salt)} characters cannot be read: supported after "
            f"{PREFIX!r} is a JSON object; make it with kvcore_trtllm.salt.request_salt"
        ) from None


def read_salt(cache_salt: str | None, tokens: int) -> Wish | None:
    """Return what a prompt of ``tokens`` tokens asks for; None if its salt asks for nothing.

    Raises ConfigError if it is malformed. The keys of `kvcore.connector.control` are left to that.
    """
    table = open_salt(cache_salt)
    if table is None:
        return None
    assert cache_salt is not None
    try:
        content = converted({k: v for k, v in table.items() if k not in CONTROLS}, _Content)
    except FormatError as error:
        raise ConfigError(
            f"a cache_salt of {len(cache_salt)} characters: {error}; supported after {PREFIX!r} is "
            f"JSON with once, fusion, salt, {', '.join(CONTROLS)}: make one with "
            "kvcore_trtllm.salt.request_salt"
        ) from error
    controls = any(name in table for name in CONTROLS)
    if not content.once and (content.fusion is not None or not controls):
        raise ConfigError(
            "cache_salt: the field `once` is empty; make the salt with "
            "kvcore_trtllm.salt.fusion_salt(), which draws a fresh nonce"
        )
    if not content.once:
        return Wish(None, content.salt or None)
    fusion = content.fusion or FusionOptions()
    fusion.check(tokens)
    return Wish(fusion, content.salt or None)
