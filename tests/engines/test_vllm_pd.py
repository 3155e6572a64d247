"""Prefill on one real vLLM, decode on another; KV goes from memory to memory over NIXL. Each has
tiers of its own, or is behind a server. Models with resume points are answered from the last one.
The two may have unlike numbers of ranks and stages.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from contextlib import ExitStack, closing
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from kvcore.harness.compare import (
    ANSWER,
    SMALL,
    answers,
    assert_all_from,
    assert_same_answers,
    counted,
)
from kvcore.harness.engine_process import EngineProcess, Generation
from kvcore.harness.models import tiny_model
from kvcore.harness.prompts import windows, words
from kvcore_devtools.disagg_proxy import prefill, split
from kvcore_devtools.server_fixture import server_process, wait_until_idle
from kvcore_devtools.servers import free_port, need_client
from kvcore_vllm.testing.conformance import STAGED
from kvcore_vllm.testing.rig import V2
from support.environments import python_of

pytestmark = pytest.mark.engine

pytest.importorskip("zmq")
need_client("nixl_cu13")

HERE = Path(__file__).parent
BLOCK, VOCABULARY = 16, 512
AS_NEAR = 1e-4
"""How near log-probabilities in float32 are, where the same is computed."""


class Kind(NamedTuple):
    """A kind of model, and how it is started.

    The model goes on behind every ``step`` tokens. With ``spare`` this may be the end of a prompt,
    whose last token is computed again. Each of the two instances has so many ``ranks`` in each of
    its ``stages``.
    """

    arch: str = "llama"
    step: int = BLOCK
    spare: bool = True
    args: Mapping[str, Any] = MappingProxyType({})
    env: Mapping[str, str] = MappingProxyType({})
    kv_heads: int = 2
    ranks: tuple[int, int] = (1, 1)
    stages: tuple[int, int] = (1, 1)
    python: str = ""

    def size(self, number: int) -> int:
        """The ranks of an instance, of all its stages."""
        return self.ranks[number] * self.stages[number]

    def arguments(self, number: int) -> dict[str, Any]:
        """What an instance is started with: the first is 0."""
        made: dict[str, Any] = {**SMALL, **self.args}
        if self.python:
            made["python"] = python_of(self.python)
        if self.ranks[number] > 1:
            made["tensor_parallel_size"] = self.ranks[number]
        if self.stages[number] > 1:
            compilation = {**made.get("compilation_config", {}), **STAGED["compilation_config"]}
            made |= {**STAGED, "compilation_config": compilation}
            made["pipeline_parallel_size"] = self.stages[number]
        return made

    @property
    def is_packed(self) -> bool:
        """Layers have two caches, so that blocks keep vLLM's pages as they are."""
        return self.args == PACKED

    @property
    def has_points(self) -> bool:
        return self.arch != "llama"

    @property
    def in_detail(self) -> bool:
        """Log-probabilities are compared too: a mistake need not change the likeliest token."""
        return self.has_points or self.is_packed

    def model(self) -> Path:
        if not self.in_detail:
            return tiny_model("llama", layers=4, heads=4, kv_heads=2, head_dim=64)
        if self.is_packed:
            return tiny_model("llama", layers=3, heads=4, kv_heads=2, vocabulary=VOCABULARY)
        heads = {"heads": 8 if self.arch == "lfm2" else 4, "kv_heads": self.kv_heads}
        return tiny_model(
            self.arch, layers=6, head_dim=64, sliding_window=128, vocabulary=VOCABULARY, **heads
        )

    def prompts(self, seed: int, count: int) -> list[list[int]]:
        """Random ones where states and windows must show; one of them ends where a page does."""
        if not self.in_detail:
            return windows(self.model(), count, 150, 600, seed=seed)
        lengths = (600, 256, 400, 150, 513, 300, 450, 520)
        ids = range(1, VOCABULARY - 8)
        return [words(100 * seed + i, lengths[i % 8], ids) for i in range(count)]

    def resumed(self, prompt: Sequence[int]) -> int:
        """How many tokens of a prompt come from the engine that computed it."""
        count, last = len(prompt), len(prompt) - 1
        if not self.spare:
            return last // self.step * self.step
        return min(count // self.step * self.step, last)

    def environment(self, spoil: Path) -> dict[str, str]:
        """What an engine starts with, to make the mistake that the file ``spoil`` names."""
        plugins = ["spoiling", *(["windowed"] if "KVCORE_WINDOW" in self.env else [])]
        plugins += ["sides"] if self.is_packed else []
        path = [*(str(HERE / name) for name in plugins), os.environ.get("PYTHONPATH", "")]
        own = {"PYTHONPATH": os.pathsep.join(path), "KVCORE_SPOIL": str(spoil)}
        own |= {"KVCORE_SIDES": str(spoil)} if self.is_packed else {}
        return {"UCX_TLS": "tcp", **self.env, **own}


# vLLM's CPU kernel rotates a part of LFM2's heads, by positions that depend on the chunk.
LFM2 = {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}
PACKED = {"block_size": 32}
KINDS = {
    "llama": Kind(),
    "lfm2": Kind("lfm2", 128, False, LFM2, kv_heads=1),
    # One of its two layers with attention has a window.
    "lfm2-windows": Kind("lfm2", 128, False, LFM2, {"KVCORE_WINDOW": "100"}, kv_heads=1),
    "gpt_oss": Kind("gpt_oss"),
    "gemma3": Kind("gemma3"),
    "llama-v2": Kind(env=V2),
    "lfm2-windows-v2": Kind("lfm2", 128, False, LFM2, {"KVCORE_WINDOW": "100", **V2}, kv_heads=1),
    "llama-ranks": Kind(ranks=(2, 2)),
    "llama-ranks-to-one": Kind(ranks=(2, 1)),
    "llama-ranks-to-one-0.33": Kind(ranks=(2, 1), python="vllm-0.33"),
    "llama-one-to-ranks": Kind(ranks=(1, 2)),
    "llama-stages-to-one": Kind(stages=(2, 1)),
    "lfm2-ranks": Kind("lfm2", 128, False, LFM2, ranks=(2, 2)),
    "lfm2-ranks-to-one": Kind("lfm2", 128, False, LFM2, ranks=(2, 1)),
    "lfm2-one-to-ranks": Kind("lfm2", 128, False, LFM2, ranks=(1, 2)),
    "packed": Kind("llama", 32, True, PACKED),
    "packed-ranks": Kind("llama", 32, True, PACKED, ranks=(2, 2)),
}
UNLIKE = {
    "packed-ranks-to-one": Kind("llama", 32, True, PACKED, ranks=(2, 1)),
    # Two ranks have copies of one head, and a stage has states of its own.
    "lfm2-one-to-ranks-of-a-head": Kind("lfm2", 128, False, LFM2, kv_heads=1, ranks=(1, 2)),
    "lfm2-stages-to-one": Kind("lfm2", 128, False, LFM2, stages=(2, 1)),
}
"""Those of which one instance can read nothing that the other wrote."""
DAILY = ("llama", "lfm2-windows")


def kinds(*names: str, daily: Sequence[str] = DAILY) -> Any:
    marks = {name: () if name in daily else (pytest.mark.exhaustive,) for name in names}
    each = [pytest.param(KINDS[name], id=name, marks=marks[name]) for name in names]
    return pytest.mark.parametrize("kind", each)


def assert_same(kind: Kind, got: Sequence[Generation], right: Sequence[Generation]) -> None:
    """States of zeros need not change the likeliest token of so small a model."""
    assert_same_answers(got, right)
    if kind.in_detail:
        assert likelihoods(got) == pytest.approx(likelihoods(right), abs=AS_NEAR)


def likelihoods(got: Sequence[Generation]) -> list[float]:
    return [each for answer in got for each in answer.logprobs]


def settings(listen: str, ranks: int = 1, **more: Any) -> dict[str, Any]:
    """Patient with a busy machine, but for a node that is gone. It lists no node but its own."""
    last = int(listen.rpartition(":")[2]) + ranks - 1
    options = {
        "listen": listen,
        "peers": [f"{listen}-{last}"],
        **more,
        "lend": "64MiB",
        "timeout_s": 5.0,
        "lookup_s": 60.0,
        "deadline_s": 60.0,
        "lease_s": 60.0,
    }
    return {
        "host": {"capacity": "64MiB"},
        "tiers": {"far": {"plugin": "peer", "capacity": "64MiB", "options": options}},
        "transfer": {"load_deadline_s": 300.0},
        "vllm": {"promise_s": 15.0},
    }


@kinds(*KINDS)
def test_one_computes_and_the_other_answers(kind: Kind, tmp_path: Path) -> None:
    """What is right is what the first says when it answers itself, under a salt that nothing else
    has: without any KV of kvcore's. The other learns of the first by promises alone, and waits for
    the last rank of the first, which has not yet stored its part."""
    told = {"logprobs": kind.in_detail}
    documents, spoil = kind.prompts(1, 11), tmp_path / "spoil"
    sizes = [kind.size(number) for number in range(2)]
    here, there = (f"127.0.0.1:{free_port(size)}" for size in sizes)
    consumer = settings(there, sizes[1], guests=["127.0.0.1"], guest_ports="1024-65535")
    with ExitStack() as started:
        first, second = both(kind, started, spoil, settings(here, sizes[0]), consumer)
        asked, [foreign, lost, spoiled, held, halved] = documents[:6], documents[6:]
        got = split(first, second, asked, ANSWER, **told)
        expected = answers(first, documents, cache_salt="alone", **told)
        assert not any(answer.reused_tokens for answer in expected)
        assert len({tuple(answer.token_ids) for answer in expected}) > 6
        assert_same(kind, got, expected[:6])
        assert_all_from("far", got, [kind.resumed(d) for d in asked])
        computed = [answer.prompt_tokens - answer.cached_tokens for answer in got]
        assert max(computed) <= kind.step, "no more than what is behind the last boundary"
        assert counted(second, "kvcore_failures_total") == 0
        spoil.write_text("hold")
        late = second.submit(held, ANSWER, promise=prefill(first, held), **told)
        assert not wait([late], 1.0).done, "answered without what was promised"
        spoil.unlink()
        assert_same(kind, [late.result(600)], expected[9:10])
        assert_all_from("far", [late.result()], [kind.resumed(held)])
        promise = prefill(first, foreign)
        stranger = answers(second, [foreign], promise=promise, cache_salt="tenant", **told)
        assert_same(kind, stranger, expected[6:7])
        assert stranger[0].reused_tokens == 0, "promised to another tenant"
        aborted = second.submit(foreign, ANSWER, promise=promise, abort_after=0)
        aborted.result(600)
        after = answers(second, [foreign], promise=promise, **told)
        assert_same(kind, after, expected[6:7])
        assert_all_from("far", after, [kind.resumed(foreign)])
        if kind.in_detail:
            promise = prefill(first, spoiled)
            spoil.write_text("zeros")
            wrong = answers(second, [spoiled], promise=promise, **told)
            spoil.unlink()
            assert wrong[0].tiers == {"far": kind.resumed(spoiled)}
            assert likelihoods(wrong) != pytest.approx(likelihoods(expected[8:9]), abs=AS_NEAR)
        promise = prefill(first, lost)
        spoil.write_text("hold")
        late = second.submit(halved, ANSWER, promise=prefill(first, halved), **told)
        assert not wait([late], 1.0).done, "answered without what was promised"
        first.kill()
        spoil.unlink()
        recomputed = [late.result(600), *answers(second, [lost], promise=promise, **told)]
        assert_same(kind, recomputed, [expected[10], expected[7]])
        none = "there is nobody to have it from"
        assert not any(answer.reused_tokens for answer in recomputed), none


def serving(folder: Path, listen: str, **more: Any) -> list[str]:
    """What `kvcore server` is told: the tiers of `settings`, and where it is."""
    told = settings(listen, **more)
    options = told["tiers"]["far"].pop("options")
    tables = {
        "server.folder": str(folder),
        "host.capacity": "64MiB",
        "log.level": "warning",
        **{f"tiers.far.{name}": value for name, value in told["tiers"]["far"].items()},
        **{f"tiers.far.options.{name}": value for name, value in options.items()},
    }
    return [f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in tables.items()]


@kinds("llama", "lfm2-windows", daily=())
def test_each_behind_a_server_of_its_own(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first engine may be gone, since its server has promised; a server that is gone costs the
    computing alone."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    told = {"logprobs": kind.in_detail}
    documents = kind.prompts(2, 6)
    asked, [gone], [lost] = documents[:4], documents[4:5], documents[5:]
    here, there = (f"127.0.0.1:{free_port()}" for _ in range(2))
    folders = [tmp_path / name for name in ("here", "there")]
    guests = {"guests": ["127.0.0.1"], "guest_ports": "1024-65535"}
    with ExitStack() as started:
        servers = [
            started.enter_context(server_process(*serving(folders[0], here))),
            started.enter_context(server_process(*serving(folders[1], there, **guests))),
        ]
        first, second = both(kind, started, tmp_path / "spoil", *map(client, folders))
        got = split(first, second, asked, ANSWER, **told)
        expected = answers(first, documents, cache_salt="alone", **told)
        assert not any(answer.reused_tokens for answer in expected)
        assert_same(kind, got, expected[:4])
        assert_all_from("far", got, [kind.resumed(d) for d in asked])
        assert counted(second, "kvcore_failures_total") == 0
        promises = [prefill(first, document) for document in (gone, lost)]
        assert {promise["node"] for promise in promises} == {here}, "not an engine's: its server's"
        wait_until_idle(folders[0])
        first.kill()
        [kept] = answers(second, [gone], promise=promises[0], **told)
        assert_same(kind, [kept], expected[4:5])
        assert_all_from("far", [kept], [kind.resumed(gone)])
        servers[0].kill()
        servers[0].wait()
        [broken] = answers(second, [lost], promise=promises[1], **told)
        assert_same(kind, [broken], expected[5:])
        assert broken.reused_tokens == 0, "there is nobody to have it from"
        wait_until_idle(folders[1])


@kinds("lfm2-windows", "gpt_oss", daily=())
def test_both_behind_one_server(kind: Kind, tmp_path: Path) -> None:
    """The second waits for what the first is still saving, and finds it in the server's memory."""
    told, documents, folder = {"logprobs": True}, kind.prompts(3, 5), tmp_path / "kv"
    alone = {"server.folder": str(folder), "host.capacity": "64MiB", "log.level": "warning"}
    with ExitStack() as started:
        started.enter_context(server_process(*(f"{k}={v}" for k, v in alone.items())))
        first, second = both(kind, started, tmp_path / "spoil", *[client(folder)] * 2)
        got = split(first, second, documents, ANSWER, **told)
        expected = answers(first, documents, cache_salt="alone", **told)
        assert_same(kind, got, expected)
        assert_all_from("host", got, [kind.resumed(d) for d in documents])
        assert counted(second, "kvcore_failures_total") == 0
        wait_until_idle(folder)


FOLDER = (
    "lfm2",
    "gpt_oss",
    "llama-ranks-to-one",
    "llama-one-to-ranks",
    "llama-stages-to-one",
    "lfm2-ranks-to-one",
    "lfm2-one-to-ranks",
    "packed",
)


@kinds(*FOLDER, daily=())
def test_what_goes_wrong_in_a_shared_folder(kind: Kind, tmp_path: Path) -> None:
    """A load of a point that fails, and rows of one rank that are not those written. Both are
    computed."""
    told, documents, shared = {"logprobs": True}, kind.prompts(4, 3), tmp_path / "shared"
    options = {"path": str(shared), "lookup_s": 60.0, "deadline_s": 60.0}
    config = {
        "host": {"capacity": "64MiB"},
        "tiers": {"far": {"plugin": "files", "capacity": "1GiB", "options": options}},
        "transfer": {"load_deadline_s": 300.0},
        "vllm": {"promise_s": 60.0},
    }
    spoil = tmp_path / "spoil"
    with ExitStack() as started:
        first, second = both(kind, started, spoil, config, config)
        expected = answers(first, documents, cache_salt="alone", **told)
        got = split(first, second, documents[:1], ANSWER, **told)
        assert_same(kind, got, expected[:1])
        assert_all_from("far", got, [kind.resumed(documents[0])])
        if kind.has_points:
            promise = prefill(first, documents[1])
            spoil.write_text("fail")
            failed = answers(second, documents[1:2], promise=promise, **told)
            spoil.unlink()
            assert_same(kind, failed, expected[1:2])
            assert failed[0].reused_tokens == 0
        for engine in (first, second):
            engine.settle()
        before = files_in(shared)
        promise = prefill(first, documents[2])
        first.settle()
        written = files_in(shared) - before
        rank = max(path.parent for path in written)
        for path in (path for path in written if path.parent == rank):
            value = bytearray(path.read_bytes())
            value[len(value) // 2] ^= 1
            path.write_bytes(value)
        rotten = answers(second, documents[2:], promise=promise, **told)
        assert_same(kind, rotten, expected[2:])
        assert rotten[0].reused_tokens == 0
        assert counted(second, "kvcore_corrupt_blocks_total") > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", [pytest.param(each, id=name) for name, each in UNLIKE.items()])
def test_a_size_that_can_read_nothing_computes_at_once(kind: Kind, tmp_path: Path) -> None:
    """And says why in one line."""
    documents, shared = kind.prompts(5, 2), tmp_path / "shared"
    options = {"path": str(shared), "lookup_s": 60.0, "deadline_s": 60.0}
    config = {
        "host": {"capacity": "64MiB"},
        "tiers": {"far": {"plugin": "files", "capacity": "1GiB", "options": options}},
        "vllm": {"promise_s": 3600.0},
    }
    with ExitStack() as started:
        first, second = both(kind, started, tmp_path / "spoil", config, config)
        got = split(first, second, documents, ANSWER, logprobs=True)
        # A second cache is of the first head of each rank, so two ranks answer otherwise than one.
        expected = answers(second, documents, cache_salt="alone", logprobs=True)
        assert_same(kind, got, expected)
        assert not any(answer.reused_tokens for answer in got)
        lines = [line for line in second.log.read_text().splitlines() if "promise" in line]
        assert len(lines) == len(documents)
        assert all("promise refused" in line and "ranks" in line for line in lines), lines
        assert counted(second, "kvcore_failures_total") == 0


def files_in(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


def both(
    kind: Kind, started: ExitStack, spoil: Path, *kvcore: dict[str, Any]
) -> list[EngineProcess]:
    """Start an engine that computes and one that answers, with these settings, both at once."""
    env, roles = kind.environment(spoil), ("kv_producer", "kv_consumer")
    return [
        started.enter_context(
            closing(EngineProcess(kind.model(), kvcore=each, env=env, kv_role=role, **args))
        )
        for each, role, args in zip(kvcore, roles, map(kind.arguments, range(2)), strict=True)
    ]


def client(folder: Path) -> dict[str, Any]:
    """Of an engine whose server has this folder."""
    return {
        "server": {"address": "local", "folder": str(folder), "deadline_s": 20.0},
        "transfer": {"load_deadline_s": 300.0},
        "vllm": {"promise_s": 60.0},
    }
