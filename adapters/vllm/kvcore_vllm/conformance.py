"""vLLM for the conformance kit: the real engine in a process of its own.

This module imports no vLLM; the child process does.
"""

from __future__ import annotations

import importlib.metadata
import os
import time
from collections.abc import Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, ClassVar

from kvcore.errors import TransferError
from kvcore.testing.asking import SMALL, SPACE
from kvcore.testing.conformance.driver import Answer, Ask, Capability, Driver, Engine, Setup
from kvcore.testing.conformance.metrics import total_of_samples
from kvcore.testing.conformance.reference import settings
from kvcore.testing.engine_process import EngineProcess, Generation

PAGE_TOKENS = 32
PUBLISHED_S = 0.5
"""vLLM tells nobody when a save is published; after this long without work it is."""


class InProcessOfItsOwn(Engine):
    """An `EngineProcess`."""

    def __init__(self, setup: Setup) -> None:
        kvcore = None
        if setup.kvcore is not None:
            kvcore = settings({**setup.kvcore, "vllm": {"min_load_tokens": 1}})
        path = [*map(str, setup.path), os.environ.get("PYTHONPATH", "")]
        env = {**SPACE, "PYTHONPATH": os.pathsep.join(filter(None, path))}
        self._process = EngineProcess(
            setup.model, kvcore=kvcore, env=env, **{**SMALL, **_arguments(setup)}
        )
        self._process.wait_ready()

    def ask(self, asks: Sequence[Ask], timeout_s: float = 120.0) -> list[Answer]:
        futures = [
            self._process.submit(
                ask.tokens,
                ask.max_tokens,
                cache_salt=ask.salt,
                lora=ask.lora,
                abort_after=ask.abort_after,
                fusion=dict(ask.fusion) if ask.fusion is not None else {"enabled": False},
            )
            for ask in asks
        ]
        limit = time.monotonic() + timeout_s
        try:
            return [_answer(future.result(max(limit - time.monotonic(), 0))) for future in futures]
        except FutureTimeout as error:
            raise TransferError(f"a request did not end within {timeout_s} s") from error

    def settle(self) -> None:
        time.sleep(PUBLISHED_S)

    def forget(self) -> None:
        self._process.reset_prefix_cache()  # waits for pages that are being saved

    def clear(self) -> None:
        self.settle()
        self._process.reset_prefix_cache(connector=True)

    def counted(self, name: str, **labels: str) -> float:
        return total_of_samples(self._process.metrics(), name, labels)

    @property
    def preemptions(self) -> int:
        return int(self.counted("vllm:num_preemptions_total"))

    def check(self) -> None:
        """That every page can be let go of; the rest is in the engine's own process."""
        self._process.reset_prefix_cache()

    def stop(self) -> None:
        self._process.close()


def _arguments(setup: Setup) -> dict[str, Any]:
    made: dict[str, Any] = {
        "block_size": PAGE_TOKENS,
        "enable_prefix_caching": setup.kvcore is not None,
        "tensor_parallel_size": setup.ranks,
        "dtype": setup.dtype,
    }
    if setup.step_tokens is not None:
        made["max_num_batched_tokens"] = setup.step_tokens
    if setup.memory_tokens is not None:
        made["num_gpu_blocks_override"] = setup.memory_tokens // PAGE_TOKENS
        made["max_model_len"] = setup.memory_tokens - PAGE_TOKENS
    if setup.lora:
        made |= {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    return made


def _answer(generation: Generation) -> Answer:
    return Answer(generation.token_ids, generation.tiers)


class VllmDriver(Driver):
    name: ClassVar[str] = "vllm"
    capabilities: ClassVar[frozenset[Capability]] = frozenset(Capability)

    def start(self, setup: Setup) -> Engine:
        return InProcessOfItsOwn(setup)

    def about(self) -> str:
        return f"vLLM {importlib.metadata.version('vllm')}, float32 on a CPU"


def driver() -> Driver:
    return VllmDriver()
