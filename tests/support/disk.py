"""A disk tier, with its store prepared as by a leader and opened as by a worker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvcore.memory.arena import slot_bytes
from kvcore.model.shape import BlockShape
from kvcore.testing.tier_contract import Block, write_blocks
from kvcore.tiers.disk import (
    DiskAccess,
    DiskTier,
    Geometry,
    MountedStore,
    PreparedStore,
    prepare_store,
)

SHAPE = BlockShape(layers=5, kv_heads=2, head_dim=16, block_tokens=16, dtype="bfloat16")
GEOMETRY = Geometry(SHAPE, b"model", ((0, 2),))
SLOT = slot_bytes(SHAPE)
ROOM = 1 << 20


def open_tier(
    store: PreparedStore, geometry: Geometry = GEOMETRY, shard: int = 0, **options: Any
) -> DiskTier:
    """Open a tier as a worker does, in the store that its leader prepared."""
    guard = options.pop("guard", None)
    return DiskTier(
        MountedStore.from_options(store.mounted.to_options()),
        geometry,
        shard=shard,
        slot_nbytes=slot_bytes(geometry.shard_shape(shard)),
        access=DiskAccess(**options),
        guard=guard,
    )


@contextmanager
def opened(
    path: Path, geometry: Geometry = GEOMETRY, capacity: int = ROOM, **options: Any
) -> Iterator[tuple[PreparedStore, DiskTier]]:
    """Yield the store and the tier of shard 0, opened as after a restart."""
    store = prepare_store(path, geometry, capacity, wait_s=0, guard=options.get("guard"))
    tier = open_tier(store, geometry, **options)
    try:
        yield store, tier
    finally:
        tier.close()
        store.close()


def flip(file: Path, offset: int, mask: int = 0x10) -> None:
    """Flip bits of one byte."""
    with file.open("r+b") as data:
        data.seek(offset)
        (byte,) = data.read(1)
        data.seek(offset)
        data.write(bytes([byte ^ mask]))


def some_blocks(count: int, first_seed: int = 0) -> list[Block]:
    return [Block(slot, first_seed + slot, SLOT) for slot in range(count)]


def fill(path: Path, count: int, **options: Any) -> tuple[Path, list[Block]]:
    """Return (folder of a store with ``count`` blocks, the blocks)."""
    blocks = some_blocks(count)
    with opened(path, **options) as (store, tier):
        write_blocks(tier, blocks)
        return store.folder, blocks
