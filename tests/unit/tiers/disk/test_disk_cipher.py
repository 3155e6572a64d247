"""Encryption at rest: nothing on disk is readable, and no block is served under another key or in
another place. Apart from that the tier behaves as it does without encryption.
"""

from __future__ import annotations

import base64
import threading
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvcore.config import load_config, read_key
from kvcore.errors import ConfigError, CorruptBlock, FormatError
from kvcore.memory.arena import slot_bytes
from kvcore.model.shape import BlockShape
from kvcore.plugins import PluginManager
from kvcore.runtime.build import build_segments
from kvcore.runtime.tiers import BackingOpener, prepare_backings
from kvcore.testing.tier_contract import Block, TierContract, read_back, write_blocks
from kvcore.tiers.base import BlockRead, BlockWrite, Tier
from kvcore.tiers.checksum import checksum
from kvcore.tiers.disk import DiskTier, Geometry, MountedStore, PreparedStore, prepare_store
from kvcore.tiers.disk import tier as disk_tier
from kvcore.tiers.disk.format import Record
from kvcore.tiers.disk.scratch import AT_ONCE
from kvcore.tiers.disk.scrub import StoreState, scrub
from kvcore.tiers.geometry import RECORD_NBYTES
from kvcore.tiers.guard import BlockCipher, BlockMac
from support import disk as disk_rig

SHAPE = BlockShape(layers=5, kv_heads=2, head_dim=32, block_tokens=16, dtype="bfloat16")
SLOT = slot_bytes(SHAPE)
KEY, OTHER = bytes(range(32)), bytes(range(1, 33))
CIPHER = BlockCipher(KEY)
GEOMETRY = Geometry(SHAPE, b"model", ((0, 2),), CIPHER.name)
ROOM = 2 << 20


def opened(
    path: Path, geometry: Geometry = GEOMETRY, cipher: BlockCipher | None = CIPHER, **options: Any
) -> AbstractContextManager[tuple[PreparedStore, DiskTier]]:
    return disk_rig.opened(path, geometry, ROOM, guard=cipher, **options)


def some_blocks(count: int) -> list[Block]:
    return [Block(slot, slot, SLOT) for slot in range(count)]


# -- the tier -----------------------------------------------------------------------------------


class TestEncryptedDiskTier(TierContract):
    """The contract that every tier keeps."""

    persistent = True

    def make_tier(self, folder: Path) -> Tier:
        if not (folder / "store.json").exists():
            GEOMETRY.save(folder)
        return DiskTier(
            MountedStore(folder, self.num_slots),
            GEOMETRY,
            shard=0,
            slot_nbytes=SLOT,
            guard=CIPHER,
        )


class TestEncryptedDiskTierFromOddMemory(TestEncryptedDiskTier):
    odd = True


class TestEncryptedDiskTierOfLargeBlocks(TestEncryptedDiskTier):
    """Large blocks are decrypted by other threads."""

    @pytest.fixture(autouse=True)
    def all_are_large(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(disk_tier, "_THREADED_DECRYPT_NBYTES", 0)


def test_large_blocks_are_decrypted_several_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of one block is reported for that block only."""
    monkeypatch.setattr(disk_tier, "_THREADED_DECRYPT_NBYTES", 0)
    blocks = some_blocks(8)
    bad = {1, 6}
    with opened(tmp_path) as (store, tier):
        write_blocks(tier, blocks)
        with (store.folder / "shard-0.data").open("r+b") as data:
            for slot in bad:
                data.seek(slot * SLOT + 100)
                byte = data.read(1)[0]
                data.seek(slot * SLOT + 100)
                data.write(bytes([byte ^ 1]))
        meeting, unseal = threading.Barrier(2), BlockCipher.unseal

        def together(*given: Any) -> bool:
            meeting.wait(60)  # a lone thread would break it
            return unseal(*given)

        monkeypatch.setattr(BlockCipher, "unseal", together)
        buffers = [block.memory() for block in blocks]
        pairs = zip(blocks, buffers, strict=True)
        errors = tier.read([BlockRead(block.slot, block.key, [into]) for block, into in pairs])
        assert {slot for slot, error in enumerate(errors) if error is not None} == bad
        assert all(isinstance(errors[slot], CorruptBlock) for slot in bad)
        for block in blocks:
            assert block.slot in bad or bytes(buffers[block.slot]) == block.data
        monkeypatch.setattr(BlockCipher, "unseal", unseal)
        for slot in bad:
            with pytest.raises(CorruptBlock, match="does not hold"):
                read_back(tier, blocks[slot])


def test_blocks_come_back_and_cannot_be_read_on_disk(tmp_path: Path) -> None:
    """More blocks than are encrypted together, also in several pieces as in a layerwise arena."""
    blocks = some_blocks(2 * AT_ONCE + 3)
    with opened(tmp_path) as (store, tier):
        write_blocks(tier, blocks)
        folder = store.folder
    with opened(tmp_path) as (store, tier):
        assert store.folder == folder
        assert len(store.records) == len(blocks)
        for block in blocks:
            assert read_back(tier, block) == block.data
        pieces = [memoryview(bytearray(SLOT // 2)) for _ in range(2)]
        assert tier.read([BlockRead(blocks[3].slot, blocks[3].key, pieces)]) == [None]
        assert b"".join(pieces)[: SHAPE.nbytes] == blocks[3].data[: SHAPE.nbytes]
    written = (folder / "shard-0.data").read_bytes() + (folder / "shard-0.index").read_bytes()
    for block in blocks:
        # not the first ones: data of one seed begins with the key of another, which is on disk
        assert not any(block.data[i : i + 16] in written for i in range(16, SHAPE.nbytes, 500))
    assert {f.stat().st_mode & 0o777 for f in tmp_path.rglob("*") if f.is_file()} == {0o600}
    assert {f.stat().st_mode & 0o777 for f in tmp_path.rglob("*") if f.is_dir()} == {0o700}


def test_a_nonce_is_used_once_also_for_the_same_block(tmp_path: Path) -> None:
    (block,) = some_blocks(1)
    seen: set[bytes] = set()
    bodies: set[bytes] = set()
    for _ in range(3):
        with opened(tmp_path) as (store, tier):
            for _ in range(3):
                write_blocks(tier, [block])
                packed = (store.folder / "shard-0.index").read_bytes()[:128]
                record = Record.unpack(packed, CIPHER)
                assert record is not None
                seen.add(record.nonce)
                bodies.add((store.folder / "shard-0.data").read_bytes()[: SHAPE.nbytes])
    assert len(seen) == len(bodies) == 9


@pytest.mark.parametrize("cipher", [BlockCipher(OTHER), None])
def test_what_another_key_or_none_wrote_is_never_served(
    tmp_path: Path, cipher: BlockCipher | None
) -> None:
    blocks = some_blocks(3)
    other = replace(GEOMETRY, cipher=cipher.name if cipher else "")
    with opened(tmp_path) as (mine, tier):
        write_blocks(tier, blocks)
    with opened(tmp_path, other, cipher) as (theirs, tier):
        assert (theirs.records, theirs.foreign) == ([], {})
        assert theirs.folder.parent != mine.folder.parent
        with pytest.raises(CorruptBlock):
            read_back(tier, blocks[0])
        write_blocks(tier, blocks)
    with pytest.raises(FormatError, match=r"cipher|another model"):
        DiskTier(mine.mounted, other, shard=0, slot_nbytes=SLOT, guard=cipher)
    with pytest.raises(FormatError, match="uses the cipher"):
        DiskTier(mine.mounted, GEOMETRY, shard=0, slot_nbytes=SLOT, guard=cipher)
    with opened(tmp_path) as (_, tier):
        assert read_back(tier, blocks[2]) == blocks[2].data


def test_a_block_is_bound_to_its_record_and_its_place(tmp_path: Path) -> None:
    """Someone who can write all files, seals included, cannot move a block to another key.

    Neither can a plain block be passed off as an encrypted one.
    """
    blocks = some_blocks(2)
    with opened(tmp_path) as (store, tier):
        write_blocks(tier, blocks)
    index, data = store.folder / "shard-0.index", store.folder / "shard-0.data"
    good, body = index.read_bytes()[:RECORD_NBYTES], data.read_bytes()[: SHAPE.nbytes]
    record = Record.unpack(good, CIPHER)
    assert record is not None
    plain = checksum(blocks[1].key, [memoryview(body)], len(body))
    forged = {
        "key": record._replace(key=blocks[1].key, checksum=plain),
        "parent": record._replace(parent=b"x" * 16),
        "namespace": record._replace(namespace=b"x" * 16),
        "stamp": record._replace(stamp=record.stamp + 1),
        "tag": record._replace(tag=b"x" * 16),
        "nonce": record._replace(nonce=b"x" * 16),
        "plain": record._replace(nonce=b"", tag=b"", flags=0),
        "mac": record._replace(flags=BlockMac.flag),
    }
    for name, lie in forged.items():
        index.write_bytes(lie.pack())
        with opened(tmp_path) as (found, tier):
            assert found.records == [], "its seal is not keyed"
            (error,) = tier.read([BlockRead(0, lie.key, [memoryview(bytearray(SLOT))])])
        assert isinstance(error, CorruptBlock), name
        index.write_bytes(lie.pack(CIPHER))  # even with the seal right
        with opened(tmp_path) as (_, tier):
            (error,) = tier.read([BlockRead(0, lie.key, [memoryview(bytearray(SLOT))])])
        assert isinstance(error, CorruptBlock), name
        assert not any(index.read_bytes()[:RECORD_NBYTES]), "it is erased"
    index.write_bytes(good)
    with opened(tmp_path) as (_, tier):
        assert read_back(tier, blocks[0]) == blocks[0].data


def test_any_number_of_ranks_reads_what_any_other_wrote(tmp_path: Path) -> None:
    two = Geometry(SHAPE, b"model", ((0, 1), (1, 2)), CIPHER.name)
    whole = Block(0, 0, SLOT).data[: SHAPE.nbytes]
    heads = np.frombuffer(whole, np.uint8).reshape(SHAPE.layers, 2, SHAPE.head_nbytes)
    key, parent, space = Block(0, 0, SLOT).key, bytes(16), b"n" * 16
    store = prepare_store(tmp_path, two, ROOM, wait_s=0, guard=CIPHER)
    for shard in (0, 1):
        tier = disk_rig.open_tier(store, two, shard, guard=CIPHER)
        part = memoryview(heads[:, shard].tobytes())
        assert tier.write([BlockWrite(0, key, parent, space, [part])]) == [None]
        tier.close()
    store.close()
    with opened(tmp_path) as (found, tier):
        ((record),) = found.records
        into = memoryview(bytearray(SLOT))
        assert tier.read([BlockRead(record.slot, key, [into])]) == [None]
        assert bytes(into[: SHAPE.nbytes]) == whole
    other = BlockCipher(OTHER)
    geometry = replace(GEOMETRY, cipher=other.name)
    store = prepare_store(tmp_path, geometry, ROOM, wait_s=0)
    # a leader mounts a store that this key cannot read
    mounted = MountedStore(store.folder, 2, {1: found.foreign[1]})
    tier = DiskTier(mounted, geometry, shard=0, slot_nbytes=SLOT, guard=other)
    (error,) = tier.read([BlockRead(record.slot, key, [into])])
    assert isinstance(error, CorruptBlock)
    tier.close()
    store.close()


def test_scrub_needs_no_key(tmp_path: Path) -> None:
    with opened(tmp_path) as (store, tier):
        write_blocks(tier, some_blocks(4))
    (report,) = scrub(tmp_path)
    assert (report.state, report.blocks) == (StoreState.WHOLE, 4)
    with (store.folder / "shard-0.data").open("r+b") as data:
        data.seek(SLOT + 9)
        data.write(b"rot")
    (report,) = scrub(tmp_path)
    assert (report.num_bad, report.blocks) == (1, 3)


# -- settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [KEY.hex(), KEY.hex().upper(), base64.b64encode(KEY).decode()])
def test_keys_are_read(text: str, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(text + "\n")
    assert read_key("K", None, {"K": text}) == read_key(None, str(file)) == KEY


@pytest.mark.parametrize(
    "text", [KEY.hex()[:-1], "hunter2", "z" * 64, base64.b64encode(KEY[1:]).decode(), "é" * 40]
)
def test_what_is_no_key_is_refused_and_not_shown(text: str, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(text)
    for variable, name in (("K", None), (None, str(file))):
        with pytest.raises(ConfigError) as caught:
            read_key(variable, name, {"K": text})
        assert text not in str(caught.value)


def test_no_key_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the variable K is not set"):
        read_key("K", None, {})
    with pytest.raises(ConfigError, match="cannot be read as a key"):
        read_key(None, str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="give one of them"):
        read_key("K", "file", {"K": KEY.hex()})


def test_the_settings_reach_the_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader and the worker go through the hooks, as in an engine."""
    monkeypatch.setenv("DISK_KEY", KEY.hex())
    plain = Geometry(SHAPE, b"model", ((0, 2),))
    disk = {"path": str(tmp_path), "capacity": ROOM, "key_env": "DISK_KEY"}
    config = load_config(overrides={"disk": disk}, env={})
    plugins = PluginManager(entry_points=[])
    (found,) = prepare_backings(config, plain, plugins)
    tier = BackingOpener(config, plain, 0, plugins)("disk", found.rank_options)
    (block,) = some_blocks(1)
    write_blocks(tier, [block])
    tier.close()
    found.prepared.release()
    with opened(tmp_path) as (_, tier):
        assert read_back(tier, block) == block.data
    monkeypatch.delenv("DISK_KEY")
    with pytest.raises(ConfigError, match="DISK_KEY"):
        prepare_backings(config, plain, plugins)


def test_tokens_are_not_kept_in_the_clear(tmp_path: Path) -> None:
    """Segments are the user's text. With encryption they stay in memory."""
    model: Any = SimpleNamespace(fingerprint=b"f" * 16)
    disk = {"path": str(tmp_path)}
    for more, files in (({}, 1), ({"key_env": "K"}, 0), ({"key_file": "k"}, 0)):
        segments = build_segments(load_config(overrides={"disk": disk | more}, env={}), model)
        segments.close()
        found = list(tmp_path.glob("segments-*"))
        assert len(found) == files
        for file in found:
            file.unlink()
