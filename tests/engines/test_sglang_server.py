"""SGLang and the reference engine behind one kvcore server: what one computed the other loads and
blends; and when the server is killed every answer stays the same."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq")

from kvcore.config import load_config
from kvcore.harness.compare import (
    ALL,
    ANSWER,
    EXACT,
    answers,
    blended,
    settle_and_empty,
    small_engine,
)
from kvcore.harness.models import tiny_model
from kvcore.harness.prompts import windows
from kvcore.testing.engine import EngineArgs, Llama, ReferenceEngine, load
from kvcore_devtools import shared_server_checks
from kvcore_devtools.server_fixture import server_process, wait_until_idle
from kvcore_devtools.servers import free_port
from kvcore_devtools.shared_server_checks import LEAD, Pair, Texts
from support.front_door import get, post, served

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]

BLOCK = 16
PAGE = 16


@pytest.fixture(scope="module")
def folder() -> Path:
    return tiny_model("llama", layers=4, heads=4, kv_heads=2, head_dim=64)


@pytest.fixture(scope="module")
def model(folder: Path) -> Llama:
    return load(folder)


@pytest.fixture(scope="module")
def plain(model: Llama) -> Iterator[Callable[[Sequence[Sequence[int]]], list[list[int]]]]:
    """Answers without kvcore."""
    args = EngineArgs(num_pages=256, prefix_cache=False)
    with ReferenceEngine(model, args) as engine:
        yield lambda prompts: [engine.generate([prompt], ANSWER)[0] for prompt in prompts]


@pytest.fixture(scope="module")
def texts(folder: Path) -> Texts:
    return Texts.of(folder)


def asked(engine: ReferenceEngine, prompts: Sequence[Sequence[int]]) -> list[int]:
    """Tokens of each prompt that came from host memory."""
    requests = [engine.submit(prompt, ANSWER) for prompt in prompts]
    engine.run()
    engine.settle()
    return [request.reused.get("host", 0) for request in requests]


@pytest.mark.exhaustive  # integration/server/test_server_fusion.py has it without SGLang
@pytest.mark.whole_machine
def test_two_ranks_load_and_blend_what_one_computed(
    tmp_path: Path, folder: Path, model: Llama, texts: Texts
) -> None:
    """Rank 0's scheduler asks the server; both ranks map its memory, and read and write their own
    heads of whole blocks. When it is killed every answer stays the same."""
    shared = {"address": "local", "folder": str(tmp_path / "kv"), "deadline_s": 20.0}
    kvcore = {
        "server": shared,
        "fusion": {"enabled": True},
        "sglang": {"keep_on_flush": True, "prefetch": "wait"},
    }
    given = (f"server.folder={tmp_path / 'kv'}", "host.capacity=256MiB", "fusion.enabled=true")
    config = load_config(None, {"server": shared, "fusion": {"enabled": True}}, {})
    two: dict[str, Any] = {"tp_size": 2, "page_size": PAGE}
    known, new = texts.prompts[:3], texts.prompts[3:6]
    with (
        server_process(*given, "log.level=warning") as server,
        ReferenceEngine(model, EngineArgs(prefix_cache=False), config) as reference,
        small_engine(folder, kvcore, engine="sglang", **two) as sglang,
    ):
        asked(reference, [*known, *texts.chunks])
        found = answers(sglang, known, fusion=EXACT)
        texts.check(found)
        whole = [(len(prompt) - 1) // PAGE * PAGE for prompt in known]
        assert [answer.tiers for answer in found] == [{"host": count} for count in whole]
        made = answers(sglang, new, fusion=ALL)
        assert [answer.token_ids for answer in made] == texts.right[3:6]
        assert min(blended(made)) >= 400, [answer.kvcore for answer in made]
        settle_and_empty(sglang)
        assert all(count < LEAD for count in asked(reference, new)), "blends are not stored"
        again = answers(sglang, [[5, *prompt] for prompt in known], fusion=EXACT)
        settle_and_empty(sglang)
        wait_until_idle(tmp_path / "kv")
        read = asked(reference, [[5, *prompt] for prompt in known])
        assert min(read) >= 400, "both ranks have stored their heads"
        server.kill()
        server.wait()
        texts.check(answers(sglang, texts.prompts, fusion=ALL))
        settle_and_empty(sglang)
        gone = answers(sglang, [[5, *prompt] for prompt in known], fusion=ALL)
        assert [a.token_ids for a in gone] == [a.token_ids for a in again]
        assert not any(answer.reused_tokens for answer in gone), "there is nothing to reuse"


# -- as a user starts it --------------------------------------------------------------------------


def documented() -> tuple[dict[str, str], list[str]]:
    """Return the environment and the options with which docs/sglang.md starts SGLang on a CPU."""
    page = (Path(__file__).parents[2] / "docs" / "sglang.md").read_text()
    [line] = re.findall(r"\n(\w+=.*-m sglang.launch_server (?:.*\\\n)*.*)", page)
    before, _, options = line.replace("\\\n", " ").partition(
        "python -m sglang.launch_server --model-path MODEL"
    )
    return dict(word.split("=") for word in shlex.split(before)), shlex.split(options)


@pytest.mark.exhaustive  # a server takes long to start; in `make test` vLLM's README line does
def test_as_a_user_serves_it(tmp_path: Path, folder: Path, plain: Any) -> None:
    """`kvcore serve` runs SGLang's own server. In 0.5.23 the stand-ins must be in each process."""
    prompts = windows(folder, 3, 150, 500, seed=22)
    file, log, port = tmp_path / "kvcore.toml", tmp_path / "log", free_port()
    secrets = ["salt-of-a-tenant-0f1e2d3c", "secret-of-all-4b5a69788796"]
    file.write_text(
        f'[host]\ncapacity = "256MiB"\n[namespace]\nsecret = "{secrets[1]}"\n'
        f'[tenants.ann]\nsalt = "{secrets[0]}"\nquota = {{ host = "50%" }}\n'
    )
    env, options = documented()
    command = [str(Path(sys.executable).with_name("kvcore")), "serve", "--engine", "sglang"]
    more = ["--host", "127.0.0.1", "--port", str(port), "--max-total-tokens", "8192"]
    given = [*command, str(folder), "-c", str(file), "--", *options, *more, "--skip-server-warmup"]
    with served(given, port, log, env) as address:
        for turn in range(2):
            for prompt, right in zip(prompts, plain(prompts), strict=True):
                sampling = {"temperature": 0, "max_new_tokens": ANSWER, "ignore_eos": True}
                body = {"input_ids": prompt, "sampling_params": sampling}
                answer = post(address, "/generate", body)
                assert answer["output_ids"] == right
                reusable = (len(prompt) - 1) // BLOCK * BLOCK
                assert answer["meta_info"]["cached_tokens"] == turn * reusable
            post(address, "/flush_cache?timeout=30")  # any client may, and kvcore keeps its tiers
        told = get(address, "/server_info")
        assert not [secret for secret in secrets if secret in told]
        assert "in_flight" in told
        assert answer["meta_info"]["id"] not in told, "requests of others are not listed"
        changed = post(address, "/update_weights_from_disk", {"model_path": str(folder)})
        assert changed["success"], changed
        body = {"input_ids": prompts[0], "sampling_params": sampling}
        answer = post(address, "/generate", body)
        assert answer["output_ids"] == plain(prompts)[0]
        assert answer["meta_info"]["cached_tokens"] == 0, "KV of weights that were replaced"


# -- one rank -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    place, keeps = (
        tmp_path_factory.mktemp("pair") / "kv",
        {"keep_on_flush": True, "prefetch": "wait"},
    )
    with shared_server_checks.pair("sglang", folder, place, sglang=keeps) as made:
        yield made


def test_each_loads_what_the_other_computed_and_a_killed_server_changes_no_answer(
    pair: Pair, texts: Texts, folder: Path, plain: Any
) -> None:
    pair.serve()
    prompts = windows(folder, 8, 150, 500, seed=21)
    right, first, second = plain(prompts), prompts[:4], prompts[4:]
    assert pair.learn(first) == [(answer, 0) for answer in right[:4]]
    found = answers(pair.second, first, fusion=EXACT)
    assert [answer.token_ids for answer in found] == right[:4]
    whole = [(len(prompt) - 1) // BLOCK * BLOCK for prompt in first]
    assert [answer.tiers for answer in found] == [{"host": count} for count in whole]
    stored = answers(pair.second, second, fusion=EXACT)
    assert [answer.token_ids for answer in stored] == right[4:]
    settle_and_empty(pair.second)
    wait_until_idle(pair.folder)
    for (answer, reused), prompt, wanted in zip(pair.learn(second), second, right[4:], strict=True):
        assert answer == wanted
        assert reused >= len(prompt) - BLOCK
    shared_server_checks.shares(pair, texts)
    shared_server_checks.outlives(pair, texts)
    for _ in range(2):
        gone = answers(pair.second, prompts, fusion=EXACT)
        assert [answer.token_ids for answer in gone] == right
        assert not any(answer.reused_tokens for answer in gone), "there is nothing to reuse"
        settle_and_empty(pair.second)


def test_loads_that_were_counted_on_and_are_not_planned(pair: Pair, texts: Texts) -> None:
    shared_server_checks.misses(pair, texts)


def test_a_tier_that_was_not_there_when_the_engines_started(
    pair: Pair, texts: Texts, tmp_path: Path
) -> None:
    shared_server_checks.returns(pair, texts, tmp_path / "disk")
