"""The device that holds an engine's pages: streams, events, and host memory that it can reach.

All that kvcore asks of a GPU goes through a `Device`. An implementation is chosen by the type of a
torch device (`device_of`), so tests can put one in the place of a GPU that is not there
(`kvcore_devtools.gpu`).

    host thread ── issues ──▶ stream ── record ──▶ event
                                                     ├── a stream waits: the host goes on
                                                     └── the host waits, without spinning

On a CPU work has ended when its call returns, so streams and events have nothing to do.
"""

from __future__ import annotations

import ctypes
import logging
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from ctypes import byref, c_int, c_size_t, c_uint, c_void_p
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcore._util.log_limit import LogLimit
from kvcore.errors import TransferError, UnsupportedError

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    from kvcore.memory.cuda_batch import Addresses

__all__ = ["CpuDevice", "CudaDevice", "Device", "Event", "Stream", "device_of", "serve_devices"]


_log = logging.getLogger("kvcore.memory.device")
_refusals = LogLimit()

_PCI = Path("/sys/bus/pci/devices")
_MAPS = Path("/proc/self/maps")
_BUS_ID_NBYTES = 32
_RUNTIME = re.compile(r"/lib(cudart|amdhip64)[^/]*\.so[^/]*$")
_BY_ADDRESS = 4
"""cudaMemcpyDefault: the runtime finds out from the addresses which way to copy."""
_OTHERS_CAPTURE = 1
"""cudaStreamCaptureModeThreadLocal: what this thread may do depends on its own captures only."""


class Event(ABC):
    """A point in the work of a stream."""

    @abstractmethod
    def wait(self) -> None:
        """Block the calling thread, without spinning, until the work before the event has ended."""

    @abstractmethod
    def passed(self) -> bool:
        """Return True if the work before the event has ended. Does not block."""

    @abstractmethod
    def since(self, earlier: Event) -> float:
        """Return the seconds from ``earlier`` to this event. Both were recorded with ``timed``."""


class Stream(ABC):
    """An order of work on a device."""

    @abstractmethod
    def record(self, *, timed: bool = False) -> Event:
        """Return an event after all work that was issued so far."""

    @abstractmethod
    def follow(self, event: Event) -> None:
        """Let all work that is issued from now on wait for ``event``. The host does not wait."""

    @abstractmethod
    def issuing(self) -> AbstractContextManager[object]:
        """Return a context in which this thread issues its work to this stream."""

    def hold(self, tensor: torch.Tensor) -> None:  # noqa: B027 - most memory needs no holding
        """Keep the tensor's memory from being reused before the work issued so far has ended.

        Memory that was allocated for another stream needs it.
        """


class Device(ABC):
    """A device, for the rank that uses it. Every method may be called from any thread."""

    name: torch.device

    @property
    @abstractmethod
    def queues(self) -> bool:
        """True if a call that issues work returns before the work has ended."""

    @abstractmethod
    def enter(self) -> None:
        """Make this device the current one of the calling thread, from now on.

        For threads of kvcore. They may then go on while an engine's thread captures a graph.
        """

    @abstractmethod
    def current(self) -> AbstractContextManager[object]:
        """Return a context in which this device is the current one of the calling thread."""

    @abstractmethod
    def stream(self) -> Stream:
        """Return a new stream of the lowest priority."""

    @abstractmethod
    def current_stream(self) -> Stream:
        """Return the stream that this thread issues its work to."""

    def stream_of(self, engine_stream: Any) -> Stream:
        """Return a stream that an engine has made, by the engine's own object for it.

        A device that engines make no streams for takes any object, and returns the current stream.
        """
        return self.current_stream()

    def numa_node(self) -> int | None:
        """Return the NUMA node that the device is attached to; None if it is not known."""
        return None

    @abstractmethod
    def register(self, address: int, nbytes: int) -> None:
        """Lock host memory in place and let the device reach it. Blocks: 2 to 6 GB a second.

        ``address`` is at the start of a page. Each process that maps shared memory registers it
        for itself; one registration counts for all devices of the process. Use
        `kvcore.memory.pinned` for large memory. Raises UnsupportedError if it cannot. No error is
        left pending then.
        """

    @abstractmethod
    def unregister(self, address: int) -> None:
        """End what `register` began at this address. No work may use the memory."""

    @abstractmethod
    def reaches(self, tensor: torch.Tensor) -> bool:
        """Return True if kernels of this device can read and write the tensor's memory."""

    @abstractmethod
    def upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """Copy an array to the device, on the current stream. The host does not wait."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return new memory of the device as flat bytes.

        Raises torch.OutOfMemoryError if there is none.
        """
        import torch

        return torch.empty(nbytes, dtype=torch.uint8, device=self.name)

    @abstractmethod
    def copy_batch(
        self, dst: Addresses, src: Addresses, sizes: Addresses, *, registered: bool = True
    ) -> None:
        """Copy ``sizes[i]`` bytes from address ``src[i]`` to ``dst[i]``, on the current stream.

        Addresses are those of host or device memory. The copies may run in any order and at once,
        all of them after the stream's earlier work. ``registered`` says that this device has
        registered all of the host memory (`register`). The host waits only if it has not. Raises
        TransferError if the device refuses a copy.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Block until all work on the device has ended."""


# -- a CPU ----------------------------------------------------------------------------------


class _Now(Event):
    def __init__(self) -> None:
        self._at = time.perf_counter()

    def wait(self) -> None:
        pass

    def passed(self) -> bool:
        return True

    def since(self, earlier: Event) -> float:
        assert isinstance(earlier, _Now)
        return self._at - earlier._at


class _Inline(Stream):
    def record(self, *, timed: bool = False) -> Event:
        return _Now()

    def follow(self, event: Event) -> None:
        pass

    def issuing(self) -> AbstractContextManager[object]:
        return nullcontext()


class CpuDevice(Device):
    """The CPU: a call that issues work returns when the work has ended."""

    def __init__(self, name: torch.device) -> None:
        self.name = name

    @property
    def queues(self) -> bool:
        return False

    def enter(self) -> None:
        pass

    def current(self) -> AbstractContextManager[object]:
        return nullcontext()

    def stream(self) -> Stream:
        return _Inline()

    def current_stream(self) -> Stream:
        return _Inline()

    def register(self, address: int, nbytes: int) -> None:
        raise UnsupportedError("a CPU reaches all host memory: there is nothing to register")

    def unregister(self, address: int) -> None:
        raise UnsupportedError("a CPU reaches all host memory: there is nothing to register")

    def reaches(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu"

    def upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        import torch

        return torch.from_numpy(array)

    def copy_batch(
        self, dst: Addresses, src: Addresses, sizes: Addresses, *, registered: bool = True
    ) -> None:
        for target, source, nbytes in zip(dst.tolist(), src.tolist(), sizes.tolist(), strict=True):
            ctypes.memmove(target, source, nbytes)

    def synchronize(self) -> None:
        pass


# -- CUDA and ROCm --------------------------------------------------------------------------


class _CudaEvent(Event):
    def __init__(self, event: Any) -> None:
        self.event = event

    def wait(self) -> None:
        self.event.synchronize()

    def passed(self) -> bool:
        return bool(self.event.query())

    def since(self, earlier: Event) -> float:
        assert isinstance(earlier, _CudaEvent)
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class _CudaStream(Stream):
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def record(self, *, timed: bool = False) -> Event:
        import torch

        event: Any = torch.cuda.Event(enable_timing=timed, blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return _CudaEvent(event)

    def follow(self, event: Event) -> None:
        assert isinstance(event, _CudaEvent)
        self._stream.wait_event(event.event)

    def issuing(self) -> AbstractContextManager[object]:
        import torch

        context: AbstractContextManager[object] = torch.cuda.stream(self._stream)
        return context

    def hold(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self._stream)


class CudaDevice(Device):
    """A GPU of CUDA or ROCm, through torch."""

    def __init__(self, name: torch.device) -> None:
        import torch

        index = torch.cuda.current_device() if name.index is None else name.index
        self.name = torch.device(name.type, index)
        self._hip = torch.version.hip is not None

    @property
    def queues(self) -> bool:
        return True

    def enter(self) -> None:
        import torch

        torch.cuda.set_device(self.name)
        # Else a capture elsewhere forbids this thread to register memory or to ask an event, and
        # doing so ends the capture.
        mode = c_int(_OTHERS_CAPTURE)
        with suppress(UnsupportedError):
            _runtime().ThreadExchangeStreamCaptureMode(byref(mode))

    def current(self) -> AbstractContextManager[object]:
        import torch

        return torch.cuda.device(self.name)

    def stream(self) -> Stream:
        import torch

        least, _ = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]
        return _CudaStream(torch.cuda.Stream(self.name, priority=least))  # type: ignore[no-untyped-call]

    def current_stream(self) -> Stream:
        import torch

        return _CudaStream(torch.cuda.current_stream(self.name))

    def stream_of(self, engine_stream: Any) -> Stream:
        return _CudaStream(engine_stream)

    def numa_node(self) -> int | None:
        name = ctypes.create_string_buffer(_BUS_ID_NBYTES)
        try:
            runtime = _runtime()
            code = runtime.DeviceGetPCIBusId(name, c_int(len(name)), c_int(self.name.index))
            if code:
                runtime.GetLastError()
                return None
            node = int((_PCI / name.value.decode().lower() / "numa_node").read_text())
        except (UnsupportedError, OSError, ValueError):
            return None
        return node if node >= 0 else None  # -1: the machine has one node, or does not tell

    def register(self, address: int, nbytes: int) -> None:
        with self.current():
            runtime = _runtime()
            code = runtime.HostRegister(c_void_p(address), c_size_t(nbytes), c_uint(0))
            if code:
                runtime.GetLastError()
                raise UnsupportedError(f"the driver refuses it with error {code}")

    def unregister(self, address: int) -> None:
        with self.current():
            runtime = _runtime()
            if runtime.HostUnregister(c_void_p(address)):
                runtime.GetLastError()

    def reaches(self, tensor: torch.Tensor) -> bool:
        if tensor.device.type == "cpu":  # ROCm maps registered memory to other addresses
            return not self._hip and tensor.is_pinned()
        return tensor.device == self.name

    def upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        import torch

        return torch.from_numpy(array).pin_memory().to(self.name, non_blocking=True)

    def copy_batch(
        self, dst: Addresses, src: Addresses, sizes: Addresses, *, registered: bool = True
    ) -> None:
        import torch

        with self.current():
            runtime = _runtime()
            # The driver's call needs a current context, which a new thread may not have yet.
            runtime.SetDevice(c_int(self.name.index))
            stream = int(torch.cuda.current_stream(self.name).cuda_stream)
            batch = None
            if registered and stream and not self._hip:
                from kvcore.memory.cuda_batch import batch_copy

                batch = batch_copy()
            if batch is not None:
                code = batch(dst, src, sizes, stream)
                if not code:
                    return
                if _refusals.admit(code) is not None:
                    _log.warning(
                        "the driver refuses copies in one call (cuMemcpyBatchAsync, error %d): "
                        "they are made one by one, which is slower",
                        code,
                    )
            runtime.copy_each(dst, src, sizes, stream)

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize(self.name)


class _Runtime:
    """Functions of the CUDA (or HIP) runtime that torch does not pass on, by names without prefix.

    ``GetLastError`` takes this thread's pending error. torch would raise it at the engine's next
    kernel.
    """

    def __init__(self) -> None:
        mapped = {line.split()[-1] for line in _MAPS.read_text().splitlines()}
        libraries = [one for one in mapped if _RUNTIME.search(one)]
        if not libraries:
            raise UnsupportedError("the process has loaded no CUDA runtime (libcudart)")
        # Another one may be there too, and knows neither torch's devices nor its errors.
        chosen = min(libraries, key=lambda one: (_torch_suffix() not in one, one))
        library = ctypes.CDLL(chosen)
        prefix = "hip" if "libamdhip64" in chosen else "cuda"
        self.HostRegister = getattr(library, f"{prefix}HostRegister")
        self.HostUnregister = getattr(library, f"{prefix}HostUnregister")
        self.GetLastError = getattr(library, f"{prefix}GetLastError")
        self.DeviceGetPCIBusId = getattr(library, f"{prefix}DeviceGetPCIBusId")
        self.SetDevice = getattr(library, f"{prefix}SetDevice")
        self.ThreadExchangeStreamCaptureMode = getattr(
            library, f"{prefix}ThreadExchangeStreamCaptureMode"
        )
        self.MemcpyAsync = getattr(library, f"{prefix}MemcpyAsync")

    def copy_each(self, dst: Addresses, src: Addresses, sizes: Addresses, stream: int) -> None:
        """Enqueue one copy after the other. Raises TransferError."""
        on, kind = c_void_p(stream), c_int(_BY_ADDRESS)
        for target, source, nbytes in zip(dst.tolist(), src.tolist(), sizes.tolist(), strict=True):
            code = self.MemcpyAsync(c_void_p(target), c_void_p(source), c_size_t(nbytes), kind, on)
            if code:
                self.GetLastError()
                raise TransferError(f"the driver refuses a copy of {nbytes} bytes: error {code}")


def _torch_suffix() -> str:
    """Return what is in the name of the runtime that torch was built for."""
    import torch

    return f".so.{(torch.version.cuda or torch.version.hip or '').partition('.')[0]}"


@cache
def _runtime() -> _Runtime:
    import torch

    torch.cuda.init()  # type: ignore[no-untyped-call]
    return _Runtime()


# -- the choice -----------------------------------------------------------------------------

_serving: dict[str, Callable[[torch.device], Device]] = {"cpu": CpuDevice, "cuda": CudaDevice}
_made: dict[torch.device, Device] = {}
"""Devices by their full names. A GPU without a number is the thread's current one: never kept."""


def device_of(name: torch.device | None) -> Device:
    """Return the `Device` for a torch device; None is the CPU. Every launch of a kernel asks.

    Raises UnsupportedError if kvcore knows no device of this type.
    """
    if name is not None and (found := _made.get(name)) is not None:
        return found
    import torch

    name = torch.device("cpu") if name is None else name
    make = _serving.get(name.type)
    if make is None:
        raise UnsupportedError(
            f"KV on device {name}: kvcore copies on {', '.join(sorted(_serving))}"
        )
    made = make(name)
    if name.type == "cpu" or name.index is not None:
        _made[name] = made
    return made


def serve_devices(kind: str, make: Callable[[torch.device], Device]) -> Callable[[], None]:
    """Let `device_of` make devices of type ``kind`` with ``make``; for tests.

    Returns what undoes it.
    """
    before = _serving.get(kind)
    _serve(kind, make)
    return partial(_serve, kind, before)


def _serve(kind: str, make: Callable[[torch.device], Device] | None) -> None:
    if make is None:
        del _serving[kind]
    else:
        _serving[kind] = make
    _made.clear()
