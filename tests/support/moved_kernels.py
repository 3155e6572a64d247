"""Launches of kernels on memory of another device, for tests that make their tensors on the CPU.

Each public function of a ``kvcore_kernels.*.launch`` module is replaced, wherever it was imported:

    a test's tensors, on the CPU ── storages copied ──▶ the same views on the device ── launch
                                 ◀── storages copied ── what the kernel wrote, what it returned

Strides, offsets and storages that several tensors share stay as they are, so a case means the same
on a device. Addresses that are given in the place of a tensor are those of its memory there. The
naive twins still run on the CPU.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import pkgutil
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch

import kvcore_kernels
from kvcore.memory.hugepages import PAGE
from kvcore.memory.layout import KVView
from kvcore_kernels.fusion_rows import Strided, strided_rows
from kvcore_kernels.planes import PlaneTable, plane_table
from kvcore_kernels.shift.launch import Shifts

DEVICE = os.environ.get("KERNEL_TESTS_ON", "")
"""The type of device that the kernels' tests run on; empty for the interpreter alone."""
COMPILED = DEVICE not in ("", "cpu")

interpreted = pytest.mark.skipif(
    bool(DEVICE), reason="needs the interpreter, and memory of its own"
)
"""Marks tests of the interpreter alone: on memory that claims to be a GPU's, say."""


def at_program(monkeypatch: pytest.MonkeyPatch, number: tuple[int, int], of: int) -> None:
    """Let the interpreter run program ``number`` of ``of`` in the place of the first."""
    from triton.language import int32
    from triton.runtime import interpreter

    def handle(value: int) -> Any:
        return interpreter.TensorHandle(np.array([value], np.int32), int32)

    builder = interpreter.InterpreterBuilder
    monkeypatch.setattr(builder, "create_get_program_id", lambda self, axis: handle(number[axis]))
    monkeypatch.setattr(builder, "create_get_num_programs", lambda self, axis: handle(of))


_SPARSE = 1 << 30
"""Bytes from which memory is moved in pieces, those that were never touched left out."""
_PIECE = 16 << 20


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


class _Memory:
    """A storage on the CPU, and as much memory of the device. Of large ones, what is used moves."""

    def __init__(self, storage: torch.UntypedStorage, device: torch.device) -> None:
        self._here = torch.empty(0, dtype=torch.uint8).set_(storage)
        self.sparse = len(self._here) > _SPARSE
        size = len(self._here)
        # Not `to`, which would return the same memory if the device is the CPU.
        if not self.sparse:
            self._there = torch.empty(size, dtype=torch.uint8, device=device)
        elif device.type == "cpu":  # numpy's zeros are not touched, torch's are
            self._there = torch.from_numpy(np.zeros(size, dtype=np.uint8))
        else:
            self._there = torch.zeros(size, dtype=torch.uint8, device=device)
        self.storage = self._there.untyped_storage()
        self.send()

    def send(self) -> None:
        for part in self._used(written=False):
            self._there[part].copy_(self._here[part])

    def fetch(self) -> None:
        for part in self._used(written=True):
            self._here[part].copy_(self._there[part])

    def _used(self, *, written: bool) -> Iterator[slice]:
        """Yield what was touched here, and with ``written`` also what is not zero there."""
        if not self.sparse:
            yield slice(None)
            return
        used = _touched(self._here)
        if written:
            used |= _touched(self._there) if self._there.device.type == "cpu" else _set(self._there)
        for number in np.flatnonzero(used).tolist():
            yield slice(number * _PIECE, (number + 1) * _PIECE)


_Pieces = np.ndarray[Any, np.dtype[np.bool_]]


def _touched(memory: torch.Tensor) -> _Pieces:
    """Return which pieces of the CPU's memory were written to, or read."""
    address = memory.data_ptr() // PAGE * PAGE
    skip = memory.data_ptr() - address
    told = np.zeros(-(-(skip + len(memory)) // PAGE), dtype=np.uint8)
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    if mincore(address, skip + len(memory), told.ctypes.data):
        raise OSError(ctypes.get_errno(), "mincore")
    pieces = np.unique((np.flatnonzero(told & 1) * PAGE - skip) // _PIECE)
    found = np.zeros(-(-len(memory) // _PIECE), dtype=bool)
    found[np.clip(pieces, 0, len(found) - 1)] = True
    found[np.clip(pieces + 1, 0, len(found) - 1)] = True  # a page may be of two pieces
    return found


def _set(memory: torch.Tensor) -> _Pieces:
    """Return which pieces of a device's memory are not zero."""
    return np.array([bool(piece.any()) for piece in memory.split(_PIECE)])


class _Rows(Strided):
    """The addresses of ``part``."""

    part: torch.Tensor


class _Planes(PlaneTable):
    """The addresses of planes; ``of`` are the arguments of `plane_table`."""

    of: tuple[Any, ...]


def _noted_rows(part: torch.Tensor) -> Strided:
    found = _Rows(*strided_rows(part))
    found.part = part
    return found


def _noted_planes(*of: Any) -> PlaneTable:
    found = _Planes(*plane_table(*of))
    found.of = of
    return found


class Mover:
    """Copies tensors on the CPU to a device, once a storage, and back."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._storages: dict[int, _Memory] = {}

    def there(self, given: Any) -> Any:
        """Return what is given over the device's memory, and anything without memory as it is.

        Raises TypeError for addresses that nobody noted: the device cannot reach what they mean.
        """
        if isinstance(given, torch.Tensor):
            return self._tensor(given)
        if isinstance(given, KVView):
            return KVView(given.layout, [self._tensor(tensor) for tensor in given.tensors])
        if isinstance(given, torch.device):
            return self._device
        if isinstance(given, _Rows):
            return strided_rows(self._tensor(given.part))
        if isinstance(given, _Planes):
            return plane_table(*map(self.there, given.of))
        if isinstance(given, (Strided, PlaneTable)):
            raise TypeError(f"addresses of memory that is not moved: {given}")
        if isinstance(given, (list, tuple)):
            parts = [self.there(part) for part in given]
            if all(part is one for part, one in zip(parts, given, strict=True)):
                return given
            return type(given)(*parts) if hasattr(given, "_fields") else type(given)(parts)
        return given

    @property
    def large(self) -> bool:
        """True if it holds memory of which only a part was moved."""
        return any(memory.sparse for memory in self._storages.values())

    def send(self) -> None:
        """Copy all memory to the device once more."""
        for memory in self._storages.values():
            memory.send()

    def write_back(self) -> None:
        """Copy all memory of the device to where it came from. Waits for the device."""
        for memory in self._storages.values():
            memory.fetch()

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
            if not COMPILED:
                raise TypeError(f"memory that only claims to be on {tensor.device}")
            return tensor
        storage = tensor.untyped_storage()
        memory = self._storages.get(storage.data_ptr())
        if memory is None:
            memory = self._storages[storage.data_ptr()] = _Memory(storage, self._device)
        empty = torch.empty(0, dtype=tensor.dtype, device=self._device)
        return empty.set_(memory.storage, tensor.storage_offset(), tensor.size(), tensor.stride())


_moving = threading.local()
"""``depth``: how many launches of `moved` this thread is in."""


@contextmanager
def _launching() -> Iterator[None]:
    _moving.depth = getattr(_moving, "depth", 0) + 1
    try:
        yield
    finally:
        _moving.depth -= 1


def moved(launch: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Return ``launch`` for tensors on the CPU, done on ``device``."""

    @functools.wraps(launch)
    def launched(*args: Any, **kwargs: Any) -> Any:
        if getattr(_moving, "depth", 0):  # a launch calls another, on memory that is there
            return launch(*args, **kwargs)
        mover = Mover(device)
        there = [mover.there(arg) for arg in args]
        named = {name: mover.there(arg) for name, arg in kwargs.items()}
        with _launching():
            got = launch(*there, **named)
        mover.write_back()
        found = mover.here(got)
        if mover.large and COMPILED:  # other processes of this run need the memory
            del mover, there, named, got
            torch.cuda.empty_cache()
        return found

    return launched


class _MovedShifts:
    """`Shifts` for memory of the CPU, done on ``device``. What a launch writes comes back."""

    def __init__(self, device: torch.device, *args: Any) -> None:
        self._mover = Mover(device)
        self._shifts = Shifts(*map(self._mover.there, args))

    def launch(self, first: int) -> None:
        self._mover.send()  # it may have been written to since
        with _launching():
            self._shifts.launch(first)
        self._mover.write_back()


def moved_shifts(device: torch.device) -> Callable[..., Any]:
    """Return what makes `Shifts` for tensors on the CPU, done on ``device``."""

    def made(*args: Any) -> Any:
        return Shifts(*args) if getattr(_moving, "depth", 0) else _MovedShifts(device, *args)

    return made


def refuse_unmoved(patch: pytest.MonkeyPatch) -> None:
    """Let the interpreter refuse a launch that `moved` did not make, as a GPU refuses it."""
    from triton.runtime.interpreter import GridExecutor

    call = GridExecutor.__call__

    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not getattr(_moving, "depth", 0):
            raise RuntimeError(
                f"{self.fn.__name__} is launched on memory that was not moved to the device: "
                "call a function of a launch module, or skip the test if it is COMPILED"
            )
        return call(self, *args, **kwargs)

    patch.setattr(GridExecutor, "__call__", checked)


def launches() -> Iterator[FunctionType]:
    """Yield the functions that take tensors, of all launch modules."""
    for found in pkgutil.walk_packages(kvcore_kernels.__path__, "kvcore_kernels."):
        if found.name.endswith(".launch"):
            module = importlib.import_module(found.name)
            for name in module.__all__:
                item = getattr(module, name)
                if isinstance(item, FunctionType) and item.__module__ == found.name:
                    hints = str(item.__annotations__)
                    if re.search(r"Tensor|KVView|\bCopy\b", hints):
                        yield item


def replace_launches(patch: pytest.MonkeyPatch, device: torch.device) -> list[str]:
    """Replace all launches in all modules of the kernels. Return their names."""
    ours: dict[Any, Any] = {launch: moved(launch, device) for launch in launches()}
    names = sorted(launch.__name__ for launch in ours)
    ours |= {Shifts: moved_shifts(device), strided_rows: _noted_rows, plane_table: _noted_planes}
    for name, module in list(sys.modules.items()):
        if name.startswith("kvcore_kernels"):
            for attribute, value in list(vars(module).items()):
                if isinstance(value, (FunctionType, type)) and value in ours:
                    patch.setattr(module, attribute, ours[value])
    return names
