"""Memory that the recording device knows, and the accesses to it that are not yet superseded.

Places are addresses. A page of the engine, a slot of the arena and a buffer are therefore the same
thing here, whatever view names them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvcore.memory.layout import KVView
from kvcore_devtools.gpu.clocks import Access, Clock, Spans

if TYPE_CHECKING:
    import torch

__all__ = ["NOTHING", "Memory", "Region", "Spans", "span", "spans_of", "tensor_spans", "together"]

NOTHING: Spans = np.zeros((0, 2), dtype=np.int64)


def span(address: int, nbytes: int) -> Spans:
    """Return one range."""
    return np.array([[address, address + nbytes]], dtype=np.int64)


def together(parts: Iterable[Spans]) -> Spans:
    """Return the union of ranges."""
    every = [part for part in parts if len(part)]
    if not every:
        return NOTHING
    if len(every) == len(every[0]) == 1:
        return every[0]
    spans = np.concatenate(every)
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    reach = np.maximum.accumulate(spans[:, 1])
    first = np.concatenate([[True], spans[1:, 0] > reach[:-1]])
    last = np.concatenate([np.flatnonzero(first)[1:] - 1, [len(spans) - 1]])
    return np.stack([spans[first, 0], reach[last]], axis=1)


def common(a: Spans, b: Spans) -> int | None:
    """Return the first address in both, or None."""
    if not len(a) or not len(b):
        return None
    if len(a) == len(b) == 1:
        (start, stop), (first, last) = a[0].tolist(), b[0].tolist()
        return max(start, first) if start < last and first < stop else None
    at = np.searchsorted(b[:, 1], a[:, 0], side="right")
    inside = at < len(b)
    hit = np.zeros(len(a), dtype=bool)
    hit[inside] = b[at[inside], 0] < a[inside, 1]
    if not hit.any():
        return None
    i = int(np.argmax(hit))
    return int(max(a[i, 0], b[at[i], 0]))


def within(a: Spans, b: Spans) -> bool:
    """Return True if all of ``a`` is in ``b``."""
    return outside(a, b) is None


def outside(a: Spans, b: Spans) -> int | None:
    """Return the first address of the first range of ``a`` that is not all in ``b``, or None."""
    if not len(a):
        return None
    if not len(b):
        return int(a[0, 0])
    if len(a) == len(b) == 1:
        (start, stop), (first, last) = a[0].tolist(), b[0].tolist()
        return None if first <= start and stop <= last else start if start < first else last
    at = np.searchsorted(b[:, 0], a[:, 0], side="right") - 1
    bad = (at < 0) | (a[:, 1] > b[at, 1])
    if not bad.any():
        return None
    i = int(np.argmax(bad))
    return int(a[i, 0] if at[i] < 0 else max(a[i, 0], b[at[i], 1]))


def spans_of(
    view: KVView,
    units: npt.NDArray[np.int64],
    layers: Sequence[int],
    unit_tokens: int,
    heads: range | None = None,
) -> Spans:
    """Return the bytes of units of a view. Negative units are left out."""
    layout = view.layout
    units = np.asarray(units, dtype=np.int64).ravel()
    units = units[units >= 0]
    tokens = (units[:, None] * unit_tokens + np.arange(unit_tokens)).ravel()
    page, token = np.divmod(tokens, layout.page_tokens)
    chosen = np.asarray(range(layout.kv_heads) if heads is None else heads, dtype=np.int64)
    parts = []
    for layer in layers:
        for plane in layout.planes[layer]:
            dims = np.array([plane.dim(i) for i in range(plane.head_dim)], dtype=np.int64)
            outer, inner = np.divmod(token, plane.token.inner)
            place = page * plane.page + outer * plane.token.stride
            place += inner * plane.token.inner_stride + plane.offset
            every = place[:, None, None] + (chosen * plane.head)[:, None] + dims
            start = every.ravel() * layout.itemsize + view.tensors[plane.tensor].data_ptr()
            parts.append(together([np.stack([start, start + layout.itemsize], axis=1)]))
    return together(parts)


def tensor_spans(tensor: torch.Tensor) -> Spans:
    """Return the bytes of a tensor, which may be a view with any strides that are not negative."""
    if not tensor.numel():
        return NOTHING
    if tensor.is_contiguous():
        return span(tensor.data_ptr(), tensor.nbytes)
    run, starts = tensor.itemsize, np.array([tensor.data_ptr()], dtype=np.int64)
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        step = stride * tensor.itemsize
        if size == 1 or not step:
            continue
        if step <= run and len(starts) == 1:
            run += step * (size - 1)
        else:
            starts = (starts[:, None] + np.arange(size, dtype=np.int64) * step).ravel()
    return together([np.stack([starts, starts + run], axis=1)])


@dataclass(eq=False)
class Region:
    """A range of memory with a name. ``place`` names an offset in it, for messages.

    ``reached`` is False while device memory is unmapped. The device reaches host memory where it
    is registered (`Memory.registered`); ``why`` says why it does not.
    """

    name: str
    start: int
    stop: int
    place: Callable[[int], str]
    is_host: bool
    reached: bool = True
    why: str = ""
    live: list[Access] = field(default_factory=list)


@dataclass(frozen=True)
class Conflict:
    """Two accesses of one place, of which one writes, with no order between them."""

    place: str
    earlier: Access
    later: Access


class Memory:
    """All known regions, and the ranges of host memory that are registered. Not thread-safe."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self._regions: list[Region] = []
        self._starts: list[int] = []
        self._known: Spans | None = None

    def add(self, region: Region) -> Region:
        """Know a region from now on. It replaces those that it overlaps."""
        kept = [
            one for one in self._regions if one.stop <= region.start or one.start >= region.stop
        ]
        self._regions = sorted([*kept, region], key=lambda one: one.start)
        self._starts = [one.start for one in self._regions]
        self._known = None
        return region

    def at(self, address: int) -> Region | None:
        """Return the region of an address."""
        i = bisect_right(self._starts, address) - 1
        return self._regions[i] if i >= 0 and address < self._regions[i].stop else None

    def parts(self, spans: Spans) -> list[tuple[Region, Spans]]:
        """Return the parts of ``spans`` by region."""
        found = []
        if not len(spans):
            return []
        if len(spans) == 1:
            region = self.at(int(spans[0, 0]))
            if region is not None and spans[0, 1] <= region.stop:
                return [(region, spans)]
        first = max(bisect_right(self._starts, int(spans[0, 0])) - 1, 0)
        for region in self._regions[first : bisect_right(self._starts, int(spans[-1, 1]) - 1)]:
            inside = spans[(spans[:, 1] > region.start) & (spans[:, 0] < region.stop)]
            if len(inside):
                clipped = np.clip(inside, region.start, region.stop)
                found.append((region, clipped))
        return found

    def unknown(self, spans: Spans) -> int | None:
        """Return an address of ``spans`` in no region, or None."""
        if len(spans) == 1:
            region = self.at(int(spans[0, 0]))
            if region is not None and spans[0, 1] <= region.stop:
                return None
        if self._known is None:
            self._known = together(span(one.start, one.stop - one.start) for one in self._regions)
        return outside(spans, self._known)

    def unreached(self, region: Region, spans: Spans) -> int | None:
        """Return an address of ``spans``, all in ``region``, that the device cannot touch."""
        if not region.is_host:
            return None if region.reached else int(spans[0, 0])
        return outside(spans, together(span(*one) for one in self.registered.items()))

    def touch(self, access: Access, clock: Clock) -> list[Conflict]:
        """Record an access, and return the conflicts with earlier ones, at most one a region."""
        conflicts = []
        for region, spans in self.parts(access.spans):
            keep = []
            clash: Conflict | None = None
            for old in region.live:
                ordered = old.before(clock)
                if not ordered and (old.writes or access.writes) and clash is None:
                    at = common(old.spans, spans)
                    if at is not None:
                        clash = Conflict(region.place(at - region.start), old, access)
                # What is ordered after the new access is ordered after the old one, too.
                covers = access.writes or not old.writes
                replaced = ordered and covers and within(old.spans, spans)
                if not replaced:
                    keep.append(old)
            keep.append(
                Access(
                    access.actor, access.step, access.who, access.what, access.where,
                    access.writes, spans,
                )
            )  # fmt: skip
            region.live = keep
            if clash is not None:
                conflicts.append(clash)
        return conflicts

    def in_use(self, spans: Spans, clock: Clock) -> list[Conflict]:
        """Return the accesses of ``spans`` that had not ended for whoever is at ``clock``."""
        found = []
        for region, inside in self.parts(spans):
            for old in region.live:
                at = common(old.spans, inside)
                if at is not None and not old.before(clock):
                    found.append(Conflict(region.place(at - region.start), old, old))
        return found
