"""kvcore below vLLM's own offloading, in real engines: models with windows, states, and neither.

vLLM's scheduler, keys and rows are its own; only the copies between its cache and the rows are the
test's, because vLLM has none for a CPU (`kvcore_devtools.vllm_offloading`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvcore.harness.compare import SMALL
from kvcore.harness.engine_process import EngineProcess, Generation, run_program
from kvcore.harness.models import tiny_model
from kvcore.harness.prompts import windows
from support.environments import python_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

HERE = Path(__file__).parent
KINDS = {
    "llama": {},
    "gpt_oss": {},
    "gemma3": {},
    # vLLM's CPU kernel rotates a part of LFM2's heads, by positions that depend on the chunk.
    "lfm2": {"compilation_config": {"custom_ops": ["-rotary_embedding"]}},
    # vLLM's CPU build forgets a block size that it chose itself, and then keeps few states.
    "qwen3_next": {"dtype": "bfloat16", "block_size": 384},
}
"""Full attention, two kinds of windows, and two kinds of states."""
ANSWER = 12
AS_NEAR = 1e-3
"""How near log-probabilities in float32 are, where the same is computed."""


def offloaded(folder: Path, **more: Any) -> dict[str, Any]:
    from kvcore_devtools.vllm_offloading import offloading

    disk = {"path": str(folder / "kv"), "capacity": "1GiB"}
    return {"kv_transfer_config": offloading({"disk": disk}, **more)}


def served(server: Path, **more: Any) -> dict[str, Any]:
    from kvcore_devtools.vllm_offloading import offloading

    settings = {"address": "local", "folder": str(server), "deadline_s": 5.0}
    return {"kv_transfer_config": offloading({"server": settings}, **more)}


def asked(model: Path, args: dict[str, Any]) -> list[Generation]:
    """Answers of an engine that starts and ends for them, one after the other."""
    with EngineProcess(model, engine="vllm", kvcore=None, **{**SMALL, **args}) as engine:
        found = []
        for prompt in prompts(model):
            found += engine.generate([prompt], max_tokens=ANSWER, logprobs=True)
            engine.settle(5)
        return found


def prompts(model: Path) -> list[list[int]]:
    """Two prompts with 800 tokens in common, one of its own, and a short one.

    vLLM stores what the last step made in the next step, so a short one comes last.
    """
    first, second, third, fourth = windows(model, 4, 900, 900, seed=34)
    return [first[:800] + second[:100], first[:800] + third[:100], fourth, third[-40:]]


def tokens(answers: Sequence[Generation]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


def logprobs(answers: Sequence[Generation]) -> list[float]:
    return [each for answer in answers for each in answer.logprobs]


def model_of(kind: str) -> Path:
    return tiny_model(kind, layers=4, heads=4, kv_heads=2, head_dim=64)


def apart(got: Generation, right: Generation) -> float:
    """The largest difference of two log-probabilities; infinite if the tokens differ."""
    if got.token_ids != right.token_ids:
        return math.inf
    return max(abs(a - b) for a, b in zip(got.logprobs, right.logprobs, strict=True))


def check_a_restart(kind: str, folder: Path, **args: Any) -> list[Generation]:
    """Return the answers of an engine that has found what another stored in ``folder``."""
    model, args = model_of(kind), {**KINDS[kind], **args}
    cold = asked(model, {**args, **offloaded(folder)})
    assert cold[0].cached_tokens == 0
    warm = asked(model, {**args, **offloaded(folder)})
    assert tokens(warm) == tokens(cold)
    if args.get("dtype") is None:  # with float32 a wrong byte shows before it changes a token
        assert logprobs(warm) == pytest.approx(logprobs(cold), abs=AS_NEAR)
    reused = [answer.cached_tokens for answer in warm]
    assert min(reused[:3]) >= 700, reused
    return warm


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["gpt_oss", "llama", "gemma3"])
def test_a_restart_finds_what_was_stored(kind: str, tmp_path: Path) -> None:
    check_a_restart(kind, tmp_path)


@pytest.mark.parametrize("kind", ["lfm2", pytest.param("qwen3_next", marks=pytest.mark.exhaustive)])
def test_a_restart_finds_states_and_answers_depend_on_them(kind: str, tmp_path: Path) -> None:
    """Without the second part the test of a restart would prove nothing.

    A state of zeroes need not change the likeliest token of so small a model. But it changes
    log-probabilities by more than they vary in the model's type of number.
    """
    model, args = model_of(kind), KINDS[kind]
    warm = check_a_restart(kind, tmp_path)
    plain = asked(model, args)
    assert tokens(warm) == tokens(plain)
    spoiled = asked(model, {**args, **offloaded(tmp_path, zeroes=True)})
    assert spoiled[2].cached_tokens >= 700
    assert apart(spoiled[2], plain[2]) > max(AS_NEAR, 3 * apart(warm[2], plain[2]))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["lfm2"])
def test_engines_share_a_server(kind: str, tmp_path: Path) -> None:
    """One after the other over one server; then without it, with zeros in place of its chunks."""
    from kvcore_devtools.server_fixture import server_process

    model, args, folder = model_of(kind), KINDS[kind], tmp_path / "server"
    given = ["server.address=local", f"server.folder={folder}", "host.capacity=512MiB"]
    plain = asked(model, args)
    with server_process(*given, f"disk.path={tmp_path / 'kv'}", "disk.capacity=1GiB") as process:
        cold = asked(model, {**args, **served(folder)})
        warm = asked(model, {**args, **served(folder)})
        spoiled = asked(model, {**args, **served(folder, zeroes=True)})
        process.kill()
    computed = asked(model, {**args, **served(folder)})
    assert tokens(cold) == tokens(warm) == tokens(computed) == tokens(plain)
    assert logprobs(warm) == pytest.approx(logprobs(plain), abs=AS_NEAR)
    reused = [answer.cached_tokens for answer in warm]
    assert min(reused[:3]) >= 700, reused
    assert spoiled[2].cached_tokens >= 700
    assert logprobs(spoiled[2:3]) != pytest.approx(logprobs(plain[2:3]), abs=AS_NEAR)
    assert computed[2].cached_tokens == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("version", "kind"),
    # vLLM 0.30's kernel for CPUs takes no convolutions as wide as LFM2's.
    [("0.30", "llama"), ("0.30", "qwen3_next"), ("0.33", "llama"), ("0.33", "lfm2")],
)
def test_other_versions(version: str, kind: str, tmp_path: Path) -> None:
    check_a_restart(kind, tmp_path, python=python_of(f"vllm-{version}"))


@pytest.mark.exhaustive
def test_two_ranks(tmp_path: Path) -> None:
    """A row has the bytes of both."""
    check_a_restart("llama", tmp_path, tensor_parallel_size=2)


def test_errors_of_kvcore_and_of_its_medium_cost_hits_only(tmp_path: Path) -> None:
    """In each call of vLLM, in one engine: see the script."""
    model = model_of("llama")
    said = run_program("vllm", model, HERE / "vllm_tier_guard.py", model, tmp_path, timeout_s=1200)
    [told] = [line for line in said.splitlines() if line.startswith("{")]
    found = json.loads(told)
    assert {name: each["right"] for name, each in found.items()} == dict.fromkeys(found, True)
    assert [name for name, each in found.items() if each["cached"]] == ["nothing"]
    stops = {name for name, each in found.items() if each["stopped"]}
    assert stops == set(found) - {"nothing", "corrupt", "missing"}
    assert "Failed to close mmap_obj" not in said
