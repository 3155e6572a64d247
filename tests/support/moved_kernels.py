"""Launches of kernels on memory of another device, for tests that make their tensors on the CPU.

Each public function of a ``kvcore_kernels.*.launch`` module is replaced, wherever it was imported:

    a test's tensors, on the CPU ── storages copied ──▶ the same views on the device ── launch
                                 ◀── storages copied ── what the kernel wrote, what it returned

Strides, offsets and storages that several tensors share stay as they are, so a case means the same
on a device. The naive twins still run on the CPU.
"""

from __future__ import annotations

import functools
import importlib
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any

import pytest
import torch

import kvcore_kernels
from kvcore.memory.layout import KVView

DEVICE = os.environ.get("KERNEL_TESTS_ON", "")
"""The type of device that the kernels' tests run on; empty for the interpreter alone."""
COMPILED = DEVICE not in ("", "cpu")


def assert_rotated(ours: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> None:
    """Assert that tensors with rotated K are equal; in the interpreter, to the last bit.

    A GPU fuses multiply and add. Its float32 result may then differ by the rounding of a product,
    which is large beside a sum that is near zero, and rounds to a neighbour at most.
    """
    for a, b in zip(ours, right, strict=True):
        if COMPILED:
            eps = 2 * torch.finfo(b.dtype).eps
            torch.testing.assert_close(a, b, rtol=eps, atol=2e-6, equal_nan=True)
        else:
            kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[b.element_size()]
            assert torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


class Mover:
    """Copies tensors on the CPU to a device, once a storage, and back."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._storages: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def there(self, given: Any) -> Any:
        """Return a tensor or a view over the device's memory, and anything else as it is."""
        if isinstance(given, KVView):
            return KVView(given.layout, [self._tensor(tensor) for tensor in given.tensors])
        return self._tensor(given) if isinstance(given, torch.Tensor) else given

    def write_back(self) -> None:
        """Copy all memory of the device to where it came from."""
        for here, there in self._storages.values():
            here.copy_(there)

    def here(self, got: Any) -> Any:
        """Return a result whose tensors are on the CPU. It may be a tuple of tensors."""
        if isinstance(got, torch.Tensor):
            return got.cpu()
        if isinstance(got, tuple):
            parts = [self.here(part) for part in got]
            return type(got)(*parts) if hasattr(got, "_fields") else tuple(parts)
        return got

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "cpu":
            return tensor
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._storages:
            flat = torch.empty(0, dtype=torch.uint8).set_(storage)
            # Not `to`, which would return the same memory if the device is the CPU.
            moved = torch.empty(flat.shape, dtype=torch.uint8, device=self._device).copy_(flat)
            self._storages[storage.data_ptr()] = (flat, moved)
        whole = self._storages[storage.data_ptr()][1].untyped_storage()
        empty = torch.empty(0, dtype=tensor.dtype, device=self._device)
        return empty.set_(whole, tensor.storage_offset(), tensor.size(), tensor.stride())


def moved(launch: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Return ``launch`` for tensors on the CPU, done on ``device``."""

    @functools.wraps(launch)
    def launched(*args: Any, **kwargs: Any) -> Any:
        mover = Mover(device)
        there = [mover.there(arg) for arg in args]
        named = {name: mover.there(arg) for name, arg in kwargs.items()}
        got = launch(*there, **named)
        mover.write_back()  # waits for the device
        return mover.here(got)

    return launched


def launches() -> Iterator[FunctionType]:
    """Yield the functions that take tensors, of all launch modules."""
    for found in pkgutil.walk_packages(kvcore_kernels.__path__, "kvcore_kernels."):
        if found.name.endswith(".launch"):
            module = importlib.import_module(found.name)
            for name in module.__all__:
                item = getattr(module, name)
                if isinstance(item, FunctionType) and item.__module__ == found.name:
                    hints = str(item.__annotations__)
                    if "Tensor" in hints or "KVView" in hints:
                        yield item


def replace_launches(patch: pytest.MonkeyPatch, device: torch.device) -> list[str]:
    """Replace all launches in all modules of the kernels. Return their names."""
    replaced = []
    for launch in list(launches()):
        ours = moved(launch, device)
        for name, module in list(sys.modules.items()):
            if name.startswith("kvcore_kernels"):
                for attribute, value in list(vars(module).items()):
                    if value is launch:
                        patch.setattr(module, attribute, ours)
        replaced.append(launch.__name__)
    return sorted(replaced)
