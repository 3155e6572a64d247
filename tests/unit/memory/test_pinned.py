"""Memory that a device reaches: all of it or none, in chunks that no block spans."""

import contextlib
import itertools
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore._util import cpus
from kvcore.errors import UnsupportedError
from kvcore.memory import device as devices
from kvcore.memory import hugepages, pinned
from kvcore.memory.arena import HostArena
from kvcore.memory.hugepages import PAGE
from kvcore.memory.pinned import PinnedRange
from kvcore.model.shape import BlockShape
from kvcore_devtools.gpu import Machine, RecordingDevice
from kvcore_devtools.memory_pages import resident_nbytes

torch = pytest.importorskip("torch")

SHAPE = BlockShape(3, 2, 8, 16, "float32")
CHUNK = 4 * PAGE


def gpu(machine: Machine) -> RecordingDevice:
    """Return GPU 1. The threads of a test begin with GPU 0 as their current device."""
    return RecordingDevice(machine, torch.device("cuda", machine.index))


def covers(machine: Machine, address: int, nbytes: int) -> bool:
    """Return True if one registration holds the whole range."""
    held = machine.registered.items()
    return any(at <= address and address + nbytes <= at + n for at, n in held)


@contextlib.contextmanager
def chunks_of(nbytes: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pinned, "CHUNK_NBYTES", nbytes)
        yield


@given(
    blocks=st.integers(1, 80),
    unit=st.sampled_from([8, 512, 768, 1536, PAGE, 3 * PAGE, 5 * PAGE + 512]),
    pages=st.integers(1, 9),
)
def test_chunks_are_all_of_it_and_no_block_spans_two(blocks: int, unit: int, pages: int) -> None:
    machine, address = Machine(index=1), 64 * PAGE
    with chunks_of(pages * PAGE):
        held = PinnedRange(gpu(machine), address, blocks * unit, unit)
    assert sum(machine.registered.values()) == blocks * unit
    assert held.chunks == len(machine.registered)
    for block in range(blocks):
        assert covers(machine, address + block * unit, unit)
    held.close()
    assert not machine.registered
    assert all(call.current for call in machine.calls)
    machine.check()


@given(blocks=st.integers(1, 40), fails=st.integers(0, 9), by=st.sampled_from(["driver", "owner"]))
def test_all_of_it_or_none(blocks: int, fails: int, by: str) -> None:
    machine = Machine(index=1, lockable=fails * CHUNK if by == "driver" else None)

    def wanted() -> bool:
        return by == "driver" or len(machine.registered) < fails

    with chunks_of(CHUNK), contextlib.suppress(UnsupportedError):
        PinnedRange(gpu(machine), 0, blocks * PAGE, PAGE, wanted=wanted).close()
    assert not machine.registered
    done = [call.what for call in machine.calls if call.kind == "register"]
    assert done == [i * CHUNK for i in range(min(fails, -(-blocks * PAGE // CHUNK)))]
    assert [call.what for call in machine.calls if call.kind == "unregister"] == done[::-1]
    machine.check()


@pytest.mark.parametrize("arrangement", ["blockwise", "layerwise"])
@pytest.mark.parametrize("fails", [0, 2, None])
def test_an_arena_works_pinned_or_not(
    arrangement: str, fails: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    machine = Machine(index=1, lockable=None if fails is None else fails * CHUNK)
    pin = gpu(machine)
    with chunks_of(CHUNK):
        arena = HostArena(SHAPE, 64, arrangement=arrangement, huge_pages=False, pin=pin)
    assert arena.pinned is (fails is None)
    assert sum(machine.registered.values()) == (arena.nbytes if fails is None else 0)
    for slot in range(64):
        for piece in arena.slot_buffers(slot):
            start = torch.frombuffer(piece, dtype=torch.uint8).data_ptr()
            assert covers(machine, start, piece.nbytes) is (fails is None)
    arena.tensor().fill_(1)
    arena.close()
    assert not machine.registered
    assert not arena.pinned
    machine.check()
    said = [r.message for r in caplog.records if r.levelno >= logging.WARNING]
    if fails is None:
        assert not said
        assert f"host memory is pinned, {arena.nbytes} bytes in" in caplog.text
    else:
        [line] = said
        assert f"host memory of {arena.nbytes} bytes is not pinned" in line
        assert f"{fails * CHUNK} after {fails * CHUNK} bytes" in line or arrangement == "layerwise"
        assert "memory limit of the container" in line
        assert "lower host.capacity" in line


def test_memory_is_faulted_in_from_cores_near_the_device_before_it_is_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = sorted(os.sched_getaffinity(0))
    (tmp_path / "node1").mkdir()
    (tmp_path / "node1" / "cpulist").write_text(f"{mine[-1]}\n")
    monkeypatch.setattr(cpus, "_NODES", tmp_path)
    monkeypatch.setattr(hugepages, "_LEAST_OF_A_THREAD", hugepages.HUGE_PAGE)
    machine = Machine(index=1)
    ran_on: list[tuple[str, set[int]]] = []
    touched: list[tuple[int, int]] = []

    def populate(address: int, nbytes: int) -> int:
        ran_on.append(("touched", os.sched_getaffinity(0)))
        touched.append((address, nbytes))
        return 0

    monkeypatch.setattr(hugepages, "_populate", populate)
    machine.on_register = lambda count: ran_on.append(("registered", os.sched_getaffinity(0)))
    machine.node = 1
    slots = 5 * hugepages.HUGE_PAGE // SHAPE.nbytes
    arena = HostArena(SHAPE, slots, huge_pages=False, pin=gpu(machine))
    whole = sorted(touched)
    assert len(whole) > 1
    assert ran_on == [*[("touched", {mine[-1]})] * len(whole), ("registered", {mine[-1]})]
    assert [at + size for at, size in whole[:-1]] == [at for at, _ in whole[1:]]
    assert sum(size for _, size in whole) == arena.nbytes
    arena.close()
    assert os.sched_getaffinity(0) == set(mine)


def test_memory_is_unregistered_before_it_is_unmapped(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(index=1)
    arena = HostArena(SHAPE, 2, huge_pages=False, pin=gpu(machine))
    assert machine.registered
    left: list[int] = []
    close = hugepages.Pages.close
    monkeypatch.setattr(hugepages.Pages, "close", lambda _: left.append(len(machine.registered)))
    arena.close()
    close(arena._pages)
    assert left == [0]


@pytest.mark.parametrize("stops", [0, 2, None])
def test_memory_is_faulted_in_until_it_is_not_wanted(stops: int | None) -> None:
    pages = hugepages.Pages(4 * hugepages.HUGE_PAGE + PAGE, huge=False)
    asked = itertools.count()
    pages.take(lambda: stops is None or next(asked) < stops)
    found = resident_nbytes(pages.view)
    assert found == (pages.view.nbytes if stops is None else stops * hugepages.HUGE_PAGE)
    pages.close()


def test_who_waits_for_an_event_lets_the_core_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's events spin by default, a core each."""
    made = []

    class Event:
        def __init__(self, **options: bool) -> None:
            made.append(options)

        def record(self, stream: object) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "Event", Event)
    for timed in (False, True):
        devices._CudaStream(object()).record(timed=timed)
    assert made == [{"enable_timing": timed, "blocking": True} for timed in (False, True)]


def test_memory_is_faulted_in_where_no_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    pages = hugepages.Pages(2 * hugepages.HUGE_PAGE, huge=False)
    monkeypatch.setattr(threading.Thread, "start", refused)
    pages.take()
    assert resident_nbytes(pages.view) == pages.view.nbytes
    pages.close()


class Runtime:
    """The functions of the CUDA runtime that are called, and this thread's pending error."""

    def __init__(self, code: int = 0, bus: bytes = b"") -> None:
        self.code, self.bus, self.pending = code, bus, 0

    def _fail(self) -> int:
        self.pending = self.code
        return self.code

    def HostRegister(self, address: object, nbytes: object, flags: object) -> int:
        return self._fail()

    def HostUnregister(self, address: object) -> int:
        return self._fail()

    def DeviceGetPCIBusId(self, name: object, size: object, device: object) -> int:
        name.value = self.bus  # type: ignore[attr-defined]
        return self._fail()

    def GetLastError(self) -> int:
        code, self.pending = self.pending, 0
        return code


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> devices.CudaDevice:
    monkeypatch.setattr(torch.cuda, "device", lambda name: contextlib.nullcontext())
    return devices.CudaDevice(torch.device("cuda", 1))


@pytest.mark.parametrize("code", [0, 712])
def test_no_error_is_left_for_the_engines_next_kernel(
    cuda: devices.CudaDevice, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = Runtime(code)
    monkeypatch.setattr(devices, "_runtime", lambda: runtime)
    with pytest.raises(UnsupportedError, match="712") if code else contextlib.nullcontext():
        cuda.register(0, PAGE)
    assert not runtime.pending
    cuda.unregister(0)
    assert not runtime.pending
    cuda.numa_node()
    assert not runtime.pending


@pytest.mark.parametrize(("told", "node"), [("1", 1), ("0", 0), ("-1", None), ("", None)])
def test_the_node_of_a_gpu_is_that_of_its_slot(
    cuda: devices.CudaDevice,
    tmp_path: Path,
    told: str,
    node: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "_PCI", tmp_path)
    monkeypatch.setattr(devices, "_runtime", lambda: Runtime(bus=b"0000:3B:00.0"))
    assert cuda.numa_node() is None, "a container without this part of /sys"
    (tmp_path / "0000:3b:00.0").mkdir()
    (tmp_path / "0000:3b:00.0" / "numa_node").write_text(f"{told}\n")
    assert cuda.numa_node() == node
