"""Disaggregated prefill: one engine computes a prompt, and another one answers it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcore.harness.engine_process import EngineProcess, Generation

__all__ = ["prefill", "split"]


def prefill(engine: EngineProcess, prompt: Sequence[int], **options: Any) -> dict[str, Any]:
    """Compute a prompt, and return what the engine promises to the engine that answers it."""
    [made] = engine.generate([prompt], max_tokens=1, **options)
    promise = made.kvcore.get("promise")
    assert isinstance(promise, dict), f"no promise: is it a prefill instance? {made.kvcore}"
    return promise


def split(
    first: EngineProcess,
    second: EngineProcess,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    **options: Any,
) -> list[Generation]:
    """Prefill each prompt on ``first``, and answer it on ``second`` as soon as that has ended.

    Saves of ``first`` may still be in flight then. All prompts are submitted at once.
    """
    futures = [
        second.submit(prompt, max_tokens, promise=prefill(first, prompt, **options), **options)
        for prompt in prompts
    ]
    return [future.result() for future in futures]
