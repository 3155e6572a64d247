"""The settings tables of the adapters, ``[vllm]``, ``[trtllm]`` and ``[sglang]``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from kvcore.config.fields import SchemaModel, Seconds

__all__ = ["AdapterConfig", "SglangConfig", "TrtllmConfig", "VllmConfig"]


class AdapterConfig(SchemaModel):
    """Settings that every engine's adapter has.

    An adapter describes the settings that depend on its engine.
    """

    min_load_tokens: int
    save_decode: bool = Field(
        default=True,
        description="Save generated tokens too, so that the next turn of a conversation finds its "
        "answer.",
    )
    layerwise: bool


def _min_load_tokens(engine: str) -> Any:
    """Return the field of that name for ``engine``."""
    return Field(
        default=64,
        ge=0,
        description=f"Fewest tokens to load beyond what {engine} holds in its own cache. Fewer "
        "tokens are recomputed.",
    )


class VllmConfig(AdapterConfig):
    """The vLLM adapter."""

    min_load_tokens: int = _min_load_tokens("vLLM")
    layerwise: bool = Field(
        default=True,
        description="Load layer by layer during the forward pass, where loads run inside a step "
        "(`transfer.sync_load_max`). Waiting inside the forward pass "
        "needs piecewise CUDA graphs: on a GPU with full graphs kvcore waits before the forward "
        "pass instead, unless this is set to true in `kv_connector_extra_config`.",
    )
    promise_s: Seconds = Field(
        default=5.0,
        description="Longest time, in seconds, that a request waits for KV that a prefill "
        "instance has announced. What has not arrived by then is computed.",
    )
    keep_on_reset: bool = Field(
        default=True,
        description="Keep every tier when vLLM resets its cache: by `sleep`, `pause_generation`, "
        "`release_kv_cache_memory` and `reset_prefix_cache` with `reset_connector`. Otherwise a "
        "reset also removes every block from every tier of kvcore, for all engines that share it. "
        "Whether the engine still finds its KV after a reset is up to `namespace.weights_change`.",
    )
    windows: Literal["points", "dense"] = Field(
        default="points",
        description="What is kept of layers with a sliding window, beside layers without one. "
        "`points`: the end of each window, at the ends of prompts and answers, where prompts part, "
        "and once in a while between. Hits end there. `dense`: all of it, as of the other layers, "
        "so that a hit may end anywhere. It takes several times the space.",
    )
    switch_on: bool = Field(
        default=False,
        description="Use kvcore in every vLLM that names no connector, without "
        "`--kv-transfer-config`. Set it where vLLM sees it: as `KVCORE__VLLM__SWITCH_ON`, or in "
        "the file that `KVCORE_CONFIG` names. A connector in vLLM's own arguments counts more, and "
        "so does `--kv-offloading-size`.",
    )


class TrtllmConfig(AdapterConfig):
    """The TensorRT-LLM adapter."""

    min_load_tokens: int = _min_load_tokens("TensorRT-LLM")
    layerwise: bool = Field(
        default=True,
        description="Load layer by layer during the forward pass. With CUDA graphs or "
        "torch.compile the engine may skip the hooks that wait for a layer: kvcore then waits "
        "before the forward pass, whatever this setting is.",
    )
    stage_wait_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=0.1,
        description="Longest time, in seconds, that a lookup waits for KV that is not in host "
        "memory. It waits up to this long for remote stores to say what they have. With one rank "
        "it then waits up to this long again while blocks are read from disk or a store into host "
        "memory; with tensor parallelism it does not wait for reads. The first request waits as "
        "long for the files of its LoRA adapter to be read. No lookup waits for longer than "
        "`transfer.load_deadline_s` in all. TensorRT-LLM cannot retract "
        "a cache hit, so only blocks in host memory are reported as a hit. Blocks that arrive "
        "later serve later requests.",
    )


class SglangConfig(SchemaModel):
    """The SGLang adapter."""

    min_load_tokens: int = _min_load_tokens("SGLang")
    layerwise: bool = Field(
        default=True,
        description="Load layer by layer during the forward pass. Otherwise a batch waits for its "
        "loads before its forward pass.",
    )
    prefetch: Literal["best_effort", "timeout", "wait"] = Field(
        default="timeout",
        description="How long a request waits in SGLang's queue while its blocks are read from "
        "disk or a remote store into host memory: not at all, at most `prefetch_timeout_s` in "
        "total, or until they have arrived (at most `transfer.load_deadline_s`). Other requests "
        "may overtake it.",
    )
    prefetch_timeout_s: Seconds = Field(
        default=0.5, description='Seconds, for `prefetch = "timeout"`.'
    )
    keep_on_flush: bool = Field(
        default=True,
        description="Let SGLang's `/flush_cache` empty only SGLang's own cache. Otherwise it also "
        "removes every block from every tier of kvcore, for all engines that share it. Without "
        "`--admin-api-key`, every client of SGLang may flush. After weights were changed in place, "
        "KV from before is not found in either case. As HiCache's storage, kvcore is emptied by "
        "`/hicache/storage-backend/clear` only if this is false or there is that key.",
    )
    list_requests: bool = Field(
        default=False,
        description="List in SGLang's `/server_info` what each of the last requests reused, by "
        "its id. Every client can read the list, the requests of other tenants included.",
    )
