"""Copies between a GPU's memory and host memory, each by the way that suits it.

    ENGINE   the copy engine moves every contiguous piece; the GPU's cores do nothing
    STAGED   pages ◀─ gather / scatter, at the memory's speed ─▶ staging ◀─ copy engine ─▶ blocks
             of two slots of staging, one is gathered or scattered while the other is on the link
    KERNEL   a kernel of few programs reads registered host memory itself

Most engines keep the heads of a token together, where a canonical block keeps the tokens of a head
together. A contiguous piece is then one row of a head, a few hundred bytes. The copy engine takes
over a microsecond for each piece, in which the link could move 70 KiB, so these copies are staged:
a block is one piece there. The kernel is for small loads, which wait for latency alone.

ENGINE and STAGED serve host memory that is registered or not, on CUDA and ROCm.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from kvcore.errors import UnsupportedError
from kvcore.memory.copy.base import Copy, DeviceOps, HeadRange, Units
from kvcore.memory.copy.cache import ViewCache
from kvcore.memory.copy.pieces import Pieces, run_bytes, unit_pieces
from kvcore.memory.device import Device, Event, device_of
from kvcore.memory.layout import Axis, KVLayout, KVView, Plane

if TYPE_CHECKING:
    import torch

__all__ = ["LinkOps", "Way"]

# Measured on an H200 whose link (PCIe 5, 16 lanes) moves 55 GB/s: docs/kernels-link.md.

PIECE_BYTES = 64 << 10
"""Mean piece from which the copy engine takes a batch as it is. Of the link's rate it reached 39%
with pieces of 28 KiB, 60% with 64 KiB and 86% with 256 KiB. A staged copy reached 75% to 82%, but
55% to 64% beside a prefill, and it takes cores."""
CALL_BYTES = 256 << 10
"""The same where every piece is a call of its own (unregistered memory, ROCm): about 5 us each."""
FEW_PIECES = 16
"""Below so many pieces the copy engine is always taken: two launches of a staged copy cost more."""
SMALL_LOAD = 1 << 20
"""Bytes up to which a load goes by kernel. It saves a launch and an event, 10 to 15 us, in which
the link moves about as much. Not measured yet."""
SHORTEST_RUN = 1 << 10
"""Bytes below which runs are not counted up into pieces: there would be too many to be worth it."""
SLOTS = 2
"""Slots of the staging of each direction. While one is on the link, the next is gathered."""
SLOT_BYTES = (64 << 20, 16 << 20, 4 << 20, 1 << 20)
"""Bytes of a slot, the largest of these that the device has room for.

A slot of 64 MiB takes 1.2 ms on the link and 40 us in a kernel. A prefill's matrix products occupy
every core for up to 1.5 ms each, and no priority lets a kernel in before one has ended. A smaller
slot would leave the link idle meanwhile, and cost the host more launches.
"""
_ALIGNMENT = 256


class Way(str, Enum):
    """How bytes go over the link."""

    ENGINE = "engine"
    STAGED = "staged"
    KERNEL = "kernel"


class _Link(NamedTuple):
    """The two ends of a copy. ``registered``: the device reaches all of the host memory."""

    device: Device
    to_host: bool
    registered: bool


class _Staging:
    """Device memory that one copy after the other uses, whatever their streams are.

    It has two slots. The kernels of a copy run on a stream of the staging, its copies over the
    link on the stream that is current:

        kernels  | gather 0 | gather 1 |            | gather 0 |  ...
        current             | link 0         | link 1         | link 0 ...

    A slot is reused in the order of the streams. The host does not wait.

    ``slots`` were allocated on the current stream, whose work so far may still use what lay there
    before.
    """

    def __init__(self, device: Device, to_host: bool, slots: Sequence[torch.Tensor]) -> None:
        self.slots = slots
        self._device = device
        self._to_host = to_host
        self._lock = threading.Lock()
        self._kernels = device.stream()
        self._free: list[Event] = [device.current_stream().record()] * len(slots)
        self._next = 0

    @property
    def room(self) -> int:
        """Bytes of a slot."""
        return len(self.slots[0])

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Issue the turns of one copy in this block, on one stream."""
        with self._lock:
            current = self._device.current_stream()
            self._kernels.follow(current.record())
            try:
                yield
            finally:
                current.follow(self._kernels.record())
                for slot in self.slots:
                    current.hold(slot)
                    self._kernels.hold(slot)

    @contextmanager
    def turn(self) -> Iterator[int]:
        """Fill a slot in this block, and read it: yield its number."""
        number = self._next
        self._next = (number + 1) % len(self.slots)
        current = self._device.current_stream()
        fills, reads = (self._kernels, current) if self._to_host else (current, self._kernels)
        if not self._free[number].passed():
            fills.follow(self._free[number])
        try:
            yield number
        except BaseException:
            current.follow(self._kernels.record())
            self._free[number] = current.record()
            raise
        self._free[number] = reads.record()

    @contextmanager
    def kernels(self) -> Iterator[None]:
        """Issue kernels in this block: gathers before, scatters after what the link moves."""
        current = self._device.current_stream()
        if not self._to_host:
            self._kernels.follow(current.record())
        with self._kernels.issuing():
            yield
        if self._to_host:
            current.follow(self._kernels.record())


class LinkOps(DeviceOps):
    """Copies over the link between a GPU and the host, and within the GPU's memory.

    ``on_device`` copies within the GPU's memory (torch's index operations if None). ``over_link``
    copies from registered host memory by a kernel. ``way`` replaces the choice for every copy over
    the link, for tests and measurements.
    """

    name: ClassVar[str] = "link"
    priority: ClassVar[int] = 5

    def __init__(
        self,
        on_device: DeviceOps | None = None,
        over_link: DeviceOps | None = None,
        way: Way | None = None,
    ) -> None:
        from kvcore.memory.copy.reference import ReferenceOps

        self._on_device = on_device or ReferenceOps()
        self._over_link = over_link
        self._way = way
        self._views = ViewCache()
        self._stagings: dict[tuple[torch.device, bool], _Staging] = {}
        self._lock = threading.Lock()

    def supports(self, src: KVView, dst: KVView) -> bool:
        """Return True if a GPU holds one side, and that GPU or the host all of the other."""
        places = self._place(src), self._place(dst)
        devices = {place for place in places if place is not None and place.type != "cpu"}
        if None in places or len(devices) != 1:
            return False
        try:
            return device_of(devices.pop()).queues
        except UnsupportedError:
            return False

    def prepare(self, pages: KVView, blocks: KVView, unit_tokens: int) -> None:
        """Allocate the staging for both directions, and prepare the kernels.

        Raises torch.OutOfMemoryError if the device has no room for the smallest staging.
        """
        link = self._link(pages, blocks)
        if link is None:
            self._on_device.prepare(pages, blocks, unit_tokens)
            return
        layers = tuple(range(blocks.layout.layers))
        heads = HeadRange(0, 0, blocks.layout.kv_heads)
        with link.device.current():
            for to_host in (True, False):
                staging = self._staging(link.device, to_host)
                for part, some in _parts(blocks.layout, layers, heads, staging.room):
                    for view in self._staged_views(staging, blocks, part, some.size):
                        self._on_device.prepare(pages, view, unit_tokens)
            if self._over_link is not None and link.registered:
                self._over_link.prepare(pages, blocks, unit_tokens)

    def copy(self, copy: Copy) -> None:
        one = copy.wanted()._replace(layers=tuple(copy.layers))
        if one.is_empty:
            return
        link = self._link(one.src, one.dst)
        if link is None:
            self._on_device.copy(one)
            return
        with link.device.current():
            self._copy_by(self._way or self.choose(one, link), one, link)

    def choose(self, one: Copy, link: _Link) -> Way:
        """Return the way for a copy, from its size, its pieces, its direction and the device."""
        fixed = one.layers, one.unit_tokens, one.heads
        piece = run_bytes(one.src, one.dst, *fixed)
        if piece >= SHORTEST_RUN:
            piece = unit_pieces(one.src, one.dst, *fixed).mean
        nbytes = len(one.src_units) * _unit_bytes(one)
        enough = PIECE_BYTES if link.registered else CALL_BYTES
        if piece >= enough or nbytes < FEW_PIECES * piece:
            return Way.ENGINE
        by_kernel = self._over_link is not None and link.registered and not link.to_host
        return Way.KERNEL if by_kernel and nbytes <= SMALL_LOAD else Way.STAGED

    def _copy_by(self, way: Way, one: Copy, link: _Link) -> None:
        if way is Way.KERNEL:
            assert self._over_link is not None
            self._over_link.copy(one)
        elif way is Way.STAGED:
            self._copy_staged(one, link)
        else:
            pieces = unit_pieces(one.src, one.dst, one.layers, one.unit_tokens, one.heads)
            _copy_pieces(link, pieces.of(one.src_units, one.dst_units))

    def _copy_staged(self, one: Copy, link: _Link) -> None:
        """Gather into the staging and copy blocks out of it, or the other way round, in turns."""
        staging = self._staging(link.device, link.to_host)
        host = one.dst if link.to_host else one.src
        parts = _parts(host.layout, one.layers, one.heads, staging.room)
        with staging.taken():
            for layers, heads in parts:
                part = one._replace(layers=layers, heads=heads)
                staged = self._staged_views(staging, host, layers, heads.size)
                most = staged[0].layout.num_pages
                if not most:  # a head's tokens exceed the staging
                    self._copy_by(Way.ENGINE, part, link)
                    continue
                for some in _turns(part, link.to_host, most):
                    with staging.turn() as slot:
                        self._take_turn(some, staged[slot], link, staging)

    def _take_turn(self, one: Copy, staged: KVView, link: _Link, staging: _Staging) -> None:
        """Copy through a slot of the staging; the host's pages of this copy fit it."""
        host, units = (one.dst, one.dst_units) if link.to_host else (one.src, one.src_units)
        tokens, span = one.unit_tokens, one.heads
        per_page = host.layout.page_tokens // tokens
        pages, index = np.unique(units // per_page, return_inverse=True)
        places = index * per_page + units % per_page
        start = span.dst if link.to_host else span.src
        if link.to_host:
            gather = HeadRange(span.src, 0, span.size)
            with staging.kernels():
                self._on_device.copy(one._replace(dst=staged, dst_units=places, heads=gather))
        every = not link.to_host
        for unit, there, here in _whole_pages(units, places, pages, per_page, tokens, every):
            if link.to_host:
                found = unit_pieces(
                    staged, host, one.layers, unit, HeadRange(0, start, span.size)
                ).of(here, there)
            else:
                found = unit_pieces(
                    host, staged, one.layers, unit, HeadRange(start, 0, span.size)
                ).of(there, here)
            _copy_pieces(link, found)
        if not link.to_host:
            scatter = HeadRange(0, span.dst, span.size)
            with staging.kernels():
                self._on_device.copy(one._replace(src=staged, src_units=places, heads=scatter))

    def _link(self, src: KVView, dst: KVView) -> _Link | None:
        """Return the link that a copy goes over, or None if one device holds both sides."""
        place, other = self._place(src), self._place(dst)
        if place == other or place is None or other is None:
            return None
        to_host = other.type == "cpu"
        device = device_of(place if to_host else other)
        host = dst if to_host else src
        return _Link(device, to_host, all(map(device.reaches, host.tensors)))

    def _place(self, view: KVView) -> torch.device | None:
        """Return the device that holds all of a view, or None if there are several."""

        def find() -> torch.device | None:
            devices = {tensor.device for tensor in view.tensors}
            return devices.pop() if len(devices) == 1 else None

        return self._views.get((view,), "place", find)

    def _staging(self, device: Device, to_host: bool) -> _Staging:
        with self._lock:
            found = self._stagings.get((device.name, to_host))
            if found is None:
                found = _Staging(device, to_host, _allocate(device))
                self._stagings[device.name, to_host] = found
            return found

    def _staged_views(
        self, staging: _Staging, host: KVView, layers: Sequence[int], heads: int
    ) -> list[KVView]:
        """Return each slot as pages of the same tokens as the host's, for some layers."""
        import torch

        def make() -> list[KVView]:
            layout = _staged_layout(host.layout, layers, heads, staging.room)
            dtype = getattr(torch, host.layout.dtype)
            return [KVView(layout, [slot.view(dtype)]) for slot in staging.slots]

        return self._views.get((host,), (id(staging), layers, heads), make)


def _copy_pieces(link: _Link, pieces: Pieces) -> None:
    link.device.copy_batch(*pieces, registered=link.registered)


def _allocate(device: Device) -> list[torch.Tensor]:
    """Allocate the slots of a staging, smaller ones if there is little room."""
    import torch

    for nbytes in SLOT_BYTES:
        with suppress(torch.OutOfMemoryError):
            return [device.allocate(nbytes) for _ in range(SLOTS)]
    return [device.allocate(min(SLOT_BYTES)) for _ in range(SLOTS)]


def _unit_bytes(one: Copy) -> int:
    layout = one.src.layout
    width = sum(plane.head_dim for layer in one.layers for plane in layout.planes[layer])
    return width * one.heads.size * one.unit_tokens * layout.itemsize


def _layer_bytes(layout: KVLayout, layer: int) -> int:
    """Return the bytes of one head of a page."""
    width = sum(plane.head_dim for plane in layout.planes[layer])
    return width * layout.page_tokens * layout.itemsize


def _parts(
    layout: KVLayout, layers: Sequence[int], heads: HeadRange, room: int
) -> Iterator[tuple[Sequence[int], HeadRange]]:
    """Cut layers, and heads if need be, so that a page of each part has at most ``room`` bytes."""
    room -= room % _ALIGNMENT
    widest = max(_layer_bytes(layout, layer) for layer in layers)
    most = min(heads.size, max(1, room // widest))
    for first in range(0, heads.size, most):
        size = min(most, heads.size - first)
        span = HeadRange(heads.src + first, heads.dst + first, size)
        count = max(1, room // (size * widest))
        for at in range(0, len(layers), count):
            yield layers[at : at + count], span


def _turns(one: Copy, to_host: bool, most: int) -> Iterator[Copy]:
    """Cut a copy so that each has at most ``most`` pages of the host."""
    host, units = (one.dst, one.dst_units) if to_host else (one.src, one.src_units)
    page = units // (host.layout.page_tokens // one.unit_tokens)
    pages = np.unique(page)
    if len(pages) <= most:
        yield one
        return
    turn = np.searchsorted(pages, page) // most
    for number in range(-(-len(pages) // most)):
        mine = turn == number
        yield one._replace(src_units=one.src_units[mine], dst_units=one.dst_units[mine])


def _whole_pages(
    units: Units, places: Units, pages: Units, per_page: int, unit_tokens: int, every: bool
) -> Iterator[tuple[int, Units, Units]]:
    """Yield what is copied between host and staging: tokens a unit, units there, units here.

    Pages of which every unit is copied come as whole pages, because they have fewer pieces. Others
    do too if ``every`` page may: its bytes cost less than a piece for each unit of a head.
    """
    if every or per_page == 1:
        yield unit_tokens * per_page, pages, np.arange(len(pages))
        return
    one_each, first = np.unique(units, return_index=True)
    page = np.searchsorted(pages, one_each // per_page)
    whole = np.bincount(page, minlength=len(pages)) == per_page
    if whole.any():
        yield unit_tokens * per_page, pages[whole], np.flatnonzero(whole)
    rest = ~whole[page]
    if rest.any():
        yield unit_tokens, one_each[rest], places[first][rest]


def _staged_layout(host: KVLayout, layers: Sequence[int], heads: int, nbytes: int) -> KVLayout:
    """Return canonical pages in ``nbytes`` bytes. Layers that are not held repeat the first."""
    planes: dict[int, tuple[Plane, ...]] = {}
    size = heads * sum(_layer_bytes(host, layer) for layer in layers)
    page = -(-size // _ALIGNMENT) * _ALIGNMENT // host.itemsize
    offset = 0
    for layer in layers:
        head, parts = _layer_bytes(host, layer) // host.itemsize, []
        at = offset
        for plane in host.planes[layer]:
            dim = plane.head_dim
            parts.append(Plane(0, at, page, head, Axis(dim), Axis(1), dim))
            at += dim * host.page_tokens
        planes[layer] = tuple(parts)
        offset += heads * head
    held = tuple(planes.get(layer, planes[layers[0]]) for layer in range(max(layers) + 1))
    return KVLayout(host.dtype, nbytes // (page * host.itemsize), host.page_tokens, heads, held)
