"""The TensorRT-LLM connector in its harness: output as without a connector, and the rules."""

from __future__ import annotations

import random
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")

from kvcore.errors import TransferError, UnsupportedError
from kvcore.explain.file import read_records
from kvcore.worker import worker as kvcore_worker  # after the skip
from kvcore_trtllm.testing import Limits, installed
from support.trtllm_harness import ANSWER, BLOCK, Make, leader, loaded, settle, tokens

pytestmark = pytest.mark.slow  # a model runs in the harness

# --- equality ---------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["HND", "NHD"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_miss_then_hit(make: Make, reference: Any, ranks: int, overlap: bool, order: str) -> None:
    harness = make(ranks=ranks, order=order, limits=Limits(overlap=overlap))
    prompt = tokens(1, 100)
    assert harness.generate([prompt], ANSWER) == [reference(prompt)]
    assert loaded(harness) == 0
    settle(harness)
    assert harness.generate([prompt], ANSWER) == [reference(prompt)]
    assert loaded(harness) == 96  # six whole blocks


def test_the_last_token_is_always_computed(make: Make, reference: Any) -> None:
    harness = make()
    prompt = tokens(1, 6 * BLOCK)
    harness.generate([prompt], 1)
    settle(harness)
    assert harness.generate([prompt], ANSWER) == [reference(prompt)]
    assert loaded(harness) == 6 * BLOCK - 1


@pytest.mark.parametrize("block", [8, 32, 64])
def test_blocks_unlike_pages(make: Make, reference: Any, block: int) -> None:
    harness = make({"block": {"tokens": block}})
    prompts = [tokens(1, 150), [*tokens(1, 90), *tokens(2, 50)]]
    for prompt in (*prompts, *prompts):
        assert harness.generate([prompt], ANSWER) == [reference(prompt)]
        settle(harness)
    expected = [90 // block * block, 150 // block * block, 140 // block * block]
    assert loaded(harness) == sum(expected)


def test_what_the_engine_holds_is_not_loaded_again(make: Make, reference: Any) -> None:
    """The engine has the first pages, kvcore the rest: units before are left alone."""
    harness = make({"block": {"tokens": 64}})
    prompt = tokens(1, 200)
    harness.generate([prompt], 1)
    settle(harness)
    assert harness.generate([prompt[:40]], ANSWER) == [reference(prompt[:40])]
    before = loaded(harness)
    assert harness.generate([prompt], ANSWER) == [reference(prompt)]
    assert loaded(harness) - before == 192 - 32


@pytest.mark.parametrize("overlap", [False, True])
def test_every_chunk_and_every_decoded_block_is_kept(
    make: Make, reference: Any, overlap: bool
) -> None:
    limits = Limits(max_num_tokens=64, chunked=True, overlap=overlap)
    harness = make(limits=limits)
    prompt = tokens(1, 150)
    [answer] = harness.generate([prompt], 40)
    assert answer == reference(prompt, 40)
    settle(harness)
    longer = [*prompt, *answer, *tokens(2, 9)]
    before = loaded(harness)
    assert harness.generate([longer], ANSWER) == [reference(longer)]
    # All but the last answer token was computed: 189 tokens, 11 whole blocks.
    assert loaded(harness) - before == 176


def test_generated_tokens_can_be_left_out(make: Make, reference: Any) -> None:
    harness = make({"trtllm": {"save_decode": False}})
    prompt = tokens(1, 40)
    [answer] = harness.generate([prompt], 40)
    settle(harness)
    assert harness.generate([[*prompt, *answer]], ANSWER) == [reference([*prompt, *answer])]
    assert loaded(harness) == 32


@pytest.mark.parametrize("overlap", [False, True])
def test_many_requests_that_share_prefixes(make: Make, reference: Any, overlap: bool) -> None:
    harness = make(num_pages=48, limits=Limits(overlap=overlap, max_batch_size=4))
    shared = tokens(1, 70)
    prompts = [[*shared, *tokens(seed, 20 + seed)] for seed in range(2, 10)]
    for _ in range(2):
        got = harness.generate(prompts, ANSWER)
        assert got == [reference(prompt) for prompt in prompts]
        settle(harness)
    assert loaded(harness) >= 4 * 80 + 4 * 31  # the first four at once, then what they lack


@pytest.mark.parametrize("parks", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("overlap", [False, True])
def test_eviction_under_pressure(
    make: Make, reference: Any, overlap: bool, ranks: int, parks: bool
) -> None:
    """Few pages: those that saves read and loads write to are given away all the time."""
    harness = make(
        {"transfer": {"sync_load_max": 0 if parks else "1GiB"}, "host": {"capacity": "2MiB"}},
        ranks=ranks,
        num_pages=10,
        limits=Limits(overlap=overlap, chunked=True, max_num_tokens=64),
    )
    prompts = [tokens(seed, 60 + 10 * seed) for seed in range(8)]
    picks = random.Random(0)
    for _ in range(3):
        picks.shuffle(prompts)
        assert harness.generate(prompts, ANSWER) == [reference(prompt) for prompt in prompts]
    assert harness.table.evicted > 0
    assert loaded(harness) > 0


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("overlap", [False, True])
def test_large_loads_park_the_request(
    make: Make, reference: Any, overlap: bool, ranks: int
) -> None:
    harness = make({"transfer": {"sync_load_max": 0}}, ranks=ranks, limits=Limits(overlap=overlap))
    prompts = [tokens(seed, 100) for seed in range(3)]
    harness.generate(prompts, ANSWER)
    settle(harness)
    del harness.calls[:]
    assert harness.generate(prompts, ANSWER) == [reference(prompt) for prompt in prompts]
    polls = [call.detail for call in harness.calls if call.name == "get_finished"]
    assert sum(len(loading) for _, loading in polls) == 3
    assert harness.count("get_num_new_matched_tokens") == 3


# --- kept apart -------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{"cache_salt": "b"}, {"lora_task_id": 7}], ids=["salt", "lora"])
def test_what_must_not_be_shared_is_not(make: Make, fields: dict[str, Any]) -> None:
    harness = make()
    prompt = tokens(1, 100)
    harness.generate([prompt], 1)
    settle(harness)
    harness.generate([prompt], 1, **fields)
    assert loaded(harness) == 0
    settle(harness)
    harness.generate([prompt], 1, **fields)
    assert loaded(harness) == 96


@pytest.mark.parametrize(
    "fields",
    [
        {"is_dummy_request": True},
        {"prompt_embedding_table": object()},
        {"multimodal_hashes": [[1, 2]], "multimodal_positions": [50], "multimodal_lengths": [8]},
        {"py_multimodal_data": {"image": {"pixel_values": object()}}},
    ],
)
def test_requests_that_tokens_do_not_tell_are_left_alone(
    make: Make, fields: dict[str, Any]
) -> None:
    harness = make()
    for _ in range(2):
        request = harness.submit(tokens(1, 100), 2)
        for name, value in fields.items():
            setattr(request, name, value)
        harness.run()
        settle(harness)
    assert leader(harness).manager.index.num_used("host") == 0


# --- calls ------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_calls_and_their_number(make: Make, model: Any, overlap: bool) -> None:
    harness = make(limits=Limits(overlap=overlap))
    harness.generate([tokens(1, 20)], 8)
    saving = any(c.detail[0] for c in harness.calls if c.name == "get_finished")
    layers = model.config.num_hidden_layers
    assert harness.count("build_connector_meta") == 8
    assert harness.count("start_load_kv") == 8
    assert harness.count("get_finished") >= 8 + overlap
    assert harness.count("get_finished") == 8 + overlap or saving
    for name in ("wait_for_layer_load", "save_kv_layer"):
        hooks = [call.detail for call in harness.calls if call.name == name]
        assert hooks == list(range(layers)) * 8


def test_signatures_are_the_engines(adapter: Any) -> None:
    import inspect

    from kvcore_trtllm.testing.standins import KvCacheConnectorScheduler, KvCacheConnectorWorker

    pairs = [
        (adapter.KVCoreScheduler, KvCacheConnectorScheduler),
        (adapter.KVCoreWorker, KvCacheConnectorWorker),
    ]
    for ours, theirs in pairs:
        for name, method in inspect.getmembers(theirs, inspect.isfunction):
            expected = list(inspect.signature(method).parameters)
            assert list(inspect.signature(getattr(ours, name)).parameters) == expected, name


@pytest.mark.parametrize("version", ["1.2", "1.3"])
def test_the_version_is_found_by_its_module(version: str) -> None:
    from kvcore_trtllm import engine

    with installed(version):
        names = engine.find()
        assert names.worker.__name__ == "KvCacheConnectorWorker"


def test_without_the_engine_the_adapter_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kvcore_trtllm import engine

    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorrt_llm"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UnsupportedError, match=r"not installed; .*: install tensorrt-llm"):
        engine.find()


# --- graphs that skip the hooks ---------------------------------------------------------------


def test_replayed_graphs_skip_the_hooks(make: Make, reference: Any) -> None:
    """With CUDA graphs on, loads are waited for before the forward."""
    harness = make(limits=Limits(replays=True), llm_args={"cuda_graph_config": object()})
    prompt = tokens(1, 100)
    for _ in range(2):
        assert harness.generate([prompt], ANSWER) == [reference(prompt)]
        settle(harness)
    assert loaded(harness) == 96
    assert harness.count("wait_for_layer_load") == 0


def test_hooks_skipped_without_a_word_are_noticed(make: Make, copies: dict[str, Any]) -> None:
    harness = make(limits=Limits(replays=True))
    prompt = tokens(1, 100)
    harness.generate([prompt], 1)
    settle(harness)
    copies["load"] = 0.05
    request = harness.submit(prompt, ANSWER)
    with pytest.raises(TransferError, match=r"trtllm\.layerwise"):
        harness.run()
    assert request.generated == []


# --- tiers below host memory ------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path: Path) -> dict[str, Any]:
    return {"disk": {"path": str(tmp_path / "kv"), "capacity": "64MiB"}}


def stored(make: Make, disk: dict[str, Any]) -> list[int]:
    """A prompt whose KV an engine that has ended left on disk."""
    prompt = tokens(1, 300)
    first = make(disk)
    first.generate([prompt], 1)
    settle(first)
    first.close()
    return prompt


def test_a_restart_finds_what_was_on_disk(make: Make, reference: Any, disk: dict[str, Any]) -> None:
    prompt = stored(make, disk)
    second = make(disk)
    assert second.generate([prompt], ANSWER) == [reference(prompt)]
    assert loaded(second) == 288


def stuck_reads(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Reads of tiers end when this is set, or after a minute."""
    late, read = threading.Event(), kvcore_worker.TierRead.run

    def slow(*given: Any) -> Any:
        late.wait(timeout=60)
        return read(*given)

    monkeypatch.setattr(kvcore_worker.TierRead, "run", slow)
    return late


def test_what_comes_late_serves_the_next_request(
    make: Make, reference: Any, disk: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = stored(make, disk)
    second = make({**disk, "trtllm": {"stage_wait_s": 0}})
    late = stuck_reads(monkeypatch)
    assert second.generate([prompt], ANSWER) == [reference(prompt)]
    assert loaded(second) == 0
    late.set()
    settle(second)
    before = loaded(second)
    assert second.generate([prompt], ANSWER) == [reference(prompt)]
    assert loaded(second) - before == 288


def test_a_read_that_hangs_is_waited_for_until_loads_are_abandoned(
    make: Make, reference: Any, disk: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = stored(make, disk)
    patient = {"trtllm": {"stage_wait_s": 3600}, "transfer": {"load_deadline_s": 0.2}}
    second = make({**disk, **patient})
    late = stuck_reads(monkeypatch)
    assert second.generate([prompt], ANSWER) == [reference(prompt)]
    assert loaded(second) == 0, "the lookup waited for the read"
    late.set()
    settle(second)


def test_all_waits_of_a_lookup_end_at_the_deadline_of_loads(
    make: Make, reference: Any, disk: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The executor waits meanwhile: for a store that says nothing, and then for a read."""
    prompt = stored(make, disk)
    patient = {"trtllm": {"stage_wait_s": 3600}, "transfer": {"load_deadline_s": 30}}
    second = make({**disk, **patient})
    manager, waits, clock = leader(second).manager, list[float](), SimpleNamespace(now=0.0)

    def wait(*given: Any) -> bool:
        waits.append(given[-1])
        clock.now += min(given[-1], 20.0)
        return False

    with monkeypatch.context() as patched:
        for module in ("leader", "staging"):
            frozen = SimpleNamespace(monotonic=lambda: clock.now)
            patched.setattr(f"kvcore_trtllm.{module}.time", frozen)
        patched.setattr(manager, "ask_stores", lambda *_: True)
        patched.setattr(manager, "wait_stores", wait)
        patched.setattr(manager, "wait", wait)
        assert second.generate([prompt], 1) == [reference(prompt, 1)]
    assert waits == [30.0, 10.0]
    settle(second)


def test_two_ranks_bring_it_for_the_next_request(
    make: Make, reference: Any, disk: dict[str, Any]
) -> None:
    prompt = tokens(1, 300)
    first = make(disk, ranks=2)
    first.generate([prompt], 1)
    settle(first)
    first.close()
    second = make(disk, ranks=2)
    assert second.generate([prompt], ANSWER) == [reference(prompt)]
    assert loaded(second) == 0
    settle(second)
    assert second.generate([prompt], ANSWER) == [reference(prompt)]
    assert loaded(second) == 288


def test_a_corrupt_block_is_never_promised(
    make: Make, reference: Any, disk: dict[str, Any]
) -> None:
    prompt = stored(make, disk)
    for file in Path(disk["disk"]["path"]).rglob("*"):
        if file.is_file() and file.stat().st_size > 1 << 20:
            data = bytearray(file.read_bytes())
            middle = 5 * 16384 + 100  # inside the sixth block
            data[middle] ^= 0xFF
            file.write_bytes(data)
    second = make(disk)
    assert second.generate([prompt], ANSWER) == [reference(prompt)]
    assert 0 < loaded(second) < 288


# --- what is told of requests -----------------------------------------------------------------


def test_records_of_requests(make: Make, reference: Any, tmp_path: Path) -> None:
    """A miss, a hit with what loading took, too short: written as each ends."""
    harness = make({"explain": {"path": str(tmp_path)}, "trtllm": {"min_load_tokens": 32}})
    prompt = tokens(1, 100)
    assert harness.generate([prompt], ANSWER) == [reference(prompt)]
    settle(harness)
    assert harness.generate([prompt], ANSWER) == [reference(prompt)]
    settle(harness)
    assert harness.generate([prompt[:20]], ANSWER) == [reference(prompt[:20])]
    leader(harness).recorder.close()
    asked = [record for record in read_records(tmp_path) if record["tokens"] > 3]
    short, warm, cold = asked
    assert [miss["cause"] for miss in cold["misses"]] == ["never seen"]
    assert cold["loaded"] == {}
    assert warm["matched"] == [{"tier": "host", "tokens": [0, 96]}]
    assert warm["loaded"] == {"host": 96}
    assert {"lookup", "load", "rest"} == set(warm["ms"])
    assert short["misses"][-1] == {"cause": "too short"}
    assert all(record["outcome"] == "done" for record in asked)
    assert "prefill: this engine's forwards are not timed" in warm["otherwise"]["unknown"]
