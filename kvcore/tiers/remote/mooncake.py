"""Mooncake Store: a master that knows where values are, and memory lent by all its clients.

Blocks go between the host arena and other hosts' memory without a copy: the arena is registered
with Mooncake's transfer engine. What does not lie there, a value's header above all, passes through
registered pieces that grow with the largest value; so do small values as a whole over TCP.

A value stands until it is removed or evicted: Mooncake does not replace it. What a client has lent
is gone when it ends.
"""

from __future__ import annotations

import mmap
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from kvcore._util.optional import client_module
from kvcore.config.schema import Size, parse_size
from kvcore.errors import BlockMissing, CorruptBlock, TierError, TierUnavailable
from kvcore.memory.buffers import nbytes_of
from kvcore.tiers.remote.base import BlockStore, Item, copy_bytes
from kvcore.tiers.remote.options import StoreOptions
from kvcore.tiers.remote.tier import StoreKind

_LANE_NBYTES = 16 << 20
_STAGED_NBYTES = 1 << 20
"""Over TCP each piece of a value has a connection of its own: up to this size a value goes in one
piece, by a copy. Measured on 2 cores, 360 KiB and 2 MiB a value."""
_LOCAL_NBYTES = 16 << 20  # Mooncake's own buffer, for calls that are not used here
_OK, _FULL, _NOT_FOUND = 0, -200, -704


class MooncakeOptions(StoreOptions):
    """Where the master is, and what each rank brings."""

    known_by = ("master",)

    master: Annotated[str, Field(pattern=r"^[^:]+:[0-9]+$")] = Field(
        description="HOST:PORT of `mooncake_master`."
    )
    host: str = Field(
        default_factory=socket.gethostname,
        description="Name or address under which other hosts reach this one.",
    )
    metadata: Annotated[str, Field(min_length=1)] = Field(
        default="P2PHANDSHAKE",
        description="Metadata server of Mooncake's transfer engine.",
    )
    protocol: Literal["tcp", "rdma"] = Field(default="tcp", description="How bytes travel.")
    devices: str = Field(default="", description="RDMA devices, separated by commas.")
    parallel: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Requests at once, for each operation of a rank. Each is parallel by itself.",
    )
    lend: Size = Field(
        default=parse_size("1GiB"),
        description="Bytes of host memory that each rank lends to the store. They are beside "
        "`host.capacity`, and what lies there is gone when the rank ends.",
    )


class _Lane:
    """A registered piece of memory that one call at a time passes parts through."""

    def __init__(self, client: Any, nbytes: int) -> None:
        self.view = memoryview(mmap.mmap(-1, nbytes))
        self.used = 0
        self._start = _address(self.view)
        _register(client, self.view)

    def take(self, nbytes: int) -> tuple[memoryview, int] | None:
        """Room for ``nbytes`` and its address; None when too little is left."""
        start, stop = self.used, self.used + nbytes
        if stop > self.view.nbytes:
            return None
        self.used = stop
        return self.view[start:stop], self._start + start


class _Placed(NamedTuple):
    """An item as Mooncake wants it, and its parts that pass through a lane, with their place."""

    item: Item
    addresses: list[int]
    sizes: list[int]
    passing: list[tuple[memoryview, memoryview]]

    def add(self, address: int, nbytes: int) -> None:
        """Memory that comes next: one piece with the last where it lies behind it."""
        if self.addresses and self.addresses[-1] + self.sizes[-1] == address:
            self.sizes[-1] += nbytes
        else:
            self.addresses.append(address)
            self.sizes.append(nbytes)


class MooncakeStore(BlockStore):
    """``rank`` None lends nothing. The client joins the store with the first call, and where that
    fails with a later one. A call to a master that hangs takes as long as Mooncake waits for it: 30
    seconds.
    """

    def __init__(self, options: MooncakeOptions, rank: int | None = None) -> None:
        self._module = client_module("mooncake.store", "mooncake-transfer-engine")
        self._options = options
        self._lends = 0 if rank is None else options.lend
        self._lock = threading.Lock()
        self._client: Any = None
        self._arena: memoryview | None = None
        self._inside = range(0)
        self._lanes: list[_Lane] = []

    def attach(self, memory: memoryview) -> None:
        start = _address(memory)
        self._arena, self._inside = memory, range(start, start + memory.nbytes)

    def put(self, items: Sequence[Item]) -> list[TierError | None]:
        def move(client: Any, placed: Sequence[_Placed]) -> list[TierError | None]:
            for one in placed:
                for part, place in one.passing:
                    copy_bytes(part, place)
            codes = client.batch_put_from_multi_buffers(*_columns(placed))
            return [_stored(one, code) for one, code in zip(placed, codes, strict=True)]

        return self._move(items, move)

    def get(self, items: Sequence[Item]) -> list[TierError | None]:
        def move(client: Any, placed: Sequence[_Placed]) -> list[TierError | None]:
            codes = client.batch_get_into_multi_buffers(*_columns(placed))
            return [_taken(client, one, code) for one, code in zip(placed, codes, strict=True)]

        return self._move(items, move)

    def exists(self, names: Sequence[str]) -> list[bool]:
        if not names:
            return []
        codes = self._joined().batch_is_exist(list(names))
        if bad := [code for code in codes if code < 0]:
            raise _unavailable("does not tell what it holds", bad[0])
        return [bool(code) for code in codes]

    def delete(self, names: Sequence[str]) -> None:
        if not names:
            return
        codes = self._joined().batch_remove(list(names), True)
        if bad := [code for code in codes if code not in (_OK, _NOT_FOUND)]:
            raise _unavailable(f"does not remove {len(bad)} values", bad[0])

    def close(self) -> None:
        with self._lock:
            if self._client is not None:
                self._client.close()
                self._client = None
            self._arena, self._inside = None, range(0)
            self._lanes.clear()

    # -- joining ----------------------------------------------------------------------------

    def _joined(self) -> Any:
        """The client, once it is part of the store. Raises TierUnavailable."""
        with self._lock:
            if self._client is None:
                self._client = self._join()
            return self._client

    def _join(self) -> Any:
        options = self._options
        _reach(options.master, options.timeout_s)  # Mooncake itself tries for a minute and a half
        client = self._module.MooncakeDistributedStore()
        code = client.setup(
            options.host,
            options.metadata,
            self._lends,
            _LOCAL_NBYTES,
            options.protocol,
            options.devices,
            options.master,
        )
        if code != _OK:
            raise _unavailable(f"at {options.master} cannot be joined", code)
        if self._arena is not None:
            _register(client, self._arena)
        return client

    # -- moving -----------------------------------------------------------------------------

    def _move(
        self,
        items: Sequence[Item],
        move: Callable[[Any, Sequence[_Placed]], list[TierError | None]],
    ) -> list[TierError | None]:
        """``move`` the items, as many at a time as fit a lane."""
        results: list[TierError | None] = []
        if not items:
            return results
        client = self._joined()
        with self._lane(client, max(map(self._passing, items))) as lane:
            while len(results) < len(items):
                lane.used = 0
                results += move(client, self._place(lane, items[len(results) :]))
        return results

    def _passing(self, item: Item) -> int:
        """Bytes of an item that go through a lane."""
        if self._is_staged(item):
            return nbytes_of(item.parts)
        return sum(part.nbytes for part in item.parts if _address(part) not in self._inside)

    def _is_staged(self, item: Item) -> bool:
        return self._options.protocol == "tcp" and nbytes_of(item.parts) <= _STAGED_NBYTES

    @contextmanager
    def _lane(self, client: Any, least: int) -> Iterator[_Lane]:
        """One with room for ``least`` bytes, the caller's for this block."""
        with self._lock:
            lane = next((lane for lane in self._lanes if lane.view.nbytes >= least), None)
            if lane is not None:
                self._lanes.remove(lane)
        lane = lane or _Lane(client, max(_LANE_NBYTES, least))
        try:
            yield lane
        finally:
            with self._lock:
                self._lanes.append(lane)

    def _place(self, lane: _Lane, items: Sequence[Item]) -> list[_Placed]:
        placed: list[_Placed] = []
        for item in items:
            one = _Placed(item, [], [], [])
            staged = self._is_staged(item)
            for part in item.parts:
                flat = part.cast("B")
                address = _address(flat)
                if staged or address not in self._inside:
                    room = lane.take(flat.nbytes)
                    if room is None:
                        return placed
                    place, address = room
                    one.passing.append((flat, place))
                one.add(address, flat.nbytes)
            placed.append(one)
        return placed


def _reach(address: str, timeout_s: float) -> None:
    """Raises TierUnavailable unless something listens at ``HOST:PORT``. Blocks."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout_s).close()
    except OSError as error:
        raise TierUnavailable(f"Mooncake Store at {address} cannot be joined: {error}") from error


def _columns(placed: Sequence[_Placed]) -> tuple[list[str], list[list[int]], list[list[int]]]:
    return (
        [one.item.name for one in placed],
        [one.addresses for one in placed],
        [one.sizes for one in placed],
    )


def _stored(placed: _Placed, code: int) -> TierError | None:
    return None if code >= 0 else _unavailable(f"does not store {placed.item.name}", code)


def _taken(client: Any, placed: _Placed, code: int) -> TierError | None:
    """The parts are filled, or why not. ``code`` is the value's size, or negative."""
    name, wanted = placed.item.name, sum(placed.sizes)
    if code == wanted:
        for part, place in placed.passing:
            copy_bytes(place, part)
        return None
    # A value that does not fit is told apart from a transfer that failed by its size only.
    size = code if code >= 0 or code == _NOT_FOUND else client.get_size(name)
    if size == _NOT_FOUND:
        return BlockMissing(f"mooncake holds no {name}")
    if size >= 0 and size != wanted:
        return CorruptBlock(f"mooncake holds {size} bytes as {name}")
    return _unavailable(f"does not give {name}", code)


def _unavailable(what: str, code: int) -> TierUnavailable:
    hint = " (no memory left: lend more)" if code == _FULL else ""
    return TierUnavailable(f"mooncake {what}: code {code}{hint}")


def _register(client: Any, memory: memoryview) -> None:
    code = client.register_buffer(_address(memory), memory.nbytes)
    if code != _OK:
        raise _unavailable(f"cannot register {memory.nbytes} bytes", code)


def _address(memory: memoryview) -> int:
    """Where memory begins, read-only memory too."""
    return int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)


KIND = StoreKind(MooncakeOptions, MooncakeStore)
