"""SGLang's leader and worker over pools of token slots, without the engine.

KV of a token is a number that its whole prefix makes, so what a load brings can be checked against
what it must be: the oracle is `expected`, and the pages of the pool are poisoned before they are
loaded into.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvcore_sglang.describe import Rank, Served, _check_components  # noqa: E402  (needs torch)
from kvcore_sglang.fusing import Asking, FusionLeader  # noqa: E402
from kvcore_sglang.gate import LayerGate  # noqa: E402
from kvcore_sglang.layout import read_pool  # noqa: E402
from kvcore_sglang.leader import Leader  # noqa: E402
from kvcore_sglang.messages import Order  # noqa: E402
from kvcore_sglang.ranks import NoLines  # noqa: E402
from kvcore_sglang.worker import ATTEMPTS, RankWorker  # noqa: E402

from kvcore.adapting.build import LeaderParts, build_leader, build_worker  # noqa: E402
from kvcore.adapting.clock import ForwardClock  # noqa: E402
from kvcore.adapting.model import LayerGroup, ModelDescription  # noqa: E402
from kvcore.adapting.orders import BlendOrder, BlendReport  # noqa: E402
from kvcore.adapting.watching import Watch  # noqa: E402
from kvcore.config import load_config  # noqa: E402
from kvcore.errors import UnsupportedError  # noqa: E402
from kvcore.explain_file import read_records  # noqa: E402
from kvcore.fusion.segments import Segments  # noqa: E402
from kvcore.fusion.staging import Staging  # noqa: E402
from kvcore.layout import BlockShape  # noqa: E402
from kvcore.pool import SlotRun  # noqa: E402
from kvcore.rates import Part  # noqa: E402
from kvcore.transfer.graph import OpReport, TransferGraph  # noqa: E402
from kvcore.transfer.plan import layer_steps  # noqa: E402

LAYERS, HEADS, DIM, SLOTS = 3, 2, 4, 2048
SETTLE_S = 60.0


class MHATokenToKVPool:
    """What the adapter reads of SGLang's pool of this name."""

    dtype = store_dtype = torch.float32

    def __init__(self, page: int, slots: int = SLOTS, v_dim: int = DIM) -> None:
        self.k_buffer = [torch.zeros(slots + page, HEADS, DIM) for _ in range(LAYERS)]
        self.v_buffer = [torch.zeros(slots + page, HEADS, v_dim) for _ in range(LAYERS)]

    @property
    def buffers(self) -> list[Any]:
        return [*self.k_buffer, *self.v_buffer]


class MLATokenToKVPool:
    dtype = store_dtype = torch.bfloat16

    def __init__(self, page: int, slots: int = SLOTS) -> None:
        self.kv_buffer = [
            torch.zeros(slots + page, 1, 12, dtype=torch.bfloat16) for _ in range(LAYERS)
        ]

    @property
    def buffers(self) -> list[Any]:
        return self.kv_buffer


POOLS = {"mha": MHATokenToKVPool, "mla": MLATokenToKVPool}


def prefix_numbers(tokens: list[int]) -> list[int]:
    """For each token a small number that it and all before it make."""
    state, found = hashlib.sha256(), []
    for token in tokens:
        state.update(token.to_bytes(4, "little"))
        found.append(state.digest()[0])
    return found


class Landing:
    """In the place of blends: brings the chunks of orders to staging, and keeps it."""

    def __init__(self, worker: Any, shape: BlockShape) -> None:
        self._worker, self._shape = worker, shape
        self.landed: list[tuple[BlendOrder, Staging]] = []

    def begin(self, orders: list[BlendOrder]) -> list[OpReport]:
        for order in orders:
            staging = Staging(self._shape, order.blocks, torch.device("cpu"))
            self.landed.append((order, staging))
            for chunk in order.chunks:
                assert not self._worker.submit(chunk.graph, staging.groups)
        return []

    def run(self, landed: Any) -> list[int]:
        for layer in range(LAYERS):
            landed(layer)
        for order, _ in self.landed:
            for chunk in order.chunks:
                self._worker.release(chunk.graph.graph_id)
        return []

    def take_reports(self) -> list[BlendReport]:
        return [BlendReport(order.request_id) for order, _ in self.landed]

    def take_profile(self) -> list[tuple[int, float]]:
        return []


class Rig:
    """An engine of one rank: `compute` stands for its forward, `slots` for its allocator."""

    def __init__(
        self, pool: Any, page: int, kvcore: dict[str, Any], *, timed: bool = False
    ) -> None:
        self.config = load_config(overrides=kvcore, env={})
        self.page = page
        self.pool = pool
        found = read_pool(pool, page)
        shape = BlockShape(
            found.layers,
            found.heads,
            found.dim,
            self.config.block.tokens,
            found.dtype,
            kv_factor=1 if found.v_dim is None else 2,
            v_head_dim=found.v_dim,
        )
        groups = (LayerGroup(0, page, tuple(range(found.layers))),)
        model = ModelDescription(shape, groups, b"model-of-tests-1", 1)
        self.served = Served(model, Rank(0, 1, None), found, page, 1000)
        parts = build_worker(self.config, model, 0, [found.view])
        self.engine = parts.worker
        self.blends: Any = Landing(parts.worker, shape)
        clock = ForwardClock[Sequence[Part]](torch.device("cpu")) if timed else None
        self.worker = RankWorker(parts.worker, parts.open_tier, blends=self.blends, clock=clock)
        watch = Watch.of(self.config)
        self.leader = Leader(
            self.config,
            model,
            self.worker,
            NoLines(),
            lambda outbox: build_leader(self.config, model, outbox, on_event=watch.listener(None)),
            parts.metrics,
            fusion=self._fusion if self.config.fusion.enabled else None,
            watch=watch,
        )
        self.random = random.Random(7)
        self.namespace = self.leader.namespace("", None)

    def settle(self) -> None:
        """Until nothing is under way."""
        limit = time.monotonic() + SETTLE_S
        while self.leader.state["in_flight"]:
            assert time.monotonic() < limit
            self.worker.wait_report(0.02)

    def _fusion(self, parts: LeaderParts) -> FusionLeader:
        shape = self.served.model.shape
        segments = Segments(self.config.block.tokens, min_tokens=self.config.fusion.min_tokens)
        steps = layer_steps(shape.layers)
        return FusionLeader(
            self.config, shape, parts.manager, segments, steps, self.page, parts.metrics
        )

    def slots(self, tokens: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Slots of whole pages, in no order; page 0 is padding."""
        pages = -(-tokens // self.page)
        picked = self.random.sample(range(1, SLOTS // self.page), pages)
        places = [page * self.page + i for page in picked for i in range(self.page)]
        return np.array(places[:tokens], dtype=np.int64)

    def expected(self, tokens: list[int], buffer: int) -> Any:
        """``[tokens, heads, dim]`` of one of the pool's buffers."""
        like = self.pool.buffers[buffer]
        numbers = torch.tensor(prefix_numbers(tokens), dtype=torch.float32)
        heads, dim = like.shape[1:]
        grid = torch.arange(heads * dim, dtype=torch.float32).view(heads, dim)
        return (numbers[:, None, None] + grid / 4 + buffer * 8).to(like.dtype)

    def compute(self, tokens: list[int], slots: Any) -> None:
        for i, buffer in enumerate(self.pool.buffers):
            buffer[torch.from_numpy(slots)] = self.expected(tokens, i)

    def insert(self, tokens: list[int], slots: Any) -> bool:
        """Offer the tokens, all in the tree at ``slots``; whether there was something to save."""
        offer = self.leader.offer()
        order = self.leader.inserted(np.array(tokens), self.namespace, slots, [offer])
        self.worker.carry_out(order)
        self.settle()
        assert self.leader.done_offers() == 1
        self.leader.take_offer()
        return bool(order.graphs)

    def keep(self, tokens: list[int]) -> bool:
        whole = tokens[: len(tokens) // self.page * self.page]
        slots = self.slots(len(whole))
        self.compute(whole, slots)
        return self.insert(whole, slots)

    def lookup(self, rid: str, tokens: list[int], device: int = 0) -> int:
        """As the scheduler does: again while the request is held back."""
        while True:
            gain = self.leader.lookup(rid, np.array(tokens), device, self.namespace)
            if not self.leader.holds(rid, resting=True):
                return gain

    def load(self, rid: str, tokens: list[int], device: int, gain: int) -> bool:
        """Load what was looked up into poisoned slots, and check every element; False where the
        load was refused or failed."""
        slots = self.slots(gain)
        for buffer in self.pool.buffers:
            buffer[torch.from_numpy(slots)] = float("nan")
        order = self.leader.load(rid, slots)
        if order.empty:
            return False
        [graph] = order.graphs
        self.worker.start_loads([graph])
        for layer in range(LAYERS):
            self.worker.wait_layer([graph.graph_id], layer)
            self.check(tokens, device, slots, layer)
        landed = self.worker.finish([graph.graph_id])
        self.settle()
        return landed

    def check(self, tokens: list[int], device: int, slots: Any, layer: int) -> None:
        for i in range(layer, len(self.pool.buffers), LAYERS):
            want = self.expected(tokens, i)[device : device + len(slots)]
            got = self.pool.buffers[i][torch.from_numpy(slots)]
            assert torch.equal(got, want), f"layer {layer}, buffer {i}"

    def close(self) -> None:
        self.worker.close()
        self.leader.check_integrity()
        self.leader.close()


@pytest.fixture
def rigs() -> Iterator[list[Rig]]:
    made: list[Rig] = []
    yield made
    for rig in made:
        rig.close()


def text(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=length)


SETTINGS: dict[str, Any] = {"host": {"capacity": "4MiB", "huge_pages": False}}


@pytest.mark.parametrize("kind", POOLS)
@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("block", [8, 16, 64])
@pytest.mark.parametrize("layerwise", [True, False])
def test_what_was_computed_comes_back(
    rigs: list[Rig], kind: str, page: int, block: int, layerwise: bool
) -> None:
    settings = {**SETTINGS, "block": {"tokens": block}, "sglang": {"layerwise": layerwise}}
    rig = Rig(POOLS[kind](page), page, settings)
    rigs.append(rig)
    for seed, length in enumerate([300, 64, 77, 512]):
        tokens = text(length, seed)
        assert rig.lookup("before", tokens) == 0
        assert rig.keep(tokens)
        assert not rig.keep(tokens), "saved twice"
        whole = length // page * page // block * block // page * page
        for device in {0, 128 // page * page, 64}:
            wanted = whole - device
            gain = rig.lookup(f"r{seed}-{device}", tokens, device)
            assert gain == (wanted if wanted >= max(64, page) else 0)
            if gain:
                assert rig.load(f"r{seed}-{device}", tokens, device, gain)


@pytest.mark.parametrize("page", [1, 16])
def test_a_prefix_is_found_and_a_like_text_is_not(rigs: list[Rig], page: int) -> None:
    rig = Rig(MHATokenToKVPool(page), page, SETTINGS)
    rigs.append(rig)
    tokens = text(400, 1)
    rig.keep(tokens)
    branch = [*tokens[:200], *text(200, 2)]
    gain = rig.lookup("branch", branch)
    assert gain == 192
    assert rig.load("branch", branch, 0, gain)
    assert rig.lookup("other", tokens[1:]) == 0
    other = rig.leader.namespace("", "tenant")
    assert rig.leader.lookup("tenant", np.array(tokens), 0, other) == 0


def test_a_name_that_comes_again_with_another_prompt_finds_that_prompts_kv(
    rigs: list[Rig],
) -> None:
    """Clients choose requests' names: as long a prompt under a name is not the same prompt."""
    rig = Rig(MHATokenToKVPool(1), 1, SETTINGS)
    rigs.append(rig)
    first, second = text(320, 20), text(320, 21)
    assert rig.lookup("job", first) == 0
    rig.keep(first)
    assert rig.lookup("job", second) == 0, "the first prompt's KV was found for the second"
    rig.keep(second)
    gain = rig.lookup("job", second)
    assert gain == 320
    assert rig.load("job", second, 0, gain)


def test_a_request_that_was_answered_in_part_is_known_until_it_is_loaded(rigs: list[Rig]) -> None:
    rig = Rig(MHATokenToKVPool(1), 1, SETTINGS)
    rigs.append(rig)
    tokens = text(320, 22)
    rig.keep(tokens)
    assert not rig.leader.is_resumed("unknown")
    for resumed in (True, False):
        gain = rig.leader.lookup("r", np.array(tokens), 0, rig.namespace, resumed=resumed)
        assert rig.leader.is_resumed("r") is resumed
    assert rig.load("r", tokens, 0, gain)
    assert not rig.leader.is_resumed("r")


def test_blocks_of_the_disk_are_staged_before_they_are_answered(
    rigs: list[Rig], tmp_path: Path
) -> None:
    disk = {"path": str(tmp_path / "kv"), "capacity": "64MiB"}
    settings = {**SETTINGS, "disk": disk, "sglang": {"prefetch": "wait"}}
    tokens = text(500, 3)
    first = Rig(MHATokenToKVPool(16), 16, settings)
    first.keep(tokens)
    first.close()
    second = Rig(MHATokenToKVPool(1), 1, settings)
    rigs.append(second)
    gain = second.lookup("again", tokens)
    assert gain == 496
    assert second.load("again", tokens, 0, gain)
    assert second.leader.state["requests"]["again"] == {"disk": 496}
    assert second.lookup("host", tokens) == 496
    assert second.load("host", tokens, 0, 496)
    assert second.leader.state["requests"]["host"] == {"host": 496}


def test_what_another_host_put_into_a_store_is_found(rigs: list[Rig]) -> None:
    options = {"name": uuid.uuid4().hex, "lookup_s": 60}
    far = {"plugin": "memory-store", "capacity": "4MiB", "options": options}
    waits = {"prefetch": "wait", "prefetch_timeout_s": 60}
    tokens = text(500, 4)
    one, other = (
        Rig(MHATokenToKVPool(page), page, {**SETTINGS, "tiers": {"far": far}, "sglang": waits})
        for page in (16, 1)
    )
    rigs.extend([one, other])
    one.keep(tokens)
    gain = other.lookup("there", tokens)
    assert gain == 496
    assert other.load("there", tokens, 0, gain)
    assert other.leader.state["requests"]["there"] == {"far": 496}


@pytest.fixture
def from_disk(rigs: list[Rig], tmp_path: Path) -> Callable[[dict[str, Any], list[int]], Rig]:
    """Makes a rig on whose disk a prompt lies, as another left it."""

    def made(sglang: dict[str, Any], tokens: list[int]) -> Rig:
        disk = {"path": str(tmp_path / "kv"), "capacity": "64MiB"}
        settings = {**SETTINGS, "disk": disk, "sglang": sglang}
        first = Rig(MHATokenToKVPool(1), 1, settings)
        first.keep(tokens)
        first.close()
        second = Rig(MHATokenToKVPool(1), 1, settings)
        rigs.append(second)
        return second

    return made


FromDisk = Callable[[dict[str, Any], list[int]], Rig]


def held_back(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Nothing that the worker did is heard of until the returned function is called."""
    poll = rig.worker.poll
    monkeypatch.setattr(rig.worker, "poll", list)
    return lambda: monkeypatch.setattr(rig.worker, "poll", poll)


def ask_once(rig: Rig, rid: str, tokens: list[int]) -> tuple[int, bool]:
    gain = rig.leader.lookup(rid, np.array(tokens), 0, rig.namespace)
    return gain, rig.leader.holds(rid)


def missed(rig: Rig) -> dict[str, float]:
    counted = rig.leader.metrics.snapshot().get("kvcore_misses_total", {})
    return {name: count for name, count in counted.items() if count}


def test_a_request_is_held_back_for_the_disk_and_others_are_not(
    from_disk: FromDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, here = text(500, 30), text(300, 31)
    rig = from_disk({"prefetch": "wait"}, tokens)
    rig.keep(here)
    let_go = held_back(rig, monkeypatch)
    for _ in range(5):
        assert ask_once(rig, "far", tokens) == (0, True)
        assert ask_once(rig, "near", here) == (288, False)
    assert not missed(rig), "what is still to come is not missing"
    rig.leader.ask_anew("far")
    assert not rig.leader.holds("far"), "the engine asked no more: it has the prompt itself"
    let_go()
    rig.settle()
    assert ask_once(rig, "far", tokens) == (496, False)
    assert rig.load("far", tokens, 0, 496)
    assert rig.leader.state["requests"]["far"] == {"disk": 496}


def test_what_is_late_is_computed_and_found_by_the_next(
    from_disk: FromDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = text(500, 32)
    rig = from_disk({"prefetch": "timeout", "prefetch_timeout_s": 5}, tokens)
    now = 100.0
    monkeypatch.setattr(rig.leader._staging, "_clock", lambda: now)
    let_go = held_back(rig, monkeypatch)
    assert ask_once(rig, "late", tokens) == (0, True)
    now += 4.9
    assert ask_once(rig, "late", tokens) == (0, True)
    now += 0.1
    assert not rig.leader.holds("late"), "held longer than its setting says"
    for _ in range(3):
        assert ask_once(rig, "late", tokens) == (0, False)
    assert missed(rig) == {"pending": 1}, "one request, one miss"
    let_go()
    rig.settle()
    assert ask_once(rig, "next", tokens) == (496, False)


def test_a_request_waits_once_whatever_it_waits_for(
    from_disk: FromDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that come and go again keep nobody waiting for ever."""
    tokens = text(500, 33)
    rig = from_disk({"prefetch": "timeout", "prefetch_timeout_s": 5}, tokens)
    now = 100.0
    monkeypatch.setattr(rig.leader._staging, "_clock", lambda: now)
    rounds = 0
    while ask_once(rig, "r", tokens)[1] or rig.leader.holds("r"):
        now += 1.0
        rounds += 1
        assert rounds <= 5
        rig.settle()
        for seed in range(36 * rounds, 36 * rounds + 36):  # more than host memory holds
            rig.keep(text(500, 100 + seed))
    assert rounds == 5


def two_on_disk(rigs: list[Rig], tmp_path: Path) -> tuple[Rig, dict[str, list[int]]]:
    """A rig whose disk has two prompts, of which host memory holds one."""
    tokens = {"one": text(500, 50), "two": text(500, 51)}
    settings: dict[str, Any] = {
        "host": {"capacity": "240KiB", "huge_pages": False},
        "disk": {"path": str(tmp_path / "kv"), "capacity": "64MiB"},
        "sglang": {"prefetch": "wait"},
    }
    first = Rig(MHATokenToKVPool(1), 1, settings)
    for prompt in tokens.values():
        first.keep(prompt)
    first.close()
    rig = Rig(MHATokenToKVPool(1), 1, settings)
    rigs.append(rig)
    slots = rig.leader.manager.index.num_slots("host")
    assert 32 <= slots < 62, slots
    return rig, tokens


def test_two_that_do_not_fit_together_come_up_one_after_the_other(
    rigs: list[Rig], tmp_path: Path
) -> None:
    """Side by side each would push out what came for the other, until both were late."""
    rig, tokens = two_on_disk(rigs, tmp_path)
    waiting, rounds = dict(tokens), 0
    while waiting:
        rounds += 1
        assert rounds < 50, f"{list(waiting)} wait for each other"
        asked = {rid: ask_once(rig, rid, prompt) for rid, prompt in waiting.items()}
        rig.settle()
        for rid, (gain, held) in asked.items():
            if not held:
                assert gain == 496, f"{rid} is computed"
                assert rig.load(rid, waiting.pop(rid), 0, gain)
    assert not missed(rig)


@pytest.mark.parametrize("how", ["aborted", "another prompt", "flushed", "too late"])
def test_one_that_goes_makes_room_for_the_next(
    how: str, rigs: list[Rig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, tokens = two_on_disk(rigs, tmp_path)
    now = 100.0
    monkeypatch.setattr(rig.leader._staging, "_clock", lambda: now)
    assert ask_once(rig, "one", tokens["one"]) == (0, True)
    rig.settle()
    for _ in range(3):
        assert ask_once(rig, "two", tokens["two"]) == (0, True)
        rig.settle()
    now += 20
    if how == "aborted":
        rig.leader.ended("one", "abort")
    elif how == "flushed":
        rig.leader.forget_requests()
    elif how == "another prompt":
        assert ask_once(rig, "one", text(40, 52)) == (0, False)
    else:
        now += 5
        assert ask_once(rig, "two", tokens["two"]) == (0, True), "the first is not late yet"
        now += 6
        assert not rig.leader.holds("one")
        rig.leader._asked["two"].wait.since = now  # it came later than the first
    assert ask_once(rig, "two", tokens["two"]) == (0, True)
    rig.settle()
    assert ask_once(rig, "two", tokens["two"]) == (496, False)
    assert rig.load("two", tokens["two"], 0, 496)


def test_best_effort_answers_at_once_and_stages_for_the_next(
    rigs: list[Rig], tmp_path: Path
) -> None:
    disk = {"path": str(tmp_path / "kv"), "capacity": "64MiB"}
    settings = {**SETTINGS, "disk": disk, "sglang": {"prefetch": "best_effort"}}
    tokens = text(500, 3)
    first = Rig(MHATokenToKVPool(1), 1, settings)
    first.keep(tokens)
    first.close()
    second = Rig(MHATokenToKVPool(1), 1, settings)
    rigs.append(second)
    second.lookup("early", tokens)
    second.settle()
    gain = second.lookup("early", tokens)
    assert gain == 496
    assert second.load("early", tokens, 0, gain)


def test_a_rotten_block_on_disk_is_computed_again(
    rigs: list[Rig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = {"path": str(tmp_path / "kv"), "capacity": "64MiB"}
    settings = {**SETTINGS, "disk": disk, "sglang": {"prefetch": "wait"}}
    tokens = text(500, 4)
    first = Rig(MHATokenToKVPool(1), 1, settings)
    first.keep(tokens)
    first.close()
    [data] = (tmp_path / "kv").rglob("shard-0.data")
    with data.open("r+b") as file:
        file.seek(20 * 4096 + 100)  # somewhere in the 21st block
        file.write(b"\xa5" * 64)
    second = Rig(MHATokenToKVPool(1), 1, settings)
    rigs.append(second)
    gain = second.lookup("rotten", tokens)
    assert 0 < gain < 496
    assert second.load("rotten", tokens, 0, gain)
    assert second.keep(tokens), "the rest is saved again"
    assert second.lookup("healed", tokens) == 496
    assert second.load("healed", tokens, 0, 496)


def test_what_left_host_memory_since_the_lookup_is_refused(rigs: list[Rig]) -> None:
    settings = {"host": {"capacity": "320KiB", "huge_pages": False}}
    rig = Rig(MHATokenToKVPool(1), 1, settings)
    rigs.append(rig)
    tokens = text(400, 5)
    rig.keep(tokens)
    gain = rig.lookup("late", tokens)
    assert gain > 0
    for seed in range(10, 30):
        rig.keep(text(400, seed))
    assert not rig.load("late", tokens, 0, gain)
    assert rig.leader.load("unknown", rig.slots(64)).empty
    assert rig.leader.manager.in_flight == 0


def test_a_load_that_is_dropped_leaves_nothing(rigs: list[Rig]) -> None:
    rig = Rig(MHATokenToKVPool(1), 1, SETTINGS)
    rigs.append(rig)
    tokens = text(400, 6)
    rig.keep(tokens)
    gain = rig.lookup("gone", tokens)
    order = rig.leader.load("gone", rig.slots(gain))
    assert order.graphs
    rig.leader.drop(order)
    assert rig.leader.manager.in_flight == 0
    rig.leader.check_integrity()


@pytest.mark.parametrize("failures", [1, ATTEMPTS - 1, ATTEMPTS])
def test_a_copy_that_fails_is_tried_again(
    rigs: list[Rig], monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    rig = Rig(MHATokenToKVPool(1), 1, {**SETTINGS, "sglang": {"layerwise": False}})
    rigs.append(rig)
    tokens = text(400, 7)
    rig.keep(tokens)
    ops, left = rig.engine.ops, [failures]
    copy = ops.copy_blocks

    def failing(*args: Any, **kwargs: Any) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError("injected")
        copy(*args, **kwargs)

    monkeypatch.setattr(type(ops), "copy_blocks", lambda self, *a, **k: failing(*a, **k))
    if failures < ATTEMPTS:
        assert rig.load("retried", tokens, 0, rig.lookup("retried", tokens))
        return
    gain = rig.lookup("failed", tokens)
    [graph] = rig.leader.load("failed", rig.slots(gain)).graphs
    rig.worker.start_loads([graph])
    assert not rig.worker.finish([graph.graph_id])
    rig.leader.refuse(["failed"])
    rig.settle()
    assert rig.lookup("failed", tokens) == 0, "it would fail for ever"
    assert rig.lookup("another", tokens) == gain


def test_everything_is_forgotten_for_good(rigs: list[Rig], tmp_path: Path) -> None:
    disk = {"path": str(tmp_path / "kv"), "capacity": "64MiB"}
    rig = Rig(MHATokenToKVPool(1), 1, {**SETTINGS, "disk": disk})
    rigs.append(rig)
    tokens = text(400, 8)
    rig.keep(tokens)
    old = rig.namespace
    rig.leader.forget_all()
    assert rig.lookup("forgotten", tokens) == 0
    rig.namespace = rig.leader.namespace("", None)
    assert rig.namespace.digest != old.digest, "what comes now must not be found after a restart"
    rig.keep(tokens)
    assert rig.lookup("new", tokens) == 400


def test_offers_end_in_order_and_only_with_their_copies(rigs: list[Rig]) -> None:
    rig = Rig(MHATokenToKVPool(1), 1, SETTINGS)
    rigs.append(rig)
    tokens = text(320, 9)
    slots = rig.slots(320)
    rig.compute(tokens, slots)
    first, second = rig.leader.offer(), rig.leader.offer()
    assert rig.leader.done_offers() == 0, "its insert has not ended"
    order = rig.leader.inserted(np.array(tokens), rig.namespace, slots, [first, second])
    assert rig.leader.done_offers() == 0, "its save has not started"
    rig.leader.check_integrity()
    rig.worker.carry_out(order)
    rig.settle()
    assert rig.leader.done_offers() == 2


def test_orders_survive_the_line() -> None:
    from kvcore_sglang import messages

    graph = TransferGraph(1, 1, b"n" * 16, b"p" * 16, (b"k" * 16,), (3,), (-1,), (), ())  # type: ignore[arg-type]
    order = Order(True, {"disk": {"a": 1}}, [("disk", [SlotRun(1, 3)])], [7], [graph])
    assert messages.decode_order(messages.encode(order)) == order
    assert not order.empty
    assert Order().empty


# --- pools that are not served -------------------------------------------------------------------


def pool(**changes: Any) -> Any:
    made = MHATokenToKVPool(16)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (SimpleNamespace(), "of type SimpleNamespace"),
        (pool(kv_cache_layout="hnd"), "laid out as 'hnd'"),
        (pool(dtype=torch.float8_e4m3fn, store_dtype=torch.uint8), "its scales"),
        (pool(use_dsa=True), "sparse"),
        (pool(k_buffer=[], v_buffer=[]), "without a KV cache"),
        (pool(k_buffer=[torch.zeros(30, HEADS, DIM)] * LAYERS), "whole pages of 16"),
        (pool(dtype=torch.bfloat16, store_dtype=torch.bfloat16), "expects bfloat16"),
    ],
)
def test_a_pool_that_cannot_be_copied_is_named(made: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        read_pool(made, 16)


def test_k_and_v_of_unlike_width(rigs: list[Rig]) -> None:
    rig = Rig(MHATokenToKVPool(16, v_dim=8), 16, SETTINGS)
    rigs.append(rig)
    tokens = text(300, 11)
    rig.keep(tokens)
    assert rig.load("wide", tokens, 0, rig.lookup("wide", tokens))


@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("fail", [False, True])
def test_chunks_land_behind_an_exact_prefix(
    rigs: list[Rig], monkeypatch: pytest.MonkeyPatch, page: int, fail: bool
) -> None:
    """The prefix goes to the request's slots, the chunks to staging, each with the KV it was stored
    with; a chunk that fails to land is told."""
    rig = Rig(MHATokenToKVPool(page), page, {**SETTINGS, "fusion": {"enabled": True}})
    rigs.append(rig)
    opening, *chunks = (text(256, seed) for seed in (1, 2, 3))
    for stored in (opening, *chunks):
        assert rig.keep(stored)
    prompt = [*opening, *text(30, 4), *chunks[1][5:205], *text(7, 5), *chunks[0], *text(9, 6)]
    asking = Asking(np.array(prompt))
    gain = rig.leader.lookup("one", np.array(prompt[:-1]), 64, rig.namespace, asking)
    stop = 64 + gain
    assert stop % page == 0
    assert stop > len(prompt) - 9 - page
    slots = rig.slots(gain)
    order = rig.leader.load("one", slots)
    [graph], [blend] = order.graphs, order.blends
    assert (blend.exact, blend.stop, len(blend.chunks)) == (256, stop, 2)
    if fail:
        submit = rig.engine.submit

        def failing(graph: TransferGraph, into: Any = None) -> Any:
            if into is not None:
                monkeypatch.setattr(
                    type(rig.engine.ops), "copy_blocks", lambda *a, **k: 1 / 0, raising=True
                )
            return submit(graph, into)

        monkeypatch.setattr(rig.engine, "submit", failing)
    rig.worker.start_loads([graph])
    assert rig.worker.finish([graph.graph_id])
    rig.check(prompt, 64, slots[: 256 - 64], 0)
    assert rig.worker.blend(order.blends, lambda layer: None) is not fail
    rig.settle()
    assert ("error" in rig.leader.state["fusion"]["one"]) is fail
    assert rig.leader.manager.in_flight == 0
    if fail:
        return
    [(_, staging)] = rig.blends.landed
    for chunk, source in zip(blend.chunks, (chunks[1], chunks[0]), strict=True):
        here = prompt[chunk.position : chunk.position + chunk.length]
        start = chunk.position - chunk.distance
        assert here == source[start : start + chunk.length]
        for i in range(2 * LAYERS):
            got = staging.tensor[i % LAYERS, i // LAYERS][chunk.first :][: chunk.length]
            assert torch.equal(got, rig.expected(source, i)[start : start + chunk.length])


@pytest.mark.parametrize("other", ["SWA", "MAMBA"])
def test_a_model_with_a_pool_beside_its_kv_is_not_served(other: str) -> None:
    full, more = SimpleNamespace(name="FULL"), SimpleNamespace(name=other)
    _check_components([full])
    with pytest.raises(UnsupportedError, match=f"FULL, {other} components"):
        _check_components([full, more])


def test_a_name_that_comes_again_with_other_wishes_gets_those(rigs: list[Rig]) -> None:
    """Who asks for exact KV is not blended because the one before him of that name wished it: that
    one was looked up, and gone before it was loaded."""
    rig = Rig(MHATokenToKVPool(1), 1, {**SETTINGS, "fusion": {"enabled": True}})
    rigs.append(rig)
    opening, chunk = text(256, 1), text(256, 2)
    for stored in (opening, chunk):
        assert rig.keep(stored)
    prompt = [*opening, *text(30, 4), *chunk, *text(9, 6)]
    tokens = np.array(prompt[:-1])

    def gain(**wishes: Any) -> int:
        asking = Asking(np.array(prompt), wishes or None)
        return rig.leader.lookup("job", tokens, 0, rig.namespace, asking)

    assert gain() > 256
    assert gain(fusion={"enabled": False}) == 256
    order = rig.leader.load("job", rig.slots(256))
    assert not order.blends
    rig.leader.drop(order)
    assert gain(fusion={"enabled": False}) == 256
    assert gain() > 256


# -- what is told of requests ---------------------------------------------------------------------


def told(rig: Rig, folder: Path) -> dict[str, dict[str, Any]]:
    """Records by request; none but the last of each name."""
    rig.close()
    found = list(read_records(folder))
    assert len({record["request"] for record in found}) == len(found), "one was written twice"
    return {record["request"]: record for record in found}


def test_each_request_is_told_once_with_where_its_kv_lay(tmp_path: Path) -> None:
    disk = {"path": str(tmp_path / "kv"), "capacity": "64MiB"}
    records = tmp_path / "records"
    settings = {
        **SETTINGS,
        "disk": disk,
        "sglang": {"prefetch": "wait"},
        "explain": {"path": str(records)},
    }
    tokens = text(500, 3)
    first = Rig(MHATokenToKVPool(1), 1, settings)
    assert first.lookup("cold", tokens) == 0
    first.keep(tokens)
    first.leader.ended("cold", "stop")
    assert told(first, records)["cold"]["misses"] == [{"cause": "never seen"}]
    rig = Rig(MHATokenToKVPool(1), 1, settings)
    gain = rig.lookup("disk", tokens)
    assert rig.load("disk", tokens, 0, gain)
    rig.lookup("disk", tokens, 496)  # it goes on behind what was loaded
    rig.leader.ended("disk", "stop")
    rig.leader.ended("disk", "stop")
    gain = rig.lookup("host", tokens)
    assert rig.load("host", tokens, 0, gain)
    rig.leader.ended("host", "length")
    other = rig.leader.namespace("", "tenant")
    assert rig.leader.lookup("tenant", np.array(tokens), 0, other) == 0
    rig.leader.ended("tenant", "abort")
    assert rig.lookup("short", tokens[:40]) == 0
    rig.leader.ended("short", "stop")
    found = told(rig, records)
    assert found["disk"]["matched"] == [{"tier": "disk", "tokens": [0, 496]}]
    assert found["disk"]["loaded"] == {"disk": 496}
    assert (found["disk"]["outcome"], found["disk"]["misses"]) == ("stop", [])
    assert list(found["disk"]["ms"]) == ["lookup", "load", "rest"]
    assert found["host"]["loaded"] == {"host": 496}
    assert found["host"]["outcome"] == "length"
    assert found["tenant"]["misses"] == [{"cause": "other namespace", "differed": ["cache_salt"]}]
    assert "too short" in [miss["cause"] for miss in found["short"]["misses"]]
    unknown = found["host"]["otherwise"]["unknown"]
    assert "prefill: this engine's forwards are not timed" in unknown
    assert "nothing was found to load" in found["tenant"]["otherwise"]["unknown"]


def test_a_load_that_failed_and_one_that_is_gone_are_told(tmp_path: Path) -> None:
    settings = {**SETTINGS, "explain": {"path": str(tmp_path)}}
    rig = Rig(MHATokenToKVPool(1), 1, settings)
    tokens = text(320, 4)
    rig.keep(tokens)
    gain = rig.lookup("failed", tokens)
    assert rig.load("failed", tokens, 0, gain)
    rig.leader.refuse(["failed"])
    assert rig.lookup("failed", tokens) == 0
    rig.leader.ended("failed", "stop")
    gain = rig.lookup("gone", tokens)
    assert gain == 320
    rig.leader.manager.clear()
    assert not rig.load("gone", tokens, 0, gain)
    rig.leader.ended("gone", "stop")
    assert rig.lookup("evicted", tokens) == 0
    rig.leader.ended("evicted", "stop")
    found = told(rig, tmp_path)
    for name in ("failed", "gone"):
        assert found[name]["failures"] == 1
        assert found[name]["misses"][-1] == {"cause": "failed"}
        assert found[name]["loaded"] == {}
    [miss] = found["evicted"]["misses"]
    assert (miss["cause"], miss["tier"]) == ("evicted", "host")


def test_loads_are_estimated_by_what_they_took(tmp_path: Path) -> None:
    rig = Rig(MHATokenToKVPool(1), 1, {**SETTINGS, "explain": {"path": str(tmp_path)}})
    texts = [text(320, seed) for seed in range(30, 35)]
    for tokens in texts:
        rig.keep(tokens)
    for n, tokens in enumerate(texts):
        assert rig.load(str(n), tokens, 0, rig.lookup(str(n), tokens))
        rig.leader.ended(str(n), "stop")
    found = told(rig, tmp_path)
    assert found["0"]["otherwise"]["loading_ms"] is None
    assert found["4"]["otherwise"]["loading_ms"] > 0
    assert found["4"]["otherwise"]["unknown"] == ["prefill: this engine's forwards are not timed"]
    assert found["4"]["otherwise"]["load_all_ms"] is None


def saved(rig: Rig) -> dict[str, float]:
    """Seconds to the first token, of requests that loaded: expected as they were, and otherwise."""
    return dict(rig.leader.metrics.snapshot().get("kvcore_expected_ttft_seconds_total", {}))


def forwards(rig: Rig, *rows: int) -> None:
    gate = LayerGate(rig.worker, layerwise=True)
    for count in rows:
        with gate.around_forward([Part(count, 0)]):
            pass


def test_what_loads_save_is_counted_where_forwards_were_timed(rigs: list[Rig]) -> None:
    """With no record of requests: from when prefill and loads were measured, and once each."""
    rig = Rig(MHATokenToKVPool(1), 1, SETTINGS, timed=True)
    rigs.append(rig)
    texts = [text(320, seed) for seed in range(50, 60)]
    for tokens in texts:
        rig.keep(tokens)

    def answer(n: int) -> None:
        assert rig.load(str(n), texts[n], 0, rig.lookup(str(n), texts[n]))
        rig.lookup(str(n), texts[n], 320)  # it goes on behind what was loaded
        rig.leader.ended(str(n), "stop")

    for n in range(4):
        answer(n)
    assert not saved(rig), "prefill is a guess"
    forwards(rig, 100, 200, 300)
    answer(4)
    once = saved(rig)
    assert once["recompute"] > 0
    assert once["load"] > 0
    rig.leader.ended("4", "stop")
    assert saved(rig) == once
    answer(5)
    assert saved(rig)["recompute"] > once["recompute"]
    before = saved(rig)
    rig.load("6", texts[6], 0, rig.lookup("6", texts[6]))
    rig.leader.refuse(["6"])
    rig.leader.ended("6", "stop")
    assert saved(rig) == before, "it was computed"


def test_nothing_is_counted_where_forwards_are_not_timed(rigs: list[Rig]) -> None:
    rig = Rig(MHATokenToKVPool(1), 1, SETTINGS)
    rigs.append(rig)
    forwards(rig, 100, 200, 300, 400)
    tokens = text(320, 60)
    rig.keep(tokens)
    for n in range(5):
        assert rig.load(str(n), tokens, 0, rig.lookup(str(n), tokens))
        rig.leader.ended(str(n), "stop")
    assert not saved(rig)
    assert rig.worker.take_forwards() == []


def test_a_forward_that_waits_or_decodes_is_not_timed(rigs: list[Rig]) -> None:
    rig = Rig(MHATokenToKVPool(1), 1, SETTINGS, timed=True)
    rigs.append(rig)
    tokens = text(320, 61)
    rig.keep(tokens)
    slots = rig.slots(rig.lookup("waits", tokens))
    gate = LayerGate(rig.worker, layerwise=True)
    index = gate.start(rig.leader.load("waits", slots).graphs)
    for consumer, parts in (
        (index, [Part(500, 0)]),  # in step with its loads
        (-1, []),  # nobody knows what it is
        (-1, [Part(1, 400)] * 200),
    ):
        gate.set_consumer(consumer)
        with gate.around_forward(parts):
            gate.wait_until(0)
    assert gate.finish(index)
    assert rig.worker.take_forwards() == []
    timed = [Part(40, 16), Part(1, 400)]
    with gate.around_forward(timed):
        pass
    [(parts, seconds)] = rig.worker.take_forwards()
    assert parts == timed
    assert seconds > 0
    with contextlib.suppress(RuntimeError), gate.around_forward(timed):
        raise RuntimeError("half a forward")
    assert rig.worker.take_forwards() == []
