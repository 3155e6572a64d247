"""Mooncake Store: a master that knows where values are, and memory lent by all its clients.

Blocks are transferred between the host arena and other hosts' memory without a copy, because the
arena is registered with Mooncake's transfer engine. Bytes outside the arena, a value's header above
all, are staged in registered channels that grow with the largest value. Over TCP, small values are
staged as a whole.

A value stays until it is deleted or evicted: Mooncake does not replace it. The memory that a client
lends is lost, with its values, when the client ends.
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
from kvcore.config.fields import Size, parse_size
from kvcore.errors import BlockMissing, TierError, TierUnavailable
from kvcore.memory.buffers import nbytes_of
from kvcore.tiers.remote.base import BlockStore, Item, copy_bytes, wrong_size
from kvcore.tiers.remote.options import StoreOptions
from kvcore.tiers.remote.tier import StoreKind

_CHANNEL_NBYTES = 16 << 20
_STAGED_NBYTES = 1 << 20
"""Largest value that is staged as a whole over TCP, where each piece needs its own connection.

The limit was measured on 2 cores, with values of 360 KiB and 2 MiB.
"""
_LOCAL_NBYTES = 16 << 20  # Mooncake's own buffer, for calls that kvcore does not use
_OK, _FULL, _NOT_FOUND = 0, -200, -704


class MooncakeOptions(StoreOptions):
    """The address of the master, and what each rank contributes."""

    known_by = ("master",)

    master: Annotated[str, Field(pattern=r"^[^:]+:[0-9]+$")] = Field(
        description="HOST:PORT of `mooncake_master`."
    )
    host: str = Field(
        default_factory=socket.gethostname,
        description="Name or address at which other hosts reach this one.",
    )
    metadata: Annotated[str, Field(min_length=1)] = Field(
        default="P2PHANDSHAKE",
        description="Metadata server of Mooncake's transfer engine.",
    )
    protocol: Literal["tcp", "rdma"] = Field(default="tcp", description="Transport of the values.")
    devices: str = Field(default="", description="RDMA devices, separated by commas.")
    parallel: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Parallel requests for each operation of a rank. Mooncake parallelizes each "
        "request as well.",
    )
    lend: Size = Field(
        default=parse_size("1GiB"),
        description="Bytes of host memory that each rank lends to the store, in addition to "
        "`host.capacity`. Their content is lost when the rank ends.",
    )


class _Channel:
    """Registered memory through which one call at a time stages parts."""

    def __init__(self, client: Any, nbytes: int) -> None:
        self.view = memoryview(mmap.mmap(-1, nbytes))
        self.used = 0
        self._start = _address(self.view)
        _register(client, self.view)

    def take(self, nbytes: int) -> tuple[memoryview, int] | None:
        """Return free memory of ``nbytes`` and its address; None if too little is left."""
        start, stop = self.used, self.used + nbytes
        if stop > self.view.nbytes:
            return None
        self.used = stop
        return self.view[start:stop], self._start + start


class _Placed(NamedTuple):
    """An item in the form that Mooncake takes: addresses and sizes.

    ``passing`` pairs each part that is staged with its place in the channel.
    """

    item: Item
    addresses: list[int]
    sizes: list[int]
    passing: list[tuple[memoryview, memoryview]]

    def add(self, address: int, nbytes: int) -> None:
        """Append a piece of memory, merged with the previous one if they are adjacent."""
        if self.addresses and self.addresses[-1] + self.sizes[-1] == address:
            self.sizes[-1] += nbytes
        else:
            self.addresses.append(address)
            self.sizes.append(nbytes)


class MooncakeStore(BlockStore):
    """A client of Mooncake Store. With ``rank`` None it lends no memory.

    The client joins the store with the first call and, if that fails, with a later one. A call to a
    master that hangs lasts until Mooncake's own timeout of 30 seconds.
    """

    def __init__(self, options: MooncakeOptions, rank: int | None = None) -> None:
        self._module = client_module("mooncake.store", "mooncake-transfer-engine")
        self._options = options
        self._lends = 0 if rank is None else options.lend
        self._lock = threading.Lock()
        self._client: Any = None
        self._arena: memoryview | None = None
        self._inside = range(0)
        self._channels: list[_Channel] = []

    def attach(self, memory: memoryview) -> None:
        start = _address(memory)
        self._arena, self._inside = memory, range(start, start + memory.nbytes)

    def put(self, items: Sequence[Item]) -> list[TierError | None]:
        def move(client: Any, placed: Sequence[_Placed]) -> list[TierError | None]:
            for one in placed:
                for part, place in one.passing:
                    copy_bytes(part, place)
            codes = client.batch_put_from_multi_buffers(*_columns(placed))
            return [_put_result(one, code) for one, code in zip(placed, codes, strict=True)]

        return self._move(items, move)

    def get(self, items: Sequence[Item]) -> list[TierError | None]:
        def move(client: Any, placed: Sequence[_Placed]) -> list[TierError | None]:
            codes = client.batch_get_into_multi_buffers(*_columns(placed))
            return [_get_result(client, one, code) for one, code in zip(placed, codes, strict=True)]

        return self._move(items, move)

    def exists(self, names: Sequence[str]) -> list[bool]:
        if not names:
            return []
        codes = self._joined().batch_is_exist(list(names))
        if bad := [code for code in codes if code < 0]:
            raise _unavailable("cannot look up values", bad[0])
        return [bool(code) for code in codes]

    def delete(self, names: Sequence[str]) -> None:
        if not names:
            return
        codes = self._joined().batch_remove(list(names), True)
        if bad := [code for code in codes if code not in (_OK, _NOT_FOUND)]:
            raise _unavailable(f"cannot delete {len(bad)} values", bad[0])

    def close(self) -> None:
        with self._lock:
            if self._client is not None:
                self._client.close()
                self._client = None
            self._arena, self._inside = None, range(0)
            self._channels.clear()

    # -- joining ----------------------------------------------------------------------------

    def _joined(self) -> Any:
        """Return the client after it has joined the store. Raises TierUnavailable."""
        with self._lock:
            if self._client is None:
                self._client = self._join()
            return self._client

    def _join(self) -> Any:
        options = self._options
        _reach(options.master, options.timeout_s)  # Mooncake itself retries for 90 seconds
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
        """Call ``move`` on the items, in batches that fit a channel."""
        results: list[TierError | None] = []
        if not items:
            return results
        client = self._joined()
        with self._channel(client, max(map(self._passing, items))) as channel:
            while len(results) < len(items):
                channel.used = 0
                results += move(client, self._place(channel, items[len(results) :]))
        return results

    def _passing(self, item: Item) -> int:
        """Return how many bytes of an item are staged in a channel."""
        if self._is_staged(item):
            return nbytes_of(item.parts)
        return sum(part.nbytes for part in item.parts if _address(part) not in self._inside)

    def _is_staged(self, item: Item) -> bool:
        return self._options.protocol == "tcp" and nbytes_of(item.parts) <= _STAGED_NBYTES

    @contextmanager
    def _channel(self, client: Any, least: int) -> Iterator[_Channel]:
        """Lend a channel of at least ``least`` bytes to the caller until the block ends."""
        with self._lock:
            channel = next((one for one in self._channels if one.view.nbytes >= least), None)
            if channel is not None:
                self._channels.remove(channel)
        channel = channel or _Channel(client, max(_CHANNEL_NBYTES, least))
        try:
            yield channel
        finally:
            with self._lock:
                self._channels.append(channel)

    def _place(self, channel: _Channel, items: Sequence[Item]) -> list[_Placed]:
        placed: list[_Placed] = []
        for item in items:
            one = _Placed(item, [], [], [])
            staged = self._is_staged(item)
            for part in item.parts:
                flat = part.cast("B")
                address = _address(flat)
                if staged or address not in self._inside:
                    room = channel.take(flat.nbytes)
                    if room is None:
                        return placed
                    place, address = room
                    one.passing.append((flat, place))
                one.add(address, flat.nbytes)
            placed.append(one)
        return placed


def _reach(address: str, timeout_s: float) -> None:
    """Raise TierUnavailable unless something listens at ``HOST:PORT``. Blocks."""
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


def _put_result(placed: _Placed, code: int) -> TierError | None:
    return None if code >= 0 else _unavailable(f"cannot store {placed.item.name}", code)


def _get_result(client: Any, placed: _Placed, code: int) -> TierError | None:
    """Copy staged parts to their place after a get, and return its error, if any.

    ``code`` is the size of the value in bytes, or negative.
    """
    name, wanted = placed.item.name, sum(placed.sizes)
    if code == wanted:
        for part, place in placed.passing:
            copy_bytes(place, part)
        return None
    # Only the size distinguishes a value that does not fit from a transfer that failed.
    size = code if code >= 0 or code == _NOT_FOUND else client.get_size(name)
    if size == _NOT_FOUND:
        return BlockMissing(f"mooncake has no value {name}")
    if size >= 0 and size != wanted:
        return wrong_size(placed.item, size)
    return _unavailable(f"cannot return {name}", code)


def _unavailable(what: str, code: int) -> TierUnavailable:
    hint = " (no memory left: lend more)" if code == _FULL else ""
    return TierUnavailable(f"mooncake {what}: code {code}{hint}")


def _register(client: Any, memory: memoryview) -> None:
    code = client.register_buffer(_address(memory), memory.nbytes)
    if code != _OK:
        raise _unavailable(f"cannot register {memory.nbytes} bytes", code)


def _address(memory: memoryview) -> int:
    """Return the start address of memory, which may be read-only."""
    return int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)


KIND = StoreKind(MooncakeOptions, MooncakeStore)
