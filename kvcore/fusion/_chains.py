"""The stored chains of one namespace, cut into segments that the finder can hold.

    chain A   a0 a1 a2 a3 a4          segment 1   a0 a1 a2 a3 a4
    chain B   a0 a1 a2 b3 b4          segment 2         ..a2 b3 b4      behind a2
    chain C   a0 a1 a2 b3 b4 c5       segment 2         ..a2 b3 b4 c5   (it grew)

Every block belongs to one segment. A segment that branches off has a *head*: up to ``min_tokens -
1`` tokens that stand before its first block, so that each stretch of ``min_tokens`` tokens of a
chain lies in one segment, and is found. What such a stretch belongs to may reach farther, over the
end of its segment; `Chains.follow` goes on where the chain does.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from kvcore.fusion._anchors import Tokens
from kvcore.fusion.find import SegmentIndex, as_array, common
from kvcore.model.key_table import KeyTable

__all__ = ["ChainPiece", "Chains", "Segment"]

_NEAR = 5  # branches looked at: the nearest before, and four that begin with the same block
_EMPTY = as_array(())


class ChainPiece(NamedTuple):
    """Consecutive blocks of a chain with their tokens.

    Args:
        first: place in the chain of the first block.
        parent: key of the block before it; ROOT_PARENT if it starts the chain.
        keys: prefix keys of the blocks.
        head: how many tokens from before the first block are there.
        tokens: [head + blocks * block_tokens].
    """

    first: int
    parent: bytes
    keys: Sequence[bytes]
    head: int
    tokens: Tokens

    def part(self, begin: int, stop: int, most_head: int) -> ChainPiece:
        """Blocks [begin, stop) of the piece's own, behind up to ``most_head`` tokens."""
        block_tokens = (len(self.tokens) - self.head) // len(self.keys)
        start = self.head + begin * block_tokens
        head = min(start, most_head)
        return ChainPiece(
            self.first + begin,
            self.keys[begin - 1] if begin else self.parent,
            self.keys[begin:stop],
            head,
            self.tokens[start - head : self.head + stop * block_tokens],
        )


class Segment:
    """Blocks [first, stop) of a chain. ``nodes`` name them in the table of keys."""

    __slots__ = ("first", "head", "id", "nodes", "parent", "records", "waiting")

    def __init__(self, segment_id: bytes, piece: ChainPiece) -> None:
        self.id = segment_id
        self.first = piece.first
        self.parent = piece.parent
        self.head = piece.head
        self.nodes = array("I")
        self.waiting: Tokens | None = _EMPTY  # head and blocks, until the finder takes them
        self.records: list[tuple[int, int]] = []  # in the file: (number, place of first block)

    @property
    def stop(self) -> int:
        """Place in the chain behind the last block."""
        return self.first + len(self.nodes)


class Chains:
    """Known blocks of one namespace, by key and by their tokens. Not thread-safe; nothing blocks.

    ``index`` is the namespace's own and is filled here. About 40 bytes a block and 1 KB a segment,
    besides the index. The table of keys is made for ``expected_blocks``: past these it doubles now
    and then, a pause of 1 s a million blocks.
    """

    def __init__(self, block_tokens: int, index: SegmentIndex, expected_blocks: int = 0) -> None:
        self.block_tokens = block_tokens
        self.index = index
        self.segments: dict[bytes, Segment] = {}
        self._keys = KeyTable(expected_blocks)
        self._owners: list[Segment | None] = []  # by node
        self._free: list[int] = []
        self._branches: dict[bytes, list[tuple[bytes, bytes]]] = {}
        """By key of the block before them: (packed tokens of the first block, id), sorted."""

    @property
    def nbytes(self) -> int:
        """Bytes of tokens, anchors and keys; Python's own objects a segment not counted. O(1)."""
        return self.index.nbytes + self._keys.nbytes + 8 * len(self._owners)

    def key(self, segment: Segment, block: int) -> bytes:
        """Prefix key of a block of the segment, by its place in the chain."""
        return self._keys.key(segment.nodes[block - segment.first])

    def num_tokens(self, segment: Segment) -> int:
        """Tokens kept for a segment, those of its head included."""
        return segment.head + len(segment.nodes) * self.block_tokens

    def token_start(self, segment: Segment) -> int:
        """Place in the chain of the segment's first token, head included."""
        return segment.first * self.block_tokens - segment.head

    def tokens(self, segment: Segment) -> Tokens:
        """Head and blocks, not to be written to."""
        return self.index.tokens(segment.id) if segment.waiting is None else segment.waiting

    # -- growing and shrinking ------------------------------------------------------------------

    def unknown(self, first: int, keys: Sequence[bytes], begin: int) -> list[tuple[int, int]]:
        """Runs [start, stop) of keys[begin:] that are not known; keys[i] is of block first + i.

        O(unknown blocks + segments): what shares a key shares all that stands before it.
        """
        runs: list[tuple[int, int]] = []
        at, stop = len(keys), len(keys)
        while at > begin:
            node = self._keys.get(keys[at - 1])
            if node is None:
                at -= 1
                continue
            if at < stop:
                runs.append((at, stop))
            owner = self._owners[node]
            assert owner is not None, "a key in the table has an owner"
            at = stop = min(at - 1, owner.first - first)
        if begin < stop:
            runs.append((begin, stop))
        return runs[::-1]

    def enter(self, piece: ChainPiece, segment_id: bytes) -> tuple[Segment, ChainPiece]:
        """Take in blocks that are not known; returns their segment and what is new of the piece.

        They go on the segment that ends before them, which needs no head of theirs; else
        ``segment_id`` is the name of a new one.
        """
        segment = self._ending_before(piece)
        most_head = 0 if segment is not None else self.index.min_tokens - 1
        piece = piece.part(0, len(piece.keys), most_head)
        if segment is None:
            segment = self.segments[segment_id] = Segment(segment_id, piece)
            self._branch(segment, piece)
        self._name(segment, piece.keys)
        self._append(segment, piece.tokens)
        return segment, piece

    def cut(self, segment: Segment, blocks: int) -> None:
        """Forget all but the first ``blocks`` blocks, at least one, of a segment.

        Its records in the file are the caller's to take care of.
        """
        self._unname(segment, blocks)
        length = self.num_tokens(segment)
        kept = self.tokens(segment)[:length]
        if segment.waiting is not None or not self.index.cut(segment.id, length):
            segment.waiting = kept.copy()

    def forget(self, segment: Segment) -> None:
        """Forget a segment."""
        if segment.first:
            branches = self._branches[segment.parent]
            del branches[bisect_left(branches, (self._first_block(segment), segment.id))]
            if not branches:
                del self._branches[segment.parent]
        self._unname(segment, 0)
        self.index.remove(segment.id)
        del self.segments[segment.id]

    # -- lookup ---------------------------------------------------------------------------------

    def follow(
        self,
        segment: Segment,
        source: int,
        length: int,
        text: Tokens,
        keep: Callable[[Segment], bool],
    ) -> tuple[Segment, int]:
        """Follow a match into the segments that go on where its own ends or turns away.

        text[:length] equals the segment's chain from token ``source`` on. Returns the segment
        that holds the last token, and the length, of the longest match of ``text`` on a chain that
        has the same full blocks. ``keep`` is asked of every segment met whether it is still there,
        and may cut or forget it.
        """
        while length < len(text):
            block = (source + length) // self.block_tokens
            before = block * self.block_tokens - source
            if before < 0:  # the match lies within one block: no other chain has more of it
                break
            parent = segment.parent if block == segment.first else self.key(segment, block - 1)
            best = segment
            for branch in self._nearest(parent, text[before:], keep):
                held = self.tokens(branch)[branch.head :]
                reached = before + common(text[before:], held)
                if reached > length:
                    best, length = branch, reached
            if best is segment:
                break
            segment = best
        return segment, length

    def check_integrity(self) -> None:
        """Assert that keys, segments, branches and the finder agree. Slow."""
        self.index.check_integrity()
        nodes = [node for segment in self.segments.values() for node in segment.nodes]
        assert sorted([*nodes, *self._free]) == list(range(len(self._owners)))
        assert sorted(self._keys.nodes()) == sorted(nodes)
        branches = set[tuple[bytes, bytes, bytes]]()
        for segment_id, segment in self.segments.items():
            self._check_segment(segment_id, segment)
            if segment.first:
                branches.add((segment.parent, self._first_block(segment), segment_id))
        assert all(held and held == sorted(held) for held in self._branches.values())
        listed = [(key, *one) for key, held in self._branches.items() for one in held]
        assert len(listed) == len(branches)
        assert set(listed) == branches

    # -- inside ---------------------------------------------------------------------------------

    def _ending_before(self, piece: ChainPiece) -> Segment | None:
        node = self._keys.get(piece.parent) if piece.first else None
        owner = self._owners[node] if node is not None else None
        return owner if owner is not None and owner.stop == piece.first else None

    def _branch(self, segment: Segment, piece: ChainPiece) -> None:
        if segment.first:
            block = piece.tokens[piece.head :][: self.block_tokens].tobytes()
            insort(self._branches.setdefault(segment.parent, []), (block, segment.id))

    def _first_block(self, segment: Segment) -> bytes:
        return self.tokens(segment)[segment.head :][: self.block_tokens].tobytes()

    def _name(self, segment: Segment, keys: Sequence[bytes]) -> None:
        """Enter the keys of blocks that follow the segment's last."""
        new = len(keys) - len(self._free)
        if new > 0:
            self._free += range(len(self._owners), len(self._owners) + new)
            self._keys.grow(new)
            self._owners += [None] * new
        nodes = self._free[-len(keys) :]
        del self._free[-len(keys) :]
        for node, key in zip(nodes, keys, strict=True):
            self._keys.put(key, node)
            self._owners[node] = segment
        segment.nodes.extend(nodes)

    def _unname(self, segment: Segment, blocks: int) -> None:
        """Let go of the nodes behind the first ``blocks``."""
        gone = segment.nodes[blocks:]
        for node in gone:
            self._keys.remove(node)
            self._owners[node] = None
        self._free += gone
        del segment.nodes[blocks:]

    def _append(self, segment: Segment, more: Tokens) -> None:
        if segment.waiting is None:
            self.index.extend(segment.id, more)
            return
        whole = np.concatenate((segment.waiting, more))
        segment.waiting = None if self.index.add(segment.id, whole) else whole

    def _nearest(
        self, parent: bytes, text: Tokens, keep: Callable[[Segment], bool]
    ) -> list[Segment]:
        """Segments behind ``parent`` among which is one that shares most with ``text``.

        Beside the place of a string in a sorted list stand those with the longest common prefix.
        """
        block = text[: self.block_tokens].tobytes()
        while branches := self._branches.get(parent):
            at = bisect_left(branches, (block, b""))
            near = [self.segments[name] for _, name in branches[max(at - 1, 0) : at + _NEAR - 1]]
            kept = [segment for segment in near if keep(segment)]
            if len(kept) == len(near):
                return kept
        return []

    def _check_segment(self, segment_id: bytes, segment: Segment) -> None:
        assert segment.id == segment_id
        assert len(segment.nodes)
        assert 0 <= segment.head < self.index.min_tokens
        assert self.token_start(segment) >= 0
        assert len(self.tokens(segment)) == self.num_tokens(segment)
        short = self.num_tokens(segment) < self.index.min_tokens
        assert (segment_id in self.index) == (segment.waiting is None) == (not short)
        assert all(self._owners[node] is segment for node in segment.nodes)
