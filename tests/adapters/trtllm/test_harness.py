"""The harness that stands in for TensorRT-LLM, against Hugging Face and against its own rules."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers")

from kvcore.errors import ConfigError, UnsupportedError  # after the skip
from kvcore.testing.page_table import PageTable
from kvcore_trtllm.testing import Harness, HarnessArgs, Limits, State, installed
from kvcore_trtllm.testing.standins import (
    MODULES,
    KvCacheConnectorScheduler,
    KvCacheConnectorWorker,
)
from support.pairs import paired
from support.trtllm_harness import tokens

pytestmark = pytest.mark.slow  # a model runs in the harness

ANSWER = 8


def greedy(model: Any, prompt: list[int], count: int = ANSWER) -> list[int]:
    """Every token from a whole forward of Hugging Face's own: no cache of any kind."""
    found = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            logits = model(input_ids=torch.tensor([found]), use_cache=False).logits
            found.append(int(logits[0, -1].argmax()))
    return found[len(prompt) :]


class Scheduler(KvCacheConnectorScheduler):
    """Says what the test tells it to say."""

    matched: tuple[int, bool] = (0, False)
    saves = False

    def build_connector_meta(self, scheduler_output: Any) -> object:
        return {"requests": len(scheduler_output.new_requests)}

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        return self.matched

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        return self.saves

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        pass


class Worker(KvCacheConnectorWorker):
    """Reports at once everything it is told of."""

    def register_kv_caches(self, kv_cache_tensor: Any) -> None:
        self.pool = kv_cache_tensor

    def start_load_kv(self, stream: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        pass

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        pass

    def wait_for_save(self, stream: Any) -> None:
        pass

    def get_finished(self, saving: list[int], loading: list[int]) -> tuple[list[int], list[int]]:
        return saving, loading


@pytest.fixture
def silent() -> Iterator[tuple[type, type]]:
    with installed():
        yield (type("S", (Scheduler,), {}), type("W", (Worker,), {}))


PROMPTS = [tokens(seed, count) for seed, count in enumerate((5, 40, 64, 97))]


@pytest.mark.parametrize(
    ("ranks", "overlap", "order"), paired([1, 2], [False, True], ["HND", "NHD"])
)
def test_answers_are_hugging_faces(
    folder: Path, model: Any, ranks: int, overlap: bool, order: str
) -> None:
    args = HarnessArgs(ranks=ranks, order=order, limits=Limits(overlap=overlap))
    with Harness(folder, args, model=model) as harness:
        for _ in range(2):  # the second time from the engine's own cache
            assert harness.generate(PROMPTS) == [greedy(model, prompt) for prompt in PROMPTS]
        harness.table.check_integrity()
        assert harness.table.available == harness.args.num_pages


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_chunked_prefill_and_eviction_change_nothing(
    folder: Path, model: Any, overlap: bool
) -> None:
    limits = Limits(max_num_tokens=32, chunked=True, overlap=overlap)
    args = HarnessArgs(num_pages=16, page_tokens=16, limits=limits)
    prompts = [tokens(seed, 90) for seed in range(6)]
    with Harness(folder, args, model=model) as harness:
        got = [harness.generate([prompt])[0] for prompt in (*prompts, *prompts)]
        assert got == [greedy(model, prompt) for prompt in (*prompts, *prompts)]
        assert harness.table.evicted > 0


@pytest.mark.parametrize("overlap", [False, True])
def test_calls_are_as_many_as_the_engines_own_tests_say(
    folder: Path, model: Any, overlap: bool, silent: tuple[type, type]
) -> None:
    args = HarnessArgs(limits=Limits(overlap=overlap))
    with Harness(folder, args, connector=silent, model=model) as harness:
        harness.generate([PROMPTS[0]], max_tokens=ANSWER)
        layers = model.config.num_hidden_layers
        assert harness.count("get_num_new_matched_tokens") == 1
        assert harness.count("update_state_after_alloc") == 1
        assert harness.count("build_connector_meta") == ANSWER
        assert harness.count("start_load_kv") == ANSWER
        assert harness.count("wait_for_save") == ANSWER
        assert harness.count("request_finished") == 1
        assert harness.count("get_finished") == ANSWER + overlap
        for name in ("wait_for_layer_load", "save_kv_layer"):
            hooks = [call.detail for call in harness.calls if call.name == name]
            assert hooks == list(range(layers)) * ANSWER


@pytest.mark.parametrize("overlap", [False, True])
def test_deltas_of_tokens_and_blocks(
    folder: Path, model: Any, overlap: bool, silent: tuple[type, type]
) -> None:
    """The engine's own test of its scheduler output, 48 tokens in pages of 32 and chunks of 32."""
    limits = Limits(max_num_tokens=32, chunked=True, overlap=overlap)
    args = HarnessArgs(limits=limits)
    with Harness(folder, args, connector=silent, model=model) as harness:
        harness.generate([tokens(1, 48)], max_tokens=24)
        outputs = [c.detail for c in harness.calls if c.name == "build_connector_meta"]
        assert len(outputs) == 25
        [first] = outputs[0].new_requests
        assert (len(first.new_tokens), len(first.new_block_ids)) == (48, 2)
        assert (first.computed_position, first.num_scheduled_tokens) == (0, 32)
        [second] = outputs[1].cached_requests
        assert (second.new_tokens, second.new_block_ids) == ([], [])
        assert (second.computed_position, second.num_scheduled_tokens) == (32, 16)
        rest = [output.cached_requests[0] for output in outputs[2:]]
        assert not any(output.new_requests for output in outputs[1:])
        assert [len(data.new_tokens) for data in rest] == [int(not overlap), *([1] * 22)]
        assert sum(len(data.new_block_ids) for data in rest) == 1  # token 65 begins a page
        assert all(data.num_scheduled_tokens == 1 for data in rest)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_parked_requests_are_absent_and_asked_once(
    folder: Path, model: Any, ranks: int, overlap: bool, silent: tuple[type, type]
) -> None:
    scheduler, _ = silent
    args = HarnessArgs(ranks=ranks, limits=Limits(overlap=overlap))
    with Harness(folder, args, connector=silent, model=model) as harness:
        scheduler.matched = (16, True)  # type: ignore[attr-defined]
        harness.submit(tokens(1, 40))
        harness.run()
        outputs = [c.detail for c in harness.calls if c.name == "build_connector_meta"]
        assert not outputs[0].new_requests
        assert not outputs[0].cached_requests
        assert outputs[1].new_requests[0].computed_position == 16
        polls = [c.detail for c in harness.calls if c.name == "get_finished"]
        assert polls[0] == ([], [1])
        assert len(polls) == ANSWER + 1 + overlap
        assert harness.count("get_num_new_matched_tokens") == 1
        assert harness.count("update_state_after_alloc") == 1


def test_a_load_waits_for_all_ranks(folder: Path, model: Any, silent: tuple[type, type]) -> None:
    scheduler, worker = silent
    scheduler.matched = (16, True)  # type: ignore[attr-defined]
    late = {"rank": 1, "polls": 5}

    def get_finished(self: Any, saving: list[int], loading: list[int]) -> Any:
        from tensorrt_llm._utils import mpi_rank  # type: ignore[import-not-found]

        self.seen = [*getattr(self, "seen", []), *loading]
        if mpi_rank() == late["rank"] and late["polls"]:
            late["polls"] -= 1
            return saving, []
        told, self.seen = self.seen, []
        return saving, told

    worker.get_finished = get_finished  # type: ignore[attr-defined]
    with Harness(folder, HarnessArgs(ranks=2), connector=silent, model=model) as harness:
        request = harness.submit(tokens(1, 40))
        for _ in range(5):
            harness.executor.step()
            assert request.state is State.LOADING
        harness.run()
        assert request.state is State.DONE


def test_pages_stay_pinned_until_the_save_is_reported(
    folder: Path, model: Any, silent: tuple[type, type]
) -> None:
    scheduler, worker = silent
    scheduler.saves = True  # type: ignore[attr-defined]
    reports: list[list[int]] = [[], [1]]
    worker.get_finished = lambda self, saving, loading: (  # type: ignore[attr-defined]
        reports.pop(0) if saving or len(reports) == 1 else [],
        [],
    )
    with Harness(folder, connector=silent, model=model) as harness:
        request = harness.submit(tokens(1, 40), max_tokens=2)
        harness.step_until(request, State.SAVING)
        assert harness.table.available == harness.args.num_pages - 2
        harness.executor.step()
        assert request.state is State.DONE
        assert harness.table.available == harness.args.num_pages


def test_aborts_are_not_told(folder: Path, model: Any, silent: tuple[type, type]) -> None:
    with Harness(folder, connector=silent, model=model) as harness:
        queued, running = harness.submit(tokens(1, 40)), harness.submit(tokens(2, 40))
        harness.abort(queued)
        harness.step_until(running, State.GENERATING)
        harness.abort(running)
        harness.run()
        assert (queued.state, running.state) == (State.ABORTED, State.ABORTED)
        assert harness.count("request_finished") == 0
        assert harness.table.available == harness.args.num_pages


@pytest.mark.parametrize(
    ("matched", "error"),
    [((0, True), RuntimeError), ((40, False), AssertionError), ((-1, False), AssertionError)],
)
def test_answers_that_no_engine_takes(
    folder: Path, model: Any, silent: tuple[type, type], matched: Any, error: type[Exception]
) -> None:
    scheduler, _ = silent
    scheduler.matched = matched  # type: ignore[attr-defined]
    with Harness(folder, connector=silent, model=model) as harness:
        harness.submit(tokens(1, 40))
        with pytest.raises(error):
            harness.run()


def test_an_id_reported_twice_is_an_error(
    folder: Path, model: Any, silent: tuple[type, type]
) -> None:
    scheduler, worker = silent
    scheduler.saves = True  # type: ignore[attr-defined]
    worker.get_finished = lambda self, saving, loading: (  # type: ignore[attr-defined]
        saving + saving,
        loading,
    )
    with Harness(folder, connector=silent, model=model) as harness:
        harness.submit(tokens(1, 40))
        with pytest.raises(KeyError):
            harness.run()


def test_kv_that_nobody_wrote_shows(folder: Path, model: Any, silent: tuple[type, type]) -> None:
    """A connector that promises KV and brings none must not give the right answer by chance."""
    scheduler, _ = silent
    scheduler.matched = (32, False)  # type: ignore[attr-defined]
    prompt = tokens(1, 64)
    with Harness(folder, connector=silent, model=model) as harness:
        assert harness.generate([prompt]) != [greedy(model, prompt)]


def test_requests_that_can_never_run(folder: Path, model: Any) -> None:
    args = HarnessArgs(num_pages=2, limits=Limits(max_num_tokens=48))
    with Harness(folder, args, model=model) as harness:
        with pytest.raises(ConfigError, match="3 pages; there are 2"):
            harness.submit(tokens(1, 40), max_tokens=32)
        with pytest.raises(ConfigError, match="chunked prefill"):
            harness.submit(tokens(1, 49))


# --- stand-ins --------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["1.2", "1.3"])
def test_stand_ins_are_where_the_version_keeps_its_own(version: str) -> None:
    import importlib

    with installed(version):
        module = importlib.import_module(MODULES[version])
        assert issubclass(module.KvCacheConnectorWorker, KvCacheConnectorWorker)
        others = [path for name, path in MODULES.items() if name != version]
        for path in others:
            with pytest.raises(ModuleNotFoundError):
                importlib.import_module(path)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(MODULES[version])


def test_stand_ins_that_overlap_leave_nothing_behind() -> None:
    first, second = installed("1.3"), installed("1.3")
    for one in (first, second):
        one.__enter__()
    first.__exit__(None, None, None)
    assert "tensorrt_llm" in sys.modules
    second.__exit__(None, None, None)
    assert not [name for name in sys.modules if name.startswith("tensorrt_llm")]


def test_stand_ins_are_loud_outside_a_harness() -> None:
    with pytest.raises(UnsupportedError, match="outside its harness"):
        Worker(None)
    with pytest.raises(UnsupportedError, match="outside its harness"):
        Scheduler(None)


def test_stand_ins_do_not_hide_the_real_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tensorrt_llm.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnsupportedError, match="verify_on_gpu"), installed():
        pass


# --- pages ------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 20), st.booleans()), max_size=30))
def test_page_table_against_a_naive_account(
    steps: list[tuple[int, int, bool]],
) -> None:
    """Claims begin the prompt they were stored for, and every page is accounted for."""
    table = PageTable(12, 4)
    held: list[tuple[list[int], list[int]]] = []
    content: dict[int, tuple[int, ...]] = {}  # page -> the prompt up to its end
    for family, length, release in steps:
        prompt = list(itertools.chain([family], range(length)))
        found = table.claim(prompt, "")
        assert len(found) * 4 < len(prompt)
        for i, page in enumerate(found):
            assert content[page] == tuple(prompt[: 4 * (i + 1)])
        fresh = table.pages_for(len(prompt)) - len(found)
        if fresh > table.available:
            table.release(found)
        else:
            pages = found + table.allocate(fresh)
            assert len(set(pages)) == len(pages)
            assert not set(pages[len(found) :]) & {p for _, own in held for p in own}
            content.update(
                {p: tuple(prompt[: 4 * (i + 1)]) for i, p in enumerate(pages) if i >= len(found)}
            )
            held.append((prompt, pages))
            table.store(prompt, "", pages)
        if release and held:
            table.release(held.pop(0)[1])
        table.check_integrity()
