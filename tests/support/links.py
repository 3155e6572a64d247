"""KV in the memory of a GPU that is not there, and in host memory that it reaches or not."""

from __future__ import annotations

from kvcore.memory.hugepages import PAGE
from kvcore.memory.layout import KVView
from kvcore_devtools.gpu import Machine
from kvcore_devtools.gpu.device import on_device
from kvcore_devtools.gpu.memory import Spans, span, together

__all__ = ["on_gpu", "on_host"]


def on_gpu(machine: Machine, view: KVView) -> KVView:
    """Return the same memory as a view on the machine's GPU."""
    machine.keep(view)
    for address, nbytes in _storages(view):
        machine.know_device(address, nbytes, "the engine's pages")
    return KVView(view.layout, [on_device(tensor) for tensor in view.tensors])


def on_host(machine: Machine, view: KVView, *, registered: bool = True) -> KVView:
    """Return a view of host memory, whose pages are now registered, or are not."""
    machine.keep(view)
    storages = _storages(view)
    for address, nbytes in storages:
        machine.know_host(address, nbytes, "host memory")
    for start, stop in together(_pages(*storage) for storage in storages).tolist():
        if registered and start not in machine.registered:
            machine.register(start, stop - start)
        elif not registered and start in machine.registered:
            machine.unregister(start)
    return view


def _pages(address: int, nbytes: int) -> Spans:
    start, stop = address // PAGE, -(-(address + nbytes) // PAGE)
    return span(start * PAGE, (stop - start) * PAGE)


def _storages(view: KVView) -> list[tuple[int, int]]:
    storages = [tensor.untyped_storage() for tensor in view.tensors]
    return [(storage.data_ptr(), storage.nbytes()) for storage in storages]
