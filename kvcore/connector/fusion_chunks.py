"""Finds the chunks of a prompt that are cached for another position, and plans a blend of them.

    prompt  ├── exact prefix ──┼─ gap ─┼── chunk ──┼── chunk ──┼─ question ─┤
            0               exact                           stop

A chunk is a run of tokens inside blocks whose KV was stored exactly. The request marks chunks, a
separator cuts them out, or a search over stored tokens finds them. No call blocks or copies.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from kvcore.config.schema_fusion import FusionConfig
from kvcore.connector.fusion_messages import BlendPlan, BlendReport, ChunkLoad
from kvcore.errors import BlockMissing, KVCoreError
from kvcore.fusion.options import FusionOptions
from kvcore.fusion.segments import Reusable, SegmentBook
from kvcore.manager import HOST, Hit, Manager
from kvcore.model.keys import KeyChain, Namespace
from kvcore.transfer.graph import SKIP, Span, TransferGraph, UnitTable

__all__ = ["MAX_FAILURES", "MAX_FETCH", "ChunkPlanner", "worth_fetching"]

_log = logging.getLogger("kvcore.fusion")

MAX_FAILURES = 3
"""Consecutive failed blends after which no more are planned."""

MAX_FETCH = 8
"""The most blocks to prefetch into host memory for each block of a chunk."""


def worth_fetching(hit: Hit, start: int, stop: int) -> bool:
    """Return True if blocks [start, stop) of ``hit`` should be prefetched into host memory.

    Host memory keeps a block only behind all blocks before it, so these are fetched too. A chunk
    far behind the part of its chain that is in host memory is therefore left where it is.
    """
    return 0 < stop - hit.in_host <= MAX_FETCH * (stop - start)


class ChunkPlanner:
    """The reusable chunks of one engine's prompts. Not thread-safe; owned by the leader.

    ``block_nbytes`` is the size of a block in bytes, summed over all ranks.
    """

    def __init__(
        self,
        settings: FusionConfig,
        block_tokens: int,
        block_nbytes: int,
        manager: Manager,
        segments: SegmentBook,
    ) -> None:
        self._settings = settings
        self._block = block_tokens
        self._nbytes = block_nbytes
        self._manager = manager
        self._segments = segments
        self._failures = 0

    # -- results of blends ------------------------------------------------------------------

    @property
    def given_up(self) -> bool:
        """True if `MAX_FAILURES` blends in a row have failed. No more blends are planned then."""
        return self._failures >= MAX_FAILURES

    def judge(self, report: BlendReport) -> None:
        """Count consecutive failures.

        A blend whose chunks did not arrive is ignored: the chunks of the next one may arrive.
        """
        if not report.arrived:
            return
        self._failures = 0 if report.ok else self._failures + 1
        if self._failures == MAX_FAILURES:
            _log.error(
                "%d blends failed one after another: exact prefixes only until the engine restarts",
                MAX_FAILURES,
            )

    # -- stored tokens ----------------------------------------------------------------------

    def learn(self, chain: KeyChain, start: int, stop: int, tokens: Sequence[int]) -> None:
        """Record the tokens of blocks [start, stop) of a stored chain.

        ``tokens`` are all tokens of the request.
        """
        self._segments.add(chain.namespace.digest, chain.keys[:stop], start, tokens)

    def forget(self) -> None:
        """Drop all recorded tokens."""
        self._segments.clear()

    def close(self) -> None:
        """Close the segment book."""
        self._segments.close()

    # -- planning ---------------------------------------------------------------------------

    def find(
        self, tokens: Sequence[int], options: FusionOptions, namespace: Namespace, exact: int
    ) -> list[Reusable]:
        """Return all chunks of a prompt whose first ``exact`` tokens have exact KV, ascending.

        Marked chunks take precedence. The search covers the gaps between them, unless the request
        names its chunks.
        """
        spans = self._spans(tokens) if options.chunks is None else options.chunks
        found = [r for a, b in spans if (r := self._marked(tokens, namespace, a, b))]
        if not self._settings.unmarked or options.chunks is not None:
            return found
        stops = [*(r.prompt_start for r in found), len(tokens)]
        starts = [exact, *(r.prompt_start + r.length for r in found)]
        for start, stop in zip(starts, stops, strict=True):
            if stop - start >= self._settings.min_tokens:
                found += self._segments.find(
                    namespace.digest, tokens, self._held, max(start, exact), stop
                )
        return sorted(found)

    def plan(
        self, found: Iterable[Reusable], exact: int, limit: int, ratio: float
    ) -> BlendPlan | None:
        """Plan a blend of the chunks in [exact, limit) that are still cached.

        Returns None if fewer than ``fusion.min_tokens`` tokens are left.
        """
        usable = self._usable(found, exact, limit)
        if sum(chunk.length for chunk in usable) < self._settings.min_tokens:
            return None
        stop = usable[-1].prompt_start + usable[-1].length
        return BlendPlan(exact, stop, ratio, tuple(usable))

    def in_host(self, plan: BlendPlan) -> BlendPlan | None:
        """Return the plan reduced to chunks in host memory, or None if too few tokens are left."""
        chunks = [
            chunk
            for chunk, (hit, start, stop) in self.sources(plan)
            if set(hit.blocks_by_tier(start, stop)) <= {HOST}
        ]
        if sum(chunk.length for chunk in chunks) < self._settings.min_tokens:
            return None
        stop = chunks[-1].prompt_start + chunks[-1].length
        return replace(plan, stop=stop, chunks=tuple(chunks))

    def source(self, chunk: Reusable) -> tuple[Hit, int, int]:
        """Look up the chain of a chunk. Returns (hit, first block, block after the last).

        Raises KVCoreError if the chunk's last block has been evicted from every tier.
        """
        chain = self._manager.index.path(chunk.last_key)
        blocks = self.blocks(chunk.source_start, chunk.length)
        namespace = self._manager.index.namespace_of(chunk.last_key)
        hit = self._manager.get_match(chain, namespace)
        if hit.depth < blocks.stop:
            raise BlockMissing(f"{hit.depth} of {blocks.stop} blocks up to a chunk's end are held")
        return hit, blocks.start, blocks.stop

    def sources(self, plan: BlendPlan) -> Iterator[tuple[Reusable, tuple[Hit, int, int]]]:
        """Yield the chunks of a plan that are still cached, each with its `source`.

        Behind a server, chunks may have been evicted since they were found: other engines use the
        same cache, and the server may have exited.
        """
        for chunk in plan.chunks:
            if (source := self._source_if_held(chunk)) is not None:
                yield chunk, source

    def _source_if_held(self, chunk: Reusable) -> tuple[Hit, int, int] | None:
        try:
            return self.source(chunk)
        except KVCoreError as error:
            _log.debug("a chunk is no longer cached: %s", error)
            return None

    def launch(self, plan: BlendPlan, layers: Sequence[Span]) -> list[ChunkLoad]:
        """Launch the loads of a plan's chunks, whose pages the ranks fill in.

        ``layers`` are the layer steps in which the chunks arrive. A chunk that is no longer cached
        is left out and computed with the fresh tokens.
        """
        loads = []
        for chunk in plan.chunks:
            try:
                hit, start, stop = self.source(chunk)
                nowhere = np.full((stop - start, 1), SKIP, dtype=np.int64)
                planned = self._manager.plan_load(hit, Span(start, stop), layers=layers)
                tables = [UnitTable.of(nowhere, self._block)]
                graph = self._manager.launch(planned, tables, lane=_left_to_the_order)
            except KVCoreError as error:
                _log.warning("a chunk is computed because it cannot be loaded: %s", error)
                continue
            first = chunk.source_start - start * self._block
            distance = chunk.prompt_start - chunk.source_start
            loads.append(ChunkLoad(graph, first, chunk.length, chunk.prompt_start, distance))
        return loads

    def nbytes(self, plan: BlendPlan) -> dict[str, int]:
        """Return the bytes of a plan's chunks over all ranks, by the tier they would be read from.

        A chunk that has been evicted from every tier is not counted.
        """
        found: dict[str, int] = {}
        for _, (hit, start, stop) in self.sources(plan):
            for tier, blocks in hit.blocks_by_tier(start, stop).items():
                found[tier] = found.get(tier, 0) + blocks * self._nbytes
        return found

    def blocks(self, start: int, length: int) -> range:
        """Return the blocks of a chain that hold tokens [start, start + length)."""
        return range(start // self._block, -(-(start + length) // self._block))

    def _held(self, key: bytes) -> bool:
        return key in self._manager.index

    def _spans(self, tokens: Sequence[int]) -> list[tuple[int, int]]:
        """Return the spans before and between separators, or [] if no separator is configured."""
        mark = self._settings.separator
        if not mark:
            return []
        line = np.asarray(tokens, dtype=np.int64)
        if len(line) < len(mark):
            return []
        windows = np.lib.stride_tricks.sliding_window_view(line, len(mark))
        spans, start = [], 0
        for at in np.flatnonzero((windows == np.asarray(mark)).all(axis=1)).tolist():
            if at > start:
                spans.append((start, at))
            start = max(start, at + len(mark))
        return spans

    def _marked(
        self, tokens: Sequence[int], namespace: Namespace, start: int, stop: int
    ) -> Reusable | None:
        """Return a marked span as a chunk if it was computed alone, behind ``fusion.behind``."""
        behind = self._settings.behind
        chain = KeyChain(namespace, self._block)
        chain.extend([*behind, *tokens[start:stop]])
        depth = self._manager.get_match(chain.keys, namespace.digest).depth
        length = min(depth * self._block - len(behind), stop - start)
        if length < self._settings.min_tokens:
            return None
        last = (len(behind) + length - 1) // self._block
        return Reusable(start, length, len(behind), chain.keys[last])

    def _usable(self, found: Iterable[Reusable], exact: int, limit: int) -> list[Reusable]:
        usable = []
        for chunk in found:
            a = max(chunk.prompt_start, exact, self._sink(chunk))
            b = min(chunk.prompt_start + chunk.length, limit)
            moved = chunk.source_start + a - chunk.prompt_start
            if b - a < self._settings.min_tokens or not self._held(chunk.last_key):
                continue
            try:
                last_key = self._last_key(chunk, moved + b - a)
            except KVCoreError:  # the server has just exited
                continue
            usable.append(Reusable(a, b - a, moved, last_key))
        return usable

    def _sink(self, chunk: Reusable) -> int:
        """Return the first position of a prompt that a chunk may fill: 1 if it was moved, else 0.

        Every row attends to a prompt's first token, which carries no content (an attention sink). A
        token computed behind others is no sink. Put first, it leaves the prompt without one, and no
        choice of recomputed rows repairs that (docs/fusion.md has figures).
        """
        return 0 if chunk.prompt_start == chunk.source_start else 1

    def _last_key(self, chunk: Reusable, stop: int) -> bytes:
        """Return the key of the block that holds token ``stop - 1`` of the chunk's source."""
        whole = chunk.source_start + chunk.length
        if (stop - 1) // self._block == (whole - 1) // self._block:
            return chunk.last_key
        return self._manager.index.path(chunk.last_key)[(stop - 1) // self._block]


def _left_to_the_order(graph: TransferGraph) -> None:
    """Drop the graph: the blend's order carries it."""
