"""A prompt computed by one engine and answered by another: what the first tells the second.

    prefill engine ── promised ──▶ client or proxy ──▶ accept ── decode engine
                  └── KV ──▶ a store that both know ──▶ asked until it is there ──┘

A promise says how much KV of a prompt is on its way to the stores, whose, and at which node where
each has its own. It is not believed further than that: blocks are looked for by the keys that the
second engine computes itself, for a while only, and at a node only that the settings allow.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvcore.errors import FormatError
from kvcore.manager.base import Manager
from kvcore.model.keys import KEY_BYTES, KeyChain
from kvcore.tiers.remote.lookup import Promise

__all__ = ["VERSION", "accept", "accepted", "promised"]

_log = logging.getLogger("kvcore.connector")

VERSION = 1
_Hex = Annotated[str, Meta(pattern=rf"^[0-9a-f]{{{2 * KEY_BYTES}}}$")]


class _Told(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    version: Annotated[int, Meta(ge=0)]
    namespace: _Hex
    block_tokens: Annotated[int, Meta(ge=1)]
    blocks: Annotated[int, Meta(ge=1)]
    last: _Hex
    node: Annotated[str, Meta(max_length=300)] = ""


def promised(chain: KeyChain, blocks: int, manager: Manager) -> dict[str, Any] | None:
    """What the engine that answers ``chain``'s prompt needs to know of its first ``blocks``, as far
    as ``manager`` has them or is receiving them: plain data, with the manager's node where they are
    not in a place that both know. None where there are none. A server is asked once or twice."""
    blocks = manager.expected(chain.keys[: max(blocks, 0)])
    if blocks < 1:
        return None
    node = manager.node
    told = _Told(
        VERSION,
        chain.namespace.digest.hex(),
        chain.block_tokens,
        blocks,
        chain.keys[blocks - 1].hex(),
        node,
    )
    return dict(msgspec.to_builtins(told))


def accepted(told: object, chain: KeyChain, wait_s: float, request_id: object) -> Promise | None:
    """Return `accept`, or None if ``told`` is no mapping or is refused; the log says why."""
    if not isinstance(told, Mapping):
        return None
    try:
        return accept(told, chain, wait_s)
    except FormatError as error:
        _log.warning("promise refused request=%s: %s", request_id, error)
        return None


def accept(told: Mapping[str, Any], chain: KeyChain, wait_s: float) -> Promise:
    """What `promised` said of the prompt of ``chain``, to be waited for up to ``wait_s`` seconds.

    Raises FormatError for what it has not said, or not of this prompt, model and tenant.
    """
    try:
        promise = msgspec.convert(told, _Told)
    except msgspec.ValidationError as error:
        raise FormatError(f"not a promise of KV: {error}") from error
    ours = chain.namespace.digest.hex()
    for what, given, supported in (
        ("version", promise.version, VERSION),
        ("block.tokens", promise.block_tokens, chain.block_tokens),
        ("namespace (model, LoRA, secret or tenant)", promise.namespace, ours),
    ):
        if given != supported:
            raise FormatError(f"KV is promised of {what} {given}; supported here is {supported}")
    keys = chain.keys
    if promise.blocks > len(keys) or keys[promise.blocks - 1].hex() != promise.last:
        raise FormatError(f"{promise.blocks} blocks are promised of another prompt")
    return Promise(promise.blocks, wait_s, promise.node)
