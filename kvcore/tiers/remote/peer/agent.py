"""A node's NIXL agent: it offers the node's memory to others, and reads theirs.

A read goes into a channel, registered memory of the reader, and is copied from there to its target.
NIXL does not guarantee that an abandoned read stops writing. Therefore its channel is not reused
before that read has ended, and the caller's memory is never the target of a NIXL read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvcore.errors import TierUnavailable
from kvcore.memory.hugepages import Pages
from kvcore.memory.nixl import CHANNEL_NBYTES, DONE, RUNNING, Memory, NixlAgent, pauses, say


class Remote(NamedTuple):
    """A value in the memory of another node."""

    address: int
    nbytes: int


@dataclass(eq=False)
class _Channel:
    memory: Pages
    handle: Any = None
    """The handle of the abandoned read that may still write, if any."""


class Agent(NixlAgent):
    """One NIXL agent. Thread-safe.

    Other nodes read ``memory``. ``channels`` limits the parallel reads of this node. Reads by
    others over TCP advance only while this node calls `progress`.
    """

    def __init__(self, name: str, backend: str, channels: int, memory: Pages | None = None) -> None:
        """Start NIXL. Raises UnsupportedError without NIXL, TierUnavailable without its backend."""
        super().__init__(name, backend, "use UCX")
        self._lock = threading.Lock()
        self._known: set[str] = set()
        self._free: list[_Channel] = []
        self._abandoned: list[_Channel] = []
        self._lanes_left = channels
        try:
            if memory is not None:
                self._register(Memory.of(memory))
            self.metadata = bytes(self._agent.get_agent_metadata())
        except self._errors as error:
            raise TierUnavailable(f"NIXL's backend {backend} does not start: {error}") from error

    def knows(self, agent: str) -> bool:
        """Return True if `read` can reach a node without `meet`."""
        return agent in self._known

    def progress(self) -> None:
        """Serve reads of ``memory`` by others, if the network card does not do so by itself.

        Returns as soon as nothing is left to do.
        """
        with self._lock:
            if self._agent is not None:
                with suppress(*self._errors):  # errors of readers that have ended
                    self._agent.get_new_notifs()

    def meet(self, agent: str, metadata: bytes) -> None:
        """Learn how to read from a node. Raises TierUnavailable if that fails."""
        with self._lock:
            if agent in self._known:  # another thread was faster
                return
            try:
                added = self._agent.add_remote_agent(metadata)
            except self._errors as error:
                raise TierUnavailable(f"NIXL cannot reach {agent}: {say(error)}") from error
            name = added.decode() if isinstance(added, bytes) else str(added)
            if name != agent:
                with suppress(*self._errors):
                    self._agent.remove_remote_agent(name)
                raise TierUnavailable(f"{agent} sent the metadata of {name}")
            self._known.add(agent)

    @contextmanager
    def read(
        self, agent: str, values: Sequence[Remote], until: float
    ) -> Iterator[list[memoryview]]:
        """Read values from a node after the handshake (`meet`). The bytes are valid in the block.

        All values together must fit one channel. Blocks until they have arrived, at most until the
        monotonic time ``until``.

        Raises TierUnavailable if they did not arrive. Unless that was only a timeout, the node must
        be met again before the next read.
        """
        channel = self._take_lane()
        try:
            channel.handle = self._start(agent, values, channel)
            self._wait(agent, channel, until)
            yield list(_cut(channel.memory.view, [value.nbytes for value in values]))
        finally:
            self._put_back(channel)

    def close(self) -> bool:
        """Stop, and release NIXL and the channels. Idempotent.

        Returns False if abandoned reads may still write. Then the channels and NIXL stay allocated
        until the process ends.
        """
        with self._lock:
            self._sweep()
            self._lanes_left = 0
            if self._abandoned:
                _left_behind.append(self)
                return False
            self._agent = None  # before the memory that it has registered
            for channel in self._free:
                channel.memory.close()
            self._free.clear()
            return True

    # -- inside -----------------------------------------------------------------------------

    def _take_lane(self) -> _Channel:
        with self._lock:
            self._sweep()
            if self._free:
                return self._free.pop()
            if not self._lanes_left:
                raise TierUnavailable("every channel is in use, most of them by reads that hang")
            channel = _Channel(Pages(CHANNEL_NBYTES, huge=False))
            try:
                self._register(Memory.of(channel.memory))
            except self._errors as error:
                raise TierUnavailable(f"NIXL cannot register memory: {say(error)}") from error
            self._lanes_left -= 1
            return channel

    def _put_back(self, channel: _Channel) -> None:
        with self._lock:
            (self._free if channel.handle is None else self._abandoned).append(channel)

    def _sweep(self) -> None:
        """Reclaim channels whose abandoned read has ended. The caller holds the lock."""
        for channel in list(self._abandoned):
            if self._state(channel.handle) != RUNNING:
                self._abandoned.remove(channel)
                self._end(channel)
                self._free.append(channel)

    def _start(self, agent: str, values: Sequence[Remote], channel: _Channel) -> Any:
        mine, at = [], channel.memory.address
        for value in values:
            mine.append((at, value.nbytes, 0))
            at += value.nbytes
        theirs = [(value.address, value.nbytes, 0) for value in values]
        with self._lock:
            try:
                return self._agent.initialize_xfer(
                    "READ",
                    self._agent.get_xfer_descs(mine, "DRAM"),
                    self._agent.get_xfer_descs(theirs, "DRAM"),
                    agent,
                )
            except self._errors as error:
                self._forget(agent)
                raise TierUnavailable(f"NIXL cannot read from {agent}: {say(error)}") from error

    def _wait(self, agent: str, channel: _Channel, until: float) -> None:
        with self._lock:
            state = self._state(channel.handle, post=True)
        for pause in pauses():
            if state != RUNNING:
                break
            left = until - time.monotonic()
            if left <= 0:
                raise TierUnavailable(f"the bytes of {agent} did not arrive in time")
            time.sleep(min(pause, left))
            with self._lock:
                state = self._state(channel.handle)
        with self._lock:
            self._end(channel)
            if state != DONE:
                self._forget(agent)
        if state != DONE:
            raise TierUnavailable(f"reading from {agent} failed: {state}")

    def _forget(self, agent: str) -> None:
        """Require a new `meet` before the next read of a node. The caller holds the lock."""
        if agent in self._known:
            self._known.discard(agent)
            with suppress(*self._errors):
                self._agent.remove_remote_agent(agent)

    def _end(self, channel: _Channel) -> None:
        """Release the handle of a read that has ended. The caller holds the lock."""
        self._release(channel.handle)
        channel.handle = None


def _cut(memory: memoryview, sizes: Sequence[int]) -> Iterator[memoryview]:
    start = 0
    for nbytes in sizes:
        yield memory[start : start + nbytes]
        start += nbytes


_left_behind: list[Agent] = []
