"""What makes the KV of one TensorRT-LLM engine differ from another's, as kvcore's ingredients.

The engine gives a connector its arguments, and nothing of the model that it has built from them.
An argument that is not named here counts, whatever it does: one that is missing from the list can
cause a miss, but never a wrong hit.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from collections.abc import Mapping
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kvcore.model.identity import rope_rule, weights_identity
from kvcore.model.ingredients import ModelIdentity, kv_fields, split_config
from kvcore.model.shape import ITEM_BYTES
from kvcore.model.weights import fingerprint_code

__all__ = ["model_identity", "overridden", "read_environment"]

_ALIKE = frozenset(
    {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
)
"""Models whose code was compared with vLLM's. Others are not shared with other engines."""

_FILE_FORMATS = frozenset({"auto", "0"})
"""Ways to load that read the files as they are, by name or number."""

_CHECKPOINTS = frozenset({"", "HF"})

# Parallelism, batches and memory; the server, its logs and its answers; kernels for the same
# numbers; media, adapters and draft models, whose KV is not kept or kept apart; what other
# ingredients say.
# fmt: off
_NEUTRAL = frozenset({
    "model", "revision", "dtype", "model_kwargs", "load_format", "checkpoint_format",
    "checkpoint_loader", "trust_remote_code", "attn_backend", "kv_cache_config", "quant_config",
    "max_seq_len", "env_overrides", "ray_worker_extension_cls", "mx_config", "gms_config",
    "checkpoint_io_policy", "tensor_parallel_size", "pipeline_parallel_size",
    "context_parallel_size", "cp_config", "pp_partition", "gpus_per_node",
    "moe_cluster_parallel_size", "moe_tensor_parallel_size", "moe_expert_parallel_size",
    "enable_attention_dp", "attention_dp_config", "enable_lm_head_tp_in_adp", "dwdp_config",
    "max_batch_size", "max_input_len", "max_beam_width", "max_num_tokens", "scheduler_config",
    "enable_chunked_prefill", "reorder_policy_config", "batch_wait_timeout_ms",
    "batch_wait_timeout_iters", "batch_wait_max_tokens_ratio", "disable_overlap_scheduler",
    "enable_early_first_token_response", "enable_low_latency_host_dispatch",
    "enable_resource_governor", "garbage_collection_gen0_threshold", "sleep_config",
    "cuda_graph_config", "encoder_cuda_graph_config", "enable_encoder_decoder_mixed_cuda_graph",
    "torch_compile_config", "prefill_cuda_graph_backend", "prefill_capture_num_tokens",
    "enable_autotuner", "use_fine_grained_sync", "enable_layerwise_nvtx_marker",
    "layer_wise_benchmarks_config", "tokenizer", "tokenizer_mode", "custom_tokenizer",
    "tokenizer_revision", "skip_tokenizer_init", "post_processor_hook", "generation_config",
    "guided_decoding_backend", "batched_logits_processor", "decoding_config", "sampler_type",
    "sampler_force_async_worker", "enable_in_graph_sampling", "enable_speculative_beam_history_d2h",
    "gather_generation_logits", "num_postprocess_workers", "postprocess_tokenizer_dir",
    "num_serve_frontends", "reasoning_parser", "stream_interval", "mpi_session",
    "orchestrator_type", "ray_placement_config", "ray_worker_nsight_options", "backend",
    "iter_stats_max_iterations", "request_stats_max_iterations", "enable_iter_perf_stats",
    "enable_iter_req_stats", "print_iter_log", "max_stats_len", "return_perf_metrics",
    "perf_metrics_output_dir", "perf_metrics_max_requests", "prometheus_metrics_config",
    "enable_energy_metrics", "telemetry_config", "otlp_traces_endpoint", "kv_connector_config",
    "cache_transceiver_config", "peft_cache_config", "enable_lora", "lora_config",
    "speculative_config", "sparse_attention_config", "kv_cache_compression_config",
    "multimodal_config", "mm_encoder_only", "disable_mm_encoder", "encoder_max_batch_size",
    "encoder_max_num_tokens",
})
# fmt: on

_NUMBER_FORMATS = re.compile(
    r"OVERRIDE_QUANT_ALGO$|(TRTLLM|TLLM)_\w*(BF16|FP4|FP8|FP32|INT8|LAYER_NUM|LOW_PRECISION|QUANT"
    r"|SKIP_SOFTMAX|SPARSE)"
)
"""Environment variables that choose the numbers of a computation."""

_CONFIG_FILES = ("hf_quant_config.json", "dtypes.json", "params.json")
"""Files of a checkpoint beside ``config.json`` from which the engine configures the model."""

SCALES = "TRTLLM_LOAD_KV_SCALES"


def overridden(config: Mapping[str, Any], llm_args: Any) -> dict[str, Any]:
    """Return the text model's config as the engine applies it, with ``model_kwargs``.

    They may name the text model's fields at the top, or under ``text_config``.
    """
    told = dict(getattr(llm_args, "model_kwargs", None) or {})
    inner = told.pop("text_config", None)
    return _merged(_merged(config, told), inner if isinstance(inner, Mapping) else {})


def _merged(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(config)
    for name, value in changes.items():
        old = found.get(name)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            found[name] = _merged(old, value)
        else:
            found[name] = value
    return found


def read_environment(llm_args: Any) -> dict[str, str]:
    """Return the environment of the engine's processes, with ``env_overrides``."""
    return {**os.environ, **(getattr(llm_args, "env_overrides", None) or {})}


def model_identity(
    llm_args: Any, config: Mapping[str, Any], folder: str, compute_dtype: str, kv_dtype: str
) -> ModelIdentity:
    """Return what shapes all KV of the engine.

    ``config`` is the text model's with its overrides (`overridden`). ``folder`` is that of the
    checkpoint, or "" if it is not local. The types are torch names. Raises UnsupportedError if the
    weights cannot be read.
    """
    shared, _ = split_config(config, config)
    if changes := getattr(llm_args, "model_kwargs", None):
        shared["overrides"] = kv_fields(changes)
    model, revision = folder or str(llm_args.model), getattr(llm_args, "revision", None)
    environment = read_environment(llm_args)
    reasons = _unseen(llm_args)
    read = not reasons or Path(model).exists()
    weights = weights_identity(model, revision, config.get("_commit_hash")) if read else None
    if weights is not None and weights.alone:
        reasons.append(weights.alone)
    return ModelIdentity(
        config=shared,
        weights=model.encode() if weights is None else weights.digest,
        load=_load(llm_args),
        code=_code(llm_args, config, folder),
        compute_dtype=f"torch.{compute_dtype}",
        quantization=_quantization(llm_args, config),
        kv_dtype=f"torch.{kv_dtype}",
        kv_scales=_scales(environment) if ITEM_BYTES[kv_dtype] == 1 else None,
        rope=rope_rule(config, "trtllm", getattr(llm_args, "max_seq_len", None)),
        windows=None,
        attention=_latent(config),
        lora=None,
        draft=None,
        states=None,
        own=_own(llm_args, environment, folder),
        alone=tuple(reasons),
    )


def _name(value: Any) -> str:
    """Return the name of an option that may be a member of an Enum; "" for None."""
    return "" if value is None else str(value.name if isinstance(value, Enum) else value)


def _load(llm_args: Any) -> str | None:
    way = _name(getattr(llm_args, "load_format", None) or "auto").lower()
    checkpoint = _name(getattr(llm_args, "checkpoint_format", None))
    if way in _FILE_FORMATS and checkpoint in _CHECKPOINTS:
        return None
    return f"{way} {checkpoint}".strip()


def _unseen(llm_args: Any) -> list[str]:
    """Return why the files do not tell what the model computes with, one sentence each."""
    way = _name(getattr(llm_args, "load_format", None) or "auto").lower()
    found = []
    if way not in _FILE_FORMATS:
        found.append(f"weights by load_format={way!r} are not those of the files: use 'auto'")
    if _name(getattr(llm_args, "checkpoint_format", None)).upper() == "MX":
        found.append("weights by checkpoint_format='MX' come from another engine: use 'HF'")
    if getattr(llm_args, "checkpoint_loader", None) is not None:
        found.append("checkpoint_loader: a loader of its own may give other weights than the files")
    return found


def _code(llm_args: Any, config: Mapping[str, Any], folder: str) -> object | None:
    names = [str(name) for name in config.get("architectures") or ["unknown"]]
    found: dict[str, object] = {} if set(names) <= _ALIKE else {"trtllm": names}
    if getattr(llm_args, "trust_remote_code", False):
        revision = str(getattr(llm_args, "revision", None)).encode()
        found["files"] = fingerprint_code(folder) if folder else revision
    return found or None


def _quantization(llm_args: Any, config: Mapping[str, Any]) -> object | None:
    """Return how weights and activations are quantised; None for plain weights.

    For some formats the engine chooses the type of the activations by the GPU.
    """
    told = _fields(getattr(llm_args, "quant_config", None))
    plain = not told.get("quant_algo") and not config.get("quantization_config")
    if plain and not getattr(llm_args, "force_dynamic_quantization", False):
        return None
    return ["trtllm", _version(), _gpu(), kv_fields(told)]


def _fields(record: Any) -> dict[str, Any]:
    """Return the fields of a record of the engine, whichever way its version declares them."""
    if record is None:
        return {}
    if callable(dump := getattr(record, "model_dump", None)):
        return dict(dump())
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        return dataclasses.asdict(record)
    return dict(vars(record))


def _version() -> str:
    try:
        return version("tensorrt_llm")
    except PackageNotFoundError:
        return "unknown"


def _gpu() -> str:
    import torch

    return str(torch.cuda.get_device_capability()) if torch.cuda.is_available() else "no GPU"


def _scales(environment: Mapping[str, str]) -> object:
    """Return what decides the scales of 8-bit KV: the checkpoint's, as one for K and V, or 1.

    The engine's version decides if the environment does not.
    """
    told = environment.get(SCALES)
    return ["trtllm", f"version {_version()}" if told is None else told == "1"]


def _latent(config: Mapping[str, Any]) -> object | None:
    """Return a mark for latent attention: the order of its rotary part may be the engine's own."""
    return None if config.get("kv_lora_rank") is None else ["trtllm", "latent"]


def _own(llm_args: Any, environment: Mapping[str, str], folder: str) -> object | None:
    """Return the settings and files that only this engine reads; None if it has none."""
    found: dict[str, object] = {}
    if arguments := _given(llm_args):
        found["arguments"] = arguments
    if numbers := {n: environment[n] for n in sorted(environment) if _NUMBER_FORMATS.match(n)}:
        found["environment"] = numbers
    files = {
        name: hashlib.sha256((Path(folder) / name).read_bytes()).hexdigest()
        for name in _CONFIG_FILES
        if folder and (Path(folder) / name).is_file()
    }
    if files:
        found["files"] = files
    return found or None


def _given(llm_args: Any) -> dict[str, object]:
    """Return the arguments that can change KV and are not at their defaults."""
    dump = getattr(llm_args, "model_dump", None)
    told = dump(exclude_defaults=True, exclude=set(_NEUTRAL)) if callable(dump) else vars(llm_args)
    return {
        name: kv_fields(value)
        for name, value in told.items()
        if name not in _NEUTRAL and not name.startswith("_") and value not in (None, False, "", [])
    }
