"""The TensorRT-LLM connector under slow copies, aborts, loads that fail, and errors."""

from __future__ import annotations

import threading
from typing import Any

import pytest

pytest.importorskip("transformers")

from kvcore.errors import TransferError
from kvcore_trtllm.testing import Limits, State
from support.trtllm_harness import ANSWER, Make, leader, loaded, settle, tokens

pytestmark = pytest.mark.slow  # a model runs in the harness


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_pages_stay_until_slow_saves_have_read_them(
    make: Make, reference: Any, copies: dict[str, Any], ranks: int, overlap: bool
) -> None:
    """Each prompt takes all pages, so each save's pages are wanted by the next request at once."""
    harness = make(ranks=ranks, num_pages=4, limits=Limits(overlap=overlap))
    prompts = [tokens(seed, 100) for seed in range(3)]
    for prompt in prompts:
        copies["saves"].clear()
        request = harness.submit(prompt, 2)
        harness.step_until(request, State.SAVING)
        assert request.generated == reference(prompt, 2)
        harness.executor.step()
        assert harness.table.available == 0
        copies["saves"].set()
        harness.run()
    polls = [call.detail for call in harness.calls if call.name == "get_finished"]
    told = [request_id for saving, _ in polls for request_id in saving]
    assert len(told) == len(set(told)) == 3  # each save was asynchronous, and waited for
    settle(harness)
    for prompt in prompts:
        assert harness.generate([prompt], 2) == [reference(prompt, 2)]
    assert loaded(harness) == 3 * 96


@pytest.mark.parametrize("parks", [False, True])
def test_slow_loads_are_waited_for(
    make: Make, reference: Any, copies: dict[str, Any], parks: bool
) -> None:
    harness = make({"transfer": {"sync_load_max": 0 if parks else "1GiB"}})
    prompts = [tokens(seed, 100) for seed in range(2)]
    harness.generate(prompts, 1)
    settle(harness)
    copies["load"] = 0.05
    assert harness.generate(prompts, ANSWER) == [reference(prompt) for prompt in prompts]
    assert loaded(harness) == 2 * 96


# --- aborts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "state", [State.QUEUED, State.CONTEXT, State.LOADING, State.GENERATING, State.SAVING]
)
def test_abort_in_every_state(
    make: Make, reference: Any, copies: dict[str, Any], state: State, ranks: int, told: bool
) -> None:
    """Whatever was under way, the pages serve the next request, whose answer is right."""
    limits = Limits(chunked=True, max_num_tokens=64, tells_of_aborts=told)
    harness = make({"transfer": {"sync_load_max": 0}}, ranks=ranks, num_pages=6, limits=limits)
    known, other = tokens(1, 150), tokens(2, 150)
    if state is State.LOADING:
        harness.generate([known], 1)
        settle(harness)
    copies["load"] = copies["save"] = 0.03
    for gate in ("loads", "saves"):
        copies[gate].clear()
    request = harness.submit(known, 4)
    if state is not State.QUEUED:
        harness.step_until(request, state)
    harness.abort(request)
    for gate in ("loads", "saves"):  # what is under way goes on well after pages changed hands
        threading.Timer(0.3, copies[gate].set).start()
    after = harness.submit(other, ANSWER)
    harness.run()
    assert after.generated == reference(other)
    assert request.state is (State.DONE if state is State.SAVING else State.ABORTED)
    settle(harness)
    for prompt in (known, other):
        assert harness.generate([prompt], ANSWER) == [reference(prompt)]
        harness.forget()


def test_aborted_requests_are_collected(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcore_trtllm import leader as module

    monkeypatch.setattr(module, "FORGET_AFTER", 16)
    harness = make()
    for seed in range(5):
        request = harness.submit(tokens(seed, 40), 30)
        harness.step_until(request, State.GENERATING)
        harness.abort(request)
        harness.run()
    assert leader(harness).tracked == 5
    harness.generate([tokens(9, 20)], 40)
    assert leader(harness).tracked == 0


def test_a_request_that_is_silent_and_alive_is_not_lost(
    make: Make, reference: Any, copies: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parked request is not mentioned while others run, however long that takes."""
    from kvcore_trtllm import leader as module

    monkeypatch.setattr(module, "FORGET_AFTER", 8)
    harness = make({"transfer": {"sync_load_max": 0}})
    prompt = tokens(1, 100)
    harness.generate([prompt], 1)
    settle(harness)
    copies["loads"].clear()
    parked = harness.submit(prompt, ANSWER)
    running = harness.submit(tokens(2, 20), 24)
    harness.step_until(running, State.DONE)
    assert parked.state is State.LOADING
    copies["loads"].set()
    harness.run()
    assert parked.generated == reference(prompt)


# --- loads that fail --------------------------------------------------------------------------


@pytest.mark.parametrize("parks", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_load_that_fails_is_tried_again(
    make: Make, reference: Any, copies: dict[str, Any], parks: bool, ranks: int
) -> None:
    harness = make({"transfer": {"sync_load_max": 0 if parks else "1GiB"}}, ranks=ranks)
    prompt = tokens(1, 100)
    harness.generate([prompt], 1)
    settle(harness)
    copies["fail"] = 1
    assert harness.generate([prompt], ANSWER) == [reference(prompt)]
    assert copies["fail"] == 0
    assert loaded(harness) == 96


@pytest.mark.parametrize("layerwise", [False, True])
def test_a_load_that_cannot_be_had_fails_the_step(
    make: Make, copies: dict[str, Any], layerwise: bool
) -> None:
    """An error is answered, never a wrong token; the engine turns the exception into that."""
    harness = make({"trtllm": {"layerwise": layerwise}})
    prompt = tokens(1, 100)
    harness.generate([prompt], 1)
    settle(harness)
    copies["fail"] = 1000
    request = harness.submit(prompt, ANSWER)
    with pytest.raises(TransferError, match="3 attempts"):
        harness.run()
    assert request.generated == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_parked_load_that_cannot_be_had_fails_its_step_on_every_rank(
    make: Make, copies: dict[str, Any], ranks: int
) -> None:
    """It is reported, for else the request would wait for ever; then no rank lets it answer."""
    harness = make({"transfer": {"sync_load_max": 0}}, ranks=ranks)
    prompt = tokens(1, 100)
    harness.generate([prompt], 1)
    settle(harness)
    copies["fail"] = 3  # all attempts of one rank
    request = harness.submit(prompt, ANSWER)
    with pytest.raises(TransferError, match="did not arrive"):
        harness.run()
    assert request.generated == []


def test_a_parked_load_that_an_error_has_cancelled_lets_no_request_answer(
    make: Make, reference: Any, copies: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first load is being copied when the worker fails, and the second one waits behind it."""
    harness = make({"transfer": {"sync_load_max": 0, "copy_threads": 1}})
    prompts = [tokens(seed, 100) for seed in range(2)]
    harness.generate(prompts, 1)
    settle(harness)
    copies["loads"].clear()
    parked = [harness.submit(prompt, ANSWER) for prompt in prompts]
    running = harness.submit(tokens(9, 20), 40)
    harness.step_until(running, State.GENERATING)
    monkeypatch.setattr(harness.workers[0]._side, "tend_tiers", lambda *_: 1 / 0)
    threading.Timer(0.3, copies["loads"].set).start()
    with pytest.raises(TransferError, match="did not arrive"):
        harness.run()
    for request, prompt in zip(parked, prompts, strict=True):
        assert request.generated == reference(prompt)[: len(request.generated)]


@pytest.mark.parametrize("ill", [0, 1])
@pytest.mark.parametrize("fuses", [False, True])
def test_a_rank_that_cannot_read_the_model_is_not_waited_for(
    make: Make,
    reference: Any,
    adapter: Any,
    monkeypatch: pytest.MonkeyPatch,
    ill: int,
    fuses: bool,
) -> None:
    describe = adapter.describe

    def described(llm_args: Any) -> Any:
        if adapter._names.rank() == ill:
            raise OSError("this node has no checkpoint")
        return describe(llm_args)

    monkeypatch.setattr(adapter, "describe", described)
    harness = make({"fusion": {"enabled": fuses}}, ranks=2)
    prompt = tokens(1, 100)
    for _ in range(2):
        assert harness.generate([prompt], ANSWER) == [reference(prompt)]
        harness.forget()


# --- nothing raises out of the scheduler ------------------------------------------------------


def test_an_error_in_a_lookup_is_a_miss(
    make: Make, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make()
    prompt = tokens(1, 100)
    harness.generate([prompt], 1)
    settle(harness)
    monkeypatch.setattr(leader(harness), "_hit", lambda *_: 1 / 0)
    for _ in range(2):
        assert harness.generate([prompt], ANSWER) == [reference(prompt)]
    assert loaded(harness) == 0


@pytest.mark.parametrize("parks", [False, True])
def test_an_error_after_the_promise_fails_the_step(
    make: Make, reference: Any, monkeypatch: pytest.MonkeyPatch, parks: bool
) -> None:
    harness = make({"transfer": {"sync_load_max": 0 if parks else "1GiB"}})
    prompt = tokens(1, 100)
    harness.generate([prompt], 1)
    settle(harness)
    monkeypatch.setattr(leader(harness), "_load", lambda *_: 1 / 0)
    request = harness.submit(prompt, ANSWER)
    with pytest.raises(TransferError, match=r"did not arrive|could not plan"):
        harness.run()
    assert request.generated == []


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("first", "second"), [("_load", "lose"), ("_fence", "last_plan")])
def test_a_promise_is_failed_without_the_leader(
    make: Make,
    reference: Any,
    monkeypatch: pytest.MonkeyPatch,
    first: str,
    second: str,
    ranks: int,
) -> None:
    """TensorRT-LLM would answer with KV that nobody has loaded."""
    kvcore = {"transfer": {"sync_load_max": 0 if second == "lose" else "1GiB"}}
    harness = make(kvcore, Limits(goes_on=True), ranks=ranks)
    prompt = tokens(1, 100)
    harness.generate([prompt], 1)
    settle(harness)
    for name in (first, second):
        monkeypatch.setattr(leader(harness), name, lambda *_, **__: 1 / 0)
    request = harness.submit(prompt, ANSWER)
    harness.run()
    assert (request.state, request.generated) == (State.FAILED, [])
    assert harness.generate([prompt], ANSWER) == [reference(prompt)]


def test_an_error_at_the_end_of_a_request_costs_its_blocks(
    make: Make, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make()
    prompt = tokens(1, 100)
    monkeypatch.setattr(leader(harness), "finished", lambda *_: 1 / 0)
    for _ in range(2):
        assert harness.generate([prompt], ANSWER) == [reference(prompt)]
        harness.forget()


def test_an_error_in_the_books_ends_promises_and_saves(
    make: Make, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make()
    prompt = tokens(1, 100)
    monkeypatch.setattr(leader(harness).manager, "complete", lambda *_: 1 / 0)
    for _ in range(2):
        assert harness.generate([prompt], ANSWER) == [reference(prompt)]
        harness.forget()
    assert loaded(harness) == 0
