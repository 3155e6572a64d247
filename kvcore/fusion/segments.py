"""The tokens of stored blocks, and the search for runs of them anywhere in a new prompt.

    stored    prompt A   [b0][b1][b2][b3][b4]        tiers know a block by its prefix key alone
                              .....:.....
    asked     prompt C   ..........:.....:......     Reusable: these tokens, computed at 19 in A,
                                                     stored in the blocks up to b3

Tiers hold prefix-closed chains, so a run is still stored if its last block is. This is checked by
the block's key when the run is looked up; evictions are not reported to this module.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from kvcore.errors import ConfigError, FormatError
from kvcore.fusion._anchors import Tokens
from kvcore.fusion._chains import ChainPiece, Chains, Segment
from kvcore.fusion._segment_file import SegmentFile, SegmentRecord
from kvcore.fusion.find import MAX_CHECKS, MAX_TWINS, SegmentIndex, SegmentMatch, as_array
from kvcore.model.keys import KEY_BYTES, ROOT_PARENT

__all__ = ["Reusable", "SegmentBook", "Segments"]

_log = logging.getLogger("kvcore.fusion.segments")


class Reusable(NamedTuple):
    """A run of tokens of a prompt whose KV is stored, computed at any position of another prompt.

    Args:
        prompt_start: position of the first token in the given prompt.
        length: number of tokens.
        source_start: position of the first token when its KV was computed.
        last_key: prefix key of the block that holds the last token: block ``(source_start +
            length - 1) // block_tokens`` of its chain.
    """

    prompt_start: int
    length: int
    source_start: int
    last_key: bytes


class SegmentBook(Protocol):
    """The methods of `Segments` that a leader uses, on its own segments or on a server's."""

    def add(
        self, namespace: bytes, keys: Sequence[bytes], start: int, tokens: Sequence[int]
    ) -> None: ...

    def find(
        self,
        namespace: bytes,
        tokens: Sequence[int],
        held: Callable[[bytes], bool],
        start: int = 0,
        stop: int | None = None,
    ) -> list[Reusable]: ...

    def clear(self, namespace: bytes | None = None) -> None: ...

    def close(self) -> None: ...


class Segments:
    """The tokens of stored blocks, by namespace. Leader thread only.

    Only the constructor and `close` do I/O or wait. With ``path``, a file in an existing folder, a
    background thread writes added tokens to that file, and the constructor reads it (about 10 us
    per block); with a ``key``, only records that were made with it are read. If the file cannot be
    read or written, a line is logged and the tokens are lost at a restart; nothing else is
    affected. The file takes 4 bytes per token, 16 per block and 70 per `add`. Before it is
    compacted it takes up to twice that, plus 1 MiB.

    ``min_tokens`` is the shortest run that counts. ``max_tokens`` limits the tokens of all
    namespaces. Beyond it, the segments that were extended or found least recently are forgotten. A
    token takes 4 bytes plus 1 for its anchors, a block about 40 bytes, and a segment 1 KB. A
    segment is the part of a prompt that it does not share with earlier prompts.

    Only tokens are compared. If a placeholder stands for other content (an image), equal tokens do
    not mean equal KV, so such prompts must neither be added nor looked up.

    ``max_twins`` and ``max_checks`` are the bounds of `SegmentIndex`.
    """

    def __init__(
        self,
        block_tokens: int,
        *,
        min_tokens: int = 64,
        max_tokens: int = 1 << 26,
        path: Path | None = None,
        key: bytes = b"",
        max_twins: int = MAX_TWINS,
        max_checks: int = MAX_CHECKS,
    ) -> None:
        for name, value in (("block_tokens", block_tokens), ("max_tokens", max_tokens)):
            if value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        self.block_tokens = block_tokens
        self.min_tokens = min_tokens
        self.max_tokens = max_tokens
        self._bounds = {"max_twins": max_twins, "max_checks": max_checks}
        self._new_index()  # raises now if a bound is out of range
        self._chains: dict[bytes, Chains] = {}
        self._used: dict[bytes, bytes] = {}  # segment id -> namespace, least recently used first
        self._num_tokens = 0
        self._last_id = 0
        self._file = _open(path, block_tokens, key) if path is not None else None
        if self._file is not None:
            for kept in self._file.records():
                self._restore(self._file, kept)
            self._file.start()

    def __len__(self) -> int:
        """Return the number of segments."""
        return len(self._used)

    @property
    def num_tokens(self) -> int:
        """Number of tokens; those that two segments share count in both."""
        return self._num_tokens

    @property
    def nbytes(self) -> int:
        """Bytes of memory, without Python objects (about 1 KB per segment)."""
        return sum(chains.nbytes for chains in self._chains.values())

    @property
    def dropped(self) -> int:
        """Records that were not written because the queue was full or the disk failed."""
        return self._file.dropped if self._file is not None else 0

    @property
    def corrupt(self) -> int:
        """Damaged records that were skipped when the file was read."""
        return self._file.corrupt if self._file is not None else 0

    def add(
        self,
        namespace: bytes,
        keys: Sequence[bytes],
        start: int,
        tokens: Sequence[int],
        first: int = 0,
    ) -> None:
        """Add blocks [start, len(keys)) of a chain, which are stored from now on.

        ``tokens`` are the tokens of the whole prompt, at least as many as the keys cover. With
        ``first``, keys and tokens begin with that block of the chain, and ``start`` is at least 1.
        Call this when the blocks are published, because `find` forgets blocks that are not held.

        This takes about 5 us for each unknown block, and almost no time for known ones. Whenever
        the finder's table doubles, it takes 0.1 s per million anchors (about one for 32 tokens).
        """
        covered = len(keys) * self.block_tokens
        if not min(first, 1) <= start <= len(keys) or len(tokens) < covered:
            raise ConfigError(
                f"blocks [{start}, {len(keys)}) of {self.block_tokens} tokens with {len(tokens)} "
                f"tokens: give a start within the keys, and the prompt's tokens up to {covered}"
            )
        chains = self._chains_of(namespace)
        runs = chains.unknown(first, keys, start)
        if not runs:
            return
        origin = runs[0][0]
        piece = self._piece(keys, origin, tokens)._replace(first=first + origin)
        for begin, stop in runs:
            part = piece.part(begin - origin, stop - origin, self.min_tokens - 1)
            self._enter(namespace, chains, part)
        self._keep_bound()

    def find(
        self,
        namespace: bytes,
        tokens: Sequence[int],
        held: Callable[[bytes], bool],
        start: int = 0,
        stop: int | None = None,
    ) -> list[Reusable]:
        """Find stored runs of at least ``min_tokens`` tokens within tokens[start:stop].

        The runs are in order and do not overlap; the rest contains no further one. ``held`` returns
        whether the block of a key is in a tier. Blocks that are not are forgotten. A run that
        continues in another segment of its chain is returned as one run.
        """
        stop = len(tokens) if stop is None else min(stop, len(tokens))
        if start < 0:
            raise ConfigError(
                f"start is {start}: give the position of the first token to search, 0 or more"
            )
        chains = self._chains.get(namespace)
        if chains is None or stop - start < self.min_tokens:
            return []

        def keep(segment: Segment) -> bool:
            return self._keep(namespace, chains, segment, held)

        search = chains.index.search(tokens[start:stop])
        for name in search.candidates:
            keep(chains.segments[name])
        found = search.cover()
        ends = [*(match.prompt_start for match in found), stop - start][1:]
        return [
            self._reusable(namespace, chains, match, search.prompt[:end], keep, start)
            for match, end in zip(found, ends, strict=True)
        ]

    def clear(self, namespace: bytes | None = None) -> None:
        """Forget everything, or one namespace. The file follows in the background."""
        dead: list[int] = []
        for name in list(self._chains) if namespace is None else [namespace]:
            chains = self._chains.pop(name, None)
            for segment in chains.segments.values() if chains is not None else ():
                assert chains is not None
                del self._used[segment.id]
                self._num_tokens -= chains.num_tokens(segment)
                dead += (number for number, _ in segment.records)
        if self._file is not None:
            self._file.forget(dead, erase=True)

    def close(self) -> None:
        """Write what is queued and close the file. Blocks. Idempotent."""
        if self._file is not None:
            self._file.close()

    def check_integrity(self) -> None:
        """Assert that all parts are consistent. Slow."""
        held = {}
        for namespace, chains in self._chains.items():
            assert chains.segments, "a namespace without segments is forgotten"
            chains.check_integrity()
            held.update(dict.fromkeys(chains.segments, namespace))
        assert held == self._used
        assert len(held) == sum(len(chains.segments) for chains in self._chains.values())
        assert self._num_tokens <= self.max_tokens
        assert self._num_tokens == sum(
            chains.num_tokens(segment)
            for chains in self._chains.values()
            for segment in chains.segments.values()
        )

    # -- inside ---------------------------------------------------------------------------------

    def _new_index(self) -> SegmentIndex:
        return SegmentIndex(self.min_tokens, **self._bounds)

    def _piece(self, keys: Sequence[bytes], first: int, tokens: Sequence[int]) -> ChainPiece:
        """Return the piece of a chain from block ``first`` on, with as much head as a search needs.

        The head is the tokens before the piece, at most one fewer than the shortest match.
        """
        if any(len(key) != KEY_BYTES for key in keys[first:]):
            raise FormatError(f"keys are {KEY_BYTES} bytes long: make them with KeyChain")
        begin = first * self.block_tokens
        head = min(begin, self.min_tokens - 1)
        packed = as_array(tokens[begin - head : len(keys) * self.block_tokens])
        return ChainPiece(
            first, keys[first - 1] if first else ROOT_PARENT, keys[first:], head, packed
        )

    def _chains_of(self, namespace: bytes) -> Chains:
        """Return a namespace's chains, or new ones that are kept once they have a segment.

        There is nearly always only one namespace, so the first one is sized for all blocks.
        """
        chains = self._chains.get(namespace)
        if chains is None:
            expected = 0 if self._chains else self.max_tokens // self.block_tokens
            chains = Chains(self.block_tokens, self._new_index(), expected)
        return chains

    def _enter(
        self, namespace: bytes, chains: Chains, piece: ChainPiece, record: int | None = None
    ) -> None:
        """Add unknown blocks, and write a record if ``record`` does not name theirs."""
        self._chains[namespace] = chains
        self._last_id += 1
        segment, new = chains.enter(piece, self._last_id.to_bytes(8, "big"))
        self._num_tokens += len(new.tokens)
        self._use(namespace, segment)
        if self._file is not None:
            record = self._file.append(namespace, new) if record is None else record
            segment.records.append((record, new.first))

    def _restore(self, file: SegmentFile, kept: SegmentRecord) -> None:
        """Add those blocks of a record of the file that are not known yet."""
        number, namespace, piece = kept
        chains = self._chains_of(namespace)
        runs = chains.unknown(piece.first, piece.keys, 0)
        whole = runs == [(0, len(piece.keys))]
        for begin, stop in runs:
            part = piece.part(begin, stop, self.min_tokens - 1)
            self._enter(namespace, chains, part, number if whole else None)
        if not whole:
            file.forget([number])
        self._keep_bound()

    def _keep_bound(self) -> None:
        while self._num_tokens > self.max_tokens:
            self._forget_oldest()

    def _use(self, namespace: bytes, segment: Segment) -> None:
        """Mark a segment as the most recently used one."""
        self._used.pop(segment.id, None)
        self._used[segment.id] = namespace

    def _keep(
        self,
        namespace: bytes,
        chains: Chains,
        segment: Segment,
        held: Callable[[bytes], bool],
    ) -> bool:
        """Forget a segment's blocks that are no longer held. Return True if any are left."""
        if held(chains.key(segment, segment.stop - 1)):
            return True
        low, high = segment.first, segment.stop - 1  # blocks before low are held, high is not
        while low < high:
            middle = (low + high) // 2
            if held(chains.key(segment, middle)):
                low = middle + 1
            else:
                high = middle
        if low == segment.first:
            self._forget(namespace, chains, segment)
            return False
        self._num_tokens -= (segment.stop - low) * self.block_tokens
        chains.cut(segment, low - segment.first)
        self._forget_records(segment, low)
        return True

    def _forget(self, namespace: bytes, chains: Chains, segment: Segment) -> None:
        self._num_tokens -= chains.num_tokens(segment)
        del self._used[segment.id]
        chains.forget(segment)
        self._forget_records(segment, segment.first)
        if not chains.segments:
            del self._chains[namespace]

    def _forget_records(self, segment: Segment, block: int) -> None:
        """Forget the records that begin at this block of the chain or after it."""
        if self._file is not None:
            self._file.forget(number for number, first in segment.records if first >= block)
            segment.records = [record for record in segment.records if record[1] < block]

    def _forget_oldest(self) -> None:
        name, namespace = next(iter(self._used.items()))
        chains = self._chains[namespace]
        self._forget(namespace, chains, chains.segments[name])

    def _reusable(
        self,
        namespace: bytes,
        chains: Chains,
        match: SegmentMatch,
        prompt: Tokens,
        keep: Callable[[Segment], bool],
        start: int,
    ) -> Reusable:
        """Extend a match as far as the chain and ``prompt`` agree."""
        first = chains.segments[match.segment_id]
        source = chains.token_start(first) + match.segment_start
        text = prompt[match.prompt_start :]
        last, length = chains.follow(first, source, match.length, text, keep)
        self._use(namespace, first)
        self._use(namespace, last)
        block = (source + length - 1) // self.block_tokens
        return Reusable(start + match.prompt_start, length, source, chains.key(last, block))


def _open(path: Path, block_tokens: int, key: bytes) -> SegmentFile | None:
    """Open the file; log a warning and return None if that fails."""
    try:
        return SegmentFile(path, block_tokens, key=key)
    except (OSError, FormatError) as error:
        _log.warning("tokens of stored blocks are not kept in %s: %s", path, error)
        return None
