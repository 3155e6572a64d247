"""Disaggregated prefill: one engine computes a prompt, another generates the answer.

    prefill engine ── promised ──▶ client or proxy ──▶ accept ── decode engine
                  └── KV ──▶ a store that both use ──▶ polled until it is there ──┘

A promise says how many blocks of which prompt are being written to the stores, and at which node if
each node has its own store. Of a model with resume points it says that the point behind these
blocks is written too. The decode engine trusts it no further. It looks for blocks by keys that it
computes itself, for a limited time, and only at nodes that its settings allow.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvcore._util.outside import converted
from kvcore.errors import FormatError
from kvcore.manager.base import Manager
from kvcore.model.keys import KEY_BYTES, KeyChain
from kvcore.model.points import PointRows
from kvcore.telemetry.metrics import Metrics
from kvcore.tiers.finder import Promise

__all__ = ["POINT_VERSION", "VERSION", "accept", "accepted", "promised"]

_log = logging.getLogger("kvcore.connector")

VERSION = 1
"""A promise of blocks has this version."""
POINT_VERSION = 2
"""A promise of blocks and the resume point behind them has this version. Whoever cannot read it
must not take it for one of blocks, which are of no use alone.
"""
_NAMESPACE = "namespace (model, LoRA, secret, tenant; for some models also ranks and stages)"
_Hex = Annotated[str, Meta(pattern=rf"^[0-9a-f]{{{2 * KEY_BYTES}}}$")]


class _Message(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A promise in the form that clients and proxies pass on.

    ``last`` is the key of the last block, or of the last row of the resume point behind it.
    """

    version: Annotated[int, Meta(ge=0)]
    namespace: _Hex
    block_tokens: Annotated[int, Meta(ge=1)]
    blocks: Annotated[int, Meta(ge=1)]
    last: _Hex
    node: Annotated[str, Meta(max_length=300)] = ""


def promised(chain: KeyChain, blocks: int, manager: Manager) -> dict[str, Any] | None:
    """Return a promise of the first ``blocks`` of ``chain``, or None if there are none.

    It covers the blocks that ``manager`` has or is receiving, of a model with resume points as far
    as the last point of which that is true. It is plain data, and names the manager's node if the
    blocks are not in a store that both engines use. Blocks for one or two requests to a kvcore
    server, if there is one.
    """
    blocks = manager.expected(chain.keys[: max(blocks, 0)])
    if blocks < 1:
        return None
    message = _Message(
        _version(manager.points),
        chain.namespace.digest.hex(),
        chain.block_tokens,
        blocks,
        _last(chain, blocks, manager.points).hex(),
        manager.node,
    )
    return dict(msgspec.to_builtins(message))


def _version(points: PointRows | None) -> int:
    return VERSION if points is None else POINT_VERSION


def _last(chain: KeyChain, blocks: int, points: PointRows | None) -> bytes:
    """Return the last key that a promise of ``blocks`` covers."""
    return chain.keys[blocks - 1] if points is None else points.last_row(chain.keys, blocks)


def accepted(
    given: object,
    chain: KeyChain,
    wait_s: float,
    request_id: object,
    metrics: Metrics,
    points: PointRows | None = None,
) -> Promise | None:
    """Return the promise that `accept` returns, or None if it refuses ``given``, with a warning.

    Returns None without a warning if ``given`` is not a mapping.
    """
    if not isinstance(given, Mapping):
        return None
    try:
        return accept(given, chain, wait_s, points)
    except FormatError as error:
        metrics.ignored_option("promise")
        _log.warning("promise refused request=%s: %s", request_id, error)
        return None


def accept(
    given: Mapping[str, Any], chain: KeyChain, wait_s: float, points: PointRows | None = None
) -> Promise:
    """Check a promise from `promised` and return it with a wait of up to ``wait_s`` seconds.

    ``points`` are the resume points of the model; None if it goes on behind any block. Raises
    FormatError if it is malformed, or is for another prompt, model or tenant, or if only one of the
    two sides keeps resume points.
    """
    try:
        promise = converted(given, _Message)
    except FormatError as error:
        raise FormatError(f"it is not a promise of KV: {error}") from error
    ours = chain.namespace.digest.hex()
    for what, theirs, supported in (
        ("version", promise.version, _version(points)),
        ("block.tokens", promise.block_tokens, chain.block_tokens),
        (_NAMESPACE, promise.namespace, ours),
    ):
        if theirs != supported:
            raise FormatError(f"it has the {what} {theirs}; supported here is {supported}")
    if points is not None and promise.blocks % points.every:
        raise FormatError(
            f"it ends behind block {promise.blocks}; supported here are multiples of {points.every}"
        )
    if (
        promise.blocks > len(chain.keys)
        or _last(chain, promise.blocks, points).hex() != promise.last
    ):
        raise FormatError(f"its {promise.blocks} blocks are those of another prompt")
    return Promise(promise.blocks, wait_s, promise.node)
