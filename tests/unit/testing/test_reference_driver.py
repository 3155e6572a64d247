"""The reference engine as a process: answers are those of one in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("transformers")

from kvcore.harness.compare import counted
from kvcore.harness.engine_process import EngineFailed, EngineProcess
from kvcore.harness.prompts import words
from kvcore.testing.engine import EngineArgs, ReferenceEngine, random_llama

pytestmark = pytest.mark.slow  # it starts the engine's process

KVCORE = {"host": {"capacity": "4MiB", "huge_pages": False}}


@pytest.fixture(scope="module")
def process() -> Iterator[EngineProcess]:
    with EngineProcess("random", engine="reference", kvcore=KVCORE, ranks=2) as made:
        yield made


def test_it_answers_reuses_and_tells(process: EngineProcess) -> None:
    prompts = [words(seed, 70 + seed) for seed in range(3)]
    with ReferenceEngine(random_llama(), EngineArgs(prefix_cache=False)) as plain:
        right = [plain.generate([prompt], 6)[0] for prompt in prompts]
    assert [got.token_ids for got in process.generate(prompts, 6)] == right
    process.settle()
    process.reset_prefix_cache()
    [again] = process.generate(prompts[:1], 6)
    assert again.token_ids == right[0]
    assert (again.tiers, again.cached_tokens, again.prompt_tokens) == ({"host": 64}, 64, 70)
    assert 0 < again.ttft_s <= again.total_s
    assert counted(process, "kvcore_lookup_tokens_total", tier="host") == 64
    process.reset_prefix_cache(connector=True)
    [anew] = process.generate(prompts[:1], 6)
    assert (anew.token_ids, anew.reused_tokens) == (right[0], 0)


def test_requests_end_early_by_name_or_by_themselves(process: EngineProcess) -> None:
    long = process.submit(words(9, 40), 1500, request_id="long")
    early = process.submit(words(10, 40), 50, abort_after=3)
    assert len(early.result(60).token_ids) == 3
    process.abort("long")
    process.abort("unknown")
    got = long.result(60)
    assert got.finish_reason == "abort"
    assert len(got.token_ids) < 1500


def test_what_it_cannot_do_is_refused(process: EngineProcess) -> None:
    with pytest.raises(EngineFailed, match="takes token ids"):
        process.generate(["text"])


def test_another_engine_starts_where_one_was_stopped(process: EngineProcess) -> None:
    [first] = process.generate([words(1, 40)], 4)
    for settings in ({}, {"kvcore": KVCORE, "ranks": 2}):  # the last is as the others have it
        process.stop()
        with pytest.raises(EngineFailed, match="no engine runs"):
            process.generate([words(1, 40)], 4)
        process.restart("random", **settings)
        [again] = process.generate([words(1, 40)], 4)
        assert first.token_ids == again.token_ids
