"""Real vLLM: greedy tokens with and without kvcore, then times in Llama-3-8B's shape.

Nothing is fetched. Tokens are compared on a small Llama with random, spread weights in float32.
Times are taken on dummy weights in bfloat16. Both models have a config and no tokenizer.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from tools.gpu.machine import gpu_missing
from tools.gpu.parts import Machine
from tools.gpu.record import Record

ANSWER = 8
VOCABULARY = 4096
LENGTHS = (150, 333, 512, 640, 700, 901)
"""Tokens of the prompts whose answers are compared."""
MIN_REUSE = 64
"""Tokens of the shortest prefix that kvcore loads by default."""
BATCH = 4
"""Requests that are decoded together."""
ENOUGH_S = 240.0
"""Seconds after which no further engine is started."""
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 128000,
    "eos_token_id": 128001,
}  # fmt: skip
_SMALL = {
    "max_model_len": 2048, "max_num_batched_tokens": 1024, "max_num_seqs": 8, "seed": 0,
    "dtype": "float32", "kv_cache_memory_bytes": 256 << 20, "skip_tokenizer_init": True,
    "attention_backend": "TRITON_ATTN",
}  # fmt: skip
_LARGE = {
    "max_model_len": 20480, "max_num_batched_tokens": 8192, "max_num_seqs": 8, "seed": 0,
    "dtype": "bfloat16", "kv_cache_memory_bytes": 12 << 30, "skip_tokenizer_init": True,
    "attention_backend": "TRITON_ATTN", "load_format": "dummy",
}  # fmt: skip


class Timed(NamedTuple):
    """What times are taken of: a model's config, lengths of prompts, and how many of each."""

    config: Mapping[str, Any]
    lengths: tuple[int, ...]
    prompts: int
    decoded: int

    @property
    def vocabulary(self) -> int:
        return int(self.config["vocab_size"])


FULL = Timed(LLAMA_8B, (4096, 16384), prompts=3, decoded=64)
REHEARSAL = Timed(
    {**LLAMA_8B, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
     "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 4096,
     "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    (256, 640), prompts=1, decoded=4,
)  # fmt: skip
"""Enough to run every line of `times` on a CPU. Its times mean nothing."""


class Setup(NamedTuple):
    """How engines are started here: whether there is a GPU, and where they may write."""

    gpu: bool
    scratch: Path
    began: float

    @property
    def late(self) -> bool:
        return time.monotonic() - self.began > ENOUGH_S

    @contextmanager
    def engine(self, model: Path, kvcore: dict[str, Any] | None, **args: Any) -> Iterator[Any]:
        """Run vLLM; on a CPU, with the arguments of the engine tests."""
        from kvcore.harness.compare import small_engine
        from kvcore.harness.engine_process import EngineProcess

        log = self.scratch / f"vllm-{len(list(self.scratch.glob('vllm-*')))}.log"
        if not self.gpu:
            own = {name: args[name] for name in ("load_format",) if name in args}
            with small_engine(model, kvcore, log=log, **own) as process:
                yield process
            return
        # One folder of compiled graphs, so that only the first engine of a shape compiles.
        env = {"VLLM_CACHE_ROOT": str(self.scratch / "cache")}
        with EngineProcess(model, kvcore=kvcore, log=log, env=env, **args) as process:
            yield process


def run(record: Record, machine: Machine, scratch: Path) -> None:
    """Compare tokens and measure on a GPU; without one, compare on vLLM's CPU build."""
    if importlib.util.find_spec("vllm") is None:
        record.left_out("real vLLM", "not installed: vllm")
        return
    missing = gpu_missing(dict(machine))
    setup = Setup(not missing, scratch, time.monotonic())
    model = small_model(scratch / "small")
    prompts = [words(VOCABULARY, seed, length) for seed, length in enumerate(LENGTHS)]
    compare(record, setup, model, prompts, "graphs" if setup.gpu else "CPU build")
    if missing:
        record.left_out("vLLM on a GPU: tokens, and times in Llama-3-8B's shape", missing)
        times(Record(scratch / "rehearsal.jsonl"), setup, REHEARSAL)
        record.passed("the measurement of times, rehearsed", "dummy weights of a tiny shape")
        return
    eager = partial(compare, record, setup, model, prompts, "eager", enforce_eager=True)
    rest: dict[str, Callable[[], None]] = {
        "times in Llama-3-8B's shape": partial(times, record, setup, FULL),
        "equal tokens, eager": eager,
    }
    for what, step in rest.items():
        if setup.late:
            record.left_out(what, f"the engines before it took over {ENOUGH_S:g} s")
        else:
            step()


# -- equal tokens ---------------------------------------------------------------------------


def compare(
    record: Record, setup: Setup, model: Path, prompts: Sequence[list[int]], name: str, **args: Any
) -> None:
    """Ask three engines the same prompts, and record how many answers are right, by tier."""
    folder = setup.scratch / f"kv-{name.replace(' ', '-')}"
    args = {**_SMALL, **args}
    with setup.engine(model, None, **args) as process:
        cold, own = _ask(process, prompts), _ask(process, prompts)
    if len({tuple(answer.token_ids) for answer in cold}) < 2:
        record.failed(f"equal tokens, {name}", "every prompt has the same answer: it shows nothing")
        return
    right = [{tuple(a.token_ids), tuple(b.token_ids)} for a, b in zip(cold, own, strict=True)]
    disk = {"path": str(folder), "capacity": "1GiB"}
    with setup.engine(model, {"host": {"capacity": "256MiB"}, "disk": disk}, **args) as process:
        ready = process.wait_ready()
        record.passed(f"vLLM {ready['version']}, {name}", f"{ready['runner']}, {ready['device']}")
        _judge(record, f"cold, {name}", _ask(process, prompts), right, None)
        _forget(process)
        _judge(record, f"host, {name}", _ask(process, prompts), right, "host")
        process.settle()
    little = {"host": {"capacity": _half(prompts)}, "disk": disk}
    with setup.engine(model, little, **args) as process:
        _judge(record, f"disk, {name}", _ask(process, prompts), right, "disk")
        for _ in range(2):
            _forget(process)
            got = _ask(process, prompts[::-1])
            _judge(record, f"evicting, {name}", got, right[::-1], "any")


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


def _forget(process: Any) -> None:
    """Empty vLLM's own cache, after all saves were published."""
    process.settle()
    process.reset_prefix_cache(timeout_s=60.0)


def _half(prompts: Sequence[Sequence[int]]) -> int:
    """Return bytes of host memory for half of the prompts' KV, and for blocks in transit."""
    token = 4 * 2 * 2 * 64 * 4  # layers, K and V, heads, dim, bytes: see `small_model`
    return max(sum(map(len, prompts)) // 2, 1200) * token


# -- times ----------------------------------------------------------------------------------


def times(record: Record, setup: Setup, timed: Timed) -> None:
    """Record times to the first token and between tokens, without kvcore and with it."""
    model = setup.scratch / "dummy"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(timed.config))
    ids, plain = timed.vocabulary, {}
    asked = {n: [words(ids, 100 + n + i, n) for i in range(timed.prompts)] for n in timed.lengths}
    with setup.engine(model, None, **_LARGE) as process:
        _warm_up(process, timed)
        for tokens, prompts in asked.items():
            plain[f"cold, {tokens} tokens"] = _ttft(process, prompts)
            plain[f"own cache, {tokens} tokens"] = _ttft(process, prompts)
        plain["decode"] = _between(process, timed, seed=1)
    for what, seconds in plain.items():
        record.figure(f"vLLM alone: {what}", seconds * 1e3, "ms")
    with setup.engine(model, {"host": {"capacity": timed_host(setup)}}, **_LARGE) as process:
        _warm_up(process, timed)
        for tokens, prompts in asked.items():
            miss = _ttft(process, prompts)
            _forget(process)
            hit, cold = _ttft(process, prompts, reused="host"), plain[f"cold, {tokens} tokens"]
            record.figure(f"kvcore miss, {tokens} tokens", miss / cold, "times alone")
            record.figure(f"kvcore host, {tokens} tokens", hit * 1e3, "ms")
            record.figure(f"kvcore host, {tokens} tokens", cold / hit, "times sooner than cold")
        decode = _between(process, timed, seed=2)
    record.figure("decode, every block saved", decode * 1e3, "ms a token")
    record.figure(
        "decode, every block saved", decode / plain["decode"], "times alone", at_most=1.03
    )


def timed_host(setup: Setup) -> str:
    return "16GiB" if setup.gpu else "256MiB"


def _warm_up(process: Any, timed: Timed) -> None:
    for seed, tokens in enumerate(timed.lengths):
        process.generate([words(timed.vocabulary, seed, tokens)], 4)


def _ttft(process: Any, prompts: Sequence[list[int]], reused: str = "") -> float:
    """Return the median time to the first token. With ``reused``, all came from that tier.

    Raises RuntimeError if they did not.
    """
    got = [process.generate([prompt], 2)[0] for prompt in prompts]
    if reused and any(set(answer.tiers) != {reused} for answer in got):
        raise RuntimeError(f"not all from {reused}: {[answer.kvcore for answer in got]}")
    return float(median(answer.ttft_s for answer in got))


def _between(process: Any, timed: Timed, seed: int) -> float:
    """Return the seconds between tokens of requests that are decoded together."""
    rounds = []
    for number in range(3):
        prompts = [
            words(timed.vocabulary, 1000 * seed + 10 * number + i, 512) for i in range(BATCH)
        ]
        got = process.generate(prompts, timed.decoded)
        rounds.append(median((one.total_s - one.ttft_s) / (timed.decoded - 1) for one in got))
    return float(median(rounds))


# -- models ---------------------------------------------------------------------------------


def words(vocabulary: int, seed: int, count: int) -> list[int]:
    """Return random token ids. Different seeds have no first block in common."""
    from kvcore.harness import prompts

    return prompts.words(seed, count, range(1, vocabulary))


def small_model(folder: Path) -> Path:
    """Write a random Llama of four layers, without a tokenizer, and return its folder."""
    from kvcore.harness.models import tiny_llama

    origin = folder.with_name("no-tokenizer")
    origin.mkdir(exist_ok=True)
    stub: Mapping[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}
    (origin / "config.json").write_text(json.dumps(stub))
    return tiny_llama(folder, layers=4, kv_heads=2, head_dim=64, tokenizer=origin)
