"""KV in the memory of a GPU that is not there, and in host memory that it reaches or not."""

from __future__ import annotations

from kvcore.memory.layout import KVView
from kvcore.testing.gpu import Machine
from kvcore.testing.gpu.device import on_device

__all__ = ["on_gpu", "on_host"]


def on_gpu(machine: Machine, view: KVView) -> KVView:
    """Return the same memory as a view on the machine's GPU."""
    machine.keep(view)
    for address, nbytes in _storages(view):
        machine.know_device(address, nbytes, "the engine's pages")
    return KVView(view.layout, [on_device(tensor) for tensor in view.tensors])


def on_host(machine: Machine, view: KVView, *, registered: bool = True) -> KVView:
    """Return a view of host memory, which is then registered, or is not."""
    machine.keep(view)
    for address, nbytes in _storages(view):
        machine.know_host(address, nbytes, "host memory").reached = registered
    return view


def _storages(view: KVView) -> list[tuple[int, int]]:
    storages = [tensor.untyped_storage() for tensor in view.tensors]
    return [(storage.data_ptr(), storage.nbytes()) for storage in storages]
