"""Mooncake Store: a master that knows where values are, and memory lent by all its clients.

Blocks go between the host arena and other hosts' memory without a copy: the arena is registered
with Mooncake's transfer engine. What does not lie there, a value's header above all, passes through
small registered pieces.

A value stands until it is removed or evicted: Mooncake does not replace it. What a client has lent
is gone when it ends.
"""

from __future__ import annotations

import mmap
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from kvcore.errors import BlockMissing, CorruptBlock, TierError, TierUnavailable
from kvcore.schema import Size, parse_size
from kvcore.tiers.base import SlotError
from kvcore.tiers.remote.base import BlockStore, Item
from kvcore.tiers.remote.options import StoreOptions, client_module
from kvcore.tiers.remote.tier import StoreKind

_LANE_NBYTES = 8 << 20
_LOCAL_NBYTES = 16 << 20  # Mooncake's own buffer, for calls that are not used here
_OK = 0
_NOT_FOUND = -704


class MooncakeOptions(StoreOptions):
    """Where the master is, and what each rank brings."""

    master: Annotated[str, Field(pattern=r"^[^:]+:[0-9]+$")] = Field(
        description="HOST:PORT of `mooncake_master`."
    )
    host: str = Field(
        default_factory=socket.gethostname,
        description="Name or address under which other hosts reach this one.",
    )
    metadata: Annotated[str, Field(min_length=1)] = Field(
        default="P2PHANDSHAKE", description="Metadata server of the transfer engine, if there is one."
    )
    protocol: Literal["tcp", "rdma"] = Field(default="tcp", description="How bytes travel.")
    devices: str = Field(default="", description="RDMA devices, separated by commas.")
    lend: Size = Field(
        default=parse_size("1GiB"),
        description="Bytes of host memory that each rank lends to the store. They are beside "
        "`host.capacity`, and what lies there is gone when the rank ends.",
    )


class _Lane:
    """A registered piece of memory that one call at a time passes small parts through."""

    def __init__(self, client: Any, nbytes: int = _LANE_NBYTES) -> None:
        self.view = memoryview(mmap.mmap(-1, nbytes))
        self.address = _address(self.view)
        self.used = 0
        _register(client, self.view)

    def take(self, nbytes: int) -> slice | None:
        """Room for ``nbytes``, or None when there is too little left."""
        if self.used + nbytes > self.view.nbytes:
            return None
        self.used += nbytes
        return slice(self.used - nbytes, self.used)


class _Placed(NamedTuple):
    """An item as Mooncake wants it. ``passing`` are its parts that have a place in the lane."""

    item: Item
    addresses: list[int]
    sizes: list[int]
    passing: list[tuple[memoryview, slice]]


class MooncakeStore(BlockStore):
    """``rank`` None lends nothing. The client joins the store with the first call, and tries again
    with the next where that fails. How long a call waits for a master that hangs is Mooncake's own
    affair: 30 seconds."""

    def __init__(self, options: MooncakeOptions, rank: int | None = None) -> None:
        self._module = client_module("mooncake.store", "mooncake-transfer-engine")
        self._options = options
        self._lends = 0 if rank is None else options.lend
        self._lock = threading.Lock()
        self._client: Any = None
        self._arena: memoryview | None = None
        self._lanes: list[_Lane] = []

    def attach(self, memory: memoryview) -> None:
        self._arena = memory

    def put(self, items: Sequence[Item]) -> list[TierError | None]:
        results: list[TierError | None] = []
        client = self._joined()
        for placed in self._in_lanes(client, items):
            for one in placed:
                if isinstance(one, _Placed):
                    for part, place in one.passing:
                        self._lane_of(one).view[place] = part.cast("B")
            results += self._put(client, placed)
        return results

    def get(self, items: Sequence[Item]) -> list[TierError | None]:
        raise NotImplementedError

    def exists(self, names: Sequence[str]) -> list[bool]:
        raise NotImplementedError

    def delete(self, names: Sequence[str]) -> None:
        raise NotImplementedError
