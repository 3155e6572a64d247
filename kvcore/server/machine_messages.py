"""What the first machine's server and those of the other machines tell each other.

    other machines ── Request ──▶ first      joins, what its disks hold, ops that have ended
    first          ── Order ────▶ others     memory to provide, graphs to carry out, sessions

An order has the ``ref`` 0, because it answers no request. Orders and requests arrive in the order
in which they were sent, or their connection is over: then the other machine joins anew.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvcore.admin.messages import Ref
from kvcore.index.slots import SlotRun
from kvcore.model.keys import KEY_BYTES
from kvcore.server.wire import MAX_REPORTS, Model, Number, TierName
from kvcore.transfer.graph import OpReport, TransferGraph

__all__ = [
    "MAX_HELD",
    "BeginSession",
    "CacheOpened",
    "CachePrepared",
    "CancelGraph",
    "DropCache",
    "EndSession",
    "HeldBlocks",
    "InvalidateSlots",
    "JoinMachine",
    "MachineBeat",
    "MachineJoined",
    "MachineReports",
    "OpenCache",
    "Order",
    "PrepareCache",
    "Request",
    "SessionBegun",
    "SessionFreed",
    "SubmitGraph",
]

MAX_HELD = 1 << 18
"""Blocks of a tier in one message."""
_TEXT = Meta(max_length=1000)


# -- from the other machines ------------------------------------------------------------------


class JoinMachine(msgspec.Struct, frozen=True, array_like=True, tag="machine"):
    """The server of ``machine`` offers its memory and disks. The reply is `MachineJoined`.

    ``terms`` are digests of the settings by which both must go alike. ``process`` tells this server
    from others of its machine, and ``again`` says that it was admitted before.
    """

    ref: Ref
    machine: Annotated[int, Meta(ge=1, lt=4096)]
    terms: Annotated[dict[str, str], Meta(max_length=64)]
    process: Annotated[str, Meta(max_length=64)]
    again: bool


class MachineBeat(msgspec.Struct, frozen=True, array_like=True, tag="pulse"):
    """The server of a machine is alive. The reply is `MachineJoined`."""

    ref: Ref


class HeldBlocks(msgspec.Struct, frozen=True, array_like=True, tag="holds"):
    """Blocks of a tier on a machine's disk: the next fields of `kvcore.tiers.held.Held`."""

    ref: Ref
    cache: Number
    tier: TierName
    num_slots: Number
    rank_options: dict[str, Any]
    slots: Annotated[bytes, Meta(max_length=MAX_HELD * 8)]
    keys: Annotated[bytes, Meta(max_length=MAX_HELD * KEY_BYTES)]
    torn: Number
    why: Annotated[str, _TEXT]


class CachePrepared(msgspec.Struct, frozen=True, array_like=True, tag="prepared"):
    """A machine has memory for a cache, and its tiers were told; or ``why`` it has not."""

    ref: Ref
    cache: Number
    why: Annotated[str, _TEXT] = ""


class CacheOpened(msgspec.Struct, frozen=True, array_like=True, tag="opened"):
    """A machine has opened the tiers of a cache, and takes graphs."""

    ref: Ref
    cache: Number


class MachineReports(msgspec.Struct, frozen=True, array_like=True, tag="moved"):
    """Ops of a cache that have ended on a machine."""

    ref: Ref
    cache: Number
    reports: Annotated[list[OpReport], Meta(max_length=MAX_REPORTS)]


class SessionBegun(msgspec.Struct, frozen=True, array_like=True, tag="begun"):
    """The ranks of a session may join it on this machine."""

    ref: Ref
    session: Number


class SessionFreed(msgspec.Struct, frozen=True, array_like=True, tag="freed"):
    """No process of this machine holds a session any more, and none can join it."""

    ref: Ref
    session: Number


Request = (
    JoinMachine
    | MachineBeat
    | HeldBlocks
    | CachePrepared
    | CacheOpened
    | MachineReports
    | SessionBegun
    | SessionFreed
)


# -- to the other machines --------------------------------------------------------------------


class MachineJoined(msgspec.Struct, frozen=True, array_like=True, tag="admitted"):
    """The reply to `JoinMachine` and `MachineBeat`; ``lease_s`` is the longest silence allowed."""

    ref: Ref
    lease_s: float


class PrepareCache(msgspec.Struct, frozen=True, array_like=True, tag="prepare"):
    """Provide ``slots`` of memory for the parts of a model, and tell what the disks hold of it."""

    ref: Ref
    cache: Number
    model: Model
    slots: Annotated[int, Meta(ge=1)]


class OpenCache(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """Open the tiers of a cache, with the first machine's options by name."""

    ref: Ref
    cache: Number
    tiers: dict[str, dict[str, Any]]


class DropCache(msgspec.Struct, frozen=True, array_like=True, tag="drop"):
    """End a cache and its sessions. What is written goes on to its end."""

    ref: Ref
    cache: Number


class BeginSession(msgspec.Struct, frozen=True, array_like=True, tag="begin"):
    """Let the ranks of a session join it. ``secret`` is that of the first machine's file."""

    ref: Ref
    cache: Number
    session: Number
    secret: Annotated[bytes, Meta(max_length=64)]


class EndSession(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """Let nobody join a session any more, and tell when it is held by nobody."""

    ref: Ref
    session: Number


class SubmitGraph(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """Carry out a graph between host memory and tiers."""

    ref: Ref
    cache: Number
    graph: TransferGraph


class CancelGraph(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """Fail what has not begun of a graph."""

    ref: Ref
    cache: Number
    graph_id: Number


class InvalidateSlots(msgspec.Struct, frozen=True, array_like=True, tag="invalidate"):
    """Make slots of a tier unreadable, before anything is written to them."""

    ref: Ref
    cache: Number
    tier: TierName
    slots: list[SlotRun]


Order = (
    MachineJoined
    | PrepareCache
    | OpenCache
    | DropCache
    | BeginSession
    | EndSession
    | SubmitGraph
    | CancelGraph
    | InvalidateSlots
)
