"""A prompt computed by one engine and answered by another: the least a proxy between them does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcore.harness.engine_process import EngineProcess, Generation

__all__ = ["prefill", "split"]


def prefill(engine: EngineProcess, prompt: Sequence[int], **options: Any) -> dict[str, Any]:
    """Have a prompt computed; what the engine promises to whoever answers it."""
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
    """Each prompt computed by ``first`` and, as soon as that has said so, answered by ``second``.
    Saves of ``first`` may be under way still; several prompts are."""
    futures = [
        second.submit(prompt, max_tokens, promise=prefill(first, prompt, **options), **options)
        for prompt in prompts
    ]
    return [future.result() for future in futures]
