"""Real vLLM: greedy tokens with and without kvcore, then times in Llama-3-8B's shape.

Nothing is fetched. Tokens are compared on a small Llama with random, spread weights in float32.
Times are taken on dummy weights in bfloat16 (`_vllm_times`). Both models have a config and no
tokenizer. On a GPU engines start at once where they can: a start is most of what the part costs.

    reference   cold, then from vLLM's own prefix cache
    kvcore      cold, then from host memory after vLLM's cache was emptied
    restarted   from disk, with so little host memory that blocks are evicted meanwhile

An answer from a cache must be the cold one or that of vLLM's own prefix cache, which computes the
same rows over the same KV.
"""

from __future__ import annotations

import importlib.util
import json
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from kvcore.errors import KVCoreError
from tools.gpu.machine import gpu_missing
from tools.gpu.parts import Machine
from tools.gpu.parts._vllm_blends import Blends
from tools.gpu.parts._vllm_setup import Setup, forget, words
from tools.gpu.parts._vllm_times import FULL, REHEARSAL, Times
from tools.gpu.record import Record

ANSWER = 8
VOCABULARY = 4096
LENGTHS = (150, 333, 512, 640, 700, 901)
"""Tokens of the prompts whose answers are compared."""
ENOUGH_S = 200.0
"""Seconds after which no further engines are started."""
MIN_REUSE = 64
"""Tokens of the shortest prefix that kvcore loads by default."""
_SMALL: dict[str, Any] = {
    "max_model_len": 2048, "max_num_batched_tokens": 1024, "max_num_seqs": 8, "seed": 0,
    "dtype": "float32", "kv_cache_memory_bytes": 256 << 20, "gpu_memory_utilization": 0.02,
    "skip_tokenizer_init": True, "attention_backend": "TRITON_ATTN",
}  # fmt: skip


def run(record: Record, machine: Machine, scratch: Path) -> None:
    """Compare tokens and measure on a GPU; without one, compare on vLLM's CPU build."""
    if importlib.util.find_spec("vllm") is None:
        record.left_out("real vLLM", "not installed: vllm")
        return
    missing = gpu_missing(dict(machine))
    began = time.monotonic()
    setup = Setup.of(not missing, scratch)
    model = small_model(scratch / "small")
    prompts = [words(VOCABULARY, seed, length) for seed, length in enumerate(LENGTHS)]
    if missing:
        tokens = Tokens(setup, model, prompts, "CPU build")
        tokens.compare(record)
        tokens.compare_restarted(record)
        record.left_out("vLLM on a GPU: tokens, and times in Llama-3-8B's shape", missing)
        rehearsal = Record(scratch / "rehearsal.jsonl")
        Times(setup, REHEARSAL).take(rehearsal)
        Blends(setup, REHEARSAL).take(rehearsal)
        record.passed("the measurement of times, rehearsed", "dummy weights of a tiny shape")
        return
    times = Times(setup, FULL)
    tokens = Tokens(setup, model, prompts, "graphs")
    for what, step in (
        ("equal tokens, graphs", tokens.compare),
        ("times in Llama-3-8B's shape", times.take),
        ("equal tokens after a restart, graphs", tokens.compare_restarted),
    ):
        _tried(record, what, step)
    too_long = f"what came before took over {ENOUGH_S:g} s"
    if time.monotonic() - began > ENOUGH_S:
        record.left_out("a blend, by vLLM's operators, and equal tokens, eager", too_long)
        return
    _tried(record, "a blend, by vLLM's operators", Blends(setup, FULL).take)
    if time.monotonic() - began > ENOUGH_S:
        record.left_out("equal tokens, eager", too_long)
        return
    eager = Tokens(setup, model, prompts, "eager", enforce_eager=True)
    _tried(record, "equal tokens, eager", eager.compare)
    _tried(record, "equal tokens after a restart, eager", eager.compare_restarted)


def _tried(record: Record, what: str, step: Callable[[Record], None]) -> None:
    """Take a step. An error is a failure of the part, which goes on."""
    try:
        step(record)
    except (KVCoreError, RuntimeError, OSError) as error:
        traceback.print_exc()
        record.failed(what, f"{type(error).__name__}: {error}")


# -- equal tokens ---------------------------------------------------------------------------


class Tokens:
    """The same prompts, asked of three engines: without kvcore, with it, and with it restarted.

    On a GPU the first two start at once, and the third when they have ended.
    """

    def __init__(
        self, setup: Setup, model: Path, prompts: Sequence[list[int]], name: str, **args: Any
    ) -> None:
        self._prompts, self._name = prompts, name
        self._setup, self._model, self._args = setup, model, {**_SMALL, **args}
        folder = setup.scratch / f"kv-{name.replace(' ', '-')}"
        self._disk: dict[str, Any] = {"path": str(folder), "capacity": "1GiB"}
        self._plain = self._start(None, f"cache-{name}-plain")
        host = {"host": {"capacity": "256MiB"}, "disk": self._disk}
        self._first = self._start(host, f"cache-{name}")
        self._second: AbstractContextManager[Any] | None = None
        self._right: list[set[tuple[int, ...]]] = []

    def _start(self, kvcore: dict[str, Any] | None, cache: str) -> AbstractContextManager[Any]:
        return self._setup.engine(self._model, kvcore, cache, **self._args)

    def compare(self, record: Record) -> None:
        """Record how many answers are right: computed with kvcore, and from host memory."""
        prompts, name = self._prompts, self._name
        with self._plain as process:
            cold, own = _ask(process, prompts), _ask(process, prompts)
        if len({tuple(answer.token_ids) for answer in cold}) < 2:
            record.failed(f"equal tokens, {name}", "every prompt has the same answer")
            return
        self._right = right = [
            {tuple(a.token_ids), tuple(b.token_ids)} for a, b in zip(cold, own, strict=True)
        ]
        with self._first as process:
            ready = process.wait_ready()
            detail = f"{ready['runner']}, {ready['device']}"
            record.passed(f"vLLM {ready['version']}, {name}", detail)
            _judge(record, f"cold, {name}", _ask(process, prompts), right, None)
            forget(process)
            _judge(record, f"host, {name}", _ask(process, prompts), right, "host")
            process.settle()
        little = {"host": {"capacity": _half(prompts)}, "disk": self._disk}
        self._second = self._start(little, f"cache-{name}")

    def compare_restarted(self, record: Record) -> None:
        """Record how many answers are right: from disk, and while blocks are evicted."""
        if self._second is None:
            record.left_out(f"disk, {self._name}", "the engine before it failed")
            return
        prompts, right = self._prompts, self._right
        with self._second as process:
            _judge(record, f"disk, {self._name}", _ask(process, prompts), right, "disk")
            for _ in range(2):
                forget(process)
                got = _ask(process, prompts[::-1])
                _judge(record, f"evicting, {self._name}", got, right[::-1], "any")


def _judge(
    record: Record, what: str, got: Sequence[Any], right: Sequence[set[Any]], tier: str | None
) -> None:
    """Record whether all answers are right, and whether their KV came from where it should."""
    wrong = [i for i, (a, b) in enumerate(zip(got, right, strict=True))
             if tuple(a.token_ids) not in b]  # fmt: skip
    tiers = [set(answer.tiers) for answer in got]
    astray = [i for i, found in enumerate(tiers) if not _from(found, tier)]
    if wrong or astray:
        record.failed(what, f"answers {wrong} are wrong, {astray} not from {tier}: {tiers}")
    else:
        reused = sum(answer.reused_tokens for answer in got)
        record.passed(what, f"{len(got)} answers equal, {reused} tokens reused")


def _from(found: set[str], tier: str | None) -> bool:
    if tier is None:
        return not found
    return bool(found) if tier == "any" else found == {tier}


def _ask(process: Any, prompts: Sequence[list[int]]) -> list[Any]:
    return [process.generate([prompt], ANSWER)[0] for prompt in prompts]


def _half(prompts: Sequence[Sequence[int]]) -> int:
    """Return bytes of host memory for half of the prompts' KV, and for blocks in transit."""
    token = 4 * 2 * 2 * 64 * 4  # layers, K and V, heads, dim, bytes: see `small_model`
    return max(sum(map(len, prompts)) // 2, 1200) * token


# -- models ---------------------------------------------------------------------------------


def small_model(folder: Path) -> Path:
    """Write a random Llama of four layers, without a tokenizer, and return its folder."""
    from kvcore.harness.models import tiny_llama

    origin = folder.with_name("no-tokenizer")
    origin.mkdir(exist_ok=True)
    stub: Mapping[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}
    (origin / "config.json").write_text(json.dumps(stub))
    return tiny_llama(folder, layers=4, kv_heads=2, head_dim=64, tokenizer=origin)
