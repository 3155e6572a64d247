"""Times of vLLM in Llama-3-8B's shape: alone, with kvcore, and with its own offloading."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from tools.gpu.parts._vllm_setup import Setup, forget, words
from tools.gpu.record import Record

__all__ = ["FULL", "GPU_ARGUMENTS", "HOST_GIB", "REHEARSAL", "Timed", "Times", "dummy_model"]

BATCH = 4
"""Requests that are decoded together."""
HOST_GIB = 12
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 128000,
    "eos_token_id": 128001,
}  # fmt: skip
GPU_ARGUMENTS: dict[str, Any] = {
    "max_model_len": 20480, "max_num_batched_tokens": 8192, "max_num_seqs": 8, "seed": 0,
    "dtype": "bfloat16", "kv_cache_memory_bytes": 5 << 30, "gpu_memory_utilization": 0.1,
    "skip_tokenizer_init": True, "load_format": "dummy",
}  # fmt: skip
"""On a GPU. The memory of pages is given, so the utilization is only what must be free at start."""
_OWN_OFFLOADING = {"kv_offloading_size": float(HOST_GIB), "kv_offloading_backend": "native"}


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
"""Enough to run every line on a CPU. Its times mean nothing."""


def dummy_model(setup: Setup, name: str, timed: Timed) -> Path:
    """Write the config of a model without weights, and return its folder."""
    model = setup.scratch / name
    model.mkdir()
    (model / "config.json").write_text(json.dumps(timed.config))
    return model


class Times:
    """Engines of one shape. On a GPU they start at once, and wait until `take`."""

    def __init__(self, setup: Setup, timed: Timed) -> None:
        self._timed = timed
        model = dummy_model(setup, "dummy", timed)
        ids = timed.vocabulary
        self._asked = {
            n: [words(ids, 100 + n + i, n) for i in range(timed.prompts)] for n in timed.lengths
        }
        host = {"host": {"capacity": f"{HOST_GIB}GiB" if setup.gpu else "256MiB"}}
        self._alone = setup.engine(model, None, "cache-alone", **GPU_ARGUMENTS)
        self._with = setup.engine(model, host, "cache-kvcore", **GPU_ARGUMENTS)
        self._own: AbstractContextManager[Any] | None = None
        if setup.gpu:  # on a CPU it cannot copy
            arguments = {**GPU_ARGUMENTS, **_OWN_OFFLOADING}
            self._own = setup.engine(model, None, "cache-own", **arguments)

    def take(self, record: Record) -> None:
        """Record times to the first token and between tokens."""
        plain = {}
        with self._alone as process:
            self._warm_up(process)
            for tokens, prompts in self._asked.items():
                plain[f"cold, {tokens} tokens"] = _ttft(process, prompts)
                plain[f"own cache, {tokens} tokens"] = _ttft(process, prompts)
            plain["decode"] = self._between(process, seed=1)
        for what, seconds in plain.items():
            record.figure(f"vLLM alone: {what}", seconds * 1e3, "ms")
        self._offloaded(record, "kvcore", self._with, plain, at_most=1.03)
        if self._own is not None:
            self._offloaded(record, "vLLM's own offloading", self._own, plain)

    def _offloaded(
        self,
        record: Record,
        who: str,
        engine: AbstractContextManager[Any],
        plain: Mapping[str, float],
        at_most: float | None = None,
    ) -> None:
        """Record misses, hits from host memory, and decoding while every block is saved."""
        with engine as process:
            self._warm_up(process)
            for tokens, prompts in self._asked.items():
                cold = plain[f"cold, {tokens} tokens"]
                miss = _ttft(process, prompts)
                forget(process)
                hit = _ttft(process, prompts, reused=tokens // 2)
                record.figure(f"{who}: miss, {tokens} tokens", miss / cold, "times alone")
                record.figure(f"{who}: host, {tokens} tokens", hit * 1e3, "ms")
                record.figure(f"{who}: host, {tokens} tokens", cold / hit, "times sooner than cold")
            decode = self._between(process, seed=2)
        what = f"{who}: decode, every block saved"
        record.figure(what, decode * 1e3, "ms a token")
        record.figure(what, decode / plain["decode"], "times alone", at_most=at_most)

    def _warm_up(self, process: Any) -> None:
        for seed, tokens in enumerate(self._timed.lengths):
            process.generate([words(self._timed.vocabulary, seed, tokens)], 4)

    def _between(self, process: Any, seed: int) -> float:
        """Return the seconds between tokens of requests that are decoded together."""
        timed, rounds = self._timed, []
        for number in range(3):
            first = 1000 * seed + 10 * number
            prompts = [words(timed.vocabulary, first + i, 512) for i in range(BATCH)]
            got = process.generate(prompts, timed.decoded)
            rounds.append(median((one.total_s - one.ttft_s) / (timed.decoded - 1) for one in got))
        return float(median(rounds))


def _ttft(process: Any, prompts: Sequence[list[int]], reused: int = 0) -> float:
    """Return the median time to the first token. At least ``reused`` tokens came from a cache.

    Raises RuntimeError if they did not.
    """
    got = [process.generate([prompt], 2)[0] for prompt in prompts]
    if any(answer.cached_tokens < reused for answer in got):
        found = [(answer.cached_tokens, answer.kvcore) for answer in got]
        raise RuntimeError(f"wanted {reused} tokens from a cache: {found}")
    return float(median(answer.ttft_s for answer in got))
