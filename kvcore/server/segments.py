"""Fusion with a server: the server stores the tokens of stored blocks and searches them.

What one engine computed, another may blend. The server answers which runs of a prompt are stored.
Their blocks are then matched and loaded like any others, and pinned by the load that was planned.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvcore.errors import FormatError
from kvcore.fusion.segments import Reusable, SegmentBook, Segments
from kvcore.model.keys import pack_tokens
from kvcore.server.messages import LearnTokens, SearchReply, SearchRequest, join, split

if TYPE_CHECKING:
    from kvcore.server.session import SessionKeeper

__all__ = ["RemoteSegments", "learn", "search"]

_log = logging.getLogger("kvcore.server.client")

LEAD_TOKENS = 256
"""Tokens sent along from before the new blocks, so that a run which begins in them is found whole.
"""


class RemoteSegments(SegmentBook):
    """The `Segments` of the server that ``keeper`` is joined to. For one thread, the leader's.

    A search blocks for the server's deadline at most, and finds nothing if the server does not
    answer. Tokens added while there is no server are lost: their blocks are found as an exact
    prefix only.
    """

    def __init__(self, keeper: SessionKeeper, block_tokens: int) -> None:
        self._keeper = keeper
        self._block = block_tokens
        self._warned = False

    def add(
        self, namespace: bytes, keys: Sequence[bytes], start: int, tokens: Sequence[int]
    ) -> None:
        """Send the tokens of blocks [start, len(keys)) of a chain. Does not wait for a reply."""
        member = self._keeper.member
        if member is None or start >= len(keys) or not self._kept():
            return
        first = max(start - -(-LEAD_TOKENS // self._block), 0)
        text = pack_tokens(tokens[first * self._block : len(keys) * self._block])
        link = self._keeper.link
        link.tell(
            LearnTokens(
                link.ref(), member.number, namespace, join(keys[first:]), first, start - first, text
            )
        )

    def find(
        self,
        namespace: bytes,
        tokens: Sequence[int],
        held: Callable[[bytes], bool],
        start: int = 0,
        stop: int | None = None,
    ) -> list[Reusable]:
        """Find stored runs as `Segments.find` does; the server knows which blocks are held."""
        member = self._keeper.member
        if member is None or not self._kept():
            return []
        text = pack_tokens(tokens[start : len(tokens) if stop is None else stop])
        asked = SearchRequest(self._keeper.link.ref(), member.number, namespace, text)
        reply = self._keeper.ask(asked, SearchReply)
        if not isinstance(reply, SearchReply):
            return []
        return [
            Reusable(start + at, length, source, key) for at, length, source, key in reply.found
        ]

    def _kept(self) -> bool:
        """Return True if the server keeps tokens; log once if it does not."""
        member = self._keeper.member
        kept = member is not None and member.welcome.keeps_tokens
        if member is not None and not kept and not self._warned:
            self._warned = True
            _log.warning(
                "the kvcore server keeps no tokens of what is stored, and only marked chunks are "
                "found: set fusion.enabled for the server too"
            )
        return kept

    def clear(self, namespace: bytes | None = None) -> None:
        """Do nothing: the server forgets tokens with their blocks (`RemoteManager.clear`)."""

    def close(self) -> None:
        """Do nothing: the tokens belong to the server."""


# -- on the server ----------------------------------------------------------------------------


def learn(segments: Segments, told: LearnTokens) -> None:
    """Add the tokens of blocks that a session stored. Raises KVCoreError for malformed content."""
    segments.add(told.namespace, split(told.keys), told.start, _tokens(told.tokens), told.first)


def search(segments: Segments, asked: SearchRequest, held: Callable[[bytes], bool]) -> SearchReply:
    """Search the stored tokens for a session. Raises FormatError for malformed tokens."""
    found = segments.find(asked.namespace, _tokens(asked.tokens), held)
    runs = [(r.prompt_start, r.length, r.source_start, r.last_key) for r in found]
    return SearchReply(asked.ref, runs)


def _tokens(packed: bytes) -> Sequence[int]:
    if len(packed) % 4:
        raise FormatError(f"{len(packed)} bytes of tokens; supported are multiples of 4 bytes")
    tokens: Sequence[int] = np.frombuffer(packed, dtype="<u4")  # type: ignore[assignment]
    return tokens
