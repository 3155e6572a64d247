"""Reads of the disk tier straight into device memory, for which host memory stands in here."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from kvcore.errors import CorruptBlock, TierUnavailable
from kvcore.memory.checksums import bound_to, naive_sum
from kvcore.memory.copy import builtin_ops
from kvcore.memory.device_region import DeviceRegion
from kvcore.memory.nixl import FileAgent, FileSpan, Memory, nixl_module
from kvcore.telemetry.metrics import Metrics
from kvcore.testing.tier_contract import Block, read_back, write_blocks
from kvcore.tiers.base import DeviceRead, NotDirect, SlotError, Tier
from kvcore.tiers.disk import STORE_SHIFT, DiskTier
from kvcore.tiers.disk import gds as direct
from kvcore.tiers.disk.format import Record
from kvcore.tiers.geometry import RECORD_NBYTES
from kvcore.tiers.guard import BlockCipher
from kvcore.worker.device_staging import StagedReads
from kvcore_devtools.servers import need_client
from support.disk import GEOMETRY, SHAPE, SLOT, fill, flip, opened, some_blocks

need_client("nixl_cu13")

PLACES = 6


@pytest.fixture
def region() -> Iterator[DeviceRegion]:
    made = DeviceRegion(SHAPE, PLACES, builtin_ops()[-1])
    made.tensor.fill_(255)
    yield made
    made.close()


def held(region: DeviceRegion, place: int) -> bytes:
    at = place * region.slot_nbytes
    return region.tensor[at : at + SHAPE.nbytes].numpy().tobytes()


def wanted(blocks: Sequence[Block], first: int = 0) -> list[DeviceRead]:
    return [DeviceRead(b.slot, b.key, first + i) for i, b in enumerate(blocks)]


def test_blocks_come_to_their_places(path: Path, region: DeviceRegion) -> None:
    blocks = some_blocks(5)
    with opened(path, device_sums=True) as (_, tier):
        write_blocks(tier, blocks)
        assert tier.attach_device(region) == "POSIX"
        picked = [blocks[3], blocks[0], blocks[4]]
        assert tier.read_device(wanted(picked, 2)) == [None] * 3
        assert [held(region, 2 + i) for i in range(3)] == [b.data[: SHAPE.nbytes] for b in picked]
        assert set(held(region, 0)) == {255}, "another place was written to"
        assert [read_back(tier, b) for b in blocks] == [b.data for b in blocks]


def test_records_tell_the_sum_also_after_a_restart(path: Path, region: DeviceRegion) -> None:
    folder, blocks = fill(path, 3, device_sums=True)
    records = (folder / "shard-0.index").read_bytes()
    record = Record.unpack(records[:RECORD_NBYTES])
    assert record is not None
    data = blocks[0].data
    assert record.sum == bound_to(blocks[0].key, naive_sum([memoryview(data)], SHAPE.nbytes))
    with opened(path) as (_, tier):  # new ones get none; the old ones have theirs
        tier.attach_device(region)
        assert tier.read_device(wanted(blocks)) == [None] * 3


def test_what_is_damaged_is_refused_and_erased(path: Path, region: DeviceRegion) -> None:
    folder, blocks = fill(path, 3, device_sums=True)
    flip(folder / "shard-0.data", blocks[1].slot * SLOT + SHAPE.nbytes - 1)
    with opened(path) as (_, tier):
        tier.attach_device(region)
        first, second, third = tier.read_device(wanted(blocks))
        assert first is None
        assert third is None
        assert isinstance(second, CorruptBlock)
        with pytest.raises(CorruptBlock, match="does not hold"):
            read_back(tier, blocks[1])
    with opened(path) as (store, _):
        assert {record.slot for record in store.records} == {0, 2}


def test_a_damaged_sum_is_taken_for_a_damaged_block(path: Path, region: DeviceRegion) -> None:
    folder, blocks = fill(path, 1, device_sums=True)
    flip(folder / "shard-0.index", 88)
    with opened(path) as (_, tier):
        tier.attach_device(region)
        [error] = tier.read_device(wanted(blocks))
        assert isinstance(error, CorruptBlock)


def test_swapped_blocks_are_refused(path: Path, region: DeviceRegion) -> None:
    folder, blocks = fill(path, 2, device_sums=True)
    data = folder / "shard-0.data"
    content = data.read_bytes()
    data.write_bytes(content[SLOT : 2 * SLOT] + content[:SLOT] + content[2 * SLOT :])
    with opened(path) as (_, tier):
        tier.attach_device(region)
        assert all(isinstance(e, CorruptBlock) for e in tier.read_device(wanted(blocks)))


def test_another_block_than_the_slots_is_refused(path: Path, region: DeviceRegion) -> None:
    blocks = some_blocks(1)
    with opened(path, device_sums=True) as (_, tier):
        write_blocks(tier, blocks)
        tier.attach_device(region)
        wrong = [DeviceRead(0, b"?" * 16, 0), DeviceRead(1 << 30, b"?" * 16, 1)]
        missing, outside = tier.read_device(wrong)
        assert isinstance(missing, CorruptBlock)
        assert isinstance(outside, SlotError)


class Watched(StagedReads):
    """Reads, and what they counted."""

    def __init__(self, region: DeviceRegion) -> None:
        self.metrics = Metrics()
        super().__init__(region, self.metrics)

    @property
    def bounced(self) -> int:
        counts = self.metrics.snapshot().get("kvcore_bounced_blocks_total", {})
        return int(counts.get("disk", 0))


def test_what_cannot_go_straight_comes_by_host_memory(path: Path, region: DeviceRegion) -> None:
    old, new = some_blocks(3), [Block(slot, 70 + slot, SLOT) for slot in (3, 4, 5)]
    with opened(path) as (_, tier):
        write_blocks(tier, old)
    with opened(path, device_sums=True) as (_, tier):
        write_blocks(tier, new)
        tier.attach_device(region)
        assert [type(e) for e in tier.read_device(wanted(old + new))] == (
            [NotDirect] * 3 + [type(None)] * 3
        )
        reads = Watched(region)
        region.tensor.fill_(255)
        assert reads.read("disk", tier, wanted(old + new)) == [None] * 6
        assert [held(region, i) for i in range(6)] == [b.data[: SHAPE.nbytes] for b in old + new]
        assert reads.bounced == 3


def test_a_block_that_is_damaged_on_its_way_by_host_memory_fails(
    path: Path, region: DeviceRegion
) -> None:
    folder, blocks = fill(path, 2)
    flip(folder / "shard-0.data", 5)
    with opened(path) as (_, tier):
        tier.attach_device(region)
        region.tensor.fill_(255)
        first, second = Watched(region).read("disk", tier, wanted(blocks))
        assert isinstance(first, CorruptBlock)
        assert second is None
        assert set(held(region, 0)) == {255}, "what is damaged does not come to the device"


def test_host_memory_of_reads_is_used_again_and_given_back(path: Path) -> None:
    region = DeviceRegion(SHAPE, PLACES, builtin_ops()[-1])
    blocks, reads = some_blocks(5), Watched(region)
    with opened(path) as (_, tier):
        write_blocks(tier, blocks)
        for _ in range(2):
            assert reads.read("disk", tier, wanted(blocks)) == [None] * 5
    [pages] = reads._idle
    reads.close()
    with pytest.raises(ValueError, match="released"):
        pages.view[0]


@pytest.mark.parametrize("why", ["no NIXL", "cipher", "memory"])
def test_a_tier_that_reads_none_so(
    path: Path, region: DeviceRegion, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "no NIXL":

        def refuse(*_: object) -> None:
            raise TierUnavailable("no such backend")

        monkeypatch.setattr(direct, "FileAgent", refuse)
    cipher = BlockCipher(bytes(32)) if why == "cipher" else None
    geometry = GEOMETRY if cipher is None else _encrypted(cipher)
    blocks = some_blocks(5)
    with opened(path, geometry, device_sums=True, guard=cipher) as (_, tier):
        one: Tier = tier
        if why == "memory":
            from kvcore.tiers.memory import MemoryTier

            one = MemoryTier(8, SLOT)
        write_blocks(one, blocks)
        assert one.attach_device(region) == ""
        assert all(isinstance(e, NotDirect) for e in one.read_device(wanted(blocks)))
        assert Watched(region).read("disk", one, wanted(blocks)) == [None] * 5
        assert [held(region, i) for i in range(5)] == [b.data[: SHAPE.nbytes] for b in blocks]


def _encrypted(cipher: BlockCipher):  # type: ignore[no-untyped-def]
    from dataclasses import replace

    return replace(GEOMETRY, cipher=cipher.name)


def test_blocks_of_other_stores_come_by_host_memory(path: Path, region: DeviceRegion) -> None:
    with opened(path, device_sums=True) as (_, tier):
        tier.attach_device(region)
        [error] = tier.read_device([DeviceRead(1 << STORE_SHIFT, b"?" * 16, 0)])
        assert isinstance(error, NotDirect)


def test_after_an_error_another_agent_reads_the_rest(
    path: Path, region: DeviceRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error may end everything else in the agent's queue."""
    used: list[FileAgent] = []
    move = FileAgent.move

    def some_fail(self: FileAgent, operation: str, spans: Sequence[FileSpan]) -> str:
        used.append(self)
        if any(span.offset == SLOT for span in spans):
            return "ERR"
        return move(self, operation, spans)

    blocks = some_blocks(3)
    with opened(path, device_sums=True) as (_, tier):
        write_blocks(tier, blocks)
        tier.attach_device(region)
        monkeypatch.setattr(FileAgent, "move", some_fail)
        first, second, third = tier.read_device(wanted(blocks))
        assert (first, third) == (None, None)
        assert isinstance(second, NotDirect), "the disk may be well: `read` tells"
        assert len(set(used)) == 3, "one that failed was used again"
        assert [held(region, i) for i in (0, 2)] == [blocks[i].data[: SHAPE.nbytes] for i in (0, 2)]


def test_every_transfer_is_released_and_the_file_registered_once(
    path: Path, region: DeviceRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NIXL keeps a transfer until then. GPUDirect Storage refuses to register a file again."""
    kinds, agents = [], nixl_module().nixl_agent
    register = agents.register_memory
    monkeypatch.setattr(
        agents,
        "register_memory",
        lambda agent, places, kind: (kinds.append(kind), register(agent, places, kind))[1],
    )
    released, release = [], FileAgent._release
    monkeypatch.setattr(
        FileAgent, "_release", lambda agent, one: (released.append(one), release(agent, one))
    )
    blocks = some_blocks(3)
    with opened(path, device_sums=True) as (_, tier):
        write_blocks(tier, blocks)
        tier.attach_device(region)
        for _ in range(2):
            assert tier.read_device(wanted(blocks)) == [None] * 3
    assert len(released) == 2
    assert kinds == ["DRAM", "FILE"]


def test_after_close_nothing_is_read(path: Path, region: DeviceRegion) -> None:
    blocks = some_blocks(1)
    with opened(path, device_sums=True) as (_, tier):
        write_blocks(tier, blocks)
        tier.attach_device(region)
    assert isinstance(tier, DiskTier)
    [error] = tier.read_device(wanted(blocks))
    assert error is not None


class CuFile:
    """What cuFile knows in a process: each descriptor and each region once."""

    def __init__(self) -> None:
        self.held: set[tuple[str, int]] = set()
        self.agents: list[FileAgent] = []

    def agent_class(self, barrier: threading.Barrier) -> type[FileAgent]:
        """Return a class of agents that move by POSIX, and register as cuFile does."""
        cufile = self

        class Strict(FileAgent):
            def __init__(self, backend: str, memory: Memory) -> None:
                self._mine = [cufile.take("region", memory.address)]
                super().__init__("POSIX", memory)
                cufile.agents.append(self)

            def keep(self, fd: int, nbytes: int) -> None:
                self._mine.append(cufile.take("file", fd))
                super().keep(fd, nbytes)

            def move(self, operation: str, spans: Sequence[FileSpan]) -> str:
                assert cufile.held.issuperset(self._mine), "another agent deregistered it"
                with suppress(threading.BrokenBarrierError):
                    barrier.wait(0.2)  # long enough to meet, if both callers come at once
                return super().move(operation, spans)

            def close(self) -> None:
                cufile.held.difference_update(self._mine)
                super().close()

        return Strict

    def take(self, kind: str, what: int) -> tuple[str, int]:
        if (kind, what) in self.held:
            raise TierUnavailable("CU_FILE_HANDLE_ALREADY_REGISTERED")
        self.held.add((kind, what))
        return kind, what


def test_gpudirect_storage_has_one_agent_for_a_file(
    path: Path, region: DeviceRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    cufile, barrier = CuFile(), threading.Barrier(2)
    monkeypatch.setattr(direct, "FileAgent", cufile.agent_class(barrier))
    monkeypatch.setitem(direct.BACKENDS, "DRAM", ("GDS_MT",))
    blocks = some_blocks(6)
    with opened(path, device_sums=True) as (_, tier):
        write_blocks(tier, blocks)
        assert "GDS_MT" in tier.attach_device(region)
        with ThreadPoolExecutor(2) as pool:
            parts = [wanted(blocks[at : at + 3], at) for at in (0, 3)]
            assert list(pool.map(tier.read_device, parts)) == [[None] * 3] * 2
        assert [held(region, i) for i in range(6)] == [b.data[: SHAPE.nbytes] for b in blocks]
        assert len(cufile.agents) == 1
        move = FileAgent.move

        def fail(self: FileAgent, operation: str, spans: Sequence[FileSpan]) -> str:
            return "ERR" if len(spans) > 1 else move(self, operation, spans)

        monkeypatch.setattr(FileAgent, "move", fail)
        assert tier.read_device(wanted(blocks)) == [None] * 6, "one by one, with a new agent"
        assert len(cufile.agents) == 2
    assert not cufile.held, "closed with the tier"


def test_a_start_that_fails_leaves_nothing_registered(
    path: Path, region: DeviceRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    cufile = CuFile()
    strict = cufile.agent_class(threading.Barrier(1))
    monkeypatch.setattr(direct, "FileAgent", strict)
    with opened(path, device_sums=True) as (_, tier):
        assert isinstance(tier, DiskTier)
        monkeypatch.setattr(FileAgent, "keep", lambda *_: _refuse())
        assert not tier.attach_device(region)
    assert not cufile.held


def _refuse() -> None:
    raise TierUnavailable("NIXL registers no file")
