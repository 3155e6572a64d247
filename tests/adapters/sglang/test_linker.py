"""The linker without SGLang: loads that must be done when they are planned."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvcore.config import Config  # noqa: E402
from kvcore.connector.rank_guard import RankGuard  # noqa: E402
from kvcore.errors import UnsupportedError  # noqa: E402
from kvcore_sglang import build, start  # noqa: E402
from kvcore_sglang.describe import Rank  # noqa: E402  # the whole module needs torch
from kvcore_sglang.gate import LayerGate  # noqa: E402
from kvcore_sglang.messages import Order  # noqa: E402
from kvcore_sglang.ranks import NoLinks  # noqa: E402


class Leader:
    """Plans one load, of a request that was answered in part or not."""

    def __init__(self, resumed: bool) -> None:
        self.resumed = resumed
        self.refused: list[str] = []
        self.told: list[str] = []
        self.disabled = ""

    def is_resumed(self, rid: str) -> bool:
        return self.resumed

    def load(self, rid: str, slots: Any) -> Any:
        self.resumed = False  # it is loaded, and forgotten
        graph: Any = SimpleNamespace(graph_id=7)
        return Order(graphs=[graph])

    def refuse(self, rids: Iterable[str]) -> None:
        self.refused += rids

    def drop(self, rid: str, order: Order) -> None:
        self.told.append(f"drop {rid}")

    def disable(self, why: str, error: BaseException | None = None) -> None:
        self.disabled = why
        self.told.append("stand aside")

    def forget_requests(self) -> None:
        self.told.append("forget requests")

    def clear(self) -> None:
        self.told.append("clear")

    def renew(self) -> None:
        self.told.append("renew")


class Worker:
    def __init__(self, lands: bool, fails: bool = False) -> None:
        self.lands, self.fails = lands, fails
        self.calls: list[Any] = []
        worker: Any = self
        self.guard = RankGuard(worker, self.open_loads)

    def take_on(self, graphs: Sequence[Any], orders: Sequence[Any] = ()) -> None:
        pass

    def start_loads(self, graphs: Sequence[Any]) -> None:
        if self.fails:
            raise RuntimeError("an error of kvcore")
        self.calls.append(("start", [graph.graph_id for graph in graphs]))

    def open_loads(self) -> list[int]:
        return []

    def abandon(self, graph_ids: Iterable[int], timeout: float) -> bool:
        return True

    def refuse_rest(self) -> None:
        self.calls.append("refuse")

    def finish(self, graph_ids: Iterable[int]) -> bool:
        self.calls.append(("finish", list(graph_ids)))
        return self.lands

    def quiesce(self, timeout: float) -> bool:
        return self.lands


def made(linker_class: Any, leader: Leader, worker: Worker) -> Any:
    linker = linker_class.__new__(linker_class)
    linker._queued, linker._offered, linker._inserting, linker._spoilt = {}, 0, None, False
    linker._stopped = ""
    stand_in: Any = worker
    linker.layer_done_counter = LayerGate(stand_in, layers=1, layerwise=True)
    linker._parts = SimpleNamespace(
        leader=leader,
        follower=None,
        links=NoLinks(),
        worker=worker,
        served=SimpleNamespace(rank=Rank(0, 1, None)),
    )
    return linker


TRANSFERS = [SimpleNamespace(device_indices=torch.from_numpy(np.arange(64)))]


def test_a_load_is_queued_for_its_batch(linker_class: Any) -> None:
    worker = Worker(lands=True)
    linker = made(linker_class, Leader(resumed=False), worker)
    assert linker.load("r", TRANSFERS)
    assert [graph.graph_id for graph in linker._queued["r"].graphs] == [7]
    assert not worker.calls, "it starts with the batch"


@pytest.mark.parametrize("lands", [True, False])
def test_a_request_that_was_answered_in_part_is_loaded_at_once(
    linker_class: Any, lands: bool
) -> None:
    """Where that fails it is refused, and the engine computes it: nothing waits for its batch."""
    leader, worker = Leader(resumed=True), Worker(lands)
    linker = made(linker_class, leader, worker)
    assert linker.load("r", TRANSFERS) is lands
    assert worker.calls == [("start", [7]), ("finish", [7])]
    assert not linker._queued
    assert leader.refused == ([] if lands else ["r"])


def test_a_load_at_once_that_raises_is_refused_on_all_ranks(linker_class: Any) -> None:
    """The other ranks wait for the outcome. The rank does no more work."""
    leader, worker = Leader(resumed=True), Worker(lands=True, fails=True)
    linker = made(linker_class, leader, worker)
    assert not linker.load("r", TRANSFERS)
    assert leader.refused == ["r"]
    worker.fails, leader.resumed = False, True
    assert not linker.load("r", TRANSFERS)
    assert worker.calls == ["refuse", "refuse"]
    assert linker.layer_done_counter.stopped


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("lands", [True, False])
def test_a_flush_waits_for_pages_and_for_no_medium(
    linker_class: Any, lands: bool, keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of pages that do not end are the end of kvcore here; of a medium nothing is asked."""
    leader, worker = Leader(resumed=False), Worker(lands)
    linker = made(linker_class, leader, worker)
    linker._config = SimpleNamespace(sglang=SimpleNamespace(keep_on_flush=keeps))
    linker._changed = False
    monkeypatch.setattr(
        inspect.unwrap(linker_class.reset).__globals__["hooks"], "fit", lambda hooks: True
    )
    linker.layer_done_counter = SimpleNamespace(reset=lambda: None)
    linker._queued = {"r": Order()}
    linker.reset()
    first = ["drop r", *([] if lands else ["stand aside"])]
    assert not linker._queued
    assert leader.told == [*first, "forget requests", *([] if keeps else ["clear"])]


@pytest.mark.parametrize("hooked", [True, False])
def test_kv_from_before_a_change_of_weights_is_not_found_after_a_flush(
    linker_class: Any, hooked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiers are kept, for engines with the weights of the files. Where SGLang does not say that
    weights were changed, every flush counts as one for new weights."""
    leader = Leader(resumed=False)
    linker = made(linker_class, leader, Worker(lands=True))
    linker._config = Config()
    linker._changed = False
    linker.layer_done_counter = SimpleNamespace(reset=lambda: None)
    monkeypatch.setattr(
        inspect.unwrap(linker_class.reset).__globals__["hooks"], "fit", lambda hooks: hooked
    )
    linker.weights_changed()
    linker.reset()
    assert leader.told == ["renew", "forget requests", "renew"]
    linker.reset()
    assert leader.told[3:] == ["forget requests", *([] if hooked else ["renew"])]


@pytest.mark.parametrize("fails", [True, False])
def test_a_rank_without_a_worker_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Ranks warm up together and are linked only if each of them has a worker."""
    both, words = threading.Barrier(2), ["", ""]
    closed, warmed = list[int](), list[int]()

    def first_problem(rank: Rank, word: str) -> str:
        words[rank.number] = word
        both.wait(60)
        return words[0] or words[1]

    class Connector:
        def __init__(self, number: int, *_: Any) -> None:
            self.number = number

        def warm_up_blends(self, *, timed: bool) -> None:
            warmed.append(self.number)
            raise UnsupportedError("far enough")

        def close(self) -> None:
            closed.append(self.number)

    def worker(config: Any, model: Any, number: int, views: Any) -> int:
        if fails and number:
            raise MemoryError("no host memory on this rank")
        return number

    monkeypatch.setattr(build, "first_problem", first_problem)
    monkeypatch.setattr(build, "build_worker", worker)
    monkeypatch.setattr(build, "WorkerConnector", Connector)

    def start(number: int) -> str:
        pool = SimpleNamespace(view=None)
        served: Any = SimpleNamespace(rank=Rank(number, 2, None), model=None, pool=pool)
        with pytest.raises((UnsupportedError, MemoryError)) as error:
            build.build(Config(), served)
        return str(error.value)

    with ThreadPoolExecutor(2) as ranks:
        said = list(ranks.map(start, range(2)))
    own = "no host memory on this rank"
    if fails:
        assert said == [f"another rank cannot move KV: {own}", own]
        assert (closed, warmed) == ([0], [])
    else:
        assert said == ["far enough"] * 2
        assert sorted(warmed) == [0, 1]


@pytest.mark.parametrize("refused", [True, False])
def test_ranks_stand_aside_together_where_a_server_refuses_the_leader(
    monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    """It tells rank 0 alone. The other hears of it, and what it has built is closed."""
    both, words, closed = threading.Barrier(2), ["", ""], list[int]()

    def first_problem(rank: Rank, word: str) -> str:
        words[rank.number] = word
        both.wait(60)
        found = words[0] or words[1]
        both.wait(60)
        return found

    def build_parts(config: Any, served: Any, *rest: Any, **more: Any) -> Any:
        if refused and served.rank.number == 0:
            raise UnsupportedError("the kvcore server refuses this engine")
        return SimpleNamespace(close=lambda: closed.append(served.rank.number))

    for name, stand_in in {
        "hooks": SimpleNamespace(check=lambda: None, TIME_HOOKS=(), fit=lambda hooks: True),
        "find_rank": lambda rank: rank,
        "describe": lambda args, rank, *rest: SimpleNamespace(rank=rank),
        "first_problem": first_problem,
        "build": build_parts,
        "_publisher": lambda *given: None,
    }.items():
        monkeypatch.setattr(start, name, stand_in)

    def start_rank(number: int) -> Any:
        return start.start(Config(), None, Rank(number, 2, None), set(), None)

    with ThreadPoolExecutor(2) as ranks:
        made = list(ranks.map(start_rank, range(2)))
    assert [parts is None for parts in made] == [refused, refused]
    assert closed == ([1] if refused else [])
