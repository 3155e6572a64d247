"""What of a prompt is stored at another place, for a leader that orders blends.

    prompt  ├── exact prefix ──┼─ gap ─┼── chunk ──┼── chunk ──┼─ question ─┤
            0               exact                           stop

A chunk is a run of tokens inside blocks that were stored exactly: those the request marks, those a
separator cuts out, and any that a search finds. Nothing here waits or copies.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvcore.config.schema import FusionConfig
from kvcore.connector.fusion_messages import BlendReport, ChunkLoad
from kvcore.errors import BlockMissing, KVCoreError
from kvcore.fusion.options import FusionOptions
from kvcore.fusion.segments import Reusable, SegmentBook
from kvcore.manager import HOST, Hit, Manager
from kvcore.model.keys import KeyChain, Namespace
from kvcore.transfer.graph import Span, TransferGraph, UnitTable

__all__ = ["MAX_FAILURES", "BlendPlan", "Chunks"]

_log = logging.getLogger("kvcore.fusion")

MAX_FAILURES = 3
"""Blends that fail one after another before no more are made."""


@dataclass(frozen=True)
class BlendPlan:
    """What a request's blend is made of: KV for [exact, stop), ``chunks`` ascending."""

    exact: int
    stop: int
    ratio: float
    chunks: tuple[Reusable, ...]

    @property
    def reused(self) -> int:
        """Tokens of the chunks."""
        return sum(chunk.length for chunk in self.chunks)


class Chunks:
    """The chunks of one engine's prompts. Not thread-safe: the leader's.

    ``block_nbytes`` is the size of a block over all ranks.
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

    # -- what became of blends --------------------------------------------------------------

    @property
    def given_up(self) -> bool:
        """Whether no more blends are to be made: too many have failed one after another."""
        return self._failures >= MAX_FAILURES

    def judge(self, report: BlendReport) -> None:
        """Take in what became of a blend. One whose chunks did not arrive tells nothing: the next
        one's may."""
        if not report.arrived:
            return
        self._failures = 0 if report.ok else self._failures + 1
        if self._failures == MAX_FAILURES:
            _log.error(
                "%d blends failed one after another: exact prefixes only until the engine restarts",
                MAX_FAILURES,
            )

    # -- what is stored ---------------------------------------------------------------------

    def learn(self, chain: KeyChain, start: int, stop: int, tokens: Sequence[int]) -> None:
        """Blocks [start, stop) of a chain are stored; ``tokens`` are those of the request."""
        self._segments.add(chain.namespace.digest, chain.keys[:stop], start, tokens)

    def forget(self) -> None:
        """Nothing of what was learned is stored any more."""
        self._segments.clear()

    def close(self) -> None:
        self._segments.close()

    # -- what a prompt can use --------------------------------------------------------------

    def find(
        self, tokens: Sequence[int], options: FusionOptions, namespace: Namespace, exact: int
    ) -> list[Reusable]:
        """All chunks of a prompt whose first ``exact`` tokens are held exactly, ascending.

        Marked ones first; between them what the search finds, unless the request names its chunks.
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
        self, found: Iterable[Reusable], exact: int, limit: int, ratio: float, staged: int = 0
    ) -> BlendPlan | None:
        """A blend of what of the chunks lies in [exact, limit), is held still and fits the staging,
        of which ``staged`` bytes are taken; None where that is too little to be worth one."""
        usable = self._usable(found, exact, limit, self._settings.staging_max - staged)
        if sum(chunk.length for chunk in usable) < self._settings.min_tokens:
            return None
        stop = usable[-1].prompt_start + usable[-1].length
        return BlendPlan(exact, stop, ratio, tuple(usable))

    def in_host(self, plan: BlendPlan) -> BlendPlan | None:
        """The plan with the chunks that are in host memory; None when too little is left."""
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
        """A chunk's chain as the tiers hold it, and its blocks there.

        Raises KVCoreError where its last block has left every tier.
        """
        chain = self._manager.index.path(chunk.last_key)
        blocks = self.blocks(chunk.source_start, chunk.length)
        namespace = self._manager.index.namespace_of(chunk.last_key)
        hit = self._manager.get_match(chain, namespace)
        if hit.depth < blocks.stop:
            raise BlockMissing(f"of {blocks.stop} blocks up to a chunk's end {hit.depth} are held")
        return hit, blocks.start, blocks.stop

    def sources(self, plan: BlendPlan) -> Iterator[tuple[Reusable, tuple[Hit, int, int]]]:
        """The chunks of a plan that are held still, each with its `source`.

        Those of a server may have gone since they were found: other engines store too, and it may
        have ended.
        """
        for chunk in plan.chunks:
            if (source := self._source_if_held(chunk)) is not None:
                yield chunk, source

    def _source_if_held(self, chunk: Reusable) -> tuple[Hit, int, int] | None:
        try:
            return self.source(chunk)
        except KVCoreError as error:
            _log.debug("a chunk has gone: %s", error)
            return None

    def launch(
        self, plan: BlendPlan, layers: Sequence[Span], submit: Callable[[TransferGraph], object]
    ) -> tuple[list[ChunkLoad], int]:
        """Start the copies of a plan's chunks into a staging; returns them and its blocks.

        ``layers`` are the steps in which they land, and ``submit`` takes each one's graph. A chunk
        that cannot be had any more is left out: it is computed with the rest.
        """
        loads, row = [], 0
        for chunk in plan.chunks:
            try:
                hit, start, stop = self.source(chunk)
                units = np.arange(row, row + stop - start, dtype=np.int64)[:, None]
                graph = self._manager.launch_load(
                    hit, start, stop, [UnitTable.of(units, self._block)], layers=layers
                )
            except KVCoreError as error:
                _log.warning("a chunk is computed, since it cannot be loaded: %s", error)
                continue
            submit(graph)
            first = (row - start) * self._block + chunk.source_start
            distance = chunk.prompt_start - chunk.source_start
            loads.append(ChunkLoad(graph, first, chunk.length, chunk.prompt_start, distance))
            row += stop - start
        return loads, row

    def nbytes(self, plan: BlendPlan) -> dict[str, int]:
        """Bytes of a plan's chunks over all ranks, by the tier they would be read from; those of
        one that has left every tier are not counted."""
        found: dict[str, int] = {}
        for _, (hit, start, stop) in self.sources(plan):
            for tier, blocks in hit.blocks_by_tier(start, stop).items():
                found[tier] = found.get(tier, 0) + blocks * self._nbytes
        return found

    def blocks(self, start: int, length: int) -> range:
        """Blocks of a chain that hold tokens [start, start + length)."""
        return range(start // self._block, -(-(start + length) // self._block))

    def _held(self, key: bytes) -> bool:
        return key in self._manager.index

    def _spans(self, tokens: Sequence[int]) -> list[tuple[int, int]]:
        """Stretches before and between separators; empty without one configured."""
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
        """A marked text, if it was computed on its own behind what is configured."""
        behind = self._settings.behind
        chain = KeyChain(namespace, self._block)
        chain.extend([*behind, *tokens[start:stop]])
        depth = self._manager.get_match(chain.keys, namespace.digest).depth
        length = min(depth * self._block - len(behind), stop - start)
        if length < self._settings.min_tokens:
            return None
        last = (len(behind) + length - 1) // self._block
        return Reusable(start, length, len(behind), chain.keys[last])

    def _usable(
        self, found: Iterable[Reusable], exact: int, limit: int, room: int
    ) -> list[Reusable]:
        usable = []
        for chunk in found:
            a = max(chunk.prompt_start, exact, self._sink(chunk))
            b = min(chunk.prompt_start + chunk.length, limit)
            moved = chunk.source_start + a - chunk.prompt_start
            nbytes = self._nbytes * len(self.blocks(moved, b - a))
            unfit = b - a < self._settings.min_tokens or nbytes > room
            if unfit or not self._held(chunk.last_key):
                continue
            try:
                last_key = self._last_key(chunk, moved + b - a)
            except KVCoreError:  # a server that has ended in this moment
                continue
            usable.append(Reusable(a, b - a, moved, last_key))
            room -= nbytes
        return usable

    def _sink(self, chunk: Reusable) -> int:
        """First position of a prompt that a moved chunk may fill.

        Every row looks at a prompt's first token, which tells it nothing (an attention sink). One
        that stood behind others was none: put first, it leaves the prompt without a sink, and no
        choice of rows mends that (docs/fusion.md has figures).
        """
        return 0 if chunk.prompt_start == chunk.source_start else 1

    def _last_key(self, chunk: Reusable, stop: int) -> bytes:
        """Key of the block with the token before ``stop``, when the chunk was cut at its end."""
        whole = chunk.source_start + chunk.length
        if (stop - 1) // self._block == (whole - 1) // self._block:
            return chunk.last_key
        return self._manager.index.path(chunk.last_key)[(stop - 1) // self._block]
