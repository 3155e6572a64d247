"""Copies of KV as launches of a machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from kvcore.memory.copy.base import Copy, DeviceOps
from kvcore.memory.layout import KVView
from kvcore_devtools.gpu.device import plain
from kvcore_devtools.gpu.machine import Machine
from kvcore_devtools.gpu.memory import span, spans_of, together

if TYPE_CHECKING:
    import torch

__all__ = ["RecordingOps"]


class RecordingOps(DeviceOps):
    """Queues the copies of another implementation, ``inner``, with what they read and write."""

    name: ClassVar[str] = "recording"
    priority: ClassVar[int] = 100

    def __init__(self, machine: Machine, inner: DeviceOps | None = None) -> None:
        from kvcore.memory.copy.reference import ReferenceOps

        self.machine = machine
        self.inner = inner or ReferenceOps()

    def supports(self, src: KVView, dst: KVView) -> bool:
        return self.inner.supports(_plain(src), _plain(dst))

    def copy(self, copy: Copy) -> None:
        src, a, dst, b, chosen, unit_tokens, heads = copy.wanted()
        chosen, a, b = list(chosen), a.copy(), b.copy()
        src, dst = self._queued(src), self._queued(dst)
        queued = Copy(src, a, dst, b, chosen, unit_tokens, heads)
        taken = range(heads.src, heads.src + heads.size)
        given = range(heads.dst, heads.dst + heads.size)
        self.machine.launch(
            f"a copy of layers {chosen}",
            lambda: self.inner.copy(queued),
            reads=spans_of(src, a, chosen, unit_tokens, taken),
            writes=spans_of(dst, b, chosen, unit_tokens, given),
        )

    def sums(self, data: torch.Tensor, offsets: Sequence[int], nbytes: int) -> list[int]:
        found: list[int] = []
        data = self.machine.allocator.alias(plain(data))
        address = data.data_ptr()
        work = self.machine.launch(
            "sums",
            lambda: found.extend(self.inner.sums(data, offsets, nbytes)),
            reads=together(span(address + offset, nbytes) for offset in offsets),
        )
        stream = self.machine.current_stream()
        self.machine.wait(self.machine.record(stream))
        assert work.done
        return found

    def _queued(self, view: KVView) -> KVView:
        alias = self.machine.allocator.alias
        return KVView(view.layout, [alias(plain(tensor)) for tensor in view.tensors])


def _plain(view: KVView) -> KVView:
    return KVView(view.layout, [plain(tensor) for tensor in view.tensors])
