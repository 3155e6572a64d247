"""The contract of every tier, as pytest tests to subclass in a test file.

class TestMyTier(TierContract):
    persistent = True

    def make_tier(self, folder):
        return MyTier(folder, num_slots=self.num_slots, slot_nbytes=...)

Needs pytest. The tests know nothing of the medium. Faults of the medium (a flipped bit, a full
disk, a lost connection) belong in the tier's own tests.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from kvcore.errors import CorruptBlock
from kvcore.memory.hugepages import Pages
from kvcore.tiers.base import BlockRead, BlockRecord, BlockWrite, SlotError, Tier

__all__ = ["Block", "TierContract", "read_back", "write_blocks"]

NAMESPACE = b"namespace".ljust(16, b"\0")


class Block(NamedTuple):
    """A block to store. Its bytes depend on ``seed`` alone.

    In memory it starts on a page, as in the host arena, unless ``odd`` is true.
    """

    slot: int
    seed: int
    nbytes: int
    odd: bool = False

    @property
    def key(self) -> bytes:
        return random.Random(self.seed).randbytes(16)

    @property
    def data(self) -> bytes:
        return random.Random(~self.seed).randbytes(self.nbytes)

    def to_write(self) -> BlockWrite:
        """Return a write of one read-only piece, because a tier must not write to its source."""
        parent = self.seed.to_bytes(16, "little")
        memory = self.memory()
        memory[:] = self.data
        return BlockWrite(self.slot, self.key, parent, NAMESPACE, [memory.toreadonly()])

    def memory(self) -> memoryview:
        """Return zeroed memory for the block."""
        return Pages(self.nbytes + self.odd).view[self.odd :]


def write_blocks(tier: Tier, blocks: Sequence[Block]) -> None:
    """Write ``blocks`` in one batch, and assert that all are stored."""
    assert tier.write([block.to_write() for block in blocks]) == [None] * len(blocks)


def read_back(tier: Tier, block: Block) -> bytes:
    """Return the block's bytes from the tier. Raises the tier's error."""
    buffer = block.memory()
    (error,) = tier.read([BlockRead(block.slot, block.key, [buffer])])
    if error is not None:
        raise error
    return bytes(buffer)


class TierContract:
    """The tests. ``make_tier`` returns an open tier of ``num_slots`` slots, stored in ``folder``.

    If ``persistent`` is true, ``make_tier`` is called again for the same folder after ``close``,
    and the new tier must hold what was written.
    """

    num_slots = 8
    persistent = False
    odd = False
    """If true, use memory that does not start on a page."""

    def make_tier(self, folder: Path) -> Tier:
        """Return an open tier of ``num_slots`` slots, stored in ``folder``. Must be overridden."""
        raise NotImplementedError

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        tier = self.make_tier(tmp_path)
        yield tier
        tier.close()

    def blocks(self, tier: Tier, count: int, first_seed: int = 0) -> list[Block]:
        """Return ``count`` blocks for the first slots."""
        return [Block(slot, first_seed + slot, tier.slot_nbytes, self.odd) for slot in range(count)]

    # -- reads return what was written ------------------------------------------------------

    def test_a_batch_comes_back_byte_for_byte(self, tier: Tier) -> None:
        blocks = self.blocks(tier, self.num_slots)
        write_blocks(tier, blocks)
        buffers = [block.memory() for block in blocks]
        requests = [
            BlockRead(b.slot, b.key, [into]) for b, into in zip(blocks, buffers, strict=True)
        ]
        assert tier.read(requests) == [None] * len(blocks)
        assert [bytes(into) for into in buffers] == [block.data for block in blocks]

    def test_blocks_may_be_in_pieces_cut_differently(self, tier: Tier) -> None:
        block = Block(3, 3, tier.slot_nbytes)
        third, data = block.nbytes // 3, memoryview(block.data)
        pieces = [data[:1], data[1:third], data[third:]]
        assert tier.write([block.to_write()._replace(buffers=pieces)]) == [None]
        front, back = bytearray(2 * third), bytearray(block.nbytes - 2 * third)
        request = BlockRead(block.slot, block.key, [memoryview(front), memoryview(back)])
        assert tier.read([request]) == [None]
        assert bytes(front + back) == block.data

    def test_a_slot_can_be_written_again(self, tier: Tier) -> None:
        old, new = Block(2, 1, tier.slot_nbytes), Block(2, 2, tier.slot_nbytes)
        write_blocks(tier, [old])
        write_blocks(tier, [new])
        assert read_back(tier, new) == new.data
        with pytest.raises(CorruptBlock):
            read_back(tier, old)

    def test_an_empty_batch_does_nothing(self, tier: Tier) -> None:
        assert tier.write([]) == []
        assert tier.read([]) == []
        tier.invalidate([])
        assert list(tier.scan()) == []

    def test_threads_work_on_different_slots_at_once(self, tier: Tier) -> None:
        def work(slot: int) -> None:
            for seed in range(10):
                block = Block(slot, seed * self.num_slots + slot, tier.slot_nbytes)
                write_blocks(tier, [block])
                assert read_back(tier, block) == block.data

        with ThreadPoolExecutor(self.num_slots) as pool:
            for done in [pool.submit(work, slot) for slot in range(self.num_slots)]:
                done.result()

    # -- reads return nothing else ----------------------------------------------------------

    def test_an_empty_slot_is_not_read(self, tier: Tier) -> None:
        with pytest.raises(CorruptBlock):
            read_back(tier, Block(0, 0, tier.slot_nbytes))

    def test_another_key_is_not_read_and_harms_nothing(self, tier: Tier) -> None:
        blocks = self.blocks(tier, 2)
        write_blocks(tier, blocks)
        with pytest.raises(CorruptBlock):
            read_back(tier, blocks[0]._replace(slot=1))
        for block in blocks:
            assert read_back(tier, block) == block.data

    def test_an_invalidated_slot_is_not_read(self, tier: Tier) -> None:
        blocks = self.blocks(tier, 3)
        write_blocks(tier, blocks)
        tier.invalidate([0, 2, 5])
        tier.invalidate([0])
        assert read_back(tier, blocks[1]) == blocks[1].data
        for gone in (blocks[0], blocks[2]):
            with pytest.raises(CorruptBlock):
                read_back(tier, gone)
        write_blocks(tier, [blocks[0]])
        assert read_back(tier, blocks[0]) == blocks[0].data

    def test_one_bad_request_does_not_fail_the_others(self, tier: Tier) -> None:
        good = self.blocks(tier, 2)
        outside = [Block(slot, 9, tier.slot_nbytes) for slot in (-1, self.num_slots)]
        too_long = Block(2, 9, tier.slot_nbytes + 1)
        batch = [good[0], *outside, too_long, good[1]]
        written = tier.write([block.to_write() for block in batch])
        assert [type(error) for error in written] == [
            type(None), SlotError, SlotError, SlotError, type(None),
        ]  # fmt: skip
        buffers = [block.memory() for block in batch]
        requests = [
            BlockRead(b.slot, b.key, [into]) for b, into in zip(batch, buffers, strict=True)
        ]
        assert [error is None for error in tier.read(requests)] == [True, False, False, False, True]
        assert [bytes(buffers[0]), bytes(buffers[4])] == [block.data for block in good]

    # -- scan, integrity and restart --------------------------------------------------------

    def test_scan_tells_what_can_be_read(self, tier: Tier) -> None:
        blocks = self.blocks(tier, 4)
        write_blocks(tier, blocks[:2])
        write_blocks(tier, blocks[2:])
        tier.invalidate([1])
        records = {record.slot: record for record in tier.scan()}
        assert sorted(records) == [0, 2, 3]
        for slot, record in records.items():
            assert record[:4] == blocks[slot].to_write()[:4]
        assert records[0].stamp < min(records[2].stamp, records[3].stamp)

    def test_integrity_holds(self, tier: Tier) -> None:
        write_blocks(tier, self.blocks(tier, self.num_slots))
        tier.sync()
        tier.check_integrity()

    def test_it_can_be_closed_twice(self, tmp_path: Path) -> None:
        tier = self.make_tier(tmp_path)
        write_blocks(tier, self.blocks(tier, 1))
        tier.close()
        tier.close()

    def test_blocks_survive_a_restart(self, tmp_path: Path) -> None:
        if not self.persistent:
            pytest.skip("this tier forgets")
        tier = self.make_tier(tmp_path)
        blocks = self.blocks(tier, self.num_slots)
        write_blocks(tier, blocks)
        tier.invalidate([4])
        before = sorted(tier.scan())
        tier.close()
        tier = self.make_tier(tmp_path)
        try:
            after: list[BlockRecord] = sorted(tier.scan())
            assert after == before
            for block in blocks[:4] + blocks[5:]:
                assert read_back(tier, block) == block.data
            with pytest.raises(CorruptBlock):
                read_back(tier, blocks[4])
            write_blocks(tier, [blocks[4]])
            assert max(tier.scan(), key=lambda record: record.stamp).slot == 4
        finally:
            tier.close()
