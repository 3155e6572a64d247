"""Models with resume points, on vLLM: layers with states (hybrids) and layers with windows.

Such a model can go on only where its states are at hand, at boundaries of which vLLM keeps them, or
where the ends of its windows were saved.
A state of zeros need not change the likeliest token of so small a model, so log-probabilities are
compared too, and mistakes are planted that must show (`tests/engines/spoiling`).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

pytest.importorskip("vllm")
import torch

from kvcore.harness.compare import answers, assert_same_answers, counted, settle_and_empty
from kvcore.harness.compare import small_engine as engine
from kvcore.harness.engine_process import EngineProcess, Generation
from kvcore.harness.models import tiny_deepseek_v4, tiny_model, tiny_mtp
from kvcore.harness.prompts import words
from kvcore_devtools.server_fixture import RunningServer
from kvcore_devtools.server_fixture import settings as server_settings
from kvcore_vllm.testing.conformance import STAGED
from kvcore_vllm.testing.rig import V1_INTERPRETED, V2
from support.environments import kinds_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

HERE = Path(__file__).parent
VOCABULARY = 512
BLOCK, LENGTH = 8, 900
AS_NEAR = 1e-4
"""How near log-probabilities in float32 are, where the same is computed."""


class Kind(NamedTuple):
    """A kind of model, and how it is started. vLLM keeps states every ``step`` tokens.

    Windows are kept at any block.
    """

    arch: str
    step: int
    args: dict[str, Any]
    env: Mapping[str, str] = MappingProxyType({})
    python: str = ""


def both(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The arguments of both, with the settings of compilation of both."""
    name = "compilation_config"
    return {**one, **other, name: {**one.get(name, {}), **other.get(name, {})}}


# vLLM's CPU kernel rotates a part of LFM2's heads, by positions that depend on the chunk.
LFM2 = {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}
WINDOWS = ("gpt_oss", "gemma3", "gemma4", "deepseek_v4")
# One of its two layers with attention has a window.
WINDOWED = {"KVCORE_WINDOW": "100"}
# Its layers with attention have two caches each, so that blocks keep vLLM's pages as they are.
SIDES = {"KVCORE_SIDES": ""}
# vLLM's CPU build forgets a block size that it chose itself, and then keeps few states.
QWEN = {"dtype": "bfloat16", "block_size": 384}
# Drafts by n-gram end vLLM's CPU build itself, at a step that has none beside one that has some.
MTP = {"method": "mtp", "num_speculative_tokens": 2}
V4 = {"dtype": "bfloat16", "max_model_len": 4096}
# A stage of LFM2 has one layer of attention and two of states, and the other two and one.
STAGES = {**STAGED, "pipeline_parallel_size": 2}
KINDS = {
    "lfm2": Kind("lfm2", 128, LFM2),
    "lfm2-ranks": Kind("lfm2", 128, {**LFM2, "tensor_parallel_size": 2}),
    "lfm2-stages": Kind("lfm2", 128, both(LFM2, STAGES)),
    "lfm2-tails": Kind("lfm2", 64, {**LFM2, "block_size": 256, "prefix_match_unit": 64}),
    "lfm2-windows": Kind("lfm2", 128, LFM2, WINDOWED),
    "lfm2-windows-v2": Kind("lfm2", 128, LFM2, {**WINDOWED, **V2}),
    "lfm2-windows-0.33": Kind("lfm2", 128, LFM2, WINDOWED, "vllm-0.33"),
    "lfm2-packed": Kind("lfm2", 128, LFM2, SIDES),
    "lfm2-packed-ranks": Kind("lfm2", 128, {**LFM2, "tensor_parallel_size": 2}, SIDES),
    "qwen3_next": Kind("qwen3_next", 384, QWEN),
    # vLLM 0.30's kernel for CPUs takes no convolutions as wide as LFM2's.
    "qwen3_next-0.30": Kind("qwen3_next", 384, QWEN, python="vllm-0.30"),
    "qwen3_next-mtp": Kind("qwen3_next", 384, {**QWEN, "speculative_config": MTP}, V1_INTERPRETED),
    "qwen3_next-tails": Kind("qwen3_next", 128, {**QWEN, "prefix_match_unit": 128}),
    "granite4": Kind("granite4", 128, {}),
    "falcon_h1": Kind("falcon_h1", 128, {}),
    # Its pages are vLLM's own, and what is near a token lies in four groups of windows.
    "deepseek_v4": Kind("deepseek_v4", 256, V4, V1_INTERPRETED),
    "deepseek_v4-ranks": Kind(
        "deepseek_v4", 256, {**V4, "tensor_parallel_size": 2}, V1_INTERPRETED
    ),
    "gpt_oss": Kind("gpt_oss", 128, {}),
    "gpt_oss-v2": Kind("gpt_oss", 128, {}, V2),
    "gpt_oss-0.33": Kind("gpt_oss", 128, {}, python="vllm-0.33"),
    "gemma3-ranks": Kind("gemma3", 128, {"tensor_parallel_size": 2}),
    "gpt_oss-stages": Kind("gpt_oss", 128, STAGES),
    "gpt_oss-stages-v2": Kind("gpt_oss", 128, STAGES, V2),
    "gpt_oss-stages-0.33": Kind("gpt_oss", 128, STAGES, python="vllm-0.33"),
    "gemma4-stages": Kind("gemma4", 128, {**STAGES, "max_num_batched_tokens": 256}),
    "gemma4": Kind("gemma4", 128, {"max_num_batched_tokens": 256}),
    "gemma4-ranks": Kind("gemma4", 128, {"tensor_parallel_size": 2}),
    "gemma4-0.30": Kind("gemma4", 128, {}, python="vllm-0.30"),
}
DAILY = ("lfm2-windows", "gemma4", "deepseek_v4")
"""Groups of states, of windows and of attention; windows of unlike heads; pages of vLLM's own."""


class Served(NamedTuple):
    """A running engine. ``spoil`` is the file that has the mistake to make."""

    process: EngineProcess
    kind: Kind
    spoil: Path

    def ask(self, prompts: Sequence[Sequence[int]], salt: str, batch: int = 1) -> list[Generation]:
        return answers(self.process, prompts, batch=batch, cache_salt=salt, logprobs=True)

    def resumed(self, prompt: Sequence[int]) -> int:
        """How many tokens of a prompt that was stored come back. The last one is computed.

        With MTP vLLM keeps the states of the boundary before, whose next token is in the prompt.
        """
        if self.kind.arch in WINDOWS:
            block = self.kind.step if self.kind.arch == "deepseek_v4" else BLOCK
            return min(len(prompt) // block * block, len(prompt) - 1)
        if self.kind.args.get("speculative_config") is MTP:
            return (len(prompt) // self.kind.step - 1) * self.kind.step
        return (len(prompt) - 1) // self.kind.step * self.kind.step

    def junction(self, shared: Sequence[int]) -> int:
        """How many come back of a beginning that two earlier prompts have in common.

        vLLM keeps states there at the end of one of its pages.
        """
        if self.kind.arch in WINDOWS:
            return self.resumed([*shared, 0])
        page = self.kind.args.get("block_size", self.kind.step)
        return len(shared) // page * page

    def told(self, tier: str, prompt: Sequence[int]) -> dict[str, int]:
        """What an answer tells of a prompt that was stored."""
        return {tier: tokens} if (tokens := self.resumed(prompt)) else {}

    @contextmanager
    def mistake(self, name: str) -> Iterator[None]:
        """The engine makes this mistake in the block."""
        self.spoil.write_text(name)
        try:
            yield
        finally:
            self.spoil.unlink()

    def is_exact(self) -> bool:
        return self.kind.args.get("dtype") is None or self.kind.arch == "deepseek_v4"


kind = kinds_of(KINDS, DAILY)


@pytest.fixture(scope="module")
def folder(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("states")


@pytest.fixture(scope="module")
def served(kind: Kind, folder: Path) -> Iterator[Served]:
    with started(kind, folder) as process:
        yield Served(process, kind, folder / "spoil")


def model_of(kind: Kind, **more: Any) -> Path:
    """A model whose states take several rows of blocks."""
    if kind.arch == "deepseek_v4":
        if not torch.cpu._is_amx_tile_supported():
            pytest.skip("vLLM's kernels of DeepSeek V4 need a processor with AMX")
        return tiny_deepseek_v4()
    heads = {"heads": 8 if kind.arch == "lfm2" else 4, "kv_heads": 2}
    layers = 6 if kind.arch in ("lfm2", *WINDOWS) else 4
    made = tiny_model(
        kind.arch, layers=layers, head_dim=64, sliding_window=128, vocabulary=VOCABULARY,
        **{**heads, **more},
    )  # fmt: skip
    return tiny_mtp(made) if kind.args.get("speculative_config") is MTP else made


def started(
    kind: Kind, folder: Path, tier: dict[str, Any] | None = None, kv_heads: int = 0, **more: Any
) -> Any:
    """An engine with kvcore, with blocks of eight tokens."""
    model = model_of(kind, kv_heads=kv_heads) if kv_heads else model_of(kind)
    disk = {"disk": {"path": str(folder / "kv"), "capacity": "256MiB"}}
    config = {
        "block": {"tokens": BLOCK},
        "host": {"capacity": "64MiB"},
        "transfer": {"load_deadline_s": 600},
        **(tier or disk),
    }
    env = {**environment(kind, "spoiling"), "KVCORE_SPOIL": str(folder / "spoil")}
    python = {"python": kind.python} if kind.python else {}
    return engine(model, config, env=env, **python, **kind.args, **more)


def environment(kind: Kind, *plugins: str) -> dict[str, str]:
    """Environment variables of an engine, with these folders of plugins."""
    own = ["deepseek_v4"] if kind.arch == "deepseek_v4" else []
    own += ["windowed"] if "KVCORE_WINDOW" in kind.env else []
    own += ["sides"] if "KVCORE_SIDES" in kind.env else []
    path = [*(str(HERE / name) for name in (*plugins, *own)), os.environ.get("PYTHONPATH", "")]
    return {**kind.env, "PYTHONPATH": os.pathsep.join(path)}


def prompt(seed: int, length: int = LENGTH) -> list[int]:
    return words(seed, length, range(1, VOCABULARY - 8))


def logprobs(got: Sequence[Generation]) -> list[float]:
    return [each for answer in got for each in answer.logprobs]


def assert_same(served: Served, got: Sequence[Generation], right: Sequence[Generation]) -> None:
    assert_same_answers(got, right)
    if served.is_exact():  # with float32 a wrong byte shows before it changes a token
        assert logprobs(got) == pytest.approx(logprobs(right), abs=AS_NEAR)


def test_answers_are_those_of_the_engine_alone(served: Served) -> None:
    """Later tests compare an answer with the first one, for which all was computed."""
    if not served.is_exact() or served.kind.python:
        pytest.skip("vLLM without its prefix cache computes in other pieces")
    prompts = [prompt(1), prompt(2, 130), prompt(3, 64)]
    kind = served.kind
    own = kind.arch == "deepseek_v4" or not {*WINDOWED, *SIDES}.isdisjoint(kind.env)
    args = kind.args if own else {n: v for n, v in kind.args.items() if n in LFM2}
    env = environment(kind) if own else None
    with engine(model_of(kind), None, env=env, enable_prefix_caching=False, **args) as alone:
        right = answers(alone, prompts, logprobs=True)
    assert len({str(answer.token_ids) for answer in right}) == len(prompts)
    got = served.ask(prompts, "alone")
    assert not any(answer.reused_tokens for answer in got)
    assert_same(served, got, right)


def test_a_prompt_goes_on_from_its_last_state(served: Served) -> None:
    prompts = [prompt(10), prompt(11, 2 * served.kind.step + 1)]
    if "vllm-0.30" not in served.kind.python:  # it keeps the state at the end of such a prompt only
        # A step of one token rounds bfloat16 otherwise in one of these prompts, not in the other.
        seed = 51 if served.kind.arch == "deepseek_v4" else 12
        prompts.append(prompt(seed, 2 * served.kind.step))
    cold = served.ask(prompts, "last")
    for _ in range(2):
        settle_and_empty(served.process)
        warm = served.ask(prompts, "last")
        assert_same(served, warm, cold)
        assert [answer.tiers for answer in warm] == [served.told("host", one) for one in prompts]
    other = served.ask(prompts[:1], "another salt")
    assert_same(served, other, cold[:1])
    assert not other[0].reused_tokens


def test_turns_of_a_conversation_and_prompts_that_part(served: Served) -> None:
    """A turn goes on from the turn before. Where a prompt parts there is no state, and then one is.

    vLLM's cache is empty each time, so it does not see that prompts part.
    """
    first = prompt(20)
    second = [*first, *prompt(21, 300)]
    shared = first[: LENGTH // 2]
    parted, parted_again = ([*shared, *prompt(seed, LENGTH // 2)] for seed in (22, 23))
    found = {
        "second": served.resumed(first),
        "parted again": served.junction(shared),
    }
    turns = {"first": first, "second": second, "parted": parted, "parted again": parted_again}
    cold = {name: served.ask([asked], f"turn {name}")[0] for name, asked in turns.items()}
    settle_and_empty(served.process)
    for name, asked in turns.items():
        got = served.ask([asked], "turns")
        assert_same(served, got, [cold[name]])
        if name in found:
            assert got[0].reused_tokens == found[name]
        settle_and_empty(served.process)
    again = served.ask([parted], "turns")
    assert_same(served, again, [cold["parted"]])
    assert again[0].reused_tokens == served.resumed(parted)


def test_many_at_once_and_aborts(served: Served) -> None:
    prompts = [prompt(30 + i, LENGTH - 50 * i) for i in range(6)]
    cold = served.ask(prompts, "alone at a time")
    settle_and_empty(served.process)
    for _ in range(2):
        together = served.ask(prompts, "together", batch=6)
        if served.is_exact():  # bfloat16 rounds otherwise in a batch
            assert_same_answers(together, cold)
        settle_and_empty(served.process)
    calls: list[Future[Generation]] = [
        served.process.submit(asked, 8, cache_salt="together", abort_after=i % 3)
        for i, asked in enumerate(prompts)
    ]
    for call in calls:
        call.result(600)
    settle_and_empty(served.process)
    warm = served.ask(prompts, "together")
    assert_same(served, warm, cold)
    assert [answer.reused_tokens for answer in warm] == [served.resumed(one) for one in prompts]


def test_a_load_that_fails_is_computed(served: Served) -> None:
    prompts = [prompt(40), prompt(41, 500)]
    cold = served.ask(prompts, "fails")
    settle_and_empty(served.process)
    before = counted(served.process, "kvcore_failures_total")
    with served.mistake("fail"):
        got = served.ask(prompts, "fails")
    assert_same(served, got, cold)
    assert not any(answer.reused_tokens for answer in got)
    assert counted(served.process, "kvcore_failures_total") > before
    settle_and_empty(served.process)
    warm = served.ask(prompts, "fails")
    assert_same(served, warm, cold)
    found = [answer.reused_tokens for answer in warm]
    assert found == [served.resumed(asked) for asked in prompts], "what was computed is saved anew"


@pytest.mark.parametrize("name", ["zeros", "group", "earlier"])
def test_a_mistake_with_the_states_shows(served: Served, name: str) -> None:
    """Without this the tests above would prove nothing."""
    length, names = max(LENGTH, 3 * served.kind.step + 100), [name]
    if served.kind.arch == "deepseek_v4":
        # Each group of windows. At a whole block the last token is computed again: it needs all
        # states of its compressor, of which none would be read after the block.
        length = 3 * served.kind.step
        names = [f"group {number}" for number in (0, 1, 3, 4)] if name == "group" else names
    elif name == "group" and "KVCORE_WINDOW" in served.kind.env:
        names = ["group", "windows"]
    asked = [prompt(50, length)]
    cold = served.ask(asked, f"mistake {name} cold")
    for mistake in names:
        settle_and_empty(served.process)
        with served.mistake(mistake):
            served.ask(asked, f"mistake {mistake}")
            settle_and_empty(served.process)
            spoiled = served.ask(asked, f"mistake {mistake}")
        assert spoiled[0].reused_tokens
        assert logprobs(spoiled) != pytest.approx(logprobs(cold), abs=AS_NEAR), mistake
    settle_and_empty(served.process)


def test_a_restart_finds_what_was_stored(served: Served, folder: Path, tmp_path: Path) -> None:
    """It starts another engine, on a copy of the disk."""
    prompts = [prompt(60), prompt(61, 700)]
    if served.kind.arch == "deepseek_v4":
        prompts.append(prompt(62, 2300))  # its index chooses among more than 512 latents only
    cold = served.ask(prompts, "restart")
    served.process.settle()
    shutil.copytree(folder / "kv", tmp_path / "kv")
    with started(served.kind, tmp_path) as process:
        again = served._replace(process=process)
        warm = again.ask(prompts, "restart")
        assert_same(served, warm, cold)
        assert [answer.tiers for answer in warm] == [served.told("disk", one) for one in prompts]


@pytest.mark.exhaustive
def test_a_store_gives_what_another_engine_wrote(kind: Kind, tmp_path: Path) -> None:
    """The longest resume point that is there, and equal answers from it."""
    only_one(kind)
    options = {"path": str(tmp_path / "shared"), "lookup_s": 60.0}
    far = {"tiers": {"far": {"plugin": "files", "capacity": "1GiB", "options": options}}}
    first = prompt(80)
    longer, shorter = [*first, *prompt(81, 300)], first[: LENGTH // 2]
    with started(kind, tmp_path, far) as process:
        writer = Served(process, kind, tmp_path / "spoil")
        writer.ask([first], "shared")
        cold = [writer.ask([asked], "cold")[0] for asked in (longer, shorter)]
        process.settle()
    with started(kind, tmp_path, far) as process:
        reader = writer._replace(process=process)
        warm = reader.ask([longer], "shared")
        settle_and_empty(process)
        warm += reader.ask([shorter], "shared")
        assert_same(reader, warm, cold)
        assert [answer.tiers for answer in warm] == [{"far": reader.resumed(first)}, {}]


@pytest.mark.exhaustive  # integration/server/test_server_points.py has it without an engine
def test_engines_of_a_server_go_on_from_what_one_of_them_saved(kind: Kind, tmp_path: Path) -> None:
    """It starts two engines. All is found in the server's memory, and on its disk by the next."""
    if kind.python or (kind.env not in ({}, SIDES) and kind.arch != "deepseek_v4"):
        pytest.skip("the adapter's calls are those of the other kinds")
    disk = {"path": str(tmp_path / "disk"), "capacity": "256MiB"}
    config = server_settings(tmp_path / "kv", disk=disk, host={"capacity": "64MiB"})
    address = {"server": config.server.model_dump(mode="json")}
    asked = [prompt(90), prompt(91, 500)]
    for found_in in ("host", "disk"):
        with closing(RunningServer(config)), started(kind, tmp_path, address) as process:
            served = Served(process, kind, tmp_path / "spoil")
            cold = served.ask(asked, "cold")
            if found_in == "host":
                served.ask(asked, "served")
            settle_and_empty(process)
            warm = served.ask(asked, "served")
            assert_same(served, warm, cold)
            assert [answer.tiers for answer in warm] == [
                {found_in: served.resumed(each)} for each in asked
            ]
            process.settle()


@pytest.mark.exhaustive
def test_an_answer_leaves_a_point_behind(kind: Kind, tmp_path: Path) -> None:
    """It goes past a boundary, and the next turn goes on from there. Drafts are undone in it.

    By default vLLM keeps no states there.
    """
    if kind.arch in WINDOWS or kind.python or "prefix_match_unit" in kind.args:
        pytest.skip("the end of a window is saved at any block; or tried with another kind")
    first = prompt(95, 2 * kind.step - 60)
    every = {"points": {"policy": "all"}}
    disk = {"disk": {"path": str(tmp_path / "kv"), "capacity": "256MiB"}}
    keep = {"prefix_cache_retention_interval": kind.step}
    with started(kind, tmp_path, every | disk, **keep) as process:
        [said] = answers(process, [first], max_tokens=120, cache_salt="turns")
        second = [*first, *said.token_ids, *prompt(96, 40)]
        settle_and_empty(process)
        served = Served(process, kind, tmp_path / "spoil")
        warm = served.ask([second], "turns")
        assert warm[0].reused_tokens == 2 * kind.step
        if speculative := kind.args.get("speculative_config"):
            drafts = counted(process, "vllm:spec_decode_num_drafts_total")
            accepted = counted(process, "vllm:spec_decode_num_accepted_tokens_total")
            assert drafts > 20
            assert accepted < speculative["num_speculative_tokens"] * drafts, "none was undone"
        settle_and_empty(process)
        assert_same(served, warm, served.ask([second], "cold"))


@pytest.mark.exhaustive  # without an engine: unit/worker/test_point_sizes.py
@pytest.mark.parametrize(
    ("arch", "kv_heads", "tier"),
    [  # vLLM's gpt-oss shares no head among ranks
        ("gpt_oss", 2, "far"),
        ("gemma3", 2, "far"),
        ("gemma3", 1, "far"),
        ("gemma3", 2, "host"),
        ("lfm2", 2, "far"),
        ("lfm2", 2, "host"),
        ("lfm2-windows", 2, "far"),
        ("qwen3_next", 2, "far"),
    ],
)
def test_any_number_of_ranks_reads_points_that_another_wrote(
    arch: str, kv_heads: int, tier: str, tmp_path: Path
) -> None:
    """In a store, or in a server's memory. One rank writes, two read and write more, one reads
    that. Two ranks share a single head. Prompts go on for a few tokens behind the last point, where
    states matter most: a gated delta net forgets."""
    options = {"path": str(tmp_path / "shared"), "lookup_s": 60.0, "splits_s": 0.01}
    place = {"tiers": {"far": {"plugin": "files", "capacity": "1GiB", "options": options}}}
    kind, sizes = KINDS.get(arch) or KINDS["gpt_oss"]._replace(arch=arch), ("one", "two", "one")
    lengths = {"one": LENGTH, "two": 500}
    asked = {
        size: prompt(110 + turn, length // kind.step * kind.step + 4)
        for turn, (size, length) in enumerate(lengths.items())
    }
    cold = dict[str, Generation]()
    config = server_settings(tmp_path / "kv", host={"capacity": "64MiB"})
    if tier == "host":
        place = {"server": config.server.model_dump(mode="json")}
    with closing(RunningServer(config)):
        for turn, size in enumerate(sizes):
            args = {"tensor_parallel_size": 2} if size == "two" else {}
            run = kind._replace(args={**kind.args, **args})
            with started(run, tmp_path, place, kv_heads=kv_heads) as process:
                served = Served(process, run, tmp_path / "spoil")
                if size not in cold:
                    [cold[size]] = served.ask([asked[size]], "cold")
                    served.ask([asked[size]], "shared")
                if turn:
                    other = "one" if size == "two" else "two"
                    settle_and_empty(process)
                    warm = served.ask([asked[other]], "shared")
                    if served.is_exact():
                        assert_same(served, warm, [cold[other]])
                    else:
                        assert_begins_near(warm[0], cold[other])
                    assert [answer.tiers for answer in warm] == [served.told(tier, asked[other])]
                process.settle()


def assert_begins_near(got: Generation, right: Generation) -> None:
    """Assert that bfloat16, which rounds otherwise at another size, goes on as it should.

    Log-probabilities of four tokens differed by 0.03 at most, and by 0.4 to 1.7 where a rank took
    the shares of another head.
    """
    assert got.token_ids[:4] == right.token_ids[:4]
    assert got.logprobs[:4] == pytest.approx(right.logprobs[:4], abs=0.1)


def only_one(kind: Kind, states: str = "lfm2") -> None:
    if kind not in [KINDS[name] for name in (states, "lfm2-stages", "gpt_oss", "gpt_oss-stages")]:
        pytest.skip("one kind with states and one with windows are enough")


@pytest.mark.exhaustive  # without an engine: integration/server/test_server_points.py
def test_stages_keep_what_their_own_layers_have(tmp_path: Path) -> None:
    """One stage has more attention, the other more states. Each part of a point is needed."""
    kind = KINDS["lfm2-stages"]
    asked = [prompt(100, 300)]
    with started(kind, tmp_path) as process:
        served = Served(process, kind, tmp_path / "spoil")
        cold = served.ask(asked, "stages")
        settle_and_empty(process)
        warm = served.ask(asked, "stages")
        assert_same(served, warm, cold)
        assert [answer.tiers for answer in warm] == [served.told("host", asked[0])]
        settle_and_empty(process)
        with served.mistake("stage"):
            spoiled = served.ask(asked, "stages")
        assert spoiled[0].reused_tokens == served.resumed(asked[0])
        assert logprobs(spoiled) != pytest.approx(logprobs(cold), abs=AS_NEAR)


@pytest.mark.exhaustive
def test_preempted_requests_go_on(kind: Kind, tmp_path: Path) -> None:
    """A device cache that holds a few of six conversations."""
    only_one(kind, "lfm2-windows")
    prompts = [prompt(70 + i, 600) for i in range(6)]
    with started(kind, tmp_path) as process:
        cold = answers(process, prompts, max_tokens=200)
    pages = 60 if kind.arch == "lfm2" else 40
    with started(kind, tmp_path / "less", num_gpu_blocks_override=pages) as process:
        for _ in range(2):
            got = answers(process, prompts, batch=6, max_tokens=200)
            assert_same_answers(got, cold)
        assert counted(process, "vllm:num_preemptions_total") > 0
