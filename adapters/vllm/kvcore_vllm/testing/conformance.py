"""vLLM for the conformance kit: the real engine in a process of its own.

    vllm               Model Runner V1, asynchronous scheduling, the version in the environment
    vllm:sync          Model Runner V1, synchronous scheduling
    vllm:v2            Model Runner V2, asynchronous scheduling
    vllm:0.33-v2       as well, and the version must be 0.33 (`tools/env.py vllm-0.33`)

This module imports no vLLM; the child process does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from kvcore.errors import ConfigError
from kvcore.harness.compare import SMALL
from kvcore.testing.conformance.driver import Capability, Driver, Engine, Setup
from kvcore.testing.conformance.process import ProcessDriver, ProcessEngine
from kvcore_vllm.testing.rig import V2, V2_RUNNER

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
    version: ClassVar[str] = ""
    asynchronous: ClassVar[bool] = True
    v2: ClassVar[bool] = False

    def about(self) -> str:
        """Return the version and the configuration of the last started engine."""
        runner = "V2" if self.v2 else "V1"
        scheduling = "asynchronous" if self.asynchronous else "synchronous"
        return f"{super().about()}, Model Runner {runner}, {scheduling} scheduling"

    def start(self, setup: Setup) -> Engine:
        """Start the engine. Raises ConfigError if it is not the version or the runner asked for."""
        engine = super().start(setup)
        if setup.kvcore is None:  # it may not run yet, and those with kvcore are looked at
            return engine
        version, runner = self._told["version"], self._told["runner"]
        if not version.startswith(self.version) or self.v2 != runner.startswith(V2_RUNNER):
            engine.stop()
            raise ConfigError(
                f"{self.name} was asked for, and vLLM {version} with {runner} started: give the "
                f"interpreter of another environment with --python {self.name}=PATH"
            )
        return engine

    def settings(self, kvcore: Mapping[str, Any]) -> dict[str, Any]:
        """Return kvcore's settings for this engine."""
        return {**kvcore, "vllm": {"min_load_tokens": 1}}

    def arguments(self, setup: Setup) -> dict[str, Any]:
        """Return the engine's arguments for a setup."""
        made: dict[str, Any] = {
            "asynchronous": self.asynchronous,
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


def variant(given: str) -> Driver:
    """Return the driver of a variant: "sync" or "v2", with a version and "-" before it or alone.

    Raises ConfigError for any other text.
    """
    version, _, word = given.rpartition("-")
    if not version and word[:1].isdigit():
        version, word = word, ""
    if word not in ("", "sync", "v2") or (version and not version[0].isdigit()):
        raise ConfigError(
            f"given vllm:{given}; it takes sync, v2 or a version, or both, as in vllm:0.33-v2"
        )
    told = {"name": f"vllm:{given}", "version": version, "asynchronous": word != "sync"}
    if word == "v2":
        told |= {"v2": True, "environment": V2}
    kind: type[VllmDriver] = type("VllmVariant", (VllmDriver,), told)
    return kind()
