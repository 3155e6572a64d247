"""The stored chains of one namespace, cut into segments for the finder.

    chain A   a0 a1 a2 a3 a4          segment 1   a0 a1 a2 a3 a4
    chain B   a0 a1 a2 b3 b4          segment 2         ..a2 b3 b4      behind a2
    chain C   a0 a1 a2 b3 b4 c5       segment 2         ..a2 b3 b4 c5   (it grew)

Every block belongs to one segment. A segment that branches off has a *head*: up to ``min_tokens -
1`` tokens that precede its first block. Thanks to the head, every run of ``min_tokens`` tokens of a
chain lies within one segment and can be found. A match may extend beyond the end of its segment;
`Chains.follow` continues it along the chain.
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

_NEAR = 5  # branches to compare: the nearest before, and four that begin with the same block
_EMPTY = as_array(())


class ChainPiece(NamedTuple):
    """Consecutive blocks of a chain with their tokens.

    Args:
        first: index of the first block in its chain.
        parent: key of the block before it; ROOT_PARENT if it starts the chain.
        keys: prefix keys of the blocks.
        head: how many tokens from before the first block are included.
        tokens: [head + blocks * block_tokens].
    """

    first: int
    parent: bytes
    keys: Sequence[bytes]
    head: int
    tokens: Tokens

    def part(self, begin: int, stop: int, most_head: int) -> ChainPiece:
        """Return the piece's blocks [begin, stop) with a head of up to ``most_head`` tokens."""
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
    """Blocks [first, stop) of a chain. ``nodes`` are their numbers in the table of keys."""

    __slots__ = ("first", "head", "id", "nodes", "parent", "records", "waiting")

    def __init__(self, segment_id: bytes, piece: ChainPiece) -> None:
        self.id = segment_id
        self.first = piece.first
        self.parent = piece.parent
        self.head = piece.head
        self.nodes = array("I")
        self.waiting: Tokens | None = _EMPTY  # head and blocks, until the finder holds them
        self.records: list[tuple[int, int]] = []  # in the file: (number, index of first block)

    @property
    def stop(self) -> int:
        """Index in the chain of the block after the last one."""
        return self.first + len(self.nodes)


class Chains:
    """Known blocks of one namespace, by key and by tokens. Not thread-safe; nothing blocks.

    ``index`` belongs to this namespace and is filled here. A block takes about 40 bytes and a
    segment 1 KB, in addition to the index. The table of keys is sized for ``expected_blocks``.
    Beyond that it doubles when it is full, which takes 1 s per million blocks.
    """

    def __init__(self, block_tokens: int, index: SegmentIndex, expected_blocks: int = 0) -> None:
        self.block_tokens = block_tokens
        self.index = index
        self.segments: dict[bytes, Segment] = {}
        self._keys = KeyTable(expected_blocks)
        self._owners: list[Segment | None] = []  # by node
        self._free: list[int] = []
        self._branches: dict[bytes, list[tuple[bytes, bytes]]] = {}
        """By the key of the block before a segment: sorted (packed tokens of first block, id)."""

    @property
    def nbytes(self) -> int:
        """Bytes of tokens, anchors and keys, without the Python objects of each segment. O(1)."""
        return self.index.nbytes + self._keys.nbytes + 8 * len(self._owners)

    def key(self, segment: Segment, block: int) -> bytes:
        """Return the prefix key of a block of the segment, given its index in the chain."""
        return self._keys.key(segment.nodes[block - segment.first])

    def num_tokens(self, segment: Segment) -> int:
        """Return how many tokens are kept for a segment, including its head."""
        return segment.head + len(segment.nodes) * self.block_tokens

    def token_start(self, segment: Segment) -> int:
        """Return the position in the chain of the segment's first token, including its head."""
        return segment.first * self.block_tokens - segment.head

    def tokens(self, segment: Segment) -> Tokens:
        """Return the tokens of head and blocks. The caller must not write to them."""
        return self.index.tokens(segment.id) if segment.waiting is None else segment.waiting

    # -- growing and shrinking ------------------------------------------------------------------

    def unknown(self, first: int, keys: Sequence[bytes], begin: int) -> list[tuple[int, int]]:
        """Return the runs [start, stop) of keys[begin:] that are not known.

        keys[i] is the key of block first + i. O(unknown blocks + segments), because chains that
        share a key share all blocks before it.
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
        """Add unknown blocks. Return their segment, and the part of the piece that is new.

        The blocks extend the segment that ends before them, which makes their head redundant. If
        there is none, they become a new segment named ``segment_id``. A record of a file may lack
        their head, because the segment before them had been cut when it was written.
        """
        segment = self._ending_before(piece)
        if segment is not None:
            piece = piece.part(0, len(piece.keys), 0)
        else:
            piece = self._headed(piece).part(0, len(piece.keys), self.index.min_tokens - 1)
            segment = self.segments[segment_id] = Segment(segment_id, piece)
            self._branch(segment, piece)
        self._register(segment, piece.keys)
        self._append(segment, piece.tokens)
        return segment, piece

    def cut(self, segment: Segment, blocks: int) -> None:
        """Forget all but the first ``blocks`` (at least one) blocks of a segment.

        The caller must handle the segment's records in the file.
        """
        self._release(segment, blocks)
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
        self._release(segment, 0)
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
        """Extend a match into segments that continue or branch off from its own.

        text[:length] must equal the segment's chain from token ``source`` on. The longest match of
        ``text`` on a chain with the same full blocks is found. Returns the segment that holds its
        last token, and its length. ``keep`` is called for every segment that is considered. It
        returns whether the segment is still stored, and may cut or forget it.
        """
        while length < len(text):
            block = (source + length) // self.block_tokens
            before = block * self.block_tokens - source
            if before < 0:  # the match lies within one block, so no other chain has more of it
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

    def _headed(self, piece: ChainPiece) -> ChainPiece:
        """Return the piece with all of its head that the segment it branches off from knows."""
        node = self._keys.get(piece.parent) if piece.first else None
        owner = self._owners[node] if node is not None else None
        if owner is None or piece.head >= self.index.min_tokens - 1:
            return piece
        before = self.tokens(owner)[: piece.first * self.block_tokens - self.token_start(owner)]
        if len(before) <= piece.head:
            return piece
        more = before[: len(before) - piece.head]
        return piece._replace(head=len(before), tokens=np.concatenate((more, piece.tokens)))

    def _branch(self, segment: Segment, piece: ChainPiece) -> None:
        if segment.first:
            block = piece.tokens[piece.head :][: self.block_tokens].tobytes()
            insort(self._branches.setdefault(segment.parent, []), (block, segment.id))

    def _first_block(self, segment: Segment) -> bytes:
        return self.tokens(segment)[segment.head :][: self.block_tokens].tobytes()

    def _register(self, segment: Segment, keys: Sequence[bytes]) -> None:
        """Register the keys of blocks that follow the segment's last block."""
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

    def _release(self, segment: Segment, blocks: int) -> None:
        """Release the nodes after the first ``blocks``."""
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
        """Return segments after ``parent``, among them one that shares most with ``text``.

        In a sorted list, the strings with the longest common prefix are next to the insertion
        point.
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
