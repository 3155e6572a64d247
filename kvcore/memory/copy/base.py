"""Device operations: copies of KV between two layouts on any device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from kvcore.errors import LayoutError
from kvcore.memory.checksums import tensor_sums
from kvcore.memory.copy.cache import ViewCache
from kvcore.memory.layout import KVView

if TYPE_CHECKING:
    import torch

Units = npt.NDArray[np.int64]


class HeadRange(NamedTuple):
    """``size`` heads, from ``src`` on in the source and ``dst`` on in the destination."""

    src: int
    dst: int
    size: int


class Copy(NamedTuple):
    """A copy of KV units between two views, with `DeviceOps.copy_blocks`'s defaults filled in.

    Attributes:
        src, dst: where the KV is, and where it goes.
        src_units, dst_units: int64, flat and equally many; unit i of one goes to unit i of the
            other. A pair with a negative unit is not copied.
        layers: positions in both layouts.
        unit_tokens: the tokens of a unit, which divide both pages.
        heads: the KV heads that are copied.
    """

    src: KVView
    src_units: Units
    dst: KVView
    dst_units: Units
    layers: Sequence[int]
    unit_tokens: int
    heads: HeadRange

    @property
    def is_empty(self) -> bool:
        """True if nothing is copied."""
        return not (len(self.src_units) and len(self.layers) and self.heads.size)

    def wanted(self) -> Copy:
        """Return the copy without the pairs of units that have a negative one."""
        wanted = (self.src_units >= 0) & (self.dst_units >= 0)
        if wanted.all():
            return self
        return self._replace(src_units=self.src_units[wanted], dst_units=self.dst_units[wanted])


class DeviceOps(ABC):
    """One way to copy KV units. Stateless; may be used from several threads at once."""

    name: ClassVar[str]
    priority: ClassVar[int]
    """The implementation with the highest priority is used among those that support both views."""

    @abstractmethod
    def supports(self, src: KVView, dst: KVView) -> bool:
        """Return True if it can copy between the devices and dtypes of these views."""

    def sums(self, data: torch.Tensor, offsets: Sequence[int], nbytes: int) -> list[int]:
        """Return the sums (`kvcore.memory.checksums`) of blocks of ``nbytes`` bytes.

        A block is at each of ``offsets`` (bytes, multiples of 8) of ``data``, a flat tensor of
        bytes on a device. After each block, ``data`` has enough bytes to fill its last word. Blocks
        until the sums are known, on a GPU on the current stream.
        """
        return tensor_sums(data, offsets, nbytes)

    def prepare(self, pages: KVView, blocks: KVView, unit_tokens: int) -> None:  # noqa: B027
        """Do once what the first copies between two views would do: allocate, load, compile.

        Copies will be of units of ``unit_tokens``, both ways. Moves no KV. Blocks, maybe for
        seconds. Most implementations have nothing to do.
        """

    @abstractmethod
    def copy(self, copy: Copy) -> None:
        """Carry out a copy that `check_copy` has checked."""

    def copy_blocks(
        self,
        src: KVView,
        src_units: Units,
        dst: KVView,
        dst_units: Units,
        layers: Sequence[int] | None = None,
        unit_tokens: int | None = None,
        heads: HeadRange | None = None,
    ) -> None:
        """Copy ``src_units[i]`` of ``src`` to ``dst_units[i]`` of ``dst``, whatever their shapes.

        Unit ``i`` is tokens ``[i * unit_tokens, (i + 1) * unit_tokens)``, counted across all pages.
        ``unit_tokens`` divides both pages (default: the page of ``dst``). Negative units are
        skipped. ``layers`` are positions in both layouts (default: all), and ``heads`` defaults to
        all.

        Blocks until the bytes are copied; on a GPU, until the copy is enqueued on the current
        stream. Raises LayoutError if the views do not fit each other or a unit is out of range.
        """
        chosen = range(src.layout.layers) if layers is None else layers
        tokens = dst.layout.page_tokens if unit_tokens is None else unit_tokens
        span = HeadRange(0, 0, src.layout.kv_heads) if heads is None else heads
        a = np.ascontiguousarray(src_units, dtype=np.int64).ravel()
        b = np.ascontiguousarray(dst_units, dtype=np.int64).ravel()
        copy = Copy(src, a, dst, b, chosen, tokens, span)
        check_copy(copy)
        if not copy.is_empty:
            self.copy(copy)


def plane_rows(view: KVView, layers: Sequence[int], first_head: int) -> Units:
    """Return [planes, 10]: where C (``plane_t``) and Triton find KV. Reads no memory.

    The planes are those of ``layers``, K before V. Values are in elements, except for the address,
    which is that of ``first_head``. The array is shared: it cannot be written to.

    address, page, head, token stride, inner and inner stride, dim stride, inner and inner stride,
    head dim
    """
    chosen = tuple(layers)
    return _tables.get((view,), (chosen, first_head), lambda: _plane_rows(view, chosen, first_head))


_tables, _fitting = ViewCache(), ViewCache()


def _plane_rows(view: KVView, layers: Sequence[int], first_head: int) -> Units:
    itemsize = view.layout.itemsize
    addresses = [tensor.data_ptr() for tensor in view.tensors]
    rows = []
    for layer in layers:
        for plane in view.layout.planes[layer]:
            offset = plane.offset + first_head * plane.head
            token, dim = plane.token, plane.dim
            rows.append(
                (
                    addresses[plane.tensor] + offset * itemsize,
                    plane.page, plane.head,
                    token.stride, token.inner, token.inner_stride,
                    dim.stride, dim.inner, dim.inner_stride,
                    plane.head_dim,
                )
            )  # fmt: skip
    table = np.array(rows, dtype=np.int64)
    table.flags.writeable = False
    return table


def check_copy(copy: Copy) -> None:
    """Raise LayoutError unless the parts of a copy fit each other. Reads no memory.

    What does not depend on the units is checked once for two views.
    """
    src, src_units, dst, dst_units, layers, tokens, heads = copy
    chosen = tuple(layers)
    _fitting.get(
        (src, dst), (chosen, tokens, heads), lambda: _check_views(src, dst, chosen, tokens, heads)
    )
    _check_units(src, src_units, dst, dst_units, tokens)


def _check_views(
    src: KVView, dst: KVView, layers: Sequence[int], tokens: int, heads: HeadRange
) -> None:
    """Raise LayoutError unless units of these views can be copied. Reads no memory."""
    a, b = src.layout, dst.layout
    if a.dtype != b.dtype or a.kv_factor != b.kv_factor:
        raise LayoutError(f"{a.dtype} x{a.kv_factor} does not copy to {b.dtype} x{b.kv_factor}")
    if tokens < 1 or a.page_tokens % tokens or b.page_tokens % tokens:
        raise LayoutError(
            f"units of {tokens} tokens do not divide pages of {a.page_tokens} and {b.page_tokens}"
        )
    if any(not 0 <= layer < min(a.layers, b.layers) for layer in layers):
        raise LayoutError(
            f"layers {list(layers)} are out of range: there are {a.layers} and {b.layers}"
        )
    if min(heads) < 0 or (
        heads.src + heads.size > a.kv_heads or heads.dst + heads.size > b.kv_heads
    ):
        raise LayoutError(
            f"{heads} is out of range: there are {a.kv_heads} source and {b.kv_heads} destination "
            "heads"
        )
    for layer in layers:
        dims = [
            (p.head_dim, q.head_dim) for p, q in zip(a.planes[layer], b.planes[layer], strict=True)
        ]
        if any(p != q for p, q in dims):
            raise LayoutError(f"layer {layer}: head dims {dims} differ")


def _check_units(src: KVView, src_units: Units, dst: KVView, dst_units: Units, tokens: int) -> None:
    """Raise LayoutError unless units are equally many and in range. Reads no memory."""
    if len(src_units) != len(dst_units):
        raise LayoutError(
            f"{len(src_units)} source units for {len(dst_units)} destinations: give as many of each"
        )
    for what, units, layout in (
        ("source", src_units, src.layout),
        ("destination", dst_units, dst.layout),
    ):
        most = layout.num_pages * (layout.page_tokens // tokens)
        if len(units) and int(units.max()) >= most:
            raise LayoutError(f"{what} unit {int(units.max())} is out of range: there are {most}")
