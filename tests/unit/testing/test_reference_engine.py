"""The reference engine: Hugging Face's answers, and the same ones whatever kvcore does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers")

from kvcore.config import load_config
from kvcore.errors import CapacityError, ConfigError, UnsupportedError
from kvcore.fusion.attend import Attention, naive_attend_rows
from kvcore.fusion.ops import FusionOps, TorchFusion
from kvcore.fusion.options import FusionOptions
from kvcore.fusion.plan import LayerKV
from kvcore.harness.models import smollm2, tiny_lora, tiny_model
from kvcore.harness.prompts import words
from kvcore.manager import Hit, Readiness, loader
from kvcore.testing.engine import EngineArgs, Llama, ReferenceEngine, State, load
from kvcore.testing.engine.model import Spec, attend_last
from kvcore.transfer.graph import SKIP, RowError, UnitTable
from kvcore.transfer.graph import Path as Direction
from kvcore.worker import worker as kvcore_worker  # after the skip
from support.transfers import load_blocks

pytestmark = pytest.mark.slow

ANSWER = 6


Ask = Callable[..., list[int]]


@pytest.fixture(scope="module")
def plain(model: Llama) -> Iterator[Ask]:
    """Answers of the engine without kvcore and without a cache of its own, each asked once."""
    known: dict[tuple[tuple[int, ...], int], list[int]] = {}
    with ReferenceEngine(model, EngineArgs(num_pages=128, prefix_cache=False)) as engine:

        def ask(prompt: Sequence[int], max_tokens: int = ANSWER) -> list[int]:
            place = (tuple(prompt), max_tokens)
            if place not in known:
                [known[place]] = engine.generate([prompt], max_tokens)
            return known[place]

        yield ask


Make = Callable[..., ReferenceEngine]


@pytest.fixture
def make(model: Llama) -> Iterator[Make]:
    """Makes engines with kvcore, and checks when they end that nothing is left over."""
    made: list[ReferenceEngine] = []

    def build(kvcore: dict[str, Any] | None = None, **args: Any) -> ReferenceEngine:
        engine = ReferenceEngine(model, EngineArgs(**args), configured(kvcore))
        made.append(engine)
        return engine

    yield build
    for engine in made:
        engine.settle()
        engine.check_integrity()
        engine.close()


def configured(kvcore: dict[str, Any] | None = None) -> Any:
    tables = {"host": {"capacity": "16MiB", "huge_pages": False}}
    for name, values in (kvcore or {}).items():
        tables[name] = {**tables.get(name, {}), **values}
    return load_config(None, tables)


# --- the model --------------------------------------------------------------------------------


def greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """What Hugging Face answers."""
    out = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    answer: list[int] = out[0].tolist()[len(prompt) :]
    return answer


@pytest.mark.parametrize(
    ("ranks", "folder"),
    [
        pytest.param(1, lambda: tiny_model("llama"), id="1-tiny"),
        pytest.param(2, lambda: tiny_model("llama"), id="2-tiny", marks=pytest.mark.exhaustive),
        pytest.param(
            1, smollm2, id="1-smollm2", marks=[pytest.mark.engine, pytest.mark.exhaustive]
        ),
        pytest.param(2, smollm2, id="2-smollm2", marks=pytest.mark.engine),
    ],
)
def test_hugging_face_answers_the_same(ranks: int, folder: Callable[[], Path]) -> None:
    from transformers import AutoModelForCausalLM

    path = folder()
    loaded = load(path)
    ranks = 3 if ranks == 2 and loaded.spec.kv_heads == 3 else ranks
    theirs: Any = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32).eval()
    prompts = [words(seed, count) for seed, count in enumerate((1, 17, 90))]
    with ReferenceEngine(loaded, EngineArgs(ranks=ranks, max_num_tokens=40)) as engine:
        assert engine.generate(prompts, ANSWER) == [greedy(theirs, p, ANSWER) for p in prompts]


def test_answers_depend_on_the_whole_prompt(plain: Ask) -> None:
    """Equality proves nothing where every prompt is answered alike."""
    prompts = [words(1, 100), [7, *words(1, 100)[1:]], [*words(1, 99), 7]]
    assert len({tuple(plain(prompt)) for prompt in prompts}) == 3


def test_other_architectures_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="qwen2"):
        Spec.of({"model_type": "qwen2", "hidden_act": "silu"})
    with pytest.raises(UnsupportedError, match="attention_bias"):
        Spec.of({"model_type": "llama", "hidden_act": "silu", "attention_bias": True})


def test_what_cannot_run_is_refused(model: Llama) -> None:
    with pytest.raises(ConfigError, match="3 ranks"):
        ReferenceEngine(model, EngineArgs(ranks=3))
    with pytest.raises(ConfigError, match="3 stages"):
        ReferenceEngine(model, EngineArgs(stages=3))
    fused = configured({"fusion": {"enabled": True}})
    with pytest.raises(ConfigError, match="fusion with 2"):
        ReferenceEngine(model, EngineArgs(stages=2), fused)
    engine = ReferenceEngine(model, EngineArgs(num_pages=2))
    with engine, pytest.raises(CapacityError, match="3 pages"):
        engine.submit(words(1, 30), 8)


@given(
    rows=st.integers(1, 40),
    before=st.integers(0, 63),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 3), (8, 1)]),
    seed=st.integers(0, 99),
)
def test_a_piece_of_a_prompt_attends_to_all_before_it(
    rows: int, before: int, heads: tuple[int, int], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(rows, heads[0], 16, generator=generator)
    size = (before + rows, heads[1], 16)
    kv = LayerKV(*(torch.randn(size, generator=generator) for _ in range(2)))
    positions = torch.arange(before, before + rows)
    right = naive_attend_rows(queries, positions, *kv, Attention(0.25))
    torch.testing.assert_close(attend_last(queries, kv, Attention(0.25)), right)


# --- with kvcore and without ------------------------------------------------------------------


@settings(max_examples=15)
@given(data=st.data())
def test_whatever_happens_the_answers_are_the_same(model: Llama, plain: Ask, data: Any) -> None:
    """Sizes of everything, prompts that share prefixes, aborts in between, two rounds."""
    args = EngineArgs(
        ranks=data.draw(st.sampled_from([1, 2])),
        stages=data.draw(st.sampled_from([1, 2])),
        num_pages=data.draw(st.sampled_from([12, 40])) * 2,
        page_tokens=data.draw(st.sampled_from([8, 16, 24])),
        max_num_tokens=data.draw(st.sampled_from([24, 64, 1024])),
        prefix_cache=data.draw(st.booleans()),
    )
    config = configured(
        {
            "block": {"tokens": data.draw(st.sampled_from([8, 16, 64]))},
            "host": {"capacity": data.draw(st.sampled_from(["512KiB", "16MiB"]))},
            "transfer": {"sync_load_max": data.draw(st.sampled_from([0, 1 << 30]))},
        }
    )
    with ReferenceEngine(model, args, config) as engine:
        for seed in (1, 2):
            prompts = [
                words(1, data.draw(st.integers(1, 90))) + words(seed + i, i) for i in range(5)
            ]
            requests = [engine.submit(prompt, ANSWER) for prompt in prompts]
            for _ in range(data.draw(st.integers(0, 4))):
                engine.step()
            victim = requests[data.draw(st.integers(0, 4))]
            engine.abort(victim)
            engine.run()
            for request, prompt in zip(requests, prompts, strict=True):
                if request.state is not State.ABORTED:
                    assert request.answer == plain(prompt), request.reused
            if data.draw(st.booleans()):
                engine.forget()
        engine.settle()
        engine.check_integrity()


def test_a_hit_is_a_hit(make: Make, plain: Ask) -> None:
    engine = make()
    prompt = words(1, 100)
    assert engine.generate([prompt], ANSWER) == [plain(prompt)]
    engine.settle()
    engine.forget()
    request = engine.submit(prompt, ANSWER)
    engine.run()
    assert request.answer == plain(prompt)
    assert request.reused == {"host": 96}
    other = engine.submit(prompt, ANSWER, salt="another")
    engine.run()
    assert (other.answer, other.reused) == (plain(prompt), {})


@pytest.mark.parametrize(
    ("wrote", "reads"),
    [((1, 1), (2, 1)), ((2, 1), (1, 1)), ((1, 2), (2, 1)), ((2, 2), (1, 1)), ((1, 1), (2, 2))],
)
def test_disk_at_another_number_of_ranks_and_stages(
    make: Make, plain: Ask, tmp_path: Path, wrote: tuple[int, int], reads: tuple[int, int]
) -> None:
    disk = {"disk": {"path": str(tmp_path / "kv"), "capacity": "64MiB"}}
    prompt = words(1, 100)
    writer = make(disk, ranks=wrote[0], stages=wrote[1])
    writer.generate([prompt], 1)
    writer.settle()
    writer.close()
    reader = make(disk, ranks=reads[0], stages=reads[1])
    request = reader.submit(prompt, ANSWER)
    reader.run()
    assert (request.answer, request.reused) == (plain(prompt), {"disk": 96})


@pytest.mark.parametrize(
    ("block", "page", "arrangement"),
    [(16, 128, "blockwise"), (128, 32, "layerwise"), (64, 128, "layerwise"), (64, 24, "blockwise")],
)
def test_host_disk_and_restart(
    make: Make, plain: Ask, tmp_path: Path, block: int, page: int, arrangement: str
) -> None:
    kvcore = {
        "block": {"tokens": block},
        "host": {"arrangement": arrangement},
        "disk": {"path": str(tmp_path / "kv"), "capacity": "64MiB"},
    }
    prompts = [words(seed, 260 + 7 * seed) for seed in range(4)]
    right = [plain(prompt) for prompt in prompts]
    whole = [len(prompt) // block * block for prompt in prompts]
    first = make(kvcore, page_tokens=page)
    assert first.generate(prompts, ANSWER) == right
    first.settle()
    assert served(first, prompts) == (right, [{"host": count} for count in whole])
    first.close()
    second = make(kvcore, page_tokens=page)
    assert served(second, prompts) == (right, [{"disk": count} for count in whole])


def served(
    engine: ReferenceEngine, prompts: Sequence[Sequence[int]]
) -> tuple[list[list[int]], list[dict[str, int]]]:
    """Answers, and the tokens that were reused by tier, with the engine's own cache emptied."""
    engine.forget()
    requests = [engine.submit(prompt, ANSWER) for prompt in prompts]
    engine.run()
    return [request.answer for request in requests], [request.reused for request in requests]


@pytest.mark.parametrize(
    ("write", "arrangement"),
    [("write_through", "layerwise"), ("write_back", "blockwise"), ("selective", "layerwise")],
)
def test_every_write_policy_with_tiers_that_are_too_small(
    make: Make, plain: Ask, tmp_path: Path, write: str, arrangement: str
) -> None:
    kvcore = {
        "block": {"tokens": 32},
        "host": {"capacity": "512KiB", "arrangement": arrangement},
        "disk": {
            "path": str(tmp_path / "kv"),
            "capacity": "2MiB",
            "write": write,
            "policy": "s3fifo",
        },
    }
    engine = make(kvcore, num_pages=40, page_tokens=8, max_num_tokens=64)
    prompts = [words(seed, 60 + 9 * seed) for seed in range(10)]
    found = 0
    for _ in range(3):
        requests = [engine.submit(p, 60 if i % 3 else ANSWER) for i, p in enumerate(prompts)]
        engine.run()
        for request, prompt in zip(requests, prompts, strict=True):
            assert request.answer[:ANSWER] == plain(prompt)
            found += request.reused.get("disk", 0)
        engine.settle()
        engine.forget()
    assert engine.preemptions > 0
    assert found > 0 or write == "selective"
    assert engine.leader is not None
    assert engine.leader.metrics.snapshot()["kvcore_evictions_total"]["host"] > 0


def test_pages_run_out_and_the_newest_starts_over(make: Make, plain: Ask) -> None:
    engine = make(num_pages=12, page_tokens=8)
    prompts = [words(seed, 20) for seed in range(4)]
    answers = engine.generate(prompts, 40)
    assert answers == [plain(prompt, 40) for prompt in prompts]
    assert engine.preemptions > 0


def test_a_request_that_waits_for_pages_is_one_miss(make: Make, plain: Ask) -> None:
    engine = make(num_pages=12, page_tokens=8)
    prompts = [words(seed, 60) for seed in range(3)]
    requests = [engine.submit(prompt, ANSWER) for prompt in prompts]
    for _ in range(4):
        engine.step()
    assert [request.state for request in requests[1:]] == [State.WAITING, State.WAITING]
    engine.run()
    assert [request.answer for request in requests] == [plain(prompt) for prompt in prompts]
    assert engine.leader is not None
    assert engine.leader.metrics.snapshot()["kvcore_misses_total"] == {"not_cached": 3}


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """``open`` gates the loads to pages, ``fail`` is how many of them are to fail."""
    control: dict[str, Any] = {"open": threading.Event(), "fail": 0}
    control["open"].set()
    run = kvcore_worker.DeviceCopy.run

    def controlled(self: Any, graph: Any, op: Any, rows: list[int]) -> Any:
        if op.path is Direction.H2D:
            control["open"].wait(30)
            if control["fail"]:
                control["fail"] -= 1
                return dict.fromkeys(rows, RowError.INTERNAL)
        return run(self, graph, op, rows)

    monkeypatch.setattr(kvcore_worker.DeviceCopy, "run", controlled)
    return control


@pytest.mark.parametrize("in_step", [False, True])
@pytest.mark.parametrize("failures", [1, 100])
def test_a_load_that_fails_is_computed(
    make: Make, plain: Ask, copies: dict[str, Any], in_step: bool, failures: int
) -> None:
    engine = make({"transfer": {"sync_load_max": "1GiB" if in_step else 0}})
    prompt = words(1, 100)
    engine.generate([prompt], 1)
    engine.settle()
    engine.forget()
    copies["fail"] = failures
    request = engine.submit(prompt, ANSWER)
    engine.run()
    assert request.answer == plain(prompt)
    assert bool(request.reused) is (failures == 1)  # tried again once
    copies["fail"] = 0
    assert engine.leader is not None
    counts = engine.leader.metrics.snapshot()
    tries = min(failures, 2)
    assert counts["kvcore_misses_total"]["load_failed"] == tries
    hits = sum(n for key, n in counts["kvcore_lookup_tokens_total"].items() if "hit" in key)
    assert hits == 2 * 96, "each try was a hit, of 6 blocks"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The leader's clock, which stands still."""
    made = SimpleNamespace(now=0.0)
    frozen = SimpleNamespace(monotonic=lambda: made.now)
    monkeypatch.setattr("kvcore.testing.engine.leader.time", frozen)
    return made


def on_disk(make: Make, folder: Path, prompt: Sequence[int]) -> ReferenceEngine:
    """An engine that has the prompt on disk, and three of its six blocks in host memory too."""
    disk = {"disk": {"path": str(folder / "kv"), "capacity": "64MiB"}}
    writer = make(disk)
    writer.generate([prompt], 1)
    writer.settle()
    writer.close()
    engine = make(disk, prefix_cache=False)
    engine.generate([prompt[:50]], 1)
    engine.settle()
    return engine


@pytest.mark.parametrize("what", ["a store", "slots"])
def test_all_that_a_request_waits_for_counts_for_one_deadline(
    make: Make,
    plain: Ask,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    clock: SimpleNamespace,
    what: str,
) -> None:
    """Then it is loaded as far as it is in host memory."""
    prompt = words(1, 100)
    engine = on_disk(make, tmp_path, prompt)
    assert engine.leader is not None
    manager = engine.leader.manager
    if what == "a store":
        monkeypatch.setattr(manager, "ask_stores", lambda *_: True)
    else:

        def can_load(hit: Hit, start: int, stop: int) -> Readiness:
            is_below = set(hit.blocks_by_tier(start, stop)) != {"host"}
            return Readiness.LATER if is_below else Readiness.READY

        monkeypatch.setattr(manager, "can_load", can_load)
    request = engine.submit(prompt, ANSWER)
    for _ in range(3):
        engine.step()
        assert request.state is State.WAITING
        clock.now += 9.2
    engine.run()
    assert (request.answer, request.reused) == (plain(prompt), {"host": 48})


@pytest.mark.parametrize("why", [RowError.DEADLINE, RowError.INTERNAL])
def test_a_load_that_was_late_is_followed_by_what_host_memory_has(
    make: Make,
    plain: Ask,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    clock: SimpleNamespace,
    why: RowError,
) -> None:
    """One that failed otherwise is tried again, with the rest of the deadline."""
    prompt = words(1, 100)
    engine = on_disk(make, tmp_path, prompt)
    assert engine.leader is not None
    deadlines: list[float | None] = []
    gate = threading.Event()
    run, plan = kvcore_worker.TierRead.run, engine.leader.manager.plan_load

    def fails(self: Any, graph: Any, op: Any, rows: list[int]) -> Any:
        assert gate.wait(60)
        monkeypatch.setattr(kvcore_worker.TierRead, "run", run)
        return dict.fromkeys(rows, why)

    def planned(*given: Any, **named: Any) -> Any:
        deadlines.append(named["deadline_s"])
        return plan(*given, **named)

    monkeypatch.setattr(kvcore_worker.TierRead, "run", fails)
    monkeypatch.setattr(engine.leader.manager, "plan_load", planned)
    request = engine.submit(prompt, ANSWER)
    engine.step()
    clock.now += 6.0
    gate.set()
    engine.run()
    late = why is RowError.DEADLINE
    assert request.answer == plain(prompt)
    assert request.reused == ({"host": 48} if late else {"host": 48, "disk": 48})
    assert deadlines == [30.0, None if late else 24.0]


def test_after_a_clear_running_requests_keep_nothing(make: Make, plain: Ask) -> None:
    engine = make({}, max_num_tokens=32)
    first, second = words(1, 100), words(2, 100)
    request = engine.submit(first, ANSWER)
    engine.step()
    assert engine.leader is not None
    engine.leader.clear()
    engine.run()
    assert request.answer == plain(first)
    engine.settle()
    index = engine.leader.manager.index
    assert index.num_used("host") == 0
    assert engine.generate([second], ANSWER) == [plain(second)]
    engine.settle()
    assert index.num_used("host") == len(second) // 16, "requests that come later are kept"


def test_adapters_of_one_name_are_told_apart_by_their_weights(tmp_path: Path) -> None:
    """The name is the client's; two clients may give it to different weights."""
    folder = tiny_model("llama")
    adapters = [tiny_lora(tmp_path / str(seed) / "mine", folder, seed=seed) for seed in (3, 4)]
    prompt = words(1, 100)
    with ReferenceEngine(load(folder), EngineArgs(num_pages=128), configured()) as engine:
        for adapter in adapters:
            request = engine.submit(prompt, ANSWER, lora=adapter)
            engine.run()
            engine.settle()
            engine.forget()
            assert not request.reused, f"{adapter} has read KV of other weights"


def test_a_load_that_cannot_be_planned_is_computed_and_pins_nothing(
    make: Make, plain: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make({"transfer": {"sync_load_max": 0}})
    known = words(1, 100)
    engine.generate([known], ANSWER)
    engine.settle()
    engine.forget()

    def no_room(*_: Any, **__: Any) -> None:
        raise CapacityError("no place for the rows")

    with monkeypatch.context() as patch:
        patch.setattr(loader, "build_load", no_room)
        assert engine.generate([known], ANSWER) == [plain(known)]
    engine.settle()
    assert engine.leader is not None
    index = engine.leader.manager.index
    engine.leader.clear()
    assert index.num_free("host") == index.num_slots("host"), "slots of pinned blocks are kept"


def test_an_abort_lets_the_load_end_before_its_pages_serve_others(
    make: Make, plain: Ask, copies: dict[str, Any]
) -> None:
    engine = make({"transfer": {"sync_load_max": 0}}, num_pages=8)
    known, other = words(1, 100), words(2, 100)
    engine.generate([known], 1)
    engine.settle()
    engine.forget()
    copies["open"].clear()
    request = engine.submit(known, ANSWER)
    engine.step()
    assert request.state is State.LOADING
    threading.Timer(0.2, copies["open"].set).start()
    engine.abort(request)
    after = engine.submit(other, ANSWER)
    engine.run()
    assert after.answer == plain(other)


# --- fusion -----------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
def test_blends(make: Make, plain: Ask, ranks: int) -> None:
    engine = make({"fusion": {"enabled": True}}, ranks=ranks, num_pages=64)
    chunks = [words(seed, 96) for seed in range(2)]
    engine.generate(chunks, 1)
    engine.settle()
    prompt = words(9, 20) + chunks[0] + words(10, 12) + chunks[1] + words(11, 9)
    answers = {}
    for ratio in (1.0, 0.0):
        engine.forget()
        request = engine.submit(prompt, ANSWER, fusion=FusionOptions(ratio=ratio))
        engine.run()
        assert request.reused["blend"] >= 180
        answers[ratio] = request.answer
    assert answers[1.0] == plain(prompt)
    assert answers[0.0] != plain(prompt)
    exact = engine.submit(prompt, ANSWER)  # straight after: neither cache took it for exact
    engine.run()
    assert exact.answer == plain(prompt)
    assert exact.cached_tokens <= 16


class Counted(TorchFusion):
    """Torch's operations, and which were asked for."""

    def __init__(self) -> None:
        self.asked: set[str] = set()

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name in FusionOps.__abstractmethods__:
            self.asked.add(name)
        return found


def test_blends_by_the_operations_of_the_device(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted()
    monkeypatch.setattr("kvcore.connector.build.select_fusion", lambda *_: counted)
    engine = make({"fusion": {"enabled": True}, "ops": {"backend": "reference"}}, num_pages=64)
    assert engine.implementations == {"copies": "reference", "blends": "Counted"}
    chunk = words(1, 96)
    engine.generate([chunk], 1)
    engine.settle()
    engine.generate([words(9, 20) + chunk + words(10, 12)], 1, fusion=FusionOptions(ratio=0.3))
    # Of two layers all rows are computed and nothing is chosen: ``smooth`` and ``balance`` are only
    # passed on.
    assert counted.asked == {"placing", "merge", "smooth", "balance", "attend"}


def test_without_fusion_nothing_blends(make: Make) -> None:
    assert make({"ops": {"backend": "reference"}}).implementations == {"copies": "reference"}


def test_blends_that_lose_their_pages(make: Make, plain: Ask) -> None:
    """Pages for a fraction of what runs: blends are lost with their pages, and all is computed."""
    engine = make({"fusion": {"enabled": True}}, num_pages=22, page_tokens=16)
    chunk = words(1, 96)
    engine.generate([chunk], 1)
    engine.settle()
    engine.forget()
    prompts = [words(20 + i, 5 + i) + chunk + words(30 + i, 9) for i in range(4)]
    answers = engine.generate(prompts, 60, fusion=FusionOptions(ratio=1.0))
    assert answers == [plain(prompt, 60) for prompt in prompts]
    assert engine.preemptions > 0


def test_chunks_are_fetched_from_disk(make: Make, plain: Ask, tmp_path: Path) -> None:
    engine = make(
        {
            "host": {"capacity": "512KiB"},
            "disk": {"path": str(tmp_path / "kv"), "capacity": "64MiB"},
            "fusion": {"enabled": True},
        },
        num_pages=64,
    )
    chunk = words(1, 96)
    engine.generate([chunk], 1)
    engine.settle()
    for seed in range(2, 6):
        engine.generate([words(seed, 200)], 1)
        engine.settle()
    engine.forget()
    prompt = words(9, 20) + chunk + words(10, 12)
    request = engine.submit(prompt, ANSWER, fusion=FusionOptions(ratio=1.0))
    engine.run()
    assert (request.answer, request.reused) == (plain(prompt), {"blend": 96})


def test_what_goes_no_further_than_host_memory_is_not_copied_to_the_device(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that wait in host memory for their request touch no page of the engine's."""
    engine = make(prefix_cache=False)
    engine.generate([words(1, 100)], ANSWER)
    engine.settle()
    assert engine.leader is not None
    manager, copied = engine.leader.manager, []
    index = manager.index
    ends, _ = index.admin.leaves("host", None, b"")
    keys, digest = index.path(ends[0]), index.namespace_of(ends[0])
    [side] = engine.workers
    ops = side.worker.engine._executors[Direction.H2D]._ops
    monkeypatch.setattr(type(ops), "copy_blocks", lambda self, *given: copied.append(given))
    for units in (np.full((len(keys), 1), SKIP), np.arange(len(keys))[:, None]):
        copied.clear()
        hit = manager.get_match(keys, digest)
        load_blocks(manager, hit, 0, len(keys), [UnitTable.of(units, 16)])
        engine.settle()
        assert bool(copied) == bool((units != SKIP).any())


@pytest.mark.parametrize("args", [{}, {"ranks": 2}, {"stages": 2}])
def test_straight_from_disk_to_the_pages(
    make: Make, plain: Ask, tmp_path: Path, args: dict[str, int]
) -> None:
    """The whole path with each rank's own staging, on a second engine that finds the first's KV."""
    kvcore = {
        "disk": {"path": str(tmp_path / "kv"), "capacity": "64MiB", "to_device": "on"},
    }
    prompts = [words(seed, 160) for seed in range(4)]
    first = make(kvcore, **args)
    first.generate(prompts, 1)
    first.settle()
    first.close()
    second = make(kvcore, **args)
    assert second.generate(prompts, ANSWER) == [plain(prompt) for prompt in prompts]
    for worker in second.workers:
        counts = worker.metrics.snapshot()["kvcore_transfer_bytes_total"]
        assert counts["disk2d"] == counts["d2d"] > 0
        assert "disk2h" not in counts
