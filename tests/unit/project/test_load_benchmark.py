"""The benchmark under load: traces, what generators write, ratios and bars. No engine runs."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import _load_servers as servers
from benchmarks import _load_sglang as sglang
from benchmarks import _load_traffic as traffic
from benchmarks import load
from benchmarks._load_servers import Tokens
from benchmarks._load_traffic import CHUNK, TEMPLATE, Agents, Chat, Generators, Rag, Served
from benchmarks.load import FULL, SHORT, Measured, Place, Probed

MODEL = Path("model")
NO_GENERATORS = Generators(None, None)
CHAT, FITS = Place("chat", 1.0), Place("fits", None)


def measured(
    tokens_s: float = 100.0,
    ttft: float = 1000.0,
    itl: float | None = 50.0,
    texts: tuple[str, ...] = (),
    failed: int = 0,
) -> Measured:
    served = Served(tokens_s / 10, tokens_s, ttft / 2, ttft, itl, itl, failed, texts)
    return Measured(served, Tokens(1000, 400, 100, 500), 3 << 20)


# --- what is asked --------------------------------------------------------------------------------


def chat(**given: Any) -> Chat:
    [made, *_] = FULL.workloads(["chat"], MODEL, NO_GENERATORS)
    assert isinstance(made, Chat)
    return Chat(**{**vars(made), **given})


def test_each_turn_continues_the_users_last_one() -> None:
    made = chat(users=3, turns=2, turn_tokens=40, shared_tokens=32)
    trace = made.trace()
    assert len(trace) == 6
    first, second = trace[:3], trace[3:]
    shared = first[0]["hash_ids"][:2]
    assert {each["input_length"] for each in first} == {CHUNK * 5}
    for each in first:
        assert each["hash_ids"][:2] == shared
        longer = [other for other in second if other["hash_ids"][2] == each["hash_ids"][2]]
        assert [other["hash_ids"][:5] for other in longer] == [each["hash_ids"]]
    own = [set(each["hash_ids"][2:]) for each in second]
    assert not own[0] & own[1] | own[1] & own[2] | own[0] & own[2]
    times = [each["timestamp"] for each in trace]
    assert times == sorted(times)
    assert times[0] == 0


def test_a_seed_gives_the_same_trace_and_another_one_another() -> None:
    assert chat().trace() == chat().trace()
    assert chat().trace() != chat(seed=7).trace()


def test_two_rates_share_no_prompt() -> None:
    made = FULL.workloads(["chat"], MODEL, NO_GENERATORS)
    traces = [each.trace() for each in made if isinstance(each, Chat)]
    hashes = [{each for one in trace for each in one["hash_ids"]} for trace in traces]
    assert len(hashes) == 2
    assert not hashes[0] & hashes[1]


@pytest.mark.parametrize("scale", [FULL, SHORT])
def test_contexts_are_four_device_caches_and_one_and_a_half_of_the_hosts(
    scale: traffic.Scale, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(servers, "token_nbytes", lambda model, dtype: 46_080)
    (tmp_path / "config.json").write_text("{}")
    sizes = scale.sizes(tmp_path, "float32")
    contexts = 64 + scale.users * scale.turns * scale.turn_tokens
    assert sizes.host_tokens == pytest.approx(contexts / 1.5, abs=1)
    assert sizes.device_tokens == max(-(-contexts // 4), 2 * sizes.max_tokens)
    assert sizes.host_nbytes >= sizes.host_tokens * 46_080
    assert sizes.host_nbytes % (1 << 20) == 0
    assert sizes.max_tokens > scale.longest


def test_layers_with_states_and_windows_take_no_part_of_a_caches_bytes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(servers, "token_nbytes", lambda model, dtype: 4 << 20)
    kinds = ["conv", "full_attention", "sliding_attention", "conv"]
    (tmp_path / "config.json").write_text(json.dumps({"layer_types": kinds}))
    sizes = FULL.sizes(tmp_path, "float32")
    assert sizes.device_nbytes == sizes.device_tokens << 20


def test_prefixes_are_half_or_twice_the_devices_cache() -> None:
    fits, prefix = FULL.workloads(["fits", "prefix"], MODEL, NO_GENERATORS)
    assert isinstance(fits, traffic.Prefixes)
    assert isinstance(prefix, traffic.Prefixes)
    device = FULL.sizes(MODEL, "float32").device_tokens
    assert fits.tokens == pytest.approx(device / 2, rel=0.25)
    assert prefix.tokens == pytest.approx(2 * device, rel=0.25)
    for made in (fits, prefix):
        assert made.requests % made.prefixes == 0
        assert made.requests >= 2 * made.prefixes


def test_documents_come_in_new_orders_and_questions_once() -> None:
    [made] = FULL.workloads(["rag"], MODEL, NO_GENERATORS)
    assert isinstance(made, Rag)
    trace = made.trace()
    assert len(trace) == FULL.requests
    length, shared = made.document_tokens // CHUNK, made.shared_tokens // CHUNK
    orders, questions = set(), []
    for request in trace:
        hashes = request["hash_ids"][shared:]
        texts, question = hashes[: made.found * length], hashes[made.found * length :]
        parts = [tuple(texts[n : n + length]) for n in range(0, len(texts), length)]
        assert len(set(parts)) == made.found
        assert all(part == tuple(range(part[0], part[0] + length)) for part in parts)
        orders.add(tuple(part[0] for part in parts))
        questions += question
    assert len(questions) == len({*questions})
    first = [order[0] for order in orders]
    assert len({*first}) <= made.documents < len(trace)  # so each document comes back
    assert len(orders) > len(trace) * 3 // 4  # and hardly ever behind the same ones
    longest = made.shared_tokens + made.found * made.document_tokens + made.question_tokens
    assert longest + made.answer_tokens <= FULL.longest


def test_agents_leave_room_for_a_template_in_each_turn() -> None:
    [made] = FULL.workloads(["agents"], MODEL, Generators(Path("python"), None))
    assert isinstance(made, Agents)
    config = made.config()
    assert config["max_prompt_tokens"] == made.max_tokens == FULL.longest * 3 // 4
    cache = config["cache"]
    starts = [cache["layer1_tokens"], cache["layer1_5_tokens"], cache["layer2"]["max"]]
    assert sum(starts) < made.max_tokens * 3 // 4  # a session has several turns
    turns = made.max_tokens // (made.turn_tokens + made.answer_tokens)
    sizes = FULL.sizes(MODEL, "float32")
    assert made.max_tokens + (turns + 1) * TEMPLATE <= sizes.max_tokens


@pytest.mark.parametrize("name", ["talk", "agents", "documents"])
def test_a_generator_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(SystemExit, match=r"tools\.env_load"):
        list(FULL.workloads([name], MODEL, NO_GENERATORS))


def test_options_change_the_sizes() -> None:
    options = load.parse(["--users", "5", "--rates", "2", "3", "--at-once", "2"])
    scale = load.scale_of(options)
    assert (scale.users, scale.rates, scale.at_once) == (5, (2.0, 3.0), 2)
    assert scale.turns == FULL.turns
    assert load.parse(["--short"]).contenders == ["alone", "kvcore"]
    with pytest.raises(SystemExit):
        load.parse(["--contenders", "lmcache"])


# --- what generators and engines write ------------------------------------------------------------


def test_results_of_vllm_bench_serve() -> None:
    result = {
        "request_throughput": 2.0, "output_throughput": 64.0, "median_ttft_ms": 150.0,
        "p99_ttft_ms": 900.0, "median_itl_ms": 20.0, "p99_itl_ms": 300.0, "failed": 1,
        "generated_texts": ["a", "b"], "completed": 1,
    }  # fmt: skip
    assert traffic.of_vllm(result) == Served(2.0, 64.0, 150.0, 900.0, 20.0, 300.0, 1, ("a", "b"))


def test_results_of_aiperf() -> None:
    result = {
        "request_throughput": {"avg": 2.0, "unit": "requests/sec"},
        "output_token_throughput": {"avg": 64.0},
        "time_to_first_token": {"p50": 150.0, "p99": 900.0},
        "inter_token_latency": {"p50": 20.0, "p99": 300.0},
    }
    assert traffic.of_aiperf(result) == Served(2.0, 64.0, 150.0, 900.0, 20.0, 300.0, 0)
    assert traffic.of_aiperf({**result, "error_request_count": {"avg": 3.0}}).failed == 3


def test_results_of_lmcache() -> None:
    result = {
        "config": {},
        "results": {
            "successful_requests": 8, "failed_requests": 0, "elapsed_time": 4.0,
            "output_throughput": 64.0, "p50_ttft_ms": 150.0, "p99_ttft_ms": 900.0,
        },
    }  # fmt: skip
    assert traffic.of_lmcache(result) == Served(2.0, 64.0, 150.0, 900.0, None, None, 0)


def test_tokens_from_metrics() -> None:
    text = """# TYPE vllm:prompt_tokens_by_source counter
vllm:prompt_tokens_by_source_total{engine="0",model_name="load",source="local_compute"} 1.2e+03
vllm:prompt_tokens_by_source_total{engine="1",model_name="load",source="local_compute"} 300.0
vllm:prompt_tokens_by_source_total{engine="0",source="local_cache_hit"} 128.0
vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"} 64.0
vllm:prompt_tokens_by_source_created{engine="0",source="local_compute"} 1.7e+09
vllm:prompt_tokens_total{engine="0"} 5.0
"""
    assert servers.tokens_of(text) == Tokens(1692, 1500, 128, 64)
    assert servers.tokens_of(text).since(Tokens(692, 500, 128, 64)) == Tokens(1000, 1000, 0, 0)
    assert servers.tokens_of("") == Tokens(0, 0, 0, 0)


def test_tokens_from_sglangs_metrics() -> None:
    text = """
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{is_streaming="true",model_name="load"} 700.0
sglang:prompt_tokens_total{is_streaming="false",model_name="load"} 300.0
sglang:cached_tokens_total{cache_source="device",model_name="load"} 200.0
sglang:cached_tokens_total{cache_source="host",model_name="load"} 64.0
sglang:cached_tokens_total{cache_source="storage",model_name="load"} 16.0
"""
    assert sglang.tokens_of(text) == Tokens(1000, 720, 200, 80)
    assert sglang.tokens_of("") == Tokens(0, 0, 0, 0)


def test_contenders_are_those_of_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert load.parse(["--engine", "sglang"]).contenders == [*load.DEFAULT["sglang"]]
    assert {*sglang.CONTENDERS} - {*load.DEFAULT["sglang"]} == {"kvcore-planned"}
    for wrong, told in (
        (["--engine", "sglang", "--contenders", "lmcache"], "sglang has no lmcache"),
        (["--contenders", "hicache"], "vllm has no hicache"),
        (["--engine", "sglang", "--arch", "lfm2"], "is for vLLM"),
    ):
        with pytest.raises(SystemExit):
            load.parse(wrong)
        assert told in capsys.readouterr().err


def test_memory_of_one_session(tmp_path: Path) -> None:
    for pid, session, kib in ((10, 10, 100), (11, 10, 20), (12, 99, 7)):
        folder = tmp_path / str(pid)
        folder.mkdir()
        (folder / "stat").write_text(f"{pid} (VLLM::Engine (x)) S 1 {pid} {session} 0 -1\n")
        (folder / "smaps_rollup").write_text(f"Rss:  999 kB\nPss:    {kib} kB\nPss_Anon: 1 kB\n")
    (tmp_path / "meminfo").write_text("")
    (tmp_path / "13").mkdir()  # it has ended meanwhile
    assert servers.held_nbytes(10, tmp_path) == 120 << 10


def test_a_hub_with_the_models_tokenizer(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("tokenizer.json", "chat_template.jinja", "model.safetensors"):
        (model / name).write_text(name)
    home = traffic.hub_of(model, tmp_path / "home")
    folder = home / "hub" / "models--kvcore--smollm2"
    snapshot = folder / "snapshots" / (folder / "refs" / "main").read_text()
    assert {path.name for path in snapshot.iterdir()} == {"tokenizer.json", "chat_template.jinja"}


# --- processes ------------------------------------------------------------------------------------


def test_a_process_is_stopped_with_its_children(tmp_path: Path) -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'], stdin=-1)"
    process = servers.Process([sys.executable, "-c", code], tmp_path / "log")
    limit = time.monotonic() + 30
    while servers.held_nbytes(process.session) == 0 and time.monotonic() < limit:
        time.sleep(0.05)
    process.stop()
    assert servers.held_nbytes(process.session) == 0


def test_one_that_ends_is_not_waited_for(tmp_path: Path) -> None:
    process = servers.Process([sys.executable, "-c", "print('no port')"], tmp_path / "log")
    with pytest.raises(SystemExit, match="no port"):
        process.wait_until(lambda: False, "the engine")
    process.stop()


# --- ratios and bars ------------------------------------------------------------------------------


def test_numbers_are_medians_and_ratios_are_to_the_engine_alone() -> None:
    found = {
        ("alone", CHAT): [measured(100), measured(50), measured(200)],
        ("kvcore", CHAT): [measured(150), measured(300), measured(250)],
    }
    alone, ours = load.rows(found)
    assert (alone["tokens_s"], ours["tokens_s"]) == (100, 250)
    assert (alone["tokens_s_to_alone"], ours["tokens_s_to_alone"]) == (1, 2.5)
    assert (ours["asked"], ours["computed"], ours["from_cache"]) == (1000, 400, 500)
    assert ours["memory_mib"] == 3
    assert set(ours) == {*load.PLACE, *load.SPEED, *load.WORK, *load.RATIOS}


def test_the_best_other_is_none_of_kvcores() -> None:
    found = {
        (name, CHAT): [measured(tokens, ttft)]
        for name, tokens, ttft in (
            ("alone", 100, 1000), ("lmcache", 200, 500), ("kvcore", 300, 250),
            ("kvcore-disk", 400, 100),
        )
    }  # fmt: skip
    rows = {row["contender"]: row for row in load.rows(found)}
    assert {name: row["tokens_s_to_best"] for name, row in rows.items()} == {
        "alone": 0.5, "lmcache": 2.0, "kvcore": 1.5, "kvcore-disk": 2.0,
    }  # fmt: skip
    assert rows["kvcore"]["ttft_p99_ms_to_best"] == 0.5


def test_without_the_engine_alone_there_are_no_ratios() -> None:
    [row] = load.rows({("kvcore", CHAT): [measured(texts=("a",))]})
    assert row["tokens_s_to_alone"] is None
    assert row["answers_differ"] is None


def test_a_time_that_no_generator_measured() -> None:
    found = {("alone", CHAT): [measured(itl=None)], ("kvcore", CHAT): [measured(itl=None)]}
    row = load.rows(found)[1]
    assert row["itl_p99_ms"] is None
    assert row["itl_p99_ms_to_alone"] is None
    assert "inter-token time, p99" not in {bar.what for bar in load.bars(found, {})}


def test_answers_that_differ_are_counted_over_all_rounds() -> None:
    found = {
        ("alone", CHAT): [measured(texts=("a", "b")), measured(texts=("a", "b"))],
        ("kvcore", CHAT): [measured(texts=("a", "x"), failed=1), measured(texts=("a",))],
    }
    alone, ours = load.rows(found)
    assert (alone["answers_differ"], ours["answers_differ"], ours["failed"]) == (0, 2, 1)


def test_bars_are_against_the_best_of_the_others() -> None:
    found = {
        ("alone", CHAT): [measured(100, ttft=1000, itl=50)],
        ("offloading", CHAT): [measured(200, ttft=900, itl=80)],
        ("offloading-fs", CHAT): [measured(190, ttft=800, itl=80)],
        ("kvcore", CHAT): [measured(220, ttft=700, itl=52)],
        ("alone", FITS): [measured(100)],
        ("offloading", FITS): [measured(200)],
        ("kvcore", FITS): [measured(98)],
    }
    probed = {
        "alone": [Probed(("a", "b"), 0)],
        "offloading": [Probed(("a", "c"), 9)],
        "kvcore": [Probed(("a", "b"), 9), Probed(("a", "c"), 9)],
    }
    bars = {(bar.place.workload, bar.what): bar for bar in load.bars(found, probed)}
    assert {at: (bar.against, round(bar.ratio, 3), bar.met) for at, bar in bars.items()} == {
        ("chat", "tokens a second"): ("offloading", 1.1, True),
        ("chat", "TTFT, p99"): ("offloading-fs", 0.875, False),
        ("chat", "inter-token time, p99"): ("alone", 1.04, True),
        ("fits", "tokens a second"): ("alone", 0.98, False),
        ("probes", "probes that differ"): ("alone", 1, False),
    }


def test_another_contender_begins_each_round() -> None:
    assert [load.turned("abc", n) for n in range(4)] == [
        ["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"],
    ]  # fmt: skip


def test_reports_and_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    slow = Place("chat", 0.5)
    found = {(name, at): [measured()] for name in ("alone", "kvcore") for at in (slow, CHAT, FITS)}
    probed = {name: [Probed(("a",), 4)] for name in ("alone", "kvcore")}
    picture = tmp_path / "pictures" / "load.png"
    load.report_load(found, {}, tmp_path, picture)
    load.report_probes(probed, tmp_path)
    load.report_bars(load.bars(found, probed), tmp_path)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in tmp_path.glob("*.json")} == {
        "load.json", "load_work.json", "load_ratios.json", "load_probes.json", "load_bars.json",
    }  # fmt: skip
    said = capsys.readouterr().out
    assert "met" in said
    assert "missed" in said
