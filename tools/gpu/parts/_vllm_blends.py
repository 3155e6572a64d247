"""A blend in vLLM, with two choices of operators in the layers that it runs.

A blend calls vLLM's decoder layers outside of the compiled model. In an engine that compiles, vLLM
leaves RoPE and the activation to torch, because the compiler fuses them with what is around. In a
layer of a blend RoPE is then several small kernels, and the activation (in 0.32) one that torch
compiles at its first call. An eager engine launches one of vLLM's own for each.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any, NamedTuple

from kvcore.harness.compare import blended, warm
from tools.gpu.parts._vllm_setup import Setup, words
from tools.gpu.parts._vllm_times import GPU_ARGUMENTS, HOST_GIB, Timed, dummy_model
from tools.gpu.record import Record

__all__ = ["Blends", "Mixed", "mixed"]

RATIO = 0.15
GAP = 8
"""Tokens of the prompt's own before each chunk."""
_CHOSEN, _OWN = "the operators that vLLM chose", "vLLM's own kernels for RoPE and activation"
WAYS: Mapping[str, dict[str, Any]] = {
    _CHOSEN: {},
    _OWN: {"compilation_config": {"custom_ops": ["none", "+rotary_embedding", "+silu_and_mul"]}},
}
"""Arguments of vLLM, by what its layers compute with."""


class Mixed(NamedTuple):
    """A prompt of ``count`` tokens of which the ``spans`` are chunks that are held."""

    tokens: list[int]
    spans: list[tuple[int, int]]


def mixed(vocabulary: int, count: int, number: int, chunks: list[list[int]]) -> Mixed:
    """Return a prompt with all chunks. Prompts of different numbers have no beginning in common."""
    tokens, spans = [], list[tuple[int, int]]()
    for place in range(len(chunks)):
        chunk = chunks[(place + number) % len(chunks)]
        tokens += words(vocabulary, 5000 + 100 * number + place, GAP)
        spans.append((len(tokens), len(tokens) + len(chunk)))
        tokens += chunk
    return Mixed(tokens + words(vocabulary, 5900 + number, count - len(tokens)), spans)


class Blends:
    """Engines that blend, one for each of `WAYS`. On a GPU they start at once."""

    def __init__(self, setup: Setup, timed: Timed) -> None:
        self._setup, self._timed = setup, timed
        self._tokens = timed.lengths[-1]
        size = max(64, self._tokens // 16 // 64 * 64)
        ids = timed.vocabulary
        self._chunks = [
            words(ids, 4000 + i, size) for i in range((self._tokens - 1) // (size + GAP))
        ]

    def take(self, record: Record) -> None:
        """Record the time to the first token by way, and how much sooner it is with own kernels.

        Raises RuntimeError if a prompt was not blended.
        """
        model = dummy_model(self._setup, "dummy-blends", self._timed)
        host = f"{HOST_GIB}GiB" if self._setup.gpu else "256MiB"
        kvcore = {"host": {"capacity": host}, "fusion": {"enabled": True, "min_tokens": 16}}
        engines = [
            self._setup.engine(model, kvcore, f"cache-blends-{i}", **GPU_ARGUMENTS, **arguments)
            for i, arguments in enumerate(WAYS.values())
        ]
        taken: dict[str, float] = {}
        for way, engine in zip(WAYS, engines, strict=True):
            with engine as process:
                warm(process, self._chunks)
                taken[way] = self._ttft(process)
            what = f"blend at {RATIO:.0%}, {self._tokens} tokens, {way}"
            record.figure(what, taken[way] * 1e3, "ms to the first token")
        what = f"blend at {RATIO:.0%}, {self._tokens} tokens, {_OWN}"
        record.figure(what, taken[_CHOSEN] / taken[_OWN], f"times sooner than {_CHOSEN}")

    def _ttft(self, process: Any) -> float:
        """Return the median time to the first token, after one prompt that is not counted."""
        found = []
        for number in range(self._timed.prompts + 1):
            prompt = mixed(self._timed.vocabulary, self._tokens, number, self._chunks)
            wish = {"ratio": RATIO, "chunks": prompt.spans}
            [answer] = process.generate([prompt.tokens], 2, fusion=wish)
            if not blended([answer])[0]:
                raise RuntimeError(f"prompt {number} was not blended: {answer.kvcore}")
            found.append(answer.ttft_s)
        return float(median(found[1:]))
