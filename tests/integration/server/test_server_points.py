"""Resume points behind a server: bytes of all ranks, tiers below, and requests that are none."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

pytest.importorskip("zmq")

from kvcore.config import Config
from kvcore.connector.build import build_leader, build_worker
from kvcore.connector.disagg import accept, promised
from kvcore.connector.page_table import Paging, PointPages
from kvcore.connector.step_transport import Outbox
from kvcore.errors import FormatError, LayoutError, TierUnavailable
from kvcore.manager import Hit, Manager
from kvcore.manager.base import Promise
from kvcore.memory.layout import Arrangement, KVView, from_strides
from kvcore.memory.runs import whole_pages
from kvcore.model.keys import KeyChain, Namespace
from kvcore.model.packed import PackedPages
from kvcore.model.points import (
    PageWindow,
    PointCounts,
    PointShape,
    StateGroup,
    WindowGroup,
    over_stages,
    point_keys,
)
from kvcore.model.shape import BlockShape
from kvcore.model.spec import LayerGroup, ModelDescription
from kvcore.server import messages as m
from kvcore.server.model_cache import ModelCache
from kvcore.server.runtime_dir import RuntimeDir
from kvcore.testing.waiting import until
from kvcore.transfer.graph import Span, TransferGraph
from kvcore.worker.lifecycle import close_worker, open_tiers
from kvcore_devtools.server_fixture import RunningServer, settings
from support.transfers import load_blocks

BLOCK, PAGES, TOKENS = 16, 24, 4 * 16
SHAPE = BlockShape(layers=2, kv_heads=2, head_dim=8, block_tokens=BLOCK, dtype="float32")
GROUPS = (
    LayerGroup(0, BLOCK, (0, 1)),
    LayerGroup(1, 2 * BLOCK, (), of="states"),
    LayerGroup(2, BLOCK, (), of="windows"),
)
STATES, STAGES = StateGroup(1, ("a", "b"), 2400), ((0, 1), (1, 3))
DIGEST = Namespace(bytes(16)).digest


def model(ranks: int = 1, stages: int = 1, heads: int = 2) -> ModelDescription:
    """States in two rows or more, and a window of two blocks, of every rank.

    Of two stages the first has one layer with KV and one state, and the second the rest.
    """
    shape = BlockShape(2 if stages == 1 else 3, heads, 8, BLOCK, "float32")
    names = ("w",) if stages == 1 else ("v", "w", "x")
    window = BlockShape(1, 1, 8, BLOCK, "float32")
    row = shape.nbytes // min(ranks // stages, heads)
    point = PointShape((STATES,), row, 2, (WindowGroup(2, names, window, before=20),))
    return described(shape, point, ranks, stages)


def of_pages(ranks: int = 1, stages: int = 1) -> ModelDescription:
    """The same in pages of the engine's own format, in blocks and of the window."""
    sizes = {"w": 330} if stages == 1 else {"v": 170, "w": 330, "x": 20}
    packed = PackedPages(BLOCK, (4000, 900) if stages == 1 else (4000, 900, 70))
    shape = packed.shape(BLOCK, ranks // stages, () if stages == 1 else STAGES)
    window = PageWindow(2, tuple(sizes), BLOCK, tuple(sizes.values()), before=20)
    row = shape.nbytes // (ranks // stages)
    point = PointShape((STATES,), row, 2, page_windows=(window,))
    return described(shape, point, ranks, stages, packed)


def alike(ranks: int, stages: int = 1) -> ModelDescription:
    """Latents in pages of the engine's own format: each rank of a stage has the same."""
    assert stages == 1
    packed = PackedPages(BLOCK, (900, 40))
    window = PageWindow(1, ("w",), BLOCK, (330,), before=20)
    shape = packed.shape(BLOCK, 1)
    groups = GROUPS[0], LayerGroup(1, BLOCK, (), of="windows")
    point = PointShape((), shape.nbytes, 2, page_windows=(window,))
    return ModelDescription(shape, groups, b"fingerprint-0002", ranks, point=point, packed=packed)


def described(
    shape: BlockShape,
    point: PointShape,
    ranks: int,
    stages: int,
    packed: PackedPages | None = None,
) -> ModelDescription:
    model = partial(ModelDescription, shape, fingerprint=b"fingerprint-0001", packed=packed)
    if stages == 1:
        return model(groups=GROUPS, world_size=ranks, point=point)
    rows = [point.row_nbytes // 3, 2 * point.row_nbytes // 3]
    whole, parts = over_stages(point, [{"a", "v", "w"}, {"b", "x"}], rows)
    groups = (LayerGroup(0, BLOCK, (0, 1, 2)), *GROUPS[1:])
    return model(groups=groups, world_size=ranks, stages=STAGES, point=whole, stage_points=parts)


Kind = Callable[..., ModelDescription]
Engines = tuple[int, int] | tuple[int, int, Kind]
"""Ranks, stages, and the kind of model that they have."""


def shown(value: object) -> str | None:
    """Name a parameter in the list of tests."""
    names = (
        [getattr(part, "__name__", str(part)) for part in value] if isinstance(value, tuple) else []
    )
    return "-".join(names) or None


def keys(blocks: int, seed: int = 0) -> list[bytes]:
    """Prompts of other seeds have the first two blocks in common."""
    tokens = [t if t < 2 * BLOCK else t + seed for t in range(blocks * BLOCK)]
    return KeyChain(Namespace(bytes(16)), BLOCK).extend(tokens)


class Rank:
    """The pages of one rank: those of ``like`` again, or with numbers of their own."""

    def __init__(
        self, config: Config, described: ModelDescription, number: int, like: Rank | None = None
    ) -> None:
        shape, point = described.rank_shape(number), described.rank_point(number)
        assert point is not None
        start, stop = described.layer_range(number)
        sizes = {"a": (3, 200), "b": (600,)}
        names = [name for group in point.states for name in group.names]
        self.states = [torch.rand(PAGES, *sizes[name]) for name in names]
        if (packed := described.packed) is not None:
            [window] = point.page_windows
            self.kv = [_bytes(nbytes) for nbytes in packed.page_nbytes[start:stop]]
            self.window = [_bytes(nbytes) for nbytes in window.page_nbytes]
        else:
            self.kv = [torch.rand(PAGES, shape.kv_heads, BLOCK, 16) for _ in range(shape.layers)]
            self.window = [torch.rand(PAGES, 1, BLOCK, 16) for _ in point.windows[0].names]
        if like is not None:
            self.kv, self.window = ([t.clone() for t in some] for some in (like.kv, like.window))
        states = {group.group: self.states for group in point.states}
        build = partial(build_worker, config, described, number)
        if packed is not None:
            self.parts = build([whole_pages(self.kv)], states, pages={window.group: self.window})
        else:
            views = [KVView(from_strides(self.kv, shape), self.kv)]
            tail = KVView(from_strides(self.window, point.windows[0].shape), self.window)
            self.parts = build(views, states, {2: tail})

    def content(self, table: list[int], page: int) -> list[torch.Tensor]:
        """Everything that a hit of these pages has: the window is the last two blocks."""
        found = [tensor[table] for tensor in self.kv] + [tensor[page] for tensor in self.states]
        return [*found, *(tensor[table[-2:]] for tensor in self.window)]


def _bytes(nbytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (PAGES, nbytes), dtype=torch.uint8)


class Engine:
    """A leader with its ranks, which exchange messages without delay. A server's client, mostly."""

    def __init__(self, config: Config, ranks: int = 1, stages: int = 1, kind: Kind = model) -> None:
        self.model = kind(ranks, stages)
        groups = self.model.groups
        self.paging = Paging(groups, BLOCK, no_page=-1, point=self.model.point)
        self.outbox = Outbox(pump=self._pump)
        self.leader = build_leader(config, self.model, self.outbox)
        self.ranks: list[Rank] = []
        for number in range(ranks):
            like = self.ranks[0] if self.ranks and kind is alike else None
            self.ranks.append(Rank(config, self.model, number, like))
        for rank in self.ranks:
            open_tiers(rank.parts.worker, rank.parts.open_tier, self.leader.open_tiers)
        self._said: dict[tuple[int, int], list[Any]] = {}

    @property
    def manager(self) -> Manager:
        return self.leader.manager

    def _pump(self, timeout: float) -> None:
        """Carry graphs to all ranks, and an op's report to the leader when all have told."""
        graphs, self.outbox.graphs = self.outbox.graphs, []
        for rank in self.ranks:
            worker = rank.parts.worker
            told = [report for graph in graphs for report in worker.submit(graph)]
            worker.wait_report(timeout / len(self.ranks))
            for report in [*told, *worker.poll()]:
                said = self._said.setdefault((report.graph_id, report.op_id), [])
                said.append(report)
                if len(said) == len(self.ranks):
                    worst = max(said, key=lambda one: len(one.failed))
                    self.outbox.deliver(worst)

    def save(self, chain: list[bytes], table: list[int], page: int) -> int:
        """Return the number of rows that were saved."""
        graph = self.begin_save(chain, table, page)
        if graph is None:
            return 0
        assert self.manager.wait(graph.graph_id, 60)
        return graph.num_rows

    def begin_save(self, chain: list[bytes], table: list[int], page: int) -> TransferGraph | None:
        """Launch a save, which is carried out when the manager is waited for."""
        manager, blocks = self.manager, len(chain)
        planned = manager.plan_save(chain, DIGEST, blocks, point=True)
        if planned is None:
            return None
        point = planned.graph.point
        assert point is not None
        start, stop = planned.blocks.start, planned.blocks.start + max(point, 0)
        pages = PointPages(planned.blocks.stop - stop, blocks, self._states(page))
        tables = self.paging.whole_units(self._tables(table), start, stop, pages)
        assert tables is not None
        return manager.launch(planned, tables)

    def load(self, hit: Hit, table: list[int], page: int) -> None:
        point = PointPages(hit.point, hit.blocks, self._states(page))
        tables = self.paging.units(self._tables(table), 0, hit.blocks, point=point)
        graph = load_blocks(self.manager, hit, 0, hit.depth, tables)
        assert self.manager.wait(graph.graph_id, 60)

    def _tables(self, table: list[int]) -> list[list[int]]:
        return [[] if group.of == "states" else table for group in self.model.groups]

    def _states(self, page: int) -> dict[int, int]:
        return {group.index: page for group in self.model.groups if group.of == "states"}

    def content(self, table: list[int], page: int) -> list[torch.Tensor]:
        return [part.clone() for rank in self.ranks for part in rank.content(table, page)]

    def compute(self, chain: list[bytes], table: list[int], page: int) -> None:
        """Fill pages with what a prompt has: of each block, and of its end, always the same."""
        for rank in self.ranks:
            for key, place in zip(chain, table, strict=True):
                numbers = torch.Generator().manual_seed(int.from_bytes(key[:6], "big"))
                for tensor in (*rank.kv, *rank.window):
                    tensor[place] = torch.rand(tensor[place].shape, generator=numbers)
            for tensor in rank.states:
                tensor[page] = torch.rand(tensor[page].shape, generator=numbers)

    def forget(self) -> None:
        """Other prompts have used all pages since."""
        for rank in self.ranks:
            for tensor in (*rank.kv, *rank.window, *rank.states):
                tensor.fill_(-1.0)

    def close(self) -> None:
        for rank in self.ranks:
            close_worker(rank.parts.worker)
        for release in self.leader.releases:
            release()


@pytest.fixture
def begin() -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def start(config: Config, *described: Any) -> Engine:
        made.append(Engine(config, *described))
        return made[-1]

    yield start
    for each in made:
        each.close()


def same(got: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(got) == len(right) and all(map(torch.equal, got, right))


@pytest.mark.parametrize(
    ("described", "served"),
    [
        ((1, 1), True),
        ((2, 1), True),
        ((2, 2), True),
        ((4, 2), True),
        ((4, 2), False),
        ((2, 1, of_pages), True),
        ((2, 2, of_pages), True),
        ((4, 2, of_pages), True),
        ((2, 1, alike), True),
    ],
    ids=shown,
)
def test_an_engine_goes_on_from_points_that_another_saved(
    folder: Path,
    tmp_path: Path,
    start: Callable[[Config], RunningServer],
    begin: Callable[..., Engine],
    described: Engines,
    served: bool,
) -> None:
    """From host memory, and from disk after the server was started anew."""
    config = settings(folder, disk={"path": str(tmp_path / "disk"), "capacity": "4MiB"})
    if not served:
        config = config.model_copy(update={"server": Config().server})
    server = start(config) if served else None
    saver = begin(config, *described)
    short, long = saver.content([4, 1], 2), saver.content([4, 1, 0, 5], 3)
    assert saver.save(keys(2), [4, 1], 2) == 2 + saver.model.point.rows(2)  # type: ignore[union-attr]
    saver.save(keys(4), [4, 1, 0, 5], 3)
    assert saver.save(keys(4), [4, 1, 0, 5], 3) == 0, "it is held already"

    for found_in in ("host", "disk"):
        if not served and found_in == "disk":
            saver.close()
        reader = begin(config, *described) if served or found_in == "disk" else saver
        hit = reader.manager.get_match(keys(4), DIGEST)
        assert (hit.blocks, hit.reached, {*hit.blocks_by_tier()}) == (4, 4, {found_in})
        before = reader.content([9, 8, 7, 6], 10)
        reader.load(hit, [3, 2, 1, 0], 5)
        assert same(reader.content([3, 2, 1, 0], 5), long)
        assert same(reader.content([9, 8, 7, 6], 10), before), "pages of others are as they were"

        hit = reader.manager.get_match(keys(4), DIGEST, limit=3)
        assert (hit.blocks, hit.reached) == (2, 3)
        reader.load(hit, [11, 10], 8)
        assert same(reader.content([11, 10], 8), short)

        parted = reader.manager.get_match([*keys(2), *keys(4, seed=1)[2:]], DIGEST)
        assert (parted.blocks, parted.reached) == (2, 2)
        assert reader.manager.get_match(keys(1), DIGEST).blocks == 0, "no point is there"
        assert reader.manager.get_match(keys(1), DIGEST).reached == 1
        if found_in == "host" and server is not None:
            reader.close()
            saver.close()
            server.close()
            server = start(config)


@pytest.mark.parametrize(
    ("described", "shared"),
    [
        ((1, 1), True),
        ((2, 1), False),
        ((2, 2), True),
        ((4, 2), False),
        ((2, 1, of_pages), False),
        ((2, 2, of_pages), True),
        ((2, 1, alike), True),
    ],
    ids=shown,
)
@pytest.mark.parametrize("first", ["server", "engine"])
def test_a_disk_that_an_engine_and_a_server_have_in_turn(
    folder: Path,
    tmp_path: Path,
    start: Callable[[Config], RunningServer],
    begin: Callable[..., Engine],
    described: Engines,
    shared: bool,
    first: str,
) -> None:
    """Each finds what the other wrote, unless it has the ranks' parts in another order."""
    over = settings(folder, disk={"path": str(tmp_path / "disk"), "capacity": "4MiB"})
    alone = over.model_copy(update={"server": Config().server})
    order = [over, alone] if first == "server" else [alone, over]
    server = start(over) if first == "server" else None
    saver = begin(order[0], *described)
    right = saver.content([4, 1, 0, 5], 3)
    saver.save(keys(4), [4, 1, 0, 5], 3)
    saver.close()
    if server is not None:
        server.close()
    else:
        start(over)
    reader = begin(order[1], *described)
    hit = reader.manager.get_match(keys(4), DIGEST)
    assert hit.blocks == (4 if shared else 0)
    if shared:
        reader.load(hit, [3, 2, 1, 0], 5)
        assert same(reader.content([3, 2, 1, 0], 5), right)


def test_a_store_gives_a_server_what_another_one_wrote(
    tmp_path: Path, start: Callable[[Config], RunningServer], begin: Callable[..., Engine]
) -> None:
    """The store is asked for blocks, then for the longest point within those that it holds."""
    options = {"path": str(tmp_path / "shared"), "lookup_s": 60.0}
    far = {"far": {"plugin": "files", "capacity": "64MiB", "options": options}}
    config = settings(tmp_path / "one", tiers=far)
    server = start(config)
    saver = begin(config)
    right = saver.content([4, 1], 2)
    saver.save(keys(2), [4, 1], 2)
    saver.close()
    server.close()  # when its writes have ended

    config = settings(tmp_path / "two", tiers=far)
    start(config)
    reader = begin(config)

    def found() -> Hit | None:
        hit = reader.manager.get_match(keys(4), DIGEST)
        return None if reader.manager.ask_stores(hit) else hit

    assert reader.manager.get_match(keys(4), DIGEST).blocks == 0
    hit = until(found)
    assert (hit.blocks, {*hit.blocks_by_tier()}) == (2, {"far"})
    reader.load(hit, [9, 3], 7)
    assert same(reader.content([9, 3], 7), right)


CHAIN = KeyChain(Namespace(bytes(16)), BLOCK)
"""The namespace and the keys of a prompt of four blocks; `keys` returns the same ones."""
CHAIN.extend(range(4 * BLOCK))


@pytest.mark.parametrize("ends", ["saved", "gone"])
def test_a_promised_point_that_another_engine_of_the_server_is_saving_is_waited_for(
    folder: Path, start: Callable[[Config], RunningServer], begin: Callable[..., Engine], ends: str
) -> None:
    """Though a shorter one is there meanwhile; not if the engine that saves it has gone."""
    config = settings(folder)
    server, saver, reader = start(config), begin(config), begin(config)
    right = saver.content([4, 1, 0, 5], 3)
    assert list(CHAIN.keys) == keys(4)
    assert promised(CHAIN, 4, saver.manager) is None
    saver.save(keys(2), [4, 1], 2)
    shorter = promised(CHAIN, 4, saver.manager)
    graph = saver.begin_save(keys(4), [4, 1, 0, 5], 3)
    told = promised(CHAIN, 4, saver.manager)
    assert graph is not None
    assert shorter is not None
    assert told is not None
    assert (shorter["blocks"], told["blocks"]) == (2, 4)
    promise = accept(told, CHAIN, 600.0, reader.model.point)
    hit = reader.manager.get_match(keys(4), DIGEST)
    assert reader.manager.ask_stores(hit, 0, promise)
    for _ in range(5):
        hit = reader.manager.get_match(keys(4), DIGEST)
        assert hit.blocks == 2
        assert reader.manager.ask_stores(hit), "it is not waited for"
    if ends == "gone":
        saver.close()
    else:
        assert saver.manager.wait(graph.graph_id, 60)

    def found() -> Hit | None:
        hit = reader.manager.get_match(keys(4), DIGEST)
        return None if reader.manager.ask_stores(hit) else hit

    hit = until(found)
    assert hit.blocks == (2 if ends == "gone" else 4)
    table = [3, 2, 9, 8][: hit.blocks]
    reader.load(hit, table, 5)
    if ends == "saved":
        assert same(reader.content(table, 5), right)
    [space] = server.server.models
    assert len(space._pending) == 0


def test_a_server_waits_at_a_store_for_a_promised_point(
    tmp_path: Path, start: Callable[[Config], RunningServer], begin: Callable[..., Engine]
) -> None:
    """An engine of another server writes a shorter one there first."""
    options = {"path": str(tmp_path / "shared"), "lookup_s": 60.0}
    far = {"far": {"plugin": "files", "capacity": "64MiB", "options": options}}
    engines = []
    for name in ("one", "two"):
        config = settings(tmp_path / name, tiers=far)
        start(config)
        engines.append(begin(config))
    saver, reader = engines
    right = saver.content([4, 1, 0, 5], 3)

    def found() -> Hit | None:
        hit = reader.manager.get_match(keys(4), DIGEST)
        return None if reader.manager.ask_stores(hit) else hit

    hit = reader.manager.get_match(keys(4), DIGEST)
    assert reader.manager.ask_stores(hit, 0, Promise(4, 600.0))
    saver.save(keys(2), [4, 1], 2)
    limit = time.monotonic() + 0.5
    while time.monotonic() < limit:
        assert found() is None, "it goes on from the shorter one"
        time.sleep(0.01)
    saver.save(keys(4), [4, 1, 0, 5], 3)
    hit = until(found)
    assert (hit.blocks, {*hit.blocks_by_tier()}) == (4, {"far"})
    reader.load(hit, [9, 3, 2, 1], 7)
    assert same(reader.content([9, 3, 2, 1], 7), right)


def test_many_saves_in_little_memory_give_back_what_was_saved(
    folder: Path, start: Callable[[Config], RunningServer], begin: Callable[..., Engine]
) -> None:
    """Points lose rows to others. What is found has the bytes of its own prompt."""
    config = settings(folder, host={"capacity": "192KiB"})
    server, engine = start(config), begin(config)
    picks, found, saved = random.Random(0), 0, 0
    for _ in range(120):
        chain = keys(2 * picks.randrange(1, 4), picks.randrange(6))
        page, *table = picks.sample(range(PAGES), len(chain) + 1)
        hit = engine.manager.get_match(chain, DIGEST)
        table = table[: hit.blocks or len(chain)]
        engine.compute(chain[: len(table)], table, page)
        right = engine.content(table, page)
        if hit.blocks:
            found += 1
            engine.forget()
            engine.load(hit, table, page)
            assert same(engine.content(table, page), right)
        if hit.blocks < len(chain):
            table = picks.sample(range(PAGES), len(chain))
            engine.compute(chain, table, page)
            saved += bool(engine.save(chain, table, page))
        server.server.check_integrity()
    assert found > 10
    assert saved > 30


def test_a_worker_that_cannot_use_the_memory_holds_nothing_of_the_session(
    folder: Path,
    start: Callable[[Config], RunningServer],
    begin: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each save fails alone, and leaves no file open. Once it can, it saves."""
    config = settings(folder)
    start(config)
    engine = begin(config)
    worker = engine.ranks[0].parts.worker

    def unfit(*_: Any) -> None:
        raise LayoutError("no runs of bytes")

    with monkeypatch.context() as patch:
        patch.setattr(worker, "use_arena", unfit)
        engine.save(keys(2), [4, 1], 2)  # maps the memory, which stays mapped
        gc.collect()
        before = len(list(Path("/proc/self/fd").iterdir()))
        for seed in range(1, 4):
            engine.save(keys(4, seed), [4, 1, 0, 5], 3)
        assert len(list(Path("/proc/self/fd").iterdir())) == before
        assert engine.manager.get_match(keys(2), DIGEST).blocks == 0
    engine.save(keys(2), [4, 1], 2)
    assert engine.manager.get_match(keys(2), DIGEST).blocks == 2


# -- what is no request --------------------------------------------------------------------------


@pytest.fixture
def space(folder: Path) -> Iterator[ModelCache]:
    described, held = model(), RuntimeDir(folder)
    told = m.Model.of(described.shape, described.fingerprint, described.point)
    made = ModelCache(settings(folder, host={"arrangement": "layerwise"}), told, held, "arena-1")
    yield made
    made.check_integrity()
    made.close()
    held.close()


@pytest.mark.parametrize(
    ("told", "arrangement"),
    [
        (m.Model.of(SHAPE, b"f" * 16), Arrangement.LAYERWISE),
        (m.Model.of(SHAPE, b"f" * 16, model().point), Arrangement.BLOCKWISE),
        (m.Model.of(of_pages().shape, b"f" * 16, packed=True), Arrangement.BLOCKWISE),
    ],
    ids=["blocks", "points", "pages"],
)
def test_what_is_a_run_of_bytes_lies_in_one_piece_whatever_the_setting(
    folder: Path, told: m.Model, arrangement: Arrangement
) -> None:
    held = RuntimeDir(folder)
    made = ModelCache(settings(folder, host={"arrangement": "layerwise"}), told, held, "arena-1")
    assert made.metadata["arrangement"] == arrangement.value
    made.close()
    held.close()


@pytest.mark.parametrize("blocks", [0, 1, 3])
def test_a_point_where_the_model_has_none_is_not_saved(space: ModelCache, blocks: int) -> None:
    with pytest.raises(FormatError, match=f"no resume points behind {blocks} blocks"):
        space.save(m.SaveRequest(1, 1, m.join(keys(blocks)), DIGEST, point=True), 1)


@pytest.mark.parametrize("row", [0, 1])
def test_a_prompt_with_a_row_of_its_own_point_among_its_blocks_is_not_saved(
    space: ModelCache, row: int
) -> None:
    """Such a chain comes back to itself, and who follows it never ends."""
    last = keys(2)[1]
    told = m.join([point_keys(last, 2)[row], last])
    with pytest.raises(FormatError, match="not a chain"):
        space.save(m.SaveRequest(1, 1, told, DIGEST, point=True), 1)


def loads(space: ModelCache, **changes: Any) -> m.LoadRequest:
    """A good load of the point behind two blocks, with changes."""
    graph = space.save(m.SaveRequest(1, 1, m.join(keys(2)), DIGEST, point=True), 1).graph
    assert graph is not None
    ended = [m.OpReport(graph.graph_id, op.op_id) for op in graph.ops]
    space.ops_ended(1, ended)
    found = space.match(m.MatchRequest(1, 1, m.join(keys(2)), DIGEST))
    assert found.blocks == 2
    point = space.model.point_rows
    assert point is not None
    chain = point.chain(keys(2), 2)
    good = {
        "keys": m.join(chain), "sources": found.sources, "stop": len(chain), "point": point.rows(2)
    }  # fmt: skip
    return m.LoadRequest(
        **{"ref": 1, "session": 1, "namespace": DIGEST, "start": 0, **good, **changes}
    )


def test_a_load_takes_a_whole_point(space: ModelCache) -> None:
    asked = loads(space)
    graph = space.load(asked, 1).graph
    assert graph is not None
    assert graph.point == 2
    space.end(1)


@pytest.mark.parametrize(
    "changes",
    [{"point": 0}, {"point": 1}, {"point": 40}, {"keys": m.join(keys(9)), "stop": 6}],
    ids=str,
)
def test_a_load_of_a_part_of_a_point_is_refused(space: ModelCache, changes: dict[str, Any]) -> None:
    asked = loads(space, **changes)
    with pytest.raises(FormatError, match="do not end in a resume point"):
        space.load(asked, 1)


def test_a_model_without_points_gives_none(folder: Path) -> None:
    held = RuntimeDir(folder)
    space = ModelCache(settings(folder), m.Model.of(SHAPE, b"f" * 16), held, "arena-1")
    with pytest.raises(FormatError, match="no resume points"):
        space.save(m.SaveRequest(1, 1, m.join(keys(2)), DIGEST, point=True), 1)
    space.close()
    held.close()


@pytest.mark.parametrize(
    "points",
    [m.Points(1, 0, ()), m.Points(1, 1, ((0, 3),)), m.Points(1, 1, ((1 << 16, 1 << 16),))],
    ids=str,
)
def test_points_that_cannot_be_are_refused(points: m.Points) -> None:
    told = m.Model.of(SHAPE, b"f" * 16, PointCounts(1, 1))
    wrong = msgspec.structs.replace(told, points=points)
    with pytest.raises(LayoutError, match="resume point"):
        _ = wrong.point_rows


def test_a_chain_that_ends_before_its_point_is_not_loaded(
    folder: Path, start: Callable[[Config], RunningServer], begin: Callable[..., Engine]
) -> None:
    config = settings(folder)
    start(config)
    engine = begin(config)
    engine.save(keys(4), [0, 1, 2, 3], 4)
    hit = engine.manager.get_match(keys(4), DIGEST)
    with pytest.raises(TierUnavailable, match="resume point"):
        engine.manager.plan_load(hit, Span(0, hit.blocks))
