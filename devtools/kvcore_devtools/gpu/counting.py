"""What code on CPU tensors would ask of a GPU: launches, waits of the host, and uploads.

    with DeviceCalls() as calls:             every torch call of this thread is looked at
        calls.section = "layer 3"            what follows is booked here
        with calls.foreign(): ...            not counted: the engine's own work
        calls.launched("merge")              a kernel that is not torch's

Memory is taken for device memory unless it is made on the host: by a torch function without a
``device``, from a NumPy array, or as the result of a copy to the CPU. One torch operation counts as
one launch, although some need several. Views and allocations need none.

`DeviceCalls.device` is a `kvcore.memory.device.Device` whose uploads are counted, and do not wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from kvcore.memory.device import CpuDevice, serve_devices

__all__ = ["ALLOCATIONS", "MADE_ON_HOST", "WAITS", "Counts", "DeviceCalls", "tensors_in"]

ALLOCATIONS = {
    "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty",
    "aten::new_empty_strided",
}  # fmt: skip
WAITS = {
    "aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::equal",
    "aten::allclose", "aten::nonzero", "aten::nonzero_numpy", "aten::argwhere",
    "aten::masked_select", "aten::unique", "aten::_unique", "aten::_unique2",
    "aten::unique_dim", "aten::unique_consecutive", "aten::bincount",
}  # fmt: skip
"""Operations whose result, or its size, the host reads."""
_BY_INDEX = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
MADE_ON_HOST = {
    "arange", "zeros", "ones", "empty", "full", "rand", "randn", "randint", "randperm", "tensor",
    "as_tensor", "eye", "linspace",
}  # fmt: skip
_TO_HOST = {"cpu", "numpy", "tolist"}


@dataclass
class Counts:
    """What one section asked for. ``launches`` and ``waits`` are by the name of what did it."""

    launches: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    uploads: int = 0
    upload_bytes: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.launches + other.launches,
            self.waits + other.waits,
            self.uploads + other.uploads,
            self.upload_bytes + other.upload_bytes,
        )


class _CountingDevice(CpuDevice):
    def __init__(self, calls: DeviceCalls) -> None:
        super().__init__(torch.device("cpu"))
        self._calls = calls

    def upload(self, array: npt.NDArray[Any]) -> Tensor:
        sent = _unseen_copy(torch.from_numpy(array))
        self._calls.uploaded(array.nbytes)
        return sent

    def synchronize(self) -> None:
        self._calls.waited("synchronize")


class DeviceCalls:
    """Counts what this thread asks of the device inside the ``with`` block. See the module.

    ``sections`` has the counts by the value that ``section`` had. Without ``multiplies``, products
    of matrices are zeros: in a large model's shapes a CPU takes a minute for them.
    """

    def __init__(self, *, multiplies: bool = True) -> None:
        self.section = ""
        self.multiplies = multiplies
        self.sections: dict[str, Counts] = {}
        self.device = _CountingDevice(self)
        self._paused = 0
        self._host: dict[int, Tensor] = {}  # by storage; kept, so that no address is used again
        self._stack = ExitStack()

    def __enter__(self) -> DeviceCalls:
        self._stack.callback(serve_devices("cpu", lambda _: self.device))
        self._stack.enter_context(_Functions(self))
        self._stack.enter_context(_Operations(self))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    @property
    def total(self) -> Counts:
        """The sum of all sections."""
        return sum(self.sections.values(), Counts())

    @contextmanager
    def foreign(self) -> Iterator[None]:
        """Count nothing in this block."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    @contextmanager
    def ours(self) -> Iterator[None]:
        """Count in this block, also inside `foreign`."""
        before, self._paused = self._paused, 0
        try:
            yield
        finally:
            self._paused = before

    def launched(self, name: str) -> None:
        """Count a launch of the kernel ``name``."""
        if not self._paused:
            self._here.launches[name] += 1

    def waited(self, name: str) -> None:
        """Count a wait of the host for the device."""
        if not self._paused:
            self._here.waits[name] += 1

    def uploaded(self, nbytes: int) -> None:
        """Count a copy from the host to the device."""
        if not self._paused:
            self._here.uploads += 1
            self._here.upload_bytes += nbytes

    @property
    def _here(self) -> Counts:
        return self.sections.setdefault(self.section, Counts())

    # -- where memory is --------------------------------------------------------------------

    def on_host(self, tensor: Tensor) -> bool:
        """Return True if the tensor's memory was made on the host."""
        return _storage(tensor) in self._host

    def mark_host(self, made: object) -> None:
        """Take tensors for memory of the host."""
        for tensor in tensors_in(made):
            self._host[_storage(tensor)] = tensor

    # -- what torch is asked ----------------------------------------------------------------

    def called(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Look at a call of torch's Python functions that its operations do not show."""
        on_device = any(not self.on_host(tensor) for tensor in tensors_in(args[:1]))
        if name in _TO_HOST and on_device:
            self.waited(name)

    def ran(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: object) -> None:
        """Count one operation of torch, which has run."""
        name = func.name().split(".")[0]
        given, made = tensors_in((args, dict(kwargs))), tensors_in(out)
        if given and all(map(self.on_host, given)):
            self.mark_host(made)
            return
        if name in ALLOCATIONS or name in ("aten::lift_fresh", "aten::detach_"):
            return
        if name == "aten::copy_" and self.on_host(args[0]) != self.on_host(args[1]):
            self._crossed(args[0], args[1])
            return
        if name in WAITS or (name in _BY_INDEX and _by_mask(args[1])):
            self.waited(name)
        shared = set(map(_storage, given))
        if not func._schema.is_mutable and made and all(_storage(one) in shared for one in made):
            return  # a view
        if name in ("aten::item", "aten::is_nonzero", "aten::_local_scalar_dense"):
            return
        self.launched(name)

    def _crossed(self, target: Tensor, source: Tensor) -> None:
        if self.on_host(source):
            self.uploaded(source.nbytes)
            self.waited("upload from pageable memory")
        else:
            self.waited("copy to the host")


class _Functions(TorchFunctionMode):
    def __init__(self, calls: DeviceCalls) -> None:
        super().__init__()
        self._calls = calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        self._calls.called(name, args, kwargs)
        if name in MADE_ON_HOST and not tensors_in((args, kwargs)) and not kwargs.get("device"):
            with self._calls.foreign():
                out = func(*args, **kwargs)
            self._calls.mark_host(out)
            return out
        out = func(*args, **kwargs)
        if "lift_fresh" in str(func):  # from NumPy
            self._calls.mark_host(out)
        elif name == "new_tensor":
            if self._calls.on_host(args[0]):
                self._calls.mark_host(out)
            else:
                self._sent(out)
        elif name in ("tensor", "as_tensor") and not tensors_in((args, kwargs)):
            self._sent(out)
        elif name == "to" and _device_in(args[1:], kwargs) and self._calls.on_host(args[0]):
            out = _unseen_copy(out)
            self._sent(out)
        elif name == "cpu":
            out = _unseen_copy(out)
            self._calls.mark_host(out)
        return out

    def _sent(self, tensor: Tensor) -> None:
        self._calls.uploaded(tensor.nbytes)
        self._calls.waited("upload from pageable memory")


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, calls: DeviceCalls) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.matmul.default and not self._calls.multiplies:
            out = args[0].new_zeros((*args[0].shape[:-1], args[1].shape[-1]))
        else:
            out = func(*args, **(kwargs or {}))
        self._calls.ran(func, args, kwargs or {}, out)
        return out


def _unseen_copy(tensor: Tensor) -> Tensor:
    with _disable_current_modes():
        return tensor.clone()


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def tensors_in(found: object) -> list[Tensor]:
    """Return all tensors in an argument or a result."""
    if isinstance(found, Tensor):
        return [found]
    if isinstance(found, Mapping):
        return [tensor for value in found.values() for tensor in tensors_in(value)]
    if isinstance(found, (list, tuple)):
        return [tensor for value in found for tensor in tensors_in(value)]
    return []


def _by_mask(indices: object) -> bool:
    return any(one.dtype in (torch.bool, torch.uint8) for one in tensors_in(indices))


def _device_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    return kwargs.get("device") is not None or any(isinstance(one, torch.device) for one in args)
