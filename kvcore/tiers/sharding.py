"""Parts of a block: any rank count reads what any other rank count wrote.

            heads  0     2     4      Two tensor-parallel ranks in each of two pipeline
    layers  0      ┌─────┬─────┐      stages wrote A, B, C and D. A rank that holds heads
                   │  A ┌┼────┐│      1..4 of layers 1..4 reads the overlap of each with
            2      ├────┼┼────┼┤      its own part, and puts the bytes where they belong.
                   │  C └┼────┘│
            4      └─────┴─────┘

A part is stored as a block of its own heads and layers. In the canonical order of bytes, a range of
heads is one run of bytes in each layer. Disk and remote stores both use this module.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, islice
from typing import NamedTuple

from kvcore.memory.buffers import Buffers
from kvcore.model.parts import Part, evenly
from kvcore.model.shape import BlockShape
from kvcore.tiers.base import SlotError

__all__ = ["Run", "cover", "is_tiling", "places", "runs", "splits_of"]


class Run(NamedTuple):
    """A run of bytes: at offset ``source`` in the stored part, ``target`` in the wanted part."""

    source: int
    target: int
    nbytes: int


def cover(parts: Sequence[Part], wanted: Part) -> list[int]:
    """Return the numbers of the ``parts`` that together hold each element of ``wanted`` once.

    Of equal parts (ranks with the same heads) only the first counts. Raises SlotError if the others
    overlap, or do not hold all of ``wanted``.
    """
    first = {part: number for number, part in reversed(list(enumerate(parts)))}
    chosen = {number: part.overlap(wanted) for part, number in first.items()}
    found = {number: part for number, part in chosen.items() if part is not None}
    if not _tile(list(found.values()), wanted.size):
        raise SlotError(
            f"no shards hold KV heads {wanted.heads} of layers {wanted.layers} once each: the "
            f"store has {sorted(first)}"
        )
    return sorted(found)


def is_tiling(parts: Sequence[Part], shape: BlockShape) -> bool:
    """Return True if ``parts`` hold each element of a block of ``shape`` exactly once."""
    whole = shape.layers * shape.kv_heads
    return all(part.within(shape) for part in parts) and _tile(parts, whole)


def splits_of(parts: Iterable[Part], shape: BlockShape, most: int) -> Iterator[tuple[Part, ...]]:
    """Yield the ways in which a deployment may have split blocks of ``shape`` into ``parts``.

    A way is a sequence of pipeline stages, in each of which the ranks divide the heads `evenly`.
    Ways with few ranks come first. At most ``most`` ways are yielded.
    """
    there = set(parts)
    stages = sorted({part.layers for part in there}, key=lambda layers: -layers[1])

    def every() -> Iterator[tuple[Part, ...]]:
        for ranks in range(1, shape.kv_heads + 1):
            heads = evenly(shape.kv_heads, ranks)
            whole = [n for n in stages if all(Part(h, n) in there for h in heads)]
            for way in _chains(whole, shape.layers):
                yield tuple(sorted(Part(h, n) for n in way for h in heads))

    return islice(every(), most)


def _chains(pieces: Sequence[tuple[int, int]], size: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield every chain of ``pieces`` that covers [0, size) without gap or overlap.

    Pieces from which the end cannot be reached are never tried.
    """
    reaching = {size}  # the starts from which the end can be reached
    for start, stop in sorted(pieces, reverse=True):
        if start < stop and stop in reaching:
            reaching.add(start)

    def onwards(at: int) -> Iterator[tuple[tuple[int, int], ...]]:
        if at == size:
            yield ()
        for start, stop in pieces:
            if start == at and start < stop and stop in reaching:
                yield from (((start, stop), *rest) for rest in onwards(stop))

    return onwards(0)


def _tile(parts: Sequence[Part], size: int) -> bool:
    """Return True if ``parts`` do not overlap, and have ``size`` elements together."""
    apart = all(
        one.overlap(other) is None for i, one in enumerate(parts) for other in parts[i + 1 :]
    )
    return apart and sum(part.size for part in parts) == size


def runs(held: Part, wanted: Part, head_nbytes: int) -> list[Run]:
    """Return the bytes that ``held`` and ``wanted`` share, as the longest runs, in order."""
    common = held.overlap(wanted)
    if common is None:
        return []
    (first, last), found = common.heads, list[Run]()
    nbytes = (last - first) * head_nbytes
    for layer in range(*common.layers):
        run = Run(
            _offset(held, layer, first) * head_nbytes,
            _offset(wanted, layer, first) * head_nbytes,
            nbytes,
        )
        before = found[-1] if found else None
        if before is not None and _follows(before, run):
            found[-1] = before._replace(nbytes=before.nbytes + nbytes)
        else:
            found.append(run)
    return found


def _offset(part: Part, layer: int, head: int) -> int:
    """Return the number of heads, over all layers, that are stored before this one."""
    (first, last), (top, _) = part
    return (layer - top) * (last - first) + head - first


def _follows(before: Run, run: Run) -> bool:
    source, target, nbytes = before
    return (source + nbytes, target + nbytes) == (run.source, run.target)


def places(runs: Sequence[Run], buffers: Buffers) -> Iterator[tuple[int, memoryview]]:
    """Yield (offset in the stored part, the memory for the bytes from there on), in order.

    ``buffers`` hold the wanted part, and may be longer. A run that crosses from one buffer into the
    next is split.
    """
    flat = [buffer.cast("B") for buffer in buffers]
    starts = [0, *accumulate(len(buffer) for buffer in flat)]
    for source, target, nbytes in runs:
        stop = target + nbytes
        at = bisect_right(starts, target) - 1
        while target < stop:
            piece = flat[at][target - starts[at] : stop - starts[at]]
            yield source, piece
            source, target, at = source + len(piece), target + len(piece), at + 1
