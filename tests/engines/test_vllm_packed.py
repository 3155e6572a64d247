"""Models whose pages kvcore stores as they are, on vLLM: two caches in a layer, and unlike heads.

And those whose ranks have other tokens of a page each: context parallelism.

vLLM's kernels for sparse attention and for scales beside values need a GPU. So layers of Llama get
a second attention here (`tests/engines/sides`): two caches of one layer that have unlike sizes and
share a page table, of which vLLM tells its scheduler one. So are those for context parallelism, and
`tests/engines/context` has ranks attend to the tokens of all. Right answers are then those of as
many ranks without it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

pytest.importorskip("vllm")

from kvcore.harness.compare import answers, assert_same_answers, settle_and_empty
from kvcore.harness.compare import small_engine as engine
from kvcore.harness.engine_process import EngineProcess, Generation
from kvcore.harness.models import tiny_model
from kvcore.harness.prompts import words
from kvcore.testing.conformance import CASES, Kit, run
from kvcore.testing.conformance.driver import Engine, Setup
from kvcore_devtools.server_fixture import RunningServer
from kvcore_devtools.server_fixture import settings as server_settings
from kvcore_vllm.testing.conformance import STAGED, VllmDriver
from kvcore_vllm.testing.rig import V2
from support.environments import kinds_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

HERE = Path(__file__).parent
PYTHONPATH = os.environ.get("PYTHONPATH", "")
VOCABULARY, PAGE = 512, 32
ANSWER = 12


class Kind(NamedTuple):
    """A kind of model, and how it is started."""

    plugin: str
    args: dict[str, Any]
    env: Mapping[str, str] = MappingProxyType({})
    python: str = ""
    page: int = PAGE


SMALL = {"block_size": PAGE}
DIVIDED = {**SMALL, "tensor_parallel_size": 2, "decode_context_parallel_size": 2}
RUNS = {**DIVIDED, "cp_kv_cache_interleave_size": 8}
# The kernel takes pages of 16 tokens. On a CPU with AMX vLLM would choose one without float32.
LATENTS = {
    **DIVIDED, "block_size": PAGE // 2, "attention_backend": "CPU_MLA",
    "num_gpu_blocks_override": 160,
}  # fmt: skip
KINDS = {
    "sides": Kind("sides", SMALL),
    "sides-v2": Kind("sides", SMALL, V2),
    "sides-ranks": Kind("sides", {**SMALL, "tensor_parallel_size": 2}),
    # One stage has two layers, the other one: what a rank keeps of a block differs.
    "sides-stages": Kind("sides", {**SMALL, **STAGED, "pipeline_parallel_size": 2}),
    "sides-0.30": Kind("sides", SMALL, python="vllm-0.30"),
    "sides-0.33": Kind("sides", SMALL, python="vllm-0.33"),
    # The draft has heads of its own, fewer than the model's.
    "draft": Kind("", SMALL),
    "context": Kind("context", DIVIDED, page=2 * PAGE),
    "context-runs": Kind("context", RUNS, page=2 * PAGE),
    "context-v2": Kind("context", RUNS, V2, page=2 * PAGE),
    "context-latents": Kind("context", LATENTS, page=PAGE),
    "context-0.30": Kind("context", DIVIDED, python="vllm-0.30", page=2 * PAGE),
    "context-0.33": Kind("context", RUNS, python="vllm-0.33", page=2 * PAGE),
}
DAILY = ("sides",)
OF_CONTEXT = {"decode_context_parallel_size", "cp_kv_cache_interleave_size"}


class Served(NamedTuple):
    """A running engine. ``mistake`` is the file that has kvcore leave caches out."""

    process: EngineProcess
    kind: Kind
    mistake: Path

    def ask(self, prompts: Sequence[Sequence[int]], salt: str, batch: int = 1) -> list[Generation]:
        return answers(
            self.process, prompts, batch=batch, cache_salt=salt, logprobs=True, max_tokens=ANSWER
        )


kind = kinds_of(KINDS, DAILY)


@pytest.fixture(scope="module")
def folder(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packed")


@pytest.fixture(scope="module")
def served(kind: Kind, folder: Path) -> Iterator[Served]:
    with started(kind, folder) as process:
        yield Served(process, kind, folder / "mistake")


def started(kind: Kind, folder: Path | None, more: dict[str, Any] | None = None) -> Any:
    """An engine with kvcore, or without it where no folder is given."""
    config, options = None, dict(kind.args)
    if folder is not None:
        disk = {"disk": {"path": str(folder / "kv"), "capacity": "256MiB"}}
        config = {"host": {"capacity": "64MiB"}, **(more or disk)}
    else:
        options = {name: value for name, value in options.items() if name not in OF_CONTEXT}
        options["enable_prefix_caching"] = False
    env = {**kind.env}
    if kind.plugin and (options.keys() & OF_CONTEXT or kind.plugin == "sides"):
        env["PYTHONPATH"] = os.pathsep.join([str(HERE / kind.plugin), PYTHONPATH])
        env[f"KVCORE_{kind.plugin.upper()}"] = str(folder / "mistake") if folder is not None else ""
    if "attention_backend" in options:
        model = tiny_model(
            "deepseek_v2", layers=3, heads=4, kv_heads=4, head_dim=64, latent=(512, 64),
            vocabulary=VOCABULARY,
        )  # fmt: skip
    elif kind.plugin:
        heads = 1 if kind.plugin == "context" else 2
        model = tiny_model("llama", layers=3, heads=4, kv_heads=heads, vocabulary=VOCABULARY)
    else:
        model = tiny_model("llama", layers=3, heads=4, kv_heads=4, vocabulary=VOCABULARY)
        draft = tiny_model("llama", layers=1, heads=4, kv_heads=1, vocabulary=VOCABULARY)
        told = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}
        options["speculative_config"] = told
    python = {"python": kind.python} if kind.python else {}
    return engine(model, config, env=env, **python, **options)


def prompt(seed: int, length: int = 300) -> list[int]:
    return words(seed, length, range(1, VOCABULARY - 8))


def held(tokens: int, kind: Kind) -> int:
    """The tokens of a stored prompt that come back: whole blocks, and not its last token."""
    return (tokens - 1) // kind.page * kind.page


def assert_same(got: Sequence[Generation], right: Sequence[Generation]) -> None:
    """With float32 a wrong byte shows in the log-probabilities before it changes a token."""
    assert_same_answers(got, right)
    for mine, theirs in zip(got, right, strict=True):
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


def test_answers_are_those_of_the_engine_alone(served: Served) -> None:
    """Cold, from host memory, and where two prompts part."""
    first = [prompt(i, 200 + 70 * i) for i in range(3)]
    forked = [[*asked[:150], *prompt(10 + i, 60)] for i, asked in enumerate(first)]
    with started(served.kind, None) as alone:
        right = [
            answers(alone, asked, logprobs=True, max_tokens=ANSWER) for asked in (first, forked)
        ]
    assert len({str(answer.token_ids) for answer in right[0]}) == len(first)
    assert_same(served.ask(first, "alone"), right[0])
    settle_and_empty(served.process)
    warm = served.ask(first, "alone")
    assert_same(warm, right[0])
    assert [answer.tiers for answer in warm] == [
        {"host": held(len(asked), served.kind)} for asked in first
    ]
    settle_and_empty(served.process)
    parting = served.ask(forked, "alone")
    assert_same(parting, right[1])
    assert [answer.tiers for answer in parting] == [{"host": held(151, served.kind)}] * 3


def test_many_at_once_and_aborts(served: Served) -> None:
    prompts = [prompt(30 + i, 400 - 50 * i) for i in range(6)]
    cold = served.ask(prompts, "one at a time")
    settle_and_empty(served.process)
    for _ in range(2):
        assert_same_answers(served.ask(prompts, "together", batch=6), cold)
        settle_and_empty(served.process)
    calls: list[Future[Generation]] = [
        served.process.submit(asked, 8, cache_salt="together", abort_after=i % 3)
        for i, asked in enumerate(prompts)
    ]
    for call in calls:
        call.result(600)
    settle_and_empty(served.process)
    warm = served.ask(prompts, "together")
    assert_same(warm, cold)
    assert [answer.reused_tokens for answer in warm] == [
        held(len(one), served.kind) for one in prompts
    ]


def test_a_cache_that_is_left_out_shows(served: Served) -> None:
    """Without this the tests above would prove nothing."""
    if not served.kind.plugin:
        pytest.skip("a draft never changes an answer")
    asked = [prompt(50)]
    cold = served.ask(asked, "left out")
    settle_and_empty(served.process)
    served.mistake.touch()
    try:
        spoiled = served.ask(asked, "left out")
    finally:
        served.mistake.unlink()
    assert spoiled[0].reused_tokens
    settle_and_empty(served.process)
    assert spoiled[0].logprobs != pytest.approx(cold[0].logprobs, abs=1e-4)
    settle_and_empty(served.process)
    assert_same(served.ask(asked, "left out"), cold)


def test_a_restart_finds_what_was_stored(served: Served, folder: Path, tmp_path: Path) -> None:
    """It starts another engine, on a copy of the disk."""
    prompts = [prompt(60), prompt(61, 200)]
    cold = served.ask(prompts, "restart")
    served.process.settle()
    shutil.copytree(folder / "kv", tmp_path / "kv")
    with started(served.kind, tmp_path) as process:
        warm = served._replace(process=process).ask(prompts, "restart")
        assert_same(warm, cold)
        assert [answer.tiers for answer in warm] == [
            {"disk": held(len(one), served.kind)} for one in prompts
        ]


@pytest.mark.exhaustive
def test_another_division_of_pages_finds_nothing(
    served: Served, folder: Path, tmp_path: Path
) -> None:
    """It starts another engine, on a copy of the disk."""
    if served.kind.plugin != "context":
        pytest.skip("its ranks have all tokens of a page")
    prompts = [prompt(70), prompt(71, 200)]
    cold = served.ask(prompts, "division")
    served.process.settle()
    shutil.copytree(folder / "kv", tmp_path / "kv")
    other = served.kind._replace(args={**served.kind.args, "cp_kv_cache_interleave_size": 4})
    with started(other, tmp_path) as process:
        found = served._replace(process=process).ask(prompts, "division")
        assert_same(found, cold)
        assert [answer.tiers for answer in found] == [{}] * 2


@pytest.mark.exhaustive
def test_a_server_and_a_store_give_what_another_engine_wrote(kind: Kind, tmp_path: Path) -> None:
    options = {"path": str(tmp_path / "shared"), "lookup_s": 60.0}
    far = {"tiers": {"far": {"plugin": "files", "capacity": "1GiB", "options": options}}}
    disk = {"path": str(tmp_path / "disk"), "capacity": "256MiB"}
    config = server_settings(tmp_path / "kv", disk=disk, host={"capacity": "64MiB"})
    address = {"server": config.server.model_dump(mode="json")}
    asked = [prompt(80), prompt(81, 200)]
    for tier, settings, place in (("far", far, "far"), ("disk", address, "served")):
        for turn in range(2):
            with closing(RunningServer(config)), started(kind, tmp_path, settings) as process:
                served = Served(process, kind, tmp_path / "mistake")
                cold = served.ask(asked, "cold")
                warm = served.ask(asked, place)
                assert_same(warm, cold)
                if turn:
                    found = [answer.tiers for answer in warm]
                    assert found == [{tier: held(len(one), kind)} for one in asked]
                process.settle()


CASES_OF_CONTEXT = {
    "host-hit", "partial-hit", "page-borders", "next-turn", "many-at-once", "shared-prefixes",
    "asked-again-at-once", "abort-while-saving", "abort-while-loading", "chunked-prefill",
    "preemption", "disk-hit-after-restart", "clear-forgets", "corrupt-block", "vanished-block",
    "a-read-that-fails",
}  # fmt: skip


class Divided(VllmDriver):
    """An engine with two ranks, which divide each page of 16 tokens if kvcore serves it."""

    name = "vllm:context"

    def start(self, setup: Setup) -> Engine:
        found = [HERE / "context", *map(Path, filter(None, PYTHONPATH.split(os.pathsep)))]
        return super().start(replace(setup, path=(*setup.path, *found)))

    def arguments(self, setup: Setup) -> dict[str, Any]:
        made = super().arguments(setup) | {"tensor_parallel_size": 2}
        if setup.kvcore is not None:
            made |= {**RUNS, "block_size": 8, "cp_kv_cache_interleave_size": 4}
            if setup.memory_tokens is not None:
                made["num_gpu_blocks_override"] = setup.memory_tokens // 16
        return made


@pytest.mark.exhaustive
@pytest.mark.parametrize("asynchronous", [False, True])
def test_cases_of_the_kit_with_context_parallelism(asynchronous: bool, tmp_path: Path) -> None:
    driver = Divided()
    driver.asynchronous = asynchronous
    model = tiny_model("llama", layers=4, heads=4, kv_heads=1, vocabulary=driver.vocabulary)
    with Kit(driver, tmp_path, model=model) as kit:
        results = run(kit, [case for case in CASES if case.name in CASES_OF_CONTEXT])
    found = {result.case: (result.outcome, result.why) for result in results}
    assert found == dict.fromkeys(CASES_OF_CONTEXT, ("passed", ""))
