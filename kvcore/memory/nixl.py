"""NIXL, whatever it moves bytes between: an agent with one backend.

Needs NIXL (``pip install nixl-cu13``, which also runs without a GPU).
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from kvcore._util.optional import client_module
from kvcore.errors import TierUnavailable
from kvcore.memory.hugepages import Pages

CHANNEL_NBYTES = 16 << 20
"""Bytes of a channel: registered memory that the transfers of one call use. Only the channels that
are used are ever touched."""
DONE, RUNNING = "DONE", "PROC"

_FILES_ADVICE = (
    "POSIX is in every NIXL; GDS and GDS_MT need NVIDIA's GPUDirect Storage (libcufile) on this "
    "machine"
)
_numbers = itertools.count()

_PACKAGES = ("nixl_cu13", "nixl_cu12", "nixl")
_POLL_S = (0.0001, 0.005)


class Memory(NamedTuple):
    """Memory that NIXL may access: "DRAM", or "VRAM" of the GPU ``device``."""

    address: int
    nbytes: int
    kind: str = "DRAM"
    device: int = 0

    @classmethod
    def of(cls, pages: Pages) -> Memory:
        """Return the memory of ``pages``."""
        return cls(pages.address, pages.view.nbytes)


class FileSpan(NamedTuple):
    """``nbytes`` of a file from ``offset``, moved to or from ``start`` of an agent's memory."""

    fd: int
    start: int
    nbytes: int
    offset: int = 0


def nixl_module() -> Any:
    """Return NIXL's Python interface; UnsupportedError if it is not installed."""
    found = [name for name in _PACKAGES if importlib.util.find_spec(name) is not None]
    return client_module(f"{found[0] if found else _PACKAGES[0]}._api", "nixl-cu13")


def pauses() -> Iterator[float]:
    """Yield the seconds to wait between two polls of a transfer.

    Each pause is an eighth of the time waited so far, so that the end is noticed at most that late.
    """
    least, most = _POLL_S
    waited = 0.0
    while True:
        pause = min(max(least, waited / 8), most)
        yield pause
        waited += pause


class NixlAgent:
    """An agent of NIXL with one backend.

    ``_agent`` is NIXL's agent, with ``backend`` only; ``_errors`` are all errors that it raises.
    NIXL's own thread, which never sleeps, is not used: a transfer makes progress when it is polled.
    """

    def __init__(self, name: str, backend: str, advice: str) -> None:
        """Start the agent; ``advice`` says what to change if the backend is missing.

        Raises UnsupportedError without NIXL, and TierUnavailable without its backend.
        """
        api = nixl_module()
        self.name = name
        self._registered: list[Any] = []  # what NIXL told of memory and files
        self._errors = _errors_of(api)
        # RuntimeError: raised if it finds no plugin.
        starting: tuple[type[Exception], ...] = (*self._errors, RuntimeError)
        try:
            settings = api.nixl_agent_config(enable_prog_thread=False, backends=[backend])
            self._agent = api.nixl_agent(name, settings)
        except starting as error:
            raise TierUnavailable(
                f"NIXL's backend {backend} does not start ({say(error)}): {advice}"
            ) from error
        if backend not in self._agent.backends:
            raise TierUnavailable(f"NIXL has no backend {backend!r}: {advice}")

    def _register(self, memory: Memory) -> None:
        place = (memory.address, memory.nbytes, memory.device, "")
        self._registered.append(self._agent.register_memory([place], memory.kind))

    def _state(self, handle: Any, *, post: bool = False) -> str:
        """Return the state of a transfer, as NIXL's word or an error's text."""
        agent = self._agent
        try:
            return str(agent.transfer(handle) if post else agent.check_xfer_state(handle))
        except self._errors as error:
            return say(error)

    def _release(self, handle: Any) -> None:
        """Release a transfer that has ended: NIXL does not wait for running ones."""
        with suppress(*self._errors):
            self._agent.release_xfer_handle(handle)


class FileAgent(NixlAgent):
    """Moves bytes between ``memory`` and files. For one thread at a time."""

    def __init__(self, backend: str, memory: Memory | None = None) -> None:
        """Start the agent.

        Raises UnsupportedError without NIXL, and TierUnavailable without its backend.
        """
        super().__init__(f"kvcore-files-{os.getpid()}-{next(_numbers)}", backend, _FILES_ADVICE)
        self._kept: set[int] = set()
        if memory is not None:
            self._memory = memory
            try:
                self._register(memory)
            except self._errors as error:
                raise TierUnavailable(f"NIXL registers no memory: {say(error)}") from error

    def keep(self, fd: int, nbytes: int) -> None:
        """Register a file of up to ``nbytes``, so that its moves need not register it each time.

        Raises TierUnavailable if NIXL does not accept it.
        """
        try:
            self._registered.append(self._agent.register_memory([(0, nbytes, fd, "")], "FILE"))
        except self._errors as error:
            raise TierUnavailable(f"NIXL registers no file: {say(error)}") from error
        self._kept.add(fd)

    def close(self) -> None:
        """Deregister memory and files, so that another agent may register them. Idempotent.

        No move may be under way.
        """
        while self._registered:
            with suppress(*self._errors):
                self._agent.deregister_memory(self._registered.pop())
        self._kept.clear()

    def move(self, operation: str, spans: Sequence[FileSpan]) -> str:
        """READ or WRITE files, and return NIXL's word for the outcome.

        Blocks until the transfer has ended, however long it takes.
        """
        agent, files = self._agent, None
        new = [(s.offset, s.nbytes, s.fd, "") for s in spans if s.fd not in self._kept]
        try:
            if new:
                files = agent.register_memory(new, "FILE")
        except self._errors as error:
            return say(error)
        try:
            return self._move(operation, spans)
        except self._errors as error:
            return say(error)
        finally:
            if files is not None:
                with suppress(*self._errors):
                    agent.deregister_memory(files)

    def _move(self, operation: str, spans: Sequence[FileSpan]) -> str:
        agent, (base, _, kind, device) = self._agent, self._memory
        handle = agent.initialize_xfer(
            operation,
            agent.get_xfer_descs([(base + s.start, s.nbytes, device) for s in spans], kind),
            agent.get_xfer_descs([(s.offset, s.nbytes, s.fd) for s in spans], "FILE"),
            self.name,
        )
        state = self._state(handle, post=True)
        for pause in pauses():
            if state != RUNNING:
                break
            time.sleep(pause)
            state = self._state(handle)
        self._release(handle)
        return state


def say(error: Exception) -> str:
    """Return the class and the text of an error."""
    return f"{type(error).__name__}: {error}"


def _errors_of(api: Any) -> tuple[type[Exception], ...]:
    """Return every error class of NIXL, because they have no common base."""
    kinds = [kind for kind in vars(api.nixlBind).values() if isinstance(kind, type)]
    return tuple(kind for kind in kinds if issubclass(kind, Exception))
