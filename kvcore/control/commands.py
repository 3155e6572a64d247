"""What an operator can ask for, and of which blocks. Values that msgpack carries, all bounded."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvcore.model.keys import KEY_BYTES

__all__ = [
    "CHANGES",
    "BlockFilter",
    "ClearBlocks",
    "Command",
    "ListBlocks",
    "MoveBlocks",
    "PinBlocks",
    "PrefetchBlocks",
    "SetQuota",
    "ShowQuotas",
    "UnpinBlocks",
    "command_name",
]

MAX_TOKENS = 1 << 20
"""Tokens of a prompt in an order."""

Word = Annotated[str, Meta(max_length=64)]
Salt = Annotated[str, Meta(max_length=1024)]
Limit = Annotated[int, Meta(ge=0, le=10_000)]


class BlockFilter(msgspec.Struct, frozen=True, array_like=True):
    """Blocks for which all that is given holds; every block where nothing is.

    A chosen block stands for the prompt that ends in it: all before it is chosen too.
    ``tenant`` is a name, ``salt`` the salt of one without a name; ``namespace`` is a digest (16
    bytes), ``prefix`` the first bytes of keys, ``tokens`` a prompt as little-endian uint32, which
    is hashed here, as of the tenant or salt given or of requests without a salt.
    """

    tenant: Word | None = None
    salt: Salt | None = None
    namespace: Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)] | None = None
    prefix: Annotated[bytes, Meta(max_length=KEY_BYTES)] = b""
    tokens: Annotated[bytes, Meta(max_length=4 * MAX_TOKENS)] | None = None
    tier: Word | None = None


class ListBlocks(msgspec.Struct, frozen=True, array_like=True, tag="list"):
    """How much is held of whom and where; with ``prompts``, the prompts too. At most ``limit`` of
    each."""

    where: BlockFilter = BlockFilter()
    prompts: bool = False
    limit: Limit = 100


class PinBlocks(msgspec.Struct, frozen=True, array_like=True, tag="pin"):
    """Keep what is chosen, where it is, until it is unpinned or the process ends."""

    where: BlockFilter


class UnpinBlocks(msgspec.Struct, frozen=True, array_like=True, tag="unpin"):
    """Undo `PinBlocks` for pins on what is chosen."""

    where: BlockFilter = BlockFilter()


class MoveBlocks(msgspec.Struct, frozen=True, array_like=True, tag="move"):
    """Copy what is chosen from the tier of ``where`` to the tier ``to``, then take it out of the
    first, as far as nothing else needs it there."""

    where: BlockFilter
    to: Word


class PrefetchBlocks(msgspec.Struct, frozen=True, array_like=True, tag="prefetch"):
    """Bring what is chosen into host memory; it stays below too."""

    where: BlockFilter


class ClearBlocks(msgspec.Struct, frozen=True, array_like=True, tag="clear"):
    """Forget what is chosen, and all that stands on it."""

    where: BlockFilter = BlockFilter()


class SetQuota(msgspec.Struct, frozen=True, array_like=True, tag="quota"):
    """Let a tenant have at most so much of a tier: "8GiB", "25%", or (None) as much as anyone.
    ``salt`` makes a tenant of a name that the settings do not have."""

    tenant: Word
    tier: Word
    quota: Word | None
    salt: Salt | None = None


class ShowQuotas(msgspec.Struct, frozen=True, array_like=True, tag="quotas"):
    """What each tenant has of each tier, and may have."""


Command = (
    ListBlocks
    | PinBlocks
    | UnpinBlocks
    | MoveBlocks
    | PrefetchBlocks
    | ClearBlocks
    | SetQuota
    | ShowQuotas
)

CHANGES = (PinBlocks, UnpinBlocks, MoveBlocks, PrefetchBlocks, ClearBlocks, SetQuota)
"""Orders that change something: each leaves a line in the audit log."""


def command_name(order: Command) -> str:
    """The order in a word."""
    return str(order.__struct_config__.tag)
