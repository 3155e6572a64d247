"""How `tools.gpu.parts.vllm` starts engines."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Setup", "forget", "words"]


_ON_A_CPU = ("load_format", "compilation_config")
"""Arguments of engines that those on a CPU get too."""


class Setup(NamedTuple):
    """Whether there is a GPU, where engines may write, and their numbers."""

    gpu: bool
    scratch: Path
    numbers: Iterator[int]

    @classmethod
    def of(cls, gpu: bool, scratch: Path) -> Setup:
        return cls(gpu, scratch, itertools.count())

    def engine(
        self, model: Path, kvcore: dict[str, Any] | None, cache: str = "cache", **args: Any
    ) -> AbstractContextManager[Any]:
        """Return vLLM. On a GPU it starts at once; whoever enters it waits until it is ready.

        On a CPU it starts when it is entered, with the arguments of the engine tests. Engines of
        one ``cache`` share compiled graphs: of those that start at once, each needs its own.
        """
        from kvcore.harness.compare import small_engine
        from kvcore.harness.engine_process import EngineProcess

        log = self.scratch / f"vllm-{next(self.numbers)}.log"
        if not self.gpu:
            own = {name: args[name] for name in _ON_A_CPU if name in args}
            return small_engine(model, kvcore, log=log, **own)
        env = {
            "VLLM_CACHE_ROOT": str(self.scratch / cache),
            "VLLM_USE_FLASHINFER_SAMPLER": "0",  # the bundle has no FlashInfer
        }
        return EngineProcess(model, kvcore=kvcore, log=log, env=env, **args)


def forget(process: Any) -> None:
    """Empty vLLM's own cache, after all saves were published."""
    process.settle()
    process.reset_prefix_cache(timeout_s=60.0)


def words(vocabulary: int, seed: int, count: int) -> list[int]:
    """Return random token ids. Different seeds have no first block in common."""
    from kvcore.harness import prompts

    return prompts.words(seed, count, range(1, vocabulary))
