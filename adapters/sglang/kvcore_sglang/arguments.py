"""SGLang's arguments: which cannot change KV, and what the others were given.

An argument that is not named here counts, whatever it does. One that is missing from the list can
cause a miss, but never a wrong hit. A test compares the list with the arguments of SGLang 0.5.23.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvcore.model.ingredients import kv_fields

__all__ = ["counted", "given", "number_formats"]

# How requests arrive, wait and are batched; ports, logs and metrics; where computation runs, and
# which kernel computes the same numbers; caches; media, adapters and draft models, whose KV is
# kept apart or not at all.
# fmt: off
_FEATURES = (
    "asr_", "bucket_", "constrained_", "cuda_graph_", "decoupled_spec_", "disaggregation_",
    "dynamic_batch_tokenizer_", "elastic_ep_", "encoder_", "eplb_", "expert_distribution_",
    "export_metrics_", "flexkv_", "forward_pass_metrics_", "grpc_", "hicache_", "http2_",
    "kv_canary", "lmcache_", "log_", "lora_", "mm_", "offload_", "otlp_", "ple_offload_", "pp_",
    "prefill_delayer_", "radix_", "remote_instance_weight_loader_", "schedule_", "speculative_",
    "ssl_", "stream_", "swa_", "tokenizer_", "unified_cache_", "watermark_", "weight_loader_",
)
"""Beginnings of the names of a feature's arguments."""

_NEUTRAL = frozenset({
    # what other ingredients say: weights, types, length, overrides
    "context_length", "dtype", "json_model_override_args", "kv_cache_dtype", "load_format",
    "model_path", "quantization", "revision", "trust_remote_code",
    # loading the same weights
    "checkpoint_engine_wait_weights_before_ready", "decrypted_config_file",
    "decrypted_draft_config_file", "delete_ckpt_after_loading", "download_dir", "forward_hooks",
    "model_checksum", "modelexpress_config", "modelopt_checkpoint_save_path",
    "modelopt_export_path", "startup_weight_load_mode", "weight_cache_mode",
    "weight_cache_socket", "weight_cache_timeout", "weight_version",
    # requests, batches, and the engine's own cache
    "_radix_eviction_policy_explicitly_set", "_swa_full_tokens_ratio_explicitly_set",
    "abort_on_priority_when_disabled", "allow_auto_truncate", "batch_notify_size",
    "chunked_prefill_size", "default_priority_value", "disable_chunked_prefix_cache",
    "disable_hybrid_swa_memory", "disable_overlap_schedule", "disable_priority_preemption",
    "disable_radix_cache", "enable_dynamic_chunking", "enable_flexkv",
    "enable_hierarchical_cache", "enable_linker_mla_dedup", "enable_lmcache",
    "enable_mixed_chunk", "enable_page_major_kv_layout", "enable_prefill_delayer",
    "enable_priority_scheduling", "enable_session_radix_cache", "enable_streaming_session",
    "enable_unified_cache_external_linker", "enable_unified_memory", "incremental_streaming_output",
    "max_mamba_cache_size", "max_prefill_tokens", "max_queued_requests", "max_running_requests",
    "max_total_tokens", "mem_fraction_static", "min_free_slots_delay",
    "num_continuous_decode_steps", "num_reserved_decode_tokens", "optimistic_prefill_attempts",
    "page_size", "preferred_sampling_params", "prefill_decode_interval",
    "prefill_decode_interval_min_bs", "prefill_max_requests", "prefill_only_disable_kv_cache",
    "priority_scheduling_preemption_threshold", "retraction_policy", "sampling_defaults",
    "scheduler_recv_interval", "strip_thinking_cache",
    # text to tokens and back
    "chat_template", "completion_template", "default_chat_template_kwargs",
    "disable_tokenizer_batch_decode", "detokenizer_worker_num", "enable_custom_logit_processor",
    "enable_dynamic_batch_tokenizer", "enable_strict_thinking", "enable_tokenizer_batch_encode",
    "enable_watermark", "grammar_backend", "hf_chat_template_name", "mlx_enable_sampling",
    "random_seed", "reasoning_parser", "sampling_backend", "sampling_mask_max_tokens",
    "skip_tokenizer_init", "tool_call_parser", "tool_server", "trust_request_chat_template",
    # answers
    "aux_hidden_state_capture", "enable_cache_report", "enable_response_store",
    "enable_return_aux_hidden_states", "enable_return_hidden_states",
    "enable_return_indexer_topk", "enable_return_routed_experts",
    "return_aux_hidden_state_layer_ids", "return_hidden_states_mode", "return_input_ids",
    "return_output_ids",
    # the server
    "admin_api_key", "api_key", "enable_http2", "enable_http_worker_reuseport",
    "enable_ssl_refresh", "fastapi_root_path", "file_storage_path", "gated_launch_port", "host",
    "port", "served_model_name", "sidecar", "sidecar_args", "skip_server_warmup", "smg_grpc_mode",
    "smg_http_sidecar_port", "use_ray", "warmups",
    # observation
    "crash_dump_folder", "custom_sigquit_handler", "debug_cuda_graph",
    "debug_tensor_dump_layers", "debug_tensor_dump_output_folder", "decode_log_interval",
    "disable_outlines_disk_cache", "enable_forward_pass_metrics", "enable_layerwise_nvtx_marker",
    "enable_metrics", "enable_metrics_for_all_schedulers", "enable_mfu_metrics",
    "enable_profile_cuda_graph", "enable_request_time_stats_logging", "enable_trace",
    "expert_balancedness_report_mode", "extra_metric_labels", "gc_threshold",
    "gc_warning_threshold_secs", "generation_tokens_buckets", "kv_events_config",
    "load_publish_endpoint", "load_snapshot_publish_interval", "prompt_tokens_buckets",
    "show_time_cost", "sleep_on_idle", "soft_watchdog_timeout", "spec_trace_dir", "stat_loggers",
    "trace_modules", "uvicorn_access_log_exclude_prefixes", "watchdog_timeout",
    # ranks, devices and memory
    "attn_cp_size", "attn_dp_size", "base_gpu_id", "boundary_reduction", "cp_strategy",
    "cpu_offload_gb", "dcp_comm_backend", "dcp_replicate_q_proj", "dcp_size", "device",
    "disable_attn_tp_gather", "disable_custom_all_reduce", "dist_init_addr", "dist_timeout",
    "dp_size", "enable_attn_tp_input_scattered", "enable_cp_decode_attn_tp",
    "enable_cp_tp_group_sharing", "enable_dense_mlp_attn_tp", "enable_dp_attention",
    "enable_dp_attention_local_control_broadcast", "enable_dp_lm_head",
    "enable_draft_weights_cpu_backup", "enable_dsa_cache_layer_split",
    "enable_elastic_expert_backup", "enable_eplb", "enable_kv_cache_sharding",
    "enable_layernorm_sp", "enable_memory_saver", "enable_mscclpp", "enable_nccl_nvls",
    "enable_p2p_check", "enable_paged_experts", "enable_pd_role_switch", "enable_pdmux",
    "enable_prefill_cp", "enable_shared_experts_attn_tp", "enable_single_batch_overlap",
    "enable_symm_mem", "enable_torch_symm_mem", "enable_tp_lm_head_all_to_all",
    "enable_two_batch_overlap", "enable_weights_cpu_backup", "engine_info_bootstrap_port",
    "ep_join_mode", "ep_join_rank_offset", "ep_num_redundant_experts", "ep_size", "gpu_id_step",
    "init_expert_location", "load_balance_method", "max_ep_size", "moe_dense_tp_size",
    "moe_dp_size", "mooncake_ib_device", "nccl_port", "nnodes", "node_rank", "numa_node",
    "paged_experts_num_resident", "pdmux_config_path", "pre_warm_nccl", "shared_experts_tp_size",
    "sm_group_num", "tbo_token_distribution_threshold", "tp_size",
    # kernels for the same numbers
    "attention_backend", "bf16_gemm_backend", "decode_attention_backend",
    "disable_aiter_allreduce_fusion_in_decode", "disable_aiter_allreduce_fusion_in_prefill",
    "disable_cuda_graph", "disable_cuda_graph_padding", "disable_decode_cuda_graph",
    "disable_flashinfer_autotune", "disable_prefill_cuda_graph", "enable_cudagraph_gc",
    "enable_aiter_allreduce_fusion", "enable_flashinfer_allreduce_fusion",
    "enable_fp32_lm_head", "enable_fused_moe_sum_all_reduce", "enable_lean_attention",
    "enable_torch_compile", "enforce_disable_flashinfer_allreduce_fusion",
    "flashinfer_allreduce_fusion_backend",
    "enable_torch_compile_debug_mode", "flashinfer_autotune_skip_ops", "prefill_attention_backend",
    "torch_compile_max_bs", "triton_attention_num_kv_splits", "triton_attention_split_tile_size",
    # media, adapters, draft models
    "_speculative_draft_quantization_explicitly_set", "allowed_media_domains",
    "disable_fast_image_processor", "enable_adaptive_dispatch_to_encoder",
    "enable_broadcast_mm_inputs_process", "enable_lora", "enable_lora_overlap_loading",
    "enable_mm_global_cache", "enable_multi_layer_eagle", "enable_multimodal",
    "enable_prefix_mm_cache", "experts_shared_outer_loras", "image_processor_backend",
    "limit_mm_data_per_request", "max_loaded_loras", "max_lora_chunk_size", "max_lora_rank",
    "max_loras_per_batch", "media_url_max_file_size_mb", "trust_mm_content_hashes",
    "uno_lora_path",
})
# fmt: on

_NUMBER_FORMATS = re.compile(
    r"SGLANG_\w*(BF16|DOWNCAST|DTYPE|FP4|FP8|FP32|IGNORED_LAYERS|INT4|INT8|NVFP|PRECISE|QUANT"
    r"|SKIP_SOFTMAX|SPARSE|W4A)"
)
"""Environment variables that choose numbers, or leave out parts of a computation."""


def counted(names: Iterable[str]) -> list[str]:
    """Return the arguments among ``names`` that can change KV, sorted."""
    return sorted(name for name in names if name not in _NEUTRAL and not name.startswith(_FEATURES))


def given(server_args: Any) -> dict[str, object]:
    """Return the arguments that can change KV and are not at their defaults.

    A value that names a file has the digest of the file beside it.
    """
    defaults = _defaults(server_args)
    found = {}
    for name in counted(defaults):
        value = getattr(server_args, name, defaults[name])
        if value != defaults[name] and value not in (None, ""):
            found[name] = _told(value)
    return found


def number_formats(environment: Mapping[str, str]) -> dict[str, object]:
    """Return the environment variables of SGLang that choose the numbers of a computation."""
    return {name: environment[name] for name in sorted(environment) if _NUMBER_FORMATS.match(name)}


def _defaults(server_args: Any) -> dict[str, Any]:
    """Return the default of every argument; for an unknown type of arguments, None of each."""
    kind = type(server_args)
    if dataclasses.is_dataclass(kind):
        return {each.name: _default(each) for each in dataclasses.fields(kind)}
    if not hasattr(kind, "__struct_fields__"):
        return dict.fromkeys(vars(server_args))
    import msgspec

    return {each.name: _default(each) for each in msgspec.structs.fields(kind)}


def _default(field: Any) -> Any:
    import msgspec

    missing = (dataclasses.MISSING, msgspec.NODEFAULT)
    if field.default_factory not in missing:
        return field.default_factory()
    return None if field.default in missing else field.default


def _told(value: object) -> object:
    if isinstance(value, str) and os.path.isfile(value):
        return [value, hashlib.sha256(Path(value).read_bytes()).hexdigest()]
    return kv_fields(value)
