"""A GPU played on CPU memory: its registrations, and the device of each thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from kvcore.errors import UnsupportedError
from kvcore.memory.device import CpuDevice, device_of, serve_devices
from kvcore.memory.hugepages import PAGE

NAME = torch.device("cpu", 3)


class Driver:
    """What all devices of a process share. Checks each call as a driver would.

    ``on_register`` is called with the number of registrations so far, before each; it may block, or
    raise UnsupportedError. ``calls`` are the calls: what, address, and whether the device was the
    current one of the calling thread. ``threads`` are the names of the threads that called, and
    ``entered`` of those that made the device their current one for good.
    """

    def __init__(self) -> None:
        self.on_register: Callable[[int], None] = lambda count: None
        self.calls: list[tuple[str, int, bool]] = []
        self.threads: set[str] = set()
        self.entered: set[str] = set()
        self.held: dict[int, int] = {}
        self.most_nbytes = 0
        self.node: int | None = None
        self._lock = threading.Lock()
        self._local = threading.local()

    @property
    def nbytes(self) -> int:
        """The bytes that are registered now."""
        return sum(self.held.values())

    def covers(self, address: int, nbytes: int) -> bool:
        """Return True if one registration holds the whole range."""
        return any(at <= address and address + nbytes <= at + n for at, n in self.held.items())

    def enter(self) -> None:
        self._local.current = True
        self.entered.add(threading.current_thread().name)

    @contextmanager
    def current(self) -> Iterator[None]:
        before = getattr(self._local, "current", False)
        self._local.current = True
        yield
        self._local.current = before

    def note(self, what: str, address: int) -> None:
        self.calls.append((what, address, getattr(self._local, "current", False)))
        self.threads.add(threading.current_thread().name)

    def register(self, address: int, nbytes: int) -> None:
        self.on_register(len(self.held))
        with self._lock:
            assert address % PAGE == 0, "two registrations may share a page"
            for at, n in self.held.items():
                assert address >= at + n or address + nbytes <= at, "registered twice"
            self.note("register", address)
            self.held[address] = nbytes
            self.most_nbytes = max(self.most_nbytes, self.nbytes)

    def unregister(self, address: int) -> None:
        with self._lock:
            self.note("unregister", address)
            del self.held[address]


class FakeGpu(CpuDevice):
    """CPU memory behind a `Driver`."""

    def __init__(self, driver: Driver, name: torch.device = NAME) -> None:
        super().__init__(name)
        self._driver = driver

    @property
    def queues(self) -> bool:
        return True

    def enter(self) -> None:
        self._driver.enter()

    def current(self) -> AbstractContextManager[object]:
        return self._driver.current()

    def numa_node(self) -> int | None:
        return self._driver.node

    def register(self, address: int, nbytes: int) -> None:
        self._driver.register(address, nbytes)

    def unregister(self, address: int) -> None:
        self._driver.unregister(address)


@contextmanager
def gpu_in_place_of_the_cpu() -> Iterator[Driver]:
    """Let `device_of` make `FakeGpu` devices for CPU memory in the block."""
    driver = Driver()
    undo = serve_devices("cpu", lambda name: FakeGpu(driver, name))
    try:
        assert isinstance(device_of(None), FakeGpu)
        yield driver
    finally:
        undo()


def refusing(at: int) -> Callable[[int], None]:
    """Return an ``on_register`` that refuses the registration number ``at``."""

    def refuse(count: int) -> None:
        if count == at:
            raise UnsupportedError("the driver refuses it with error 2")

    return refuse
