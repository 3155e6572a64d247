"""What an operator can ask for, and of which blocks: msgpack values, all of bounded size."""

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
"""The most tokens of a prompt in a command."""

MAX_TTL_S = 366 * 86_400
"""The longest time in seconds for which blocks can be pinned, other than without an end."""

Word = Annotated[str, Meta(max_length=64)]
Salt = Annotated[str, Meta(max_length=1024)]
Limit = Annotated[int, Meta(ge=0, le=10_000)]
Seconds = Annotated[float, Meta(gt=0, le=MAX_TTL_S)]


class BlockFilter(msgspec.Struct, frozen=True, array_like=True):
    """Selects the blocks that meet every given condition; all blocks without any.

    A selected block stands for the prompt that ends in it, so the blocks before it are selected
    too. ``tenant`` is a tenant's name, ``salt`` the salt of one without a name. ``namespace`` is a
    digest of 16 bytes, ``prefix`` the first bytes of keys. ``tokens`` is a prompt as little-endian
    uint32; it is hashed here with the given tenant or salt, or as a request without a salt.
    """

    tenant: Word | None = None
    salt: Salt | None = None
    namespace: Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)] | None = None
    prefix: Annotated[bytes, Meta(max_length=KEY_BYTES)] = b""
    tokens: Annotated[bytes, Meta(max_length=4 * MAX_TOKENS)] | None = None
    tier: Word | None = None


class ListBlocks(msgspec.Struct, frozen=True, array_like=True, tag="list"):
    """Show how many blocks each namespace has in each tier; with ``prompts`` also the prompts.

    At most ``limit`` of each.
    """

    where: BlockFilter = BlockFilter()
    prompts: bool = False
    limit: Limit = 100


class PinBlocks(msgspec.Struct, frozen=True, array_like=True, tag="pin"):
    """Keep the selected blocks where they are until they are unpinned or the process ends.

    With ``ttl_s``, for so many seconds at most. Blocks that are pinned already get this time too.
    """

    where: BlockFilter
    ttl_s: Seconds | None = None


class UnpinBlocks(msgspec.Struct, frozen=True, array_like=True, tag="unpin"):
    """Undo `PinBlocks` for the selected blocks."""

    where: BlockFilter = BlockFilter()


class MoveBlocks(msgspec.Struct, frozen=True, array_like=True, tag="move"):
    """Copy the selected blocks from the tier of ``where`` to the tier ``to``, then discard them.

    Blocks that something else needs stay in the first tier too.
    """

    where: BlockFilter
    to: Word


class PrefetchBlocks(msgspec.Struct, frozen=True, array_like=True, tag="prefetch"):
    """Copy the selected blocks into host memory. They stay in the lower tiers too."""

    where: BlockFilter


class ClearBlocks(msgspec.Struct, frozen=True, array_like=True, tag="clear"):
    """Forget the selected blocks, and all blocks that continue them."""

    where: BlockFilter = BlockFilter()


class SetQuota(msgspec.Struct, frozen=True, array_like=True, tag="quota"):
    """Limit what a tenant keeps in a tier: "8GiB", "25%", or None for no limit.

    ``salt`` adds a tenant that the settings do not name.
    """

    tenant: Word
    tier: Word
    quota: Word | None
    salt: Salt | None = None


class ShowQuotas(msgspec.Struct, frozen=True, array_like=True, tag="quotas"):
    """Show what each tenant uses of each tier, and its quota."""


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
"""Commands that change something; each leaves lines in the audit log."""


def command_name(order: Command) -> str:
    """Return the command's name in one word."""
    return str(order.__struct_config__.tag)
