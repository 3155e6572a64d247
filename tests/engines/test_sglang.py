"""Real SGLang, with and without kvcore: whatever happens, the same greedy tokens.

Every test asks an engine with kvcore what one without it was asked, and says where the KV must
have come from, so that a test cannot pass because nothing was reused. In float32, where SGLang on
a CPU answers alike however a prompt is cut: `test_the_engine_agrees_with_itself` says so.

    plain      one engine without kvcore: what is right
    written    two tensor-parallel ranks; their disk tier is what all engines after them start from
    served     one rank, asked documents of its own. Its pages are of two blocks; `make test-all`
               has larger and smaller ones too
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvcore.explain.file import read_records
from kvcore.harness.compare import (
    ANSWER,
    SETTLE_S,
    Reference,
    answers,
    assert_all_from,
    assert_same_answers,
    counted,
    settle_and_empty,
    sglang_tiers,
    small_engine,
)
from kvcore.harness.engine_process import EngineProcess, Generation
from kvcore.harness.prompts import tokens, windows
from kvcore.testing.faults import Fault, Rule, Seam, write_rules
from kvcore.testing.faults.plugin import FAULTY_MEMORY, write_plugin
from kvcore_sglang.attention import ROWS
from support.faulty import faulty_plugin

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]

engine = partial(small_engine, engine="sglang")
exhaustive = pytest.mark.exhaustive
BLOCK = 16
PAGES = (1, 16, 32, 64)
WRITTEN = 6
OWN = 6
"""Documents that two ranks wrote, and those that the engine of each page size is asked first."""

SAVED = "kvcore_expected_ttft_seconds_total"
"""Seconds to the first token of requests that loaded: as they were, and had they been computed."""

Ask = Callable[[Sequence[Sequence[int]]], list[Generation]]


class Served(NamedTuple):
    """An engine with kvcore. While there is the file ``fails``, every load of it fails."""

    process: EngineProcess
    page: int
    documents: list[list[int]]
    fails: Path
    records: Path

    def reusable(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Tokens of each that kvcore must bring back once it was answered: whole blocks and whole
        pages of all but the last token, which SGLang looks up."""
        found = [(len(prompt) - 1) // BLOCK * BLOCK // self.page * self.page for prompt in prompts]
        return [count if count >= 64 else 0 for count in found]


class Written(NamedTuple):
    """What two ranks were asked and answered: computed, then from host memory."""

    folder: Path
    asked: list[list[int]]
    cold: list[Generation]
    warm: list[Generation]


@pytest.fixture(scope="module")
def documents(model: Path) -> list[list[int]]:
    return windows(model, WRITTEN + OWN * len(PAGES), 150, 800, seed=1)


@pytest.fixture(scope="module")
def plain(model: Path) -> Iterator[EngineProcess]:
    with engine(model, None, disable_radix_cache=True) as process:
        yield process


@pytest.fixture(scope="module")
def reference(plain: EngineProcess) -> Ask:
    return Reference(plain)


@pytest.fixture(scope="module")
def written(
    model: Path, documents: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Written:
    folder, asked = tmp_path_factory.mktemp("written"), documents[:WRITTEN]
    with engine(model, sglang_tiers(folder), tp_size=2) as process:
        cold = answers(process, asked)
        settle_and_empty(process)
        warm = answers(process, asked, batch=4)
    return Written(folder, asked, cold, warm)


@pytest.fixture(
    scope="module",
    params=[pytest.param(page, marks=() if page == 2 * BLOCK else exhaustive) for page in PAGES],
    ids="page {}".format,
)
def served(
    request: pytest.FixtureRequest,
    model: Path,
    documents: list[list[int]],
    written: Written,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    """One after the other on the same folder; that of pages of 16 without overlapped schedules."""
    page: int = request.param
    scratch = tmp_path_factory.mktemp("served")
    faulty, records = faulty_plugin(scratch / "faulty"), scratch / "records"
    kvcore = {
        **sglang_tiers(written.folder),
        "ops": {"backend": "faulty"},
        "explain": {"path": str(records)},
    }
    args = {"page_size": page, "chunked_prefill_size": 256, "disable_overlap_schedule": page == 16}
    first = WRITTEN + OWN * PAGES.index(page)
    with engine(model, kvcore, faulty.env, **args) as process:
        yield Served(process, page, documents[first : first + OWN], faulty.fails, records)


# -- the engine without kvcore --------------------------------------------------------------------


def test_prompts_have_different_answers(reference: Ask, documents: list[list[int]]) -> None:
    """Equality proves nothing where every prompt is answered alike."""
    kinds = {tuple(answer.token_ids) for answer in reference(documents)}
    assert len(kinds) > len(documents) * 0.8


def test_the_engine_agrees_with_itself(
    plain: EngineProcess, reference: Ask, documents: list[list[int]]
) -> None:
    """In other batches it answers the same."""
    assert_same_answers(answers(plain, documents[:12], batch=4), reference(documents[:12]))


@exhaustive
def test_attention_for_benchmarks_answers_alike(
    model: Path, reference: Ask, documents: list[list[int]]
) -> None:
    """`kvcore_sglang.attention`: cold, in chunks, and behind a hit of the radix cache."""
    with engine(model, None, attention_backend=ROWS, chunked_prefill_size=64) as process:
        for _ in range(2):
            found = answers(process, documents[:8], batch=3)
            assert_same_answers(found, reference(documents[:8]))
    assert min(answer.sources["device"] for answer in found) > 0


# -- tiers, ranks and pages -----------------------------------------------------------------------


@pytest.mark.exhaustive
def test_two_ranks_answer_alike_from_host_memory(reference: Ask, written: Written) -> None:
    assert_same_answers(written.cold, reference(written.asked))
    assert_same_answers(written.warm, reference(written.asked))
    assert sum(answer.reused_tokens for answer in written.cold) == 0
    assert_all_from("host", written.warm, [(len(p) - 1) // BLOCK * BLOCK for p in written.asked])


def test_what_two_ranks_wrote_is_read_after_a_restart(
    served: Served, reference: Ask, written: Written
) -> None:
    """By one rank, under any page size: first from disk, then from host memory."""
    restarted = answers(served.process, written.asked, batch=3)
    assert_same_answers(restarted, reference(written.asked))
    assert_all_from("disk", restarted, served.reusable(written.asked))
    settle_and_empty(served.process)
    again = answers(served.process, written.asked[:3])
    assert_same_answers(again, reference(written.asked[:3]))
    assert_all_from("host", again, served.reusable(written.asked[:3]))


def test_whole_and_partial_hits(served: Served, reference: Ask, model: Path) -> None:
    asked, process = served.documents, served.process
    own = {"cache_salt": "hits"}
    cold = answers(process, asked, **own)
    assert_same_answers(cold, reference(asked))
    assert sum(answer.reused_tokens for answer in cold) == 0
    settle_and_empty(process)
    warm = answers(process, asked, **own)
    assert_same_answers(warm, reference(asked))
    assert_all_from("host", warm, served.reusable(asked))
    settle_and_empty(process)
    cuts = _branches(model, asked)
    branched = answers(process, [prompt for prompt, _ in cuts], batch=4, **own)
    assert_same_answers(branched, reference([prompt for prompt, _ in cuts]))
    least = max(served.page, BLOCK)
    for answer, (_, cut) in zip(branched, cuts, strict=True):
        assert answer.reused_tokens > cut - 2 * least, "the document's part was not brought back"


def _branches(model: Path, documents: Sequence[list[int]]) -> list[tuple[list[int], int]]:
    """Prompts that leave a document's path somewhere, on no border of anything; and where."""
    picks, text, prompts = random.Random(3), tokens(model), []
    for document in documents:
        cut = picks.randint(100, len(document) - 1)
        start = picks.randrange(len(text) - 200)
        prompts.append((document[:cut] + text[start : start + picks.randint(1, 120)], cut))
    return prompts


def test_the_next_turn_finds_the_answer_too(served: Served, reference: Ask) -> None:
    asked = served.documents[:4]
    assert_same_answers(answers(served.process, asked, cache_salt="turns"), reference(asked))
    follow = [
        [*document, *answer.token_ids, *range(300, 340)]
        for document, answer in zip(asked, reference(asked), strict=True)
    ]
    settle_and_empty(served.process)
    turns = answers(served.process, follow, cache_salt="turns")
    assert_same_answers(turns, reference(follow))
    least = max(served.page, BLOCK)
    assert all(t.reused_tokens > len(d) - least for t, d in zip(turns, asked, strict=True))


def test_another_tenants_kv_is_not_to_be_had(served: Served, reference: Ask) -> None:
    """And one's own is."""
    asked = served.documents[:2]
    first = answers(served.process, asked, cache_salt="tenant-a")
    settle_and_empty(served.process)
    second = answers(served.process, asked, cache_salt="tenant-a")
    other = answers(served.process, asked, cache_salt="tenant-b")
    for got in (first, second, other):
        assert_same_answers(got, reference(asked))
    assert sum(answer.reused_tokens for answer in [*first, *other]) == 0
    assert_all_from("host", second, served.reusable(asked))


def test_aborted_requests_harm_nothing(served: Served, reference: Ask, model: Path) -> None:
    """Aborted before, while and after they load and save; then the same asked again."""
    prompts = windows(model, 6, 500, 900, seed=9 + served.page)
    own = {"cache_salt": "aborted"}
    before = counted(served.process, "kvcore_failures_total")
    for after in (0, 1, 3):
        futures = [served.process.submit(p, 64, abort_after=after, **own) for p in prompts]
        for future in futures:
            future.result(600)
        settle_and_empty(served.process)
    assert_same_answers(answers(served.process, prompts, batch=4, **own), reference(prompts))
    assert counted(served.process, "kvcore_failures_total") == before


# -- faults ---------------------------------------------------------------------------------------


def test_a_load_that_fails_is_computed_and_not_aborted(served: Served, reference: Ask) -> None:
    """Every copy into the engine's pages fails for a while, also of prompts in chunks."""
    asked, process = served.documents[:4], served.process
    own = {"cache_salt": "failing"}
    assert_same_answers(answers(process, asked, **own), reference(asked))
    settle_and_empty(process)
    before = counted(process, "kvcore_misses_total", reason="load_failed")
    served.fails.touch()
    try:
        got = answers(process, asked, batch=3, **own)
    finally:
        served.fails.unlink()
    assert_same_answers(got, reference(asked))
    assert all(answer.finish_reason == "length" for answer in got)
    failed = counted(process, "kvcore_misses_total", reason="load_failed") - before
    assert failed >= len(asked)
    settle_and_empty(process)
    healed = answers(process, asked, **own)
    assert_same_answers(healed, reference(asked))
    assert_all_from("host", healed, served.reusable(asked))


def test_a_rotten_disk_costs_time_not_correctness(
    reference: Ask, model: Path, written: Written, tmp_path: Path
) -> None:
    shutil.copytree(written.folder, tmp_path, dirs_exist_ok=True)
    picks = random.Random(5)
    stores = (tmp_path / "kv").rglob("shard-0.data")  # and those of engines of one rank
    [data] = [path for path in stores if path.with_name("shard-1.data").exists()]
    used = sum(len(prompt) // BLOCK for prompt in written.asked) * _rank_block_nbytes()
    with data.open("r+b") as file:
        for _ in range(60):
            file.seek(picks.randrange(used))
            file.write(b"\xa5" * 64)
    kvcore = sglang_tiers(tmp_path, layerwise=False)  # in `make test`, here alone
    with engine(model, kvcore, disable_overlap_schedule=True) as process:
        got = answers(process, written.asked, batch=4)
        assert_same_answers(got, reference(written.asked))
        assert counted(process, "kvcore_corrupt_blocks_total", tier="disk") > 0
        settle_and_empty(process)
        healed = answers(process, written.asked)
        assert_same_answers(healed, reference(written.asked))
        assert sum(h.reused_tokens for h in healed) > sum(g.reused_tokens for g in got)


def _rank_block_nbytes() -> int:
    """Layers x a rank's heads x k/v x dim x tokens x bytes of the model's blocks."""
    return 4 * 1 * 2 * 64 * BLOCK * 4


# -- a tier that takes its time -------------------------------------------------------------------


def _far_tier(folder: Path) -> tuple[dict[str, Any], dict[str, str], Path]:
    """kvcore's config with host memory for four documents and a tier behind it that follows a file
    of rules; the engine's environment, and the file."""
    rules = folder / "rules"
    write_rules(rules)
    far = {"plugin": FAULTY_MEMORY, "capacity": "256MiB", "options": {"rules": str(rules)}}
    tiers = sglang_tiers(folder)
    del tiers["disk"]
    host = {"capacity": "6MiB", "policy": "lru"}  # the first documents go
    kvcore = {**tiers, "host": host, "tiers": {"far": far}}
    path = os.pathsep.join([str(write_plugin(folder / "plugin")), os.environ.get("PYTHONPATH", "")])
    return kvcore, {"PYTHONPATH": path}, rules


def test_requests_wait_for_a_tier_in_the_queue_and_hold_up_nobody(
    reference: Ask, model: Path, tmp_path: Path
) -> None:
    """On two ranks. While the tier hangs, others are answered; an abort of one that waits, and what
    came in the end, harm nothing."""
    kvcore, env, rules = _far_tier(tmp_path)
    asked = windows(model, 6, 350, 400, seed=60)
    others = [[7 + i, *prompt[:250]] for i, prompt in enumerate(asked[:3])]  # no prefix of any
    with engine(model, kvcore, env, tp_size=2) as process:
        assert_same_answers(answers(process, asked), reference(asked))
        settle_and_empty(process)
        write_rules(rules, Rule(Fault.HANG, Seam.TIER_READ, seconds=600))
        try:
            far = [process.submit(prompt, ANSWER) for prompt in asked[:2]]
            lost = process.submit(asked[2], ANSWER, abort_after=0)
            assert_same_answers(answers(process, others), reference(others))
            lost.result(600)
            assert not any(future.done() for future in far), "nobody waited for the tier"
        finally:
            write_rules(rules)
        got = [future.result(600) for future in far]
        assert_same_answers(got, reference(asked[:2]))
        assert_all_from("far", got, [(len(p) - 1) // BLOCK * BLOCK for p in asked[:2]])
        assert_same_answers(answers(process, asked, batch=4), reference(asked))
        settle_and_empty(process)
        assert counted(process, "kvcore_misses_total", reason="load_failed") == 0
        assert_same_answers(answers(process, asked[:3]), reference(asked[:3]))
        assert counted(process, SAVED, way="recompute") > 0, "it is counted by default"


@exhaustive
def test_a_slow_tier_is_left_alone_once_its_rates_are_known(
    reference: Ask, model: Path, tmp_path: Path
) -> None:
    """Prefill of the tiny model takes milliseconds; every read of the tier half a second."""
    kvcore, env, rules = _far_tier(tmp_path)
    asked = windows(model, 8, 350, 400, seed=61)
    with engine(model, kvcore | {"planner": {"enabled": True}}, env) as process:
        write_rules(rules, Rule(Fault.LATENCY, Seam.TIER_READ, seconds=0.5))
        for _ in range(4):
            assert_same_answers(answers(process, asked, batch=1), reference(asked))
            settle_and_empty(process)
        assert counted(process, "kvcore_misses_total", reason="planned") > 0
        assert counted(process, "kvcore_hits_total") > 0, "its rates were not known at first"


# -- too little room ------------------------------------------------------------------------------


def _cramped(folder: Path, write: str) -> dict[str, Any]:
    """Tiers far too small for the work. Flushes are of kvcore too under ``write_through``."""
    return {
        **sglang_tiers(
            folder, keep_on_flush=write != "write_through", layerwise=write != "selective"
        ),
        "block": {"tokens": 32},
        "ops": {"backend": "faulty"},
        "host": {"capacity": "16MiB"},
        "disk": {
            "path": str(folder / "kv"),
            "capacity": "60MiB",
            "write": write,
            "policy": "s3fifo",
        },
    }


@pytest.mark.parametrize(
    "write",
    [
        "write_through",
        pytest.param("write_back", marks=exhaustive),
        pytest.param("selective", marks=exhaustive),
    ],
)
def test_eviction_retraction_and_chunked_prefill(
    reference: Ask, model: Path, documents: list[list[int]], tmp_path: Path, write: str
) -> None:
    """Tiers and device memory far too small for the work, many requests at once; at last every load
    fails too."""
    asked = documents[:12]
    wanted = [ANSWER if i % 3 else 100 for i in range(len(asked))]
    retract = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "20"}  # as if no memory
    faulty = faulty_plugin(tmp_path / "faulty")
    env = {**retract, **faulty.env}
    args = {"max_total_tokens": 2600, "chunked_prefill_size": 256}
    with engine(model, _cramped(tmp_path, write), env, **args) as process:
        for turn in range(3):
            if turn == 2:
                faulty.fails.touch()
            futures = [process.submit(d, n) for d, n in zip(asked, wanted, strict=True)]
            got = [future.result(1200) for future in futures]
            assert [len(answer.token_ids) for answer in got] == wanted, "a token was answered twice"
            wrong = [
                i
                for i, (a, b) in enumerate(zip(got, reference(asked), strict=True))
                if a.token_ids[:ANSWER] != b.token_ids
            ]
            assert not wrong, f"answers {wrong} of turn {turn} differ"
        assert counted(process, "kvcore_evictions_total", tier="host") > 0
        assert counted(process, "kvcore_hits_total") > 0
        assert counted(process, "kvcore_misses_total", reason="load_failed") > 0
        assert "retracted" in process.log.read_text().lower(), "nothing was retracted"
        if write == "write_through":
            _flush_forgets_everything(process, reference, asked)
    used = sum(f.stat().st_size for f in (tmp_path / "kv").rglob("*") if f.is_file())
    assert used <= 60 << 20, "the disk tier is larger than its capacity"


def _flush_forgets_everything(
    process: EngineProcess, reference: Ask, asked: Sequence[list[int]]
) -> None:
    """With `keep_on_flush = false`."""
    process.reset_prefix_cache(connector=True, timeout_s=200)
    forgotten = answers(process, asked)
    assert_same_answers(forgotten, reference(asked))
    assert sum(answer.reused_tokens for answer in forgotten) == 0


# -- what it says of requests ---------------------------------------------------------------------


def told(served: Served, name: str) -> dict[str, Any]:
    """The record of a request, once it is written."""
    limit = time.monotonic() + SETTLE_S
    while True:
        found = [record for record in read_records(served.records) if record["request"] == name]
        if found:
            assert len(found) == 1, "written twice"
            return found[0]
        assert time.monotonic() < limit, "no record was written"
        time.sleep(0.05)


def test_records_say_what_happened(served: Served, model: Path, reference: Ask) -> None:
    [document] = windows(model, 1, 700, 700, seed=900 + served.page)
    document[0] = 900 + served.page  # nobody has asked this one
    right = reference([document])
    got: dict[str, Generation] = {}

    def ask(name: str, prompt: list[int], **options: Any) -> None:
        [got[name]] = answers(served.process, [prompt], request_id=name, **options)
        settle_and_empty(served.process)

    ask("cold", document)
    ask("warm", document)
    ask("stranger", document, cache_salt="another tenant")
    if looked_up := served.page <= 50:  # of a prompt below a page SGLang asks nobody
        ask("short", document[:50])
    served.fails.touch()
    try:
        ask("failed", document)
    finally:
        served.fails.unlink()
    for name in ("cold", "warm", "failed"):
        assert_same_answers([got[name]], right)
    [whole] = served.reusable([document])
    records = {name: told(served, name) for name in got}
    assert records["cold"]["misses"] == [{"cause": "never seen"}]
    assert records["warm"]["loaded"] == got["warm"].tiers == {"host": whole}
    assert "lookup" in records["warm"]["ms"]
    assert records["stranger"]["misses"] == [
        {"cause": "other namespace", "differed": ["cache_salt"]}
    ]
    if looked_up:
        assert {"cause": "too short"} in records["short"]["misses"]
    assert records["failed"]["failures"] == 1
    assert {"cause": "failed"} in records["failed"]["misses"]
    assert records["failed"]["loaded"] == {}
    assert {str(record["outcome"]) for record in records.values()} == {"length"}
    estimate = records["warm"]["otherwise"]
    assert estimate["recompute_ms"] > 0, "forwards were timed"
