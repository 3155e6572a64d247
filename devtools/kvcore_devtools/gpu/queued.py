"""Torch's operations as launches of a machine, so that torch code runs as late as on a GPU.

    with queued_torch(machine):    what this thread asks of torch on device memory is queued

Memory of the device is what the machine knows, and what is made with a ``device`` or from other
memory of the device. All the rest is the host's. An operation is queued on the current stream with
the bytes that it reads and writes; its result is allocated at once (`Allocator`), as on a GPU. The
host waits where it reads a value or a size.

An operation that reads or writes a tensor through indices is taken to touch all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kvcore_devtools.gpu.counting import ALLOCATIONS, MADE_ON_HOST, WAITS, tensors_in
from kvcore_devtools.gpu.machine import Machine
from kvcore_devtools.gpu.memory import Spans, tensor_spans, together

__all__ = ["queued_torch"]

_LOOKED_AT = MADE_ON_HOST | {"to", "numpy", "tolist", "cpu", "new_tensor"}
_BY_INDEX = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
"""Operations that take indices from the host, too."""


@contextmanager
def queued_torch(machine: Machine) -> Iterator[Callable[[], Any]]:
    """Queue what this thread asks of torch in this block.

    Yields a function that returns a context in which torch runs at once, for checks.
    """
    queue = _Queue(machine)
    host = machine.host()
    host.queues_torch = True
    try:
        with _Functions(queue), _Operations(queue):
            yield queue.at_once
    finally:
        host.queues_torch = False


class _Queue:
    """What both modes of a thread share."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.off = False

    @property
    def passes(self) -> bool:
        """True if torch is to run at once: this is no code of the engine or of kvcore."""
        return self.off or self.machine.runs_queued

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Return a context in which torch runs at once."""
        host, before = self.machine.host(), self.off
        self.off, host.queues_torch = True, False
        try:
            yield
        finally:
            self.off, host.queues_torch = before, not before

    def on_device(self, tensor: Tensor) -> bool:
        """Return True if a tensor has memory, and that of the device."""
        if tensor.is_meta:
            return False
        # An empty view has no address of its own.
        holder = tensor if tensor.numel() else tensor.untyped_storage()
        region = self.machine.memory.at(holder.data_ptr())
        return region is not None and not region.is_host

    def wait(self, what: str, read: list[Tensor]) -> None:
        """Let the host wait for the current stream, because it reads something."""
        machine = self.machine
        machine.wait(machine.record(machine.current_stream()))
        machine.touch(what, _spans(read), writes=False)

    def sent(self, source: Tensor) -> Tensor:
        """Return a copy on the device of a tensor of the host."""
        made = self.empty(source)
        self.launch("an upload by torch", lambda to: to.copy_(source), (made,), writes=[made])
        return made

    def empty(self, like: Tensor) -> Tensor:
        """Return memory of the device with the shape, strides and dtype of a tensor."""
        reach = sum(step * (n - 1) for step, n in zip(like.stride(), like.shape, strict=True))
        items = reach + 1 if like.numel() else 0
        flat = self.machine.allocator.allocate(items * like.itemsize)
        return flat.view(like.dtype).as_strided(like.shape, like.stride())

    def launch(
        self,
        what: str,
        run: Callable[..., object],
        args: tuple[Any, ...],
        *,
        reads: list[Tensor] | None = None,
        writes: list[Tensor] | None = None,
    ) -> None:
        """Queue ``run(*args)``. Tensors of the host are given as they are now."""
        given = self.as_queued(args)

        def at_last() -> None:
            with torch.inference_mode():
                run(*given)

        self.machine.launch(what, at_last, reads=_spans(reads or []), writes=_spans(writes or []))

    def as_queued(self, args: Any) -> Any:
        """Return arguments that keep no memory in use, and that the host does not change later."""
        alias = self.machine.allocator.alias

        def one(tensor: Tensor) -> Tensor:
            return alias(tensor) if self.on_device(tensor) else tensor.clone()

        return _each(one, args)

    # -- one operation ----------------------------------------------------------------------

    def ran(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Queue one operation of torch, and return its results."""
        name = func.name().split(".")[0]
        given = tensors_in((args, kwargs))
        on = list(filter(self.on_device, given))
        if not on and (given or kwargs.get("device") is None):
            return func(*args, **kwargs)
        if func.is_view or torch.Tag.inplace_view in func.tags or name == "aten::detach_":
            return func(*args, **kwargs)
        if name in WAITS:
            return self._at_once(func, args, kwargs, on)
        written = _written(func, args, kwargs)
        targets = [one for one in tensors_in(written) if one.numel()]
        if not all(map(self.on_device, targets)):
            self.wait(name, on)
            return func(*args, **kwargs)
        others = [one for one in given if one.dim() and one.numel() and not self.on_device(one)]
        if others and name not in _BY_INDEX and name != "aten::copy_":
            raise RuntimeError(f"{name} of tensors on the device and on the host")
        reads = [one for one in on if not any(one is target for target in targets)]
        if name.startswith("aten::new_") or name.endswith("_like"):
            reads = []  # they take its shape only
        if written:
            run: Callable[..., object] = lambda args, kwargs: func(*args, **kwargs)  # noqa: E731
            self.launch(name, run, (args, kwargs), reads=reads, writes=targets)
            return _returned(func, written)
        if not given:
            value = func(*args, **kwargs)
            return self.empty(value) if name in ALLOCATIONS else self.sent(value)
        return self._made(func, name, args, kwargs, reads)

    def _made(self, func: Any, name: str, args: Any, kwargs: dict[str, Any], reads: Any) -> Any:
        """Queue an operation that returns new memory."""
        meta = {key: "meta" if key == "device" and on else on for key, on in kwargs.items()}
        try:
            shapes = func(*_each(_meta, args), **_each(_meta, meta))
        except Exception:  # noqa: BLE001 - the size of the result depends on values
            return self._at_once(func, args, kwargs, reads)
        out = _each(self.empty, shapes)
        if name in ALLOCATIONS:
            return out
        made = tensors_in(out)

        def run(targets: list[Tensor], args: Any, kwargs: Any) -> None:
            for target, one in zip(targets, tensors_in(func(*args, **kwargs)), strict=True):
                target.copy_(one)

        self.launch(name, run, (made, args, kwargs), reads=reads, writes=made)
        return out

    def _at_once(self, func: Any, args: Any, kwargs: Any, on: list[Tensor]) -> Any:
        self.wait(func.name(), on)
        found = func(*args, **kwargs)
        return _each(self.sent, found)


class _Functions(TorchFunctionMode):
    """What torch's operations do not show: where a tensor is made, and that the host reads it."""

    def __init__(self, queue: _Queue) -> None:
        super().__init__()
        self._queue = queue

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, queue = kwargs or {}, self._queue
        name = getattr(func, "__name__", "")
        if name not in _LOOKED_AT or queue.passes:
            return func(*args, **kwargs)
        given = tensors_in((args, kwargs))
        on = list(filter(queue.on_device, given))
        to_device = kwargs.get("device") is not None or (
            name == "to" and any(isinstance(one, torch.device) for one in args[1:])
        )
        made_here = name in MADE_ON_HOST and not given
        if (made_here and (not to_device or name in ("tensor", "as_tensor"))) or (
            name == "new_tensor" and on
        ):
            with queue.at_once():
                made = func(*args, **kwargs)
            return queue.sent(made) if to_device or on else made
        if name in ("numpy", "tolist", "cpu") and on:
            queue.wait(name, on)
            return queue.machine.allocator.alias(on[0]).clone() if name == "cpu" else func(*args)
        if name == "to" and to_device and not on:
            return queue.sent(func(*args, **kwargs))
        return func(*args, **kwargs)


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, queue: _Queue) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._queue = queue

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._queue.passes:
            return func(*args, **kwargs)
        if _is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            return self._queue.ran(func, args, kwargs)


@cache
def _is_composite(func: Any) -> bool:
    """Return True if an operation consists of others, among them perhaps only views."""
    kind = torch._C.DispatchKey.CompositeImplicitAutograd
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), kind))


def _each(change: Callable[[Tensor], Any], found: Any) -> Any:
    """Return an argument or a result with each of its tensors changed."""
    if isinstance(found, Tensor):
        return change(found)
    if isinstance(found, dict):
        return {key: _each(change, value) for key, value in found.items()}
    if isinstance(found, (list, tuple)):
        return type(found)([_each(change, value) for value in found])
    return found


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that an operation writes to, by the name of what it returns for them."""
    found = {}
    for i, one in enumerate(func._schema.arguments):
        if one.alias_info is not None and one.alias_info.is_write:
            given = args[i] if i < len(args) else kwargs.get(one.name)
            found[_name(one.alias_info)] = given
    return found


def _name(alias: Any) -> str:
    return min(map(str, alias.before_set))


def _returned(func: Any, written: Mapping[str, Any]) -> Any:
    """Return what an operation returns that writes to its arguments."""
    found = [written[_name(one.alias_info)] for one in func._schema.returns]
    return found[0] if len(found) == 1 else tuple(found) or None


def _spans(tensors: list[Tensor]) -> Spans:
    return together(map(tensor_spans, tensors))
