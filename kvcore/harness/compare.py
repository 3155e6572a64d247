"""Asks engines the same prompts and compares their answers.

Every engine test is built on this: it compares the greedy answers of an engine with kvcore to those
of one without, and reads the metrics that show where the KV came from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvcore.harness.engine_process import EngineProcess, Generation
from kvcore.harness.recorded import RecordedEngine, book_of, confirmed

ANSWER = 8
"""Tokens of an answer. They are enough to reveal wrong KV, and few compared with the prompt."""

SHARED = 8
"""Limit of the tokens that the prompts of a test have in common at their start."""

REUSE: dict[str, Any] = {"ratio": 0.0}
ALL: dict[str, Any] = {"ratio": 1.0}
EXACT: dict[str, Any] = {"enabled": False}
"""Fusion options of a request: reuse chunks as stored, recompute every token of them, or no fusion.
"""

SETTLE_S = 200.0
"""Seconds that saves may take. The limit is long because the machine may be busy."""

SMALL: dict[str, Any] = {
    "max_model_len": 2048,
    "max_num_batched_tokens": 1024,
    "max_num_seqs": 8,
    "seed": 0,
    "dtype": "float32",
    "kv_cache_memory_bytes": 256 << 20,
    "skip_tokenizer_init": True,
    "start_method": "fork",
    "forked": True,
    "asynchronous": True,
}
"""Arguments of vLLM for a small model on a CPU. Prompts are token ids.

All its processes are forks, so that modules are imported once for many starts. A tokenizer takes
longer to load than the model, and a large KV cache longer to clear than to fill. Steps are
scheduled asynchronously, as vLLM does by default on a GPU.
"""

SPACE = {"VLLM_CPU_KVCACHE_SPACE": "1"}
"""Environment variables for vLLM's own server on a CPU: the size of the KV cache in GiB."""

SMALL_SGLANG: dict[str, Any] = {
    "context_length": 2048,
    "chunked_prefill_size": 1024,
    "max_running_requests": 8,
    "max_total_tokens": 24_576,
    "random_seed": 0,
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "sleep_on_idle": True,
    "start_method": "fork",
    "forked": True,
}
"""Arguments of SGLang for a small model on a CPU. Prompts are token ids."""

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Environment variables for `SMALL_SGLANG`.

With more threads, those that have almost nothing to compute spin on cores that others need. On a
machine with few cores, answers then take ten times as long.
"""

_SMALL: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "vllm": (SMALL, {}),
    "sglang": (SMALL_SGLANG, ONE_THREAD),
}


def sglang_tiers(folder: Path, **sglang: Any) -> dict[str, Any]:
    """Return kvcore's config for SGLang with host memory and a disk tier in ``folder``.

    Lookups wait for the disk, so that hits are certain even on a slow machine. ``sglang`` are
    settings of the ``sglang`` section.
    """
    return {
        "host": {"capacity": "256MiB"},
        "disk": {"path": str(folder / "kv"), "capacity": "256MiB"},
        "transfer": {"load_deadline_s": 600},
        "sglang": {"keep_on_flush": True, "prefetch": "wait", **sglang},
    }


ENGINES = tuple(_SMALL)
"""Names of the engines that have a driver here."""


def engine_arguments(
    engine: str,
    *,
    dtype: str,
    request_tokens: int,
    cached_tokens: int,
    token_nbytes: int,
    batch_tokens: int | None = None,
) -> dict[str, Any]:
    """Return the engine's own arguments for requests of up to ``request_tokens``.

    Args:
        cached_tokens: size of the engine's own cache in tokens of ``token_nbytes`` bytes each.
        batch_tokens: most tokens that the engine computes in a step; None keeps its default.
    """
    if engine == "vllm":
        args: dict[str, Any] = {"dtype": dtype, "max_model_len": request_tokens}
        args["kv_cache_memory_bytes"] = cached_tokens * token_nbytes
        batch = "max_num_batched_tokens"
    else:
        args = {"dtype": dtype, "context_length": request_tokens}
        args.update(max_total_tokens=cached_tokens, random_seed=0, start_method="fork")
        batch = "chunked_prefill_size"
    return args if batch_tokens is None else {**args, batch: batch_tokens}


def keep_on_reset(engine: str, kvcore: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``kvcore`` such that `EngineProcess.reset_prefix_cache` keeps kvcore's tiers.

    Only the engine's own cache is then emptied.
    """
    if engine != "sglang":
        return dict(kvcore)
    return {**kvcore, "sglang": {**kvcore.get("sglang", {}), "keep_on_flush": True}}


@contextmanager
def small_engine(
    model: Path,
    kvcore: dict[str, Any] | None,
    env: Mapping[str, str] | None = None,
    engine: str = "vllm",
    **args: Any,
) -> Iterator[EngineProcess]:
    """Start a small engine with the config ``kvcore``; None leaves kvcore out.

    ``args`` are the engine's own arguments, by their names in its Python API. An engine without
    kvcore and without a prefix cache may be one whose answers are on record
    (`kvcore.harness.recorded`).
    """
    small, space = _SMALL[engine]
    env, args = {**space, **(env or {})}, {**small, **args}
    with _process(model, engine, kvcore, env, args) as made:
        yield made


def _process(
    model: Path,
    engine: str,
    kvcore: dict[str, Any] | None,
    env: dict[str, str],
    args: dict[str, Any],
) -> EngineProcess:
    if kvcore is None:
        own = {name: value for name, value in args.items() if name not in ("python", "log")}
        book = book_of(engine, model, own, env=env, python=args.get("python"))
        if book is not None:
            return RecordedEngine(book, model, engine=engine, env=env, **args)
    return EngineProcess(model, engine=engine, kvcore=kvcore, env=env, **args)


def answers(
    process: EngineProcess,
    prompts: Sequence[Sequence[int]],
    batch: int = 1,
    max_tokens: int = ANSWER,
    **options: Any,
) -> list[Generation]:
    """Return greedy answers, with ``batch`` requests at a time.

    ``options`` are those of `EngineProcess.submit`.
    """
    found: list[Generation] = []
    for i in range(0, len(prompts), batch):
        found += process.generate(prompts[i : i + batch], max_tokens=max_tokens, **options)
    return found


def assert_same_answers(got: Sequence[Generation], expected: Sequence[Generation]) -> None:
    """Assert that every answer has the expected tokens. Raises AssertionError."""
    pairs = list(zip(got, expected, strict=True))
    differ = [i for i, (a, b) in enumerate(pairs) if a.token_ids != b.token_ids]
    if any(pairs[i][0].token_ids != confirmed(pairs[i][1]).token_ids for i in differ):
        wrong = [(i, a.token_ids, b.token_ids, a.kvcore) for i in differ for a, b in [pairs[i]]]
        raise AssertionError(f"{len(wrong)} of {len(expected)} answers differ: {wrong[:3]}")


def settle_and_empty(process: EngineProcess) -> None:
    """Wait until all saves are published, and empty the engine's own cache."""
    process.settle(SETTLE_S)
    process.reset_prefix_cache(timeout_s=SETTLE_S)


def assert_all_from(tier: str, got: Sequence[Generation], tokens: Sequence[int]) -> None:
    """Assert that ``tokens`` of each prompt came from the tier, and that no more were reused.

    A few tokens may come from the engine's own cache, because the prompts have them in common.
    """
    for answer, count in zip(got, tokens, strict=True):
        found = f"expected {count} tokens, got {answer.cached_tokens} cached, {answer.kvcore}"
        assert answer.tiers.keys() <= {tier}, found
        assert count <= answer.cached_tokens < count + SHARED, found
        assert count - SHARED < answer.reused_tokens <= count, found


def counted(process: EngineProcess, name: str, **labels: str) -> float:
    """Return the sum of the samples of a metric that have all of ``labels``."""
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(
        value
        for sample, value in process.metrics().items()
        if sample.split("{")[0] == name and all(label in sample for label in wanted)
    )


def warm(process: EngineProcess, chunks: Sequence[Sequence[int]], **options: Any) -> None:
    """Compute and store each chunk on its own, and empty the engine's own cache."""
    answers(process, chunks, max_tokens=1, fusion=EXACT, **options)
    settle_and_empty(process)


def blended(got: Sequence[Generation]) -> list[int]:
    """Return the number of tokens that each answer took from chunks."""
    return [answer.kvcore.get("fusion", {}).get("blended_tokens", 0) for answer in got]


class Reference:
    """Answers of an engine without kvcore and without a prefix cache. Each prompt runs once."""

    def __init__(self, process: EngineProcess, **options: Any) -> None:
        self._process = process
        self._options = options
        self._known: dict[tuple[int, ...], Generation] = {}

    def __call__(self, prompts: Sequence[Sequence[int]]) -> list[Generation]:
        for prompt in prompts:
            if tuple(prompt) not in self._known:
                [self._known[tuple(prompt)]] = answers(self._process, [prompt], **self._options)
        return [self._known[tuple(prompt)] for prompt in prompts]
