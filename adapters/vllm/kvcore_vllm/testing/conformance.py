"""vLLM for the conformance kit: the real engine in a process of its own.

This module imports no vLLM; the child process does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from kvcore.harness.compare import SMALL
from kvcore.testing.conformance.driver import Capability, Driver, Setup
from kvcore.testing.conformance.process import ProcessDriver, ProcessEngine

PAGE_TOKENS = 32
STAGED: Mapping[str, Any] = {
    "enforce_eager": False,
    "compilation_config": {"mode": 2, "backend": "eager"},
}
"""Settings for pipeline stages on a CPU: trace the model once, and run it eagerly. vLLM 0.32
allocates the buffers that a later stage receives into only in its warm-up, which an eager engine on
a CPU does not have."""


class VllmDriver(ProcessDriver):
    """vLLM in a process of its own."""

    name: ClassVar[str] = "vllm"
    title: ClassVar[str] = "vLLM"
    capabilities: ClassVar[frozenset[Capability]] = frozenset(Capability)
    engine_args: ClassVar[Mapping[str, Any]] = SMALL

    def settings(self, kvcore: Mapping[str, Any]) -> dict[str, Any]:
        """Return kvcore's settings for this engine."""
        return {**kvcore, "vllm": {"min_load_tokens": 1}}

    def arguments(self, setup: Setup) -> dict[str, Any]:
        """Return the engine's arguments for a setup."""
        made: dict[str, Any] = {
            "block_size": PAGE_TOKENS,
            "enable_prefix_caching": setup.kvcore is not None,
            "tensor_parallel_size": setup.ranks,
            "pipeline_parallel_size": setup.stages,
        }
        if setup.stages > 1:
            made |= STAGED
        if setup.step_tokens is not None:
            made["max_num_batched_tokens"] = setup.step_tokens
        if setup.memory_tokens is not None:
            made["num_gpu_blocks_override"] = setup.memory_tokens // PAGE_TOKENS
            made["max_model_len"] = setup.memory_tokens - PAGE_TOKENS
        if setup.lora:
            made |= {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
        return made

    def preemptions(self, engine: ProcessEngine) -> int:
        """Return how many requests the engine has preempted."""
        return int(engine.counted("vllm:num_preemptions_total"))


def driver() -> Driver:
    """Return the driver for the conformance kit."""
    return VllmDriver()
