"""The driver's batched copy, called through ctypes: a C function in its place looks at the call."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from kvcore._util.log_limit import LogLimit
from kvcore.errors import TransferError, UnsupportedError
from kvcore.memory import cuda_batch, device
from kvcore.memory.cuda_batch import SIGNATURE, BatchCopy
from kvcore.memory.device import CpuDevice, CudaDevice


class Driver:
    """What cuMemcpyBatchAsync does, on host memory; it returns ``code``."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.calls: list[tuple[int, ...]] = []
        self.function = SIGNATURE(self._copy)

    def _copy(self, *given: int) -> int:
        dsts, srcs, sizes, count, attributes, indices, attribute_count, failed, stream = given
        order = ctypes.cast(attributes, ctypes.POINTER(ctypes.c_uint32 * 6)).contents
        first = ctypes.cast(indices, ctypes.POINTER(ctypes.c_size_t)).contents.value
        assert failed
        self.calls.append((count, attribute_count, first, stream, *order))
        if not self.code:
            columns = [
                ctypes.cast(at, ctypes.POINTER(ctypes.c_size_t * count)).contents
                for at in (dsts, srcs, sizes)
            ]
            for target, source, nbytes in zip(*columns, strict=True):
                ctypes.memmove(target, source, nbytes)
        return self.code


def runs() -> tuple[torch.Tensor, torch.Tensor, list[np.ndarray]]:
    src, dst = torch.arange(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    offsets, sizes = np.array([0, 32, 9]), np.array([4, 20, 1])
    return src, dst, [dst.data_ptr() + offsets, src.data_ptr() + offsets, sizes]


def copied(src: torch.Tensor, dst: torch.Tensor) -> bool:
    wanted = torch.zeros_like(src)
    for first, count in ((0, 4), (32, 20), (9, 1)):
        wanted[first : first + count] = src[first : first + count]
    return torch.equal(dst, wanted)


def test_the_call_is_that_of_cuda_12_8() -> None:
    driver = Driver()
    src, dst, arrays = runs()
    assert BatchCopy(driver.function)(*arrays, 0x77) == 0
    assert copied(src, dst)
    in_stream_order = (1, 0, 0, 0, 0, 0)  # order, two locations of two words, flags
    assert driver.calls == [(3, 1, 0, 0x77, *in_stream_order)]
    assert ctypes.sizeof(cuda_batch._Attributes) == 24


def test_a_driver_that_is_not_there_has_no_batched_copy() -> None:
    found = cuda_batch.batch_copy.__wrapped__()
    assert found is None or torch.cuda.is_available()


class Runtime(device._Runtime):
    """A CUDA runtime whose copies are memmove."""

    def __init__(self, code: int = 0) -> None:
        self.count, self.drained, self.code = 0, 0, code
        self.SetDevice = lambda index: 0

    def MemcpyAsync(self, dst, src, nbytes, kind, stream):  # type: ignore[no-untyped-def]
        assert kind.value == 4
        self.count += 1
        if not self.code:
            ctypes.memmove(dst.value, src.value, nbytes.value)
        return self.code

    def GetLastError(self) -> int:
        self.drained += 1
        return self.code


@pytest.mark.parametrize(
    ("registered", "stream", "hip", "driver", "batches", "calls"),
    [
        (True, 7, False, Driver(), 1, 0),
        (False, 7, False, Driver(), 0, 3),  # the driver's call does not promise pageable memory
        (True, 0, False, Driver(), 0, 3),  # it refuses the legacy default stream
        (True, 7, True, Driver(), 0, 3),
        (True, 7, False, None, 0, 3),  # a driver older than CUDA 12.8
        (True, 7, False, Driver(801), 1, 3),  # refused: one by one
    ],
)
def test_a_gpu_copies_in_one_call_or_one_by_one(
    registered: bool,
    stream: int,
    hip: bool,
    driver: Driver | None,
    batches: int,
    calls: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    gpu, runtime = on_cpu(monkeypatch, stream, hip), Runtime()
    monkeypatch.setattr(device, "_refusals", LogLimit())
    monkeypatch.setattr(device, "_runtime", lambda: runtime)
    batch = None if driver is None else BatchCopy(driver.function)
    monkeypatch.setattr(cuda_batch, "batch_copy", lambda: batch)
    before = 0 if driver is None else len(driver.calls)
    src, dst, arrays = runs()
    gpu.copy_batch(*arrays, registered=registered)
    assert copied(src, dst)
    assert (0 if driver is None else len(driver.calls)) - before == batches
    assert runtime.count == calls
    assert ("(cuMemcpyBatchAsync, error 801)" in caplog.text) is bool(driver and driver.code)


def test_a_refused_copy_leaves_no_error_for_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, runtime = on_cpu(monkeypatch, 7, hip=True), Runtime(1)
    monkeypatch.setattr(device, "_runtime", lambda: runtime)
    with pytest.raises(TransferError, match="copy of 4 bytes: error 1"):
        gpu.copy_batch(*runs()[2])
    assert runtime.drained == 1


def test_a_thread_of_kvcores_is_not_bound_by_captures_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu, entered, modes = on_cpu(monkeypatch, 7, hip=False), [], []
    monkeypatch.setattr(torch.cuda, "set_device", entered.append)

    def exchange(mode):  # type: ignore[no-untyped-def]
        modes.append(mode._obj.value)
        mode._obj.value = 0  # the thread's mode before
        return 0

    monkeypatch.setattr(
        device, "_runtime", lambda: SimpleNamespace(ThreadExchangeStreamCaptureMode=exchange)
    )
    gpu.enter()
    gpu.enter()
    assert modes == [1, 1]
    assert entered == [gpu.name] * 2


def test_a_device_is_entered_without_a_runtime_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch may hold the runtime within itself, so that no library of it is mapped."""
    gpu, entered = on_cpu(monkeypatch, 7, hip=False), []
    monkeypatch.setattr(torch.cuda, "set_device", entered.append)

    def missing() -> None:
        raise UnsupportedError("no runtime")

    monkeypatch.setattr(device, "_runtime", missing)
    gpu.enter()
    assert entered == [gpu.name]


@pytest.mark.parametrize(
    ("cuda", "hip", "wanted"),
    [
        ("13.0", None, "/a/nvidia/cu13/lib/libcudart.so.13"),
        ("12.8", None, "/a/cuda_runtime/lib/libcudart.so.12"),
        ("11.8", None, "/a/torch/lib/libcudart-d0da41ae.so.11.0"),
        (None, "6.3.1", "/a/torch/lib/libamdhip64.so.6"),
    ],
)
def test_the_runtime_is_torchs(
    cuda: str | None,
    hip: str | None,
    wanted: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other packages may have brought another one."""
    maps, opened = tmp_path / "maps", []
    names = [
        "/a/cuda_runtime/lib/libcudart.so.12",
        "/a/nvidia/cu13/lib/libcudart.so.13",
        "/a/torch/lib/libcudart-d0da41ae.so.11.0",
        "/a/torch/lib/libamdhip64.so.6",
        "/a/torch/lib/libtorch_cuda.so",
        "[heap]",
    ]
    maps.write_text("".join(f"7f00-7f01 r--p 00000000 fe:00 12 {name}\n" for name in names))

    def load(name: str) -> MagicMock:
        opened.append(name)
        return MagicMock()

    monkeypatch.setattr(device, "_MAPS", maps)
    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    device._Runtime()
    assert opened == [wanted]


def on_cpu(monkeypatch: pytest.MonkeyPatch, stream: int, hip: bool) -> CudaDevice:
    """A CUDA device without CUDA, whose current stream has this handle."""
    gpu = CudaDevice.__new__(CudaDevice)
    gpu.name, gpu._hip = torch.device("cuda", 0), hip
    monkeypatch.setattr(CudaDevice, "current", lambda self: nullcontext())
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda name: SimpleNamespace(cuda_stream=stream)
    )
    return gpu


def test_a_cpu_copies_by_memmove() -> None:
    src, dst, arrays = runs()
    CpuDevice(torch.device("cpu")).copy_batch(*arrays)
    assert copied(src, dst)
