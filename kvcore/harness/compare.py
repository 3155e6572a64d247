"""Asking engines the same things, and comparing what they say.

What every engine test is made of: greedy answers of an engine with kvcore beside those of one
without, and the metrics that tell where the KV came from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvcore.harness.engine_process import EngineProcess, Generation

ANSWER = 8
"""Tokens asked for: enough to show a wrong cache, and little beside the prompt."""

SHARED = 8
"""Prompts of a test begin alike for fewer tokens than this."""

REUSE: dict[str, Any] = {"ratio": 0.0}
ALL: dict[str, Any] = {"ratio": 1.0}
EXACT: dict[str, Any] = {"enabled": False}
"""Wishes of a request: chunks as they were stored, every row of them recomputed, no fusion."""

SETTLE_S = 200.0
"""How long saves may take: on a machine that does much else, minutes."""

SMALL: dict[str, Any] = {
    "max_model_len": 2048,
    "max_num_batched_tokens": 1024,
    "max_num_seqs": 8,
    "seed": 0,
    "dtype": "float32",
    "start_method": "fork",
    "forked": True,
}
"""vLLM's arguments for a small model on a CPU, and all its processes as forks: what is imported is
imported once for many starts."""

SPACE = {"VLLM_CPU_KVCACHE_SPACE": "1"}
"""Its environment: GiB of KV cache."""

SMALL_SGLANG: dict[str, Any] = {
    "context_length": 2048,
    "chunked_prefill_size": 1024,
    "max_running_requests": 8,
    "max_total_tokens": 24_576,
    "random_seed": 0,
    "dtype": "float32",
    "sleep_on_idle": True,
    "start_method": "fork",
    "forked": True,
}
"""SGLang's arguments for a small model on a CPU."""

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Its environment: threads that have next to nothing to compute spin on cores that others need, and
answers take ten times as long where there are few."""

_SMALL = {"vllm": (SMALL, SPACE), "sglang": (SMALL_SGLANG, ONE_THREAD)}


def sglang_tiers(folder: Path, **sglang: Any) -> dict[str, Any]:
    """kvcore's config for SGLang with host memory and a disk tier in ``folder``. Lookups wait for
    the disk, however slow the machine is, so that what is found is certain. ``sglang`` are settings
    of its section."""
    return {
        "host": {"capacity": "256MiB"},
        "disk": {"path": str(folder / "kv"), "capacity": "256MiB"},
        "transfer": {"load_deadline_s": 600},
        "sglang": {"keep_on_flush": True, "prefetch": "wait", **sglang},
    }


ENGINES = tuple(_SMALL)
"""The engines that there is a driver for."""


def sized(
    engine: str,
    *,
    dtype: str,
    request_tokens: int,
    batch_tokens: int | None = None,
    cached_tokens: int | None = None,
    token_nbytes: int = 0,
) -> dict[str, Any]:
    """An engine's own arguments for requests of up to ``request_tokens``.

    Args:
        batch_tokens: the engine computes so many in one step; its own choice when left out.
        cached_tokens: room in the engine's own cache, tokens of ``token_nbytes`` each.
    """
    if engine == "vllm":
        args: dict[str, Any] = {"dtype": dtype, "max_model_len": request_tokens}
        memory = cached_tokens and cached_tokens * token_nbytes
        own = {"max_num_batched_tokens": batch_tokens, "kv_cache_memory_bytes": memory}
    else:
        args = {"dtype": dtype, "context_length": request_tokens}
        args.update(random_seed=0, start_method="fork")
        own = {"chunked_prefill_size": batch_tokens, "max_total_tokens": cached_tokens}
    return args | {name: value for name, value in own.items() if value is not None}


def remembering(engine: str, kvcore: Mapping[str, Any]) -> dict[str, Any]:
    """These settings of kvcore, such that `EngineProcess.reset_prefix_cache` empties the engine's
    own cache alone."""
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
    """An engine with ``kvcore`` as its config, without it for None, and little memory of its own.

    ``args`` are the engine's own, by the names its Python API has.
    """
    small, space = _SMALL[engine]
    with EngineProcess(
        model, engine=engine, kvcore=kvcore, env={**space, **(env or {})}, **{**small, **args}
    ) as made:
        yield made


def answers(
    process: EngineProcess,
    prompts: Sequence[Sequence[int]],
    batch: int = 1,
    max_tokens: int = ANSWER,
    **options: Any,
) -> list[Generation]:
    """Greedy answers, ``batch`` requests at a time; ``options`` as `EngineProcess.submit` has."""
    found: list[Generation] = []
    for i in range(0, len(prompts), batch):
        found += process.generate(prompts[i : i + batch], max_tokens=max_tokens, **options)
    return found


def same(got: Sequence[Generation], expected: Sequence[Generation]) -> None:
    """AssertionError unless every answer has the tokens expected of it."""
    wrong = [
        (i, a.token_ids, b.token_ids, a.kvcore)
        for i, (a, b) in enumerate(zip(got, expected, strict=True))
        if a.token_ids != b.token_ids
    ]
    if wrong:
        raise AssertionError(f"{len(wrong)} of {len(expected)} answers differ: {wrong[:3]}")


def settled(process: EngineProcess) -> None:
    """Forget everything in the engine's own cache, with all saves published."""
    process.settle(SETTLE_S)
    process.reset_prefix_cache(timeout_s=SETTLE_S)


def all_from(tier: str, got: Sequence[Generation], tokens: Sequence[int]) -> None:
    """AssertionError unless ``tokens`` of each prompt came from the tier and no more were reused,
    but for a few that prompts have in common and that the engine's own cache therefore holds."""
    for answer, count in zip(got, tokens, strict=True):
        told = f"{count} tokens expected, {answer.cached_tokens} cached, {answer.kvcore}"
        assert answer.tiers.keys() <= {tier}, told
        assert count <= answer.cached_tokens < count + SHARED, told
        assert count - SHARED < answer.reused_tokens <= count, told


def counted(process: EngineProcess, name: str, **labels: str) -> float:
    """Sum of the samples of a metric whose labels are these."""
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(
        value
        for sample, value in process.metrics().items()
        if sample.split("{")[0] == name and all(label in sample for label in wanted)
    )


def warm(process: EngineProcess, chunks: Sequence[Sequence[int]], **options: Any) -> None:
    """Have each chunk computed on its own and stored, and the engine's own cache empty."""
    answers(process, chunks, max_tokens=1, fusion=EXACT, **options)
    settled(process)


def blended(got: Sequence[Generation]) -> list[int]:
    """Tokens each answer took from chunks."""
    return [answer.kvcore.get("fusion", {}).get("blended_tokens", 0) for answer in got]


class Reference:
    """Answers of an engine without kvcore and without its own prefix cache, each asked once."""

    def __init__(self, process: EngineProcess, **options: Any) -> None:
        self._process = process
        self._options = options
        self._known: dict[tuple[int, ...], Generation] = {}

    def __call__(self, prompts: Sequence[Sequence[int]]) -> list[Generation]:
        for prompt in prompts:
            if tuple(prompt) not in self._known:
                [self._known[tuple(prompt)]] = answers(self._process, [prompt], **self._options)
        return [self._known[tuple(prompt)] for prompt in prompts]
