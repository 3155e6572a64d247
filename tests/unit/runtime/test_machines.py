"""A disk on each of several machines: leader and ranks as an engine builds them, without an engine.

Whatever becomes of the disk of one machine, a load brings the right bytes to every rank or fails.
"""

from __future__ import annotations

import json
import pickle
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from kvcore.config import Config, load_config  # noqa: E402  # after the skip
from kvcore.connector.build import build_leader, build_worker  # noqa: E402
from kvcore.connector.page_table import Paging  # noqa: E402
from kvcore.connector.step_transport import Outbox  # noqa: E402
from kvcore.errors import LayoutError  # noqa: E402
from kvcore.manager import HOST, KVManager  # noqa: E402
from kvcore.memory.layout import KVView, from_strides  # noqa: E402
from kvcore.model.keys import KeyChain, Namespace  # noqa: E402
from kvcore.model.shape import BlockShape  # noqa: E402
from kvcore.model.spec import LayerGroup, ModelDescription  # noqa: E402
from kvcore.runtime.build import hold_tiers  # noqa: E402
from kvcore.tiers import held as held_module  # noqa: E402
from kvcore.tiers.base import BlockRecord  # noqa: E402
from kvcore.tiers.disk import STORE_SHIFT, prepare_store  # noqa: E402
from kvcore.tiers.disk.scrub import StoreState, scrub  # noqa: E402
from kvcore.tiers.geometry import RECORD_NBYTES, Geometry  # noqa: E402
from kvcore.tiers.held import Held, agree  # noqa: E402
from kvcore.tiers.spec import PreparedTier  # noqa: E402
from kvcore.transfer.graph import OpReport  # noqa: E402
from kvcore.worker.lifecycle import close_worker, open_tiers  # noqa: E402
from support.transfers import load_blocks, save_blocks  # noqa: E402

BLOCK, BLOCKS, RANKS = 16, 4, 4
SLOT = 4096
"""Bytes of a rank's part of a block."""
SHAPE = BlockShape(layers=2, kv_heads=RANKS, head_dim=8, block_tokens=BLOCK, dtype="float32")
PAGING = Paging((LayerGroup(0, BLOCK, (0, 1)),), BLOCK, no_page=-1)
SPACES = [Namespace(bytes([i]) * 16) for i in range(2)]
EVERY = RANKS * (SLOT + RECORD_NBYTES)
"""Bytes of a block on the disks of all machines."""


def model(machines: int = 2, ranks: int = RANKS) -> ModelDescription:
    groups = (LayerGroup(0, BLOCK, (0, 1)),)
    return ModelDescription(SHAPE, groups, bytes(16), ranks, machines=machines)


class Chain:
    """A prompt of `BLOCKS` blocks, whose KV on each rank follows from its number."""

    def __init__(self, number: int) -> None:
        self.space = SPACES[number % 2]
        self.number = number
        tokens = range(number * 100, number * 100 + BLOCK * BLOCKS)
        self.keys = KeyChain(self.space, BLOCK).extend(tokens)

    def kv(self, rank: int, layer: int) -> torch.Tensor:
        seed = torch.Generator().manual_seed((self.number * RANKS + rank) * 2 + layer)
        return torch.rand(BLOCKS, 1, BLOCK, 16, generator=seed)


class _Outbox(Outbox):
    """Remembers the graphs that failed on a rank."""

    failed: set[int]

    def deliver(self, report: OpReport) -> None:
        if report.failed:
            self.failed.add(report.graph_id)
        super().deliver(report)


class Cluster:
    """An engine on several machines that has just started.

    ``deaf`` are machines that get no plan any more.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        slots: int = 64,
        told: Callable[[dict[str, Held]], dict[str, Held]] = lambda held: held,
    ) -> None:
        self.model = model(len(folders))
        self.local = RANKS // len(folders)
        self.deaf: set[int] = set()
        configs = [self._config(folder, slots, len(folders)) for folder in folders]
        self._held: list[Callable[[], None]] = []
        elsewhere = []
        for machine, config in enumerate(configs[1:], start=1):
            held, release = hold_tiers(config, self.model, machine * self.local)
            elsewhere.append(told(pickle.loads(pickle.dumps(held))))
            self._held.append(release)
        self.outbox = _Outbox(RANKS, self._pump)
        self.outbox.failed = set()
        self.leader = build_leader(configs[0], self.model, self.outbox, elsewhere=elsewhere)
        assert isinstance(self.leader.manager, KVManager)
        self.manager = self.leader.manager
        options = json.loads(json.dumps(self.leader.open_tiers))
        self.views, self.ranks = [], []
        for rank in range(RANKS):
            tensors = [torch.zeros(BLOCKS, 1, BLOCK, 16) for _ in range(2)]
            self.views.append(KVView(from_strides(tensors, self.model.rank_shape(rank)), tensors))
            config = configs[rank // self.local]
            self.ranks.append(build_worker(config, self.model, rank, [self.views[rank]]))
            open_tiers(self.ranks[rank].worker, self.ranks[rank].open_tier, options)

    @staticmethod
    def _config(folder: Path, slots: int, machines: int) -> Config:
        capacity = slots * EVERY + 2 * machines * SLOT
        return load_config(
            overrides={
                "host": {"capacity": 64 * RANKS * SLOT, "huge_pages": False},
                "disk": {"path": str(folder), "capacity": capacity, "sync_interval_s": 60.0},
            },
            env={},
        )

    def _pump(self, timeout: float) -> None:
        graphs, _, invalidated = self.outbox.take()
        for number, rank in enumerate(self.ranks):
            if number // self.local not in self.deaf:
                for name, runs in invalidated:
                    rank.worker.invalidate(name, runs)
            for graph in graphs:
                for report in rank.worker.submit(graph):
                    self.outbox.deliver(report)
        for rank in self.ranks:
            rank.worker.wait_report(0.001)
            for report in rank.worker.poll():
                self.outbox.deliver(report)

    def save(self, chain: Chain) -> None:
        """Save a chain, in host memory and on the disks, and wait until that has ended."""
        for rank, view in enumerate(self.views):
            for layer, tensor in enumerate(view.tensors):
                tensor.copy_(chain.kv(rank, layer))
        table = [list(range(BLOCKS))]
        graph = save_blocks(
            self.manager, chain.keys, chain.space.digest, BLOCKS,
            lambda start, stop: PAGING.whole_units(table, start, stop) or (),
        )  # fmt: skip
        if graph is not None:
            assert self.manager.wait(graph.graph_id, 30)

    def load(self, chain: Chain) -> dict[str, int]:
        """Load what is held of a chain, and return the blocks by tier.

        A load that fails on a rank is looked up again, as vLLM does. Asserts that what has come is
        right on every rank.
        """
        while True:
            hit = self.manager.get_match(chain.keys, chain.space.digest)
            if not hit.depth:
                return {}
            for view in self.views:
                for tensor in view.tensors:
                    tensor.fill_(-1)
            units = PAGING.units([list(range(BLOCKS))], 0, hit.depth)
            graph = load_blocks(self.manager, hit, 0, hit.depth, units)
            assert self.manager.wait(graph.graph_id, 30)
            if graph.graph_id not in self.outbox.failed:
                break
        for rank, view in enumerate(self.views):
            for layer, tensor in enumerate(view.tensors):
                right = chain.kv(rank, layer)[: hit.depth]
                assert torch.equal(tensor[: hit.depth], right), f"wrong KV on rank {rank}"
        return hit.blocks_by_tier()

    def clear(self, space: Namespace) -> None:
        self.manager.clear(space.digest)
        self._pump(0)

    def close(self) -> None:
        self._pump(0)
        for rank in self.ranks:
            close_worker(rank.worker)
        for release in (*self._held, *self.leader.releases):
            release()


Start = Callable[..., Cluster]


@pytest.fixture
def start() -> Iterator[Start]:
    made: list[Cluster] = []

    def start(*args: Any, **named: Any) -> Cluster:
        made.append(Cluster(*args, **named))
        return made[-1]

    yield start
    for cluster in made:
        cluster.close()


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    return [tmp_path / "a", tmp_path / "b"]


CHAINS = [Chain(number) for number in range(6)]


def filled(start: Start, folders: Sequence[Path], chains: Sequence[Chain] = CHAINS) -> None:
    """Save ``chains`` with an engine that ends then."""
    cluster = start(folders)
    for chain in chains:
        cluster.save(chain)
    cluster.close()


def parts_of(folder: Path) -> list[int]:
    """Return the shards whose files are in a folder."""
    return sorted(int(path.stem.split("-")[1]) for path in folder.rglob("*.data"))


def rot(folder: Path, shard: int, slots: Sequence[int]) -> None:
    [data] = folder.rglob(f"shard-{shard}.data")
    with data.open("r+b") as file:
        for slot in slots:
            file.seek(slot * SLOT + 8)
            file.write(b"\xa5" * 16)


# -- what is kept -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("machines", [2, 4])
def test_each_machine_keeps_its_ranks_parts_and_all_is_found_again(
    start: Start, tmp_path: Path, machines: int
) -> None:
    folders = [tmp_path / str(number) for number in range(machines)]
    filled(start, folders)
    local = RANKS // machines
    for number, folder in enumerate(folders):
        assert parts_of(folder) == list(range(number * local, (number + 1) * local))
        [report] = scrub(folder)
        assert (report.state, report.blocks) == (StoreState.WHOLE, BLOCKS * len(CHAINS))
    cluster = start(folders)
    assert [cluster.load(chain) for chain in CHAINS] == [{"disk": BLOCKS}] * len(CHAINS)
    assert [cluster.load(chain) for chain in CHAINS] == [{HOST: BLOCKS}] * len(CHAINS)


@pytest.mark.slow
@pytest.mark.parametrize("emptied", [0, 1])
def test_a_machine_whose_disk_was_emptied_gives_misses(
    start: Start, folders: list[Path], emptied: int
) -> None:
    filled(start, folders)
    shutil.rmtree(folders[emptied])
    cluster = start(folders)
    assert [cluster.load(chain) for chain in CHAINS] == [{}] * len(CHAINS)
    assert not cluster.outbox.failed, "nothing was promised that one machine lacks"
    cluster.save(CHAINS[0])
    cluster.close()
    assert start(folders).load(CHAINS[0]) == {"disk": BLOCKS}


@pytest.mark.slow
def test_an_older_state_gives_what_is_still_whole(start: Start, folders: list[Path]) -> None:
    """Slots that were given to other blocks since hold another key on that machine."""
    filled(start, folders, CHAINS[:3])
    old = folders[1].with_name("old")
    shutil.copytree(folders[1], old)
    cluster = start(folders)
    cluster.clear(SPACES[0])
    for chain in CHAINS[3:]:
        cluster.save(chain)
    cluster.close()
    shutil.rmtree(folders[1])
    old.rename(folders[1])
    cluster = start(folders)
    assert [cluster.load(chain) for chain in CHAINS] == [{}, {"disk": BLOCKS}, {}, {}, {}, {}]


@pytest.mark.slow
def test_the_disk_of_another_cluster_gives_misses(start: Start, folders: list[Path]) -> None:
    others = [folder.with_name(folder.name + "2") for folder in folders]
    filled(start, folders, CHAINS[:3])
    filled(start, others, CHAINS[3:])
    cluster = start([folders[0], others[1]])
    assert [cluster.load(chain) for chain in CHAINS] == [{}] * len(CHAINS)
    assert not cluster.outbox.failed, "their slots hold other keys"
    cluster.close()
    cluster = start([folders[1], folders[0]])  # the machines have changed places
    assert [cluster.load(chain) for chain in CHAINS] == [{}] * len(CHAINS)
    cluster.close()
    assert start(folders).load(CHAINS[0]) == {"disk": BLOCKS}


@pytest.mark.slow
def test_what_rots_on_one_machine_is_gone_on_all(start: Start, folders: list[Path]) -> None:
    filled(start, folders)
    rot(folders[1], 3, range(64))
    cluster = start(folders)
    assert cluster.load(CHAINS[0]) == {}
    cluster.close()
    cluster = start(folders)
    assert cluster.load(CHAINS[0]) == {}
    assert not cluster.outbox.failed, "the first engine has erased it everywhere"


@pytest.mark.slow
def test_one_engine_of_all_ranks_and_one_on_two_machines_leave_each_other_alone(
    start: Start, folders: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    """A folder of one machine's engine has all parts. Neither engine reads the other's."""
    filled(start, folders[:1], CHAINS[:2])
    filled(start, folders, CHAINS[2:4])
    caplog.set_level("INFO", "kvcore.tiers.disk")
    cluster = start(folders)
    assert [bool(cluster.load(chain)) for chain in CHAINS[:4]] == [False, False, True, True]
    assert (
        sum("is not read: ranks of other machines" in r.getMessage() for r in caplog.records) == 1
    )
    cluster.close()
    cluster = start(folders[:1])
    assert [bool(cluster.load(chain)) for chain in CHAINS[:4]] == [True, True, False, False]


@pytest.mark.slow
def test_disks_hold_no_more_than_their_share_and_evict(start: Start, folders: list[Path]) -> None:
    slots = 10
    for _ in range(2):
        cluster = start(folders, slots)
        assert cluster.manager.index.num_slots("disk") in (slots, slots + 1)
        for chain in CHAINS * 2:
            if sum(cluster.load(chain).values()) < BLOCKS:
                cluster.save(chain)
        cluster.close()
    for folder in folders:
        used = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        assert used <= (slots * EVERY + 4 * SLOT) // 2
    cluster = start(folders, slots)
    assert sum(bool(cluster.load(chain)) for chain in CHAINS) in (2, 3)


# -- clears -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("deaf", [set(), {0}, {1}, {0, 1}])
def test_a_clear_holds_whichever_machine_has_missed_it(
    start: Start, folders: list[Path], deaf: set[int]
) -> None:
    """The engine is killed before the plan with the clear has come to the machines ``deaf``."""
    filled(start, folders)
    cluster = start(folders)
    cluster.deaf = deaf
    cluster.clear(SPACES[0])
    cluster.close()
    for _ in range(2):
        cluster = start(folders)
        found = [bool(cluster.load(chain)) for chain in CHAINS]
        assert found == [chain.space is SPACES[1] for chain in CHAINS]
        cluster.save(CHAINS[1])
        cluster.close()


# -- what cannot be used ------------------------------------------------------------------------


def test_a_disk_that_cannot_be_used_on_one_machine_is_used_on_none(
    start: Start, folders: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    folders[1].write_text("no folder")
    cluster = start(folders)
    assert list(cluster.leader.open_tiers) == []
    [line] = [r.getMessage() for r in caplog.records if "the tier disk is off" in r.getMessage()]
    assert "on machine 1" in line
    assert not folders[0].exists(), "nothing was prepared here"
    cluster.save(CHAINS[0])
    assert cluster.load(CHAINS[0]) == {HOST: BLOCKS}


def test_a_machine_that_said_nothing_is_named(
    start: Start, folders: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    cluster = start(folders, told=lambda held: {})
    assert list(cluster.leader.open_tiers) == []
    assert "on machine 1 of 0 to 1: its ranks said nothing of it" in caplog.text


def test_one_folder_for_two_machines_is_refused_by_name(
    start: Start,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(prepare_store.__kwdefaults__, "wait_s", 0.0)  # type: ignore[arg-type]
    folder = tmp_path / "shared"
    cluster = start([folder, folder])
    assert list(cluster.leader.open_tiers) == []
    assert "give this one another disk.path" in caplog.text


def test_ranks_divide_evenly_over_machines() -> None:
    assert [model(2).beside(rank) for rank in (1, 2)] == [range(2), range(2, 4)]
    with pytest.raises(LayoutError, match="4 ranks on 3 machines"):
        model(3)


@given(cut=st.integers(1, 15), heads=st.integers(1, 5), capacity=st.integers(1 << 20, 1 << 30))
def test_machines_with_unlike_parts_have_room_for_as_many_blocks(
    cut: int, heads: int, capacity: int
) -> None:
    """Of two stages with unlike numbers of layers, one on each machine."""
    shape = BlockShape(layers=16, kv_heads=heads, head_dim=64, block_tokens=16, dtype="float16")
    parts = ((0, heads),) * 2, "", ((0, cut), (cut, 16))
    both = [Geometry(shape, b"model", *parts, held) for held in ((0, 1), (1, 2))]
    shares = [one.share_of(capacity) for one in both]
    assert capacity - 2 <= sum(shares) <= capacity
    slots = [share // one.per_slot for share, one in zip(shares, both, strict=True)]
    assert abs(slots[0] - slots[1]) <= 1
    assert [Geometry.from_json(one.to_json()) for one in both] == both


# -- histories ----------------------------------------------------------------------------------


def run_engine(cluster: Cluster, picks: random.Random) -> int:
    """Save, load and clear chains, and end the engine. Returns the blocks read from disk."""
    read = 0
    for _ in range(6):
        chain, what = picks.choice(CHAINS), picks.random()
        if what < 0.1:
            cluster.clear(chain.space)
            continue
        read += cluster.load(chain).get("disk", 0)
        if what < 0.6:
            cluster.save(chain)
    if picks.random() < 0.3:
        cluster.deaf = {picks.randrange(2)}
        cluster.clear(picks.choice(SPACES))
    cluster.close()
    return read


def spoil(folder: Path, picks: random.Random, copies: list[tuple[Path, Path]]) -> None:
    """Do something to a machine's disk, or nothing. ``copies`` are (folder, its older copy)."""
    fault = picks.choice(["nothing", "copy", "back", "empty", "rot", "cut", "forget"])
    if fault == "copy":
        copies.append((folder, folder.with_name(f"copy{len(copies)}")))
        shutil.copytree(*copies[-1])
    elif fault == "back" and copies:
        folder, copy = picks.choice(copies)
        shutil.rmtree(folder)
        shutil.copytree(copy, folder)
    elif fault == "empty":
        shutil.rmtree(folder)
        folder.mkdir(mode=0o700)
    elif (files := sorted(folder.rglob("*.data"))) and fault in ("rot", "cut", "forget"):
        file = picks.choice(files)
        if fault == "rot":
            rot(folder, int(file.stem.split("-")[1]), picks.sample(range(12), 3))
            return
        file = file if fault == "cut" else file.with_suffix(".index")
        with file.open("r+b") as data:
            data.truncate(picks.randrange(file.stat().st_size + 1))


MANY = [
    pytest.param(seeds, marks=pytest.mark.exhaustive) for seeds in (range(3, 30), range(30, 90))
]


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(3), *MANY], ids=str)
def test_no_history_gives_wrong_bytes(start: Start, tmp_path: Path, seeds: range) -> None:
    read = 0
    for seed in seeds:
        folders = [tmp_path / str(seed) / name for name in "ab"]
        picks, copies = random.Random(seed), list[tuple[Path, Path]]()
        slots = picks.choice([7, 12, 64])
        for _ in range(6):
            read += run_engine(start(folders, slots), picks)
            spoil(picks.choice(folders), picks, copies)
    assert read > 4 * len(seeds), "nothing was read from the disks"


# -- the merge ----------------------------------------------------------------------------------

Tables = st.dictionaries(st.integers(0, 9), st.sampled_from([b"x" * 16, b"y" * 16, b"z" * 16]))


def prepared(table: dict[int, bytes], num_slots: int) -> PreparedTier:
    records = [BlockRecord(slot, key, bytes(16), bytes(16), slot) for slot, key in table.items()]
    return PreparedTier(num_slots, records, torn=1)


@given(own=Tables, others=st.lists(st.tuples(Tables, st.integers(1, 12)), min_size=1, max_size=3))
def test_what_all_machines_hold(
    own: dict[int, bytes], others: list[tuple[dict[int, bytes], int]]
) -> None:
    told = [Held.of(prepared(table, slots), {}) for table, slots in others]
    found = agree(prepared(own, 10), told)
    slots = min(10, *(slots for _, slots in others))
    common = set(own.items()).intersection(*(table.items() for table, _ in others))
    assert found.num_slots == slots
    assert {(r.slot, r.key) for r in found.records} == {pair for pair in common if pair[0] < slots}
    assert found.torn == 1 + len(others)


def test_on_one_machine_what_is_mounted_stays() -> None:
    mounting = prepared({1 << STORE_SHIFT | 3: b"x" * 16}, 2)
    assert agree(mounting, []) is mounting


def test_a_machine_tells_of_the_oldest_blocks_if_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(held_module, "MAX_TOLD", 2)
    table = {slot: bytes([slot]) * 16 for slot in (5, 1, 9)}
    held = Held.of(prepared(table, 10), {})
    assert [record.slot for record in agree(prepared(table, 10), [held]).records] == [1, 5]
    assert "1 of 3 blocks on this machine's disk are not used" in caplog.text
