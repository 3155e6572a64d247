"""NIXL as a node uses it: its own memory for others to read, and reads of theirs.

A read goes into a lane, a registered piece of memory of the reader's, and from there to where it is
wanted. NIXL cannot promise that a read which was given up writes no more, so its lane is not used
again before that read has ended; the caller's memory is never in its way.
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
from kvcore.memory.nixl import DONE, LANE_NBYTES, RUNNING, Memory, NixlAgent, pauses, say


class Remote(NamedTuple):
    """A value of another node's memory."""

    address: int
    nbytes: int


@dataclass(eq=False)
class _Lane:
    memory: Pages
    handle: Any = None
    """Of the read that was given up and may still write."""


class Agent(NixlAgent):
    """One NIXL agent. Thread-safe.

    ``memory`` is read by others, ``lanes`` bounds this node's own reads at once. What others read
    over TCP gets on with `progress`.
    """

    def __init__(self, name: str, backend: str, lanes: int, memory: Pages | None = None) -> None:
        """Raises UnsupportedError without NIXL, TierUnavailable without its backend."""
        super().__init__(name, backend, "use UCX")
        self._lock = threading.Lock()
        self._known: set[str] = set()
        self._free: list[_Lane] = []
        self._lost: list[_Lane] = []
        self._lanes_left = lanes
        try:
            if memory is not None:
                self._register(Memory.of(memory))
            self.metadata = bytes(self._agent.get_agent_metadata())
        except self._errors as error:
            raise TierUnavailable(f"NIXL's backend {backend} does not start: {error}") from error

    def knows(self, agent: str) -> bool:
        """Whether `read` can reach it without meeting it first."""
        return agent in self._known

    def progress(self) -> None:
        """Serve what others read of ``memory``, where the network card does not do it by itself.
        Returns as soon as there is nothing left to do."""
        with self._lock:
            if self._agent is not None:
                with suppress(*self._errors):  # of readers that are gone
                    self._agent.get_new_notifs()

    def meet(self, agent: str, metadata: bytes) -> None:
        """Learn how to read from a node. Raises TierUnavailable where that is not possible."""
        with self._lock:
            if agent in self._known:  # another thread was faster
                return
            try:
                told = self._agent.add_remote_agent(metadata)
            except self._errors as error:
                raise TierUnavailable(f"NIXL cannot reach {agent}: {say(error)}") from error
            name = told.decode() if isinstance(told, bytes) else str(told)
            if name != agent:
                raise TierUnavailable(f"{agent} gives the metadata of {name}")
            self._known.add(agent)

    @contextmanager
    def read(
        self, agent: str, values: Sequence[Remote], until: float
    ) -> Iterator[list[memoryview]]:
        """The bytes of values of a node that was met, to be used within the block; together they
        fit a lane. Blocks until they are there, to the monotonic time ``until`` at most.

        Raises TierUnavailable where they did not come; the node is met anew then, unless it was
        slow alone.
        """
        lane = self._take_lane()
        try:
            lane.handle = self._start(agent, values, lane)
            self._wait(agent, lane, until)
            yield list(_cut(lane.memory.view, [value.nbytes for value in values]))
        finally:
            self._put_back(lane)

    def close(self) -> bool:
        """Stop. False where reads that were given up may still write: their lanes, and NIXL, are
        left to the process's end. Idempotent."""
        with self._lock:
            self._sweep()
            self._lanes_left = 0
            if self._lost:
                _left_behind.append(self)
                return False
            self._agent = None  # before the memory that it has registered
            for lane in self._free:
                lane.memory.close()
            self._free.clear()
            return True

    # -- inside -----------------------------------------------------------------------------

    def _take_lane(self) -> _Lane:
        with self._lock:
            self._sweep()
            if self._free:
                return self._free.pop()
            if not self._lanes_left:
                raise TierUnavailable("every lane is in use, by reads that hang for the most part")
            lane = _Lane(Pages(LANE_NBYTES, huge=False))
            try:
                self._register(Memory.of(lane.memory))
            except self._errors as error:
                raise TierUnavailable(f"NIXL registers no memory: {say(error)}") from error
            self._lanes_left -= 1
            return lane

    def _put_back(self, lane: _Lane) -> None:
        with self._lock:
            (self._free if lane.handle is None else self._lost).append(lane)

    def _sweep(self) -> None:
        """Use lanes again whose read has ended after all. With the lock."""
        for lane in list(self._lost):
            if self._state(lane.handle) != RUNNING:
                self._lost.remove(lane)
                self._end(lane)
                self._free.append(lane)

    def _start(self, agent: str, values: Sequence[Remote], lane: _Lane) -> Any:
        mine, at = [], lane.memory.address
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
                raise TierUnavailable(f"NIXL reads nothing of {agent}: {say(error)}") from error

    def _wait(self, agent: str, lane: _Lane, until: float) -> None:
        with self._lock:
            state = self._state(lane.handle, post=True)
        for pause in pauses():
            if state != RUNNING:
                break
            left = until - time.monotonic()
            if left <= 0:
                raise TierUnavailable(f"{agent} did not give its bytes in time")
            time.sleep(min(pause, left))
            with self._lock:
                state = self._state(lane.handle)
        with self._lock:
            self._end(lane)
            if state != DONE:
                self._forget(agent)
        if state != DONE:
            raise TierUnavailable(f"reading from {agent} failed: {state}")

    def _forget(self, agent: str) -> None:
        """A node that could not be read from is met anew before the next try. With the lock."""
        if agent in self._known:
            self._known.discard(agent)
            with suppress(*self._errors):
                self._agent.remove_remote_agent(agent)

    def _end(self, lane: _Lane) -> None:
        """Of a read that has ended. With the lock."""
        self._release(lane.handle)
        lane.handle = None


def _cut(memory: memoryview, sizes: Sequence[int]) -> Iterator[memoryview]:
    start = 0
    for nbytes in sizes:
        yield memory[start : start + nbytes]
        start += nbytes


_left_behind: list[Agent] = []
