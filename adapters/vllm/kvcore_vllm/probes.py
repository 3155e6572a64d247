"""The interfaces of vLLM that kvcore uses, as probes (`kvcore.engines.probes`).

Whoever uses a new name of vLLM in this package adds it here. `make test-compat` checks the releases
in `kvcore_vllm.engine.TRIED`.
"""

from __future__ import annotations

from kvcore.engines.probes import Binds, Fields, Has, Overrides, Probe, Takes

FUSION = "blends"
TIER_PROBE = "secondary tier"
LORA = "blends with LoRA"
STATES = "states"
CONTEXT = "context parallelism"
SWITCH_PROBE = "switch"

_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector"
_BASE = f"{_CONNECTOR}.v1.base"
_STATS = f"{_CONNECTOR}.v1.metrics"
_OUTPUT = "vllm.v1.core.sched.output"
_SPECS = "vllm.v1.kv_cache_interface"
_ATTENTION = "vllm.model_executor.layers.attention:Attention"

_OFFLOAD = "vllm.v1.kv_offload"
_OFFLOADING = f"{_CONNECTOR}.v1.offloading"

_BACKENDS = "vllm.v1.attention.backends"
_WRITERS = ("cpu_attn:CPUAttentionBackendImpl", "flash_attn:FlashAttentionImpl")

PROBES = (
    Probe(
        "registration",
        "for vLLM to find the connector by its name",
        (Binds(f"{_CONNECTOR}.factory:KVConnectorFactory.register_connector", 3),),
    ),
    Probe(
        "connector",
        "for vLLM to call kvcore in its scheduler and its workers",
        (
            Overrides(
                (f"{_BASE}:KVConnectorBase_V1", f"{_BASE}:SupportsHMA"),
                "kvcore_vllm.connector:KVCoreConnector",
                beside=(
                    "get_external_cache_hit_sources",
                    "supports_sleep_mode",
                    "unregister_kv_caches",
                ),
            ),
            Binds(f"{_BASE}:KVConnectorBase_V1", 3),
            Fields(f"{_BASE}:KVConnectorBase_V1", "_vllm_config", "_kv_cache_config"),
            Has(
                f"{_BASE}:KVConnectorRole.SCHEDULER",
                f"{_BASE}:KVConnectorHandshakeMetadata",
                f"{_BASE}:KVConnectorMetadata",
                "vllm.distributed.kv_transfer.kv_transfer_state:get_kv_transfer_group",
            ),
        ),
    ),
    Probe(
        "messages",
        "to send plans to the workers and their reports back",
        (
            Overrides(
                (f"{_BASE}:KVConnectorWorkerMetadata",),
                "kvcore_vllm.messages:KVCoreWorkerMetadata",
                beside=("merged",),
            ),
            Binds(
                f"{_BASE}:KVConnectorTransferResults",
                keywords=("finished_recving", "failed_recving"),
            ),
            Fields(
                "vllm.v1.outputs:KVConnectorOutput",
                "finished_recving",
                "failed_recving",
                "kv_connector_worker_meta",
            ),
        ),
    ),
    Probe(
        "steps",
        "to know which tokens a step computes and which pages it writes",
        (
            Fields(
                f"{_OUTPUT}:SchedulerOutput",
                "scheduled_new_reqs",
                "scheduled_cached_reqs",
                "num_scheduled_tokens",
                "kv_cache_block_copies",
                "kv_connector_block_state",
                "new_block_ids_to_zero",
                "total_num_scheduled_tokens",
            ),
            Fields(f"{_OUTPUT}:NewRequestData", "req_id", "block_ids"),
            Fields(f"{_OUTPUT}:CachedRequestData", "req_ids", "new_block_ids", "resumed_req_ids"),
            Binds(f"{_OUTPUT}:KVConnectorBlockState.get_block_ids", 1),
            Binds("vllm.v1.core.kv_cache_manager:KVCacheBlocks.get_block_ids"),
        ),
    ),
    Probe(
        "requests",
        "to make the keys of a request from its tokens, its media and its adapter",
        (
            Fields(
                "vllm.v1.request:Request",
                "request_id",
                "_all_token_ids",
                "cache_salt",
                "get_finished_reason",
                "kv_transfer_params",
                "lora_request",
                "mm_features",
                "num_computed_tokens",
                "num_in_flight_tokens",
                "num_prompt_tokens",
                "num_tokens",
                "pooling_params",
                "prompt_embeds",
                "prompt_token_ids",
                "resumable",
            ),
            Fields("vllm.lora.request:LoRARequest", "lora_int_id", "lora_name", "lora_path"),
            Fields(
                "vllm.multimodal.inputs:MultiModalFeatureSpec",
                "data",
                "identifier",
                "modality",
                "mm_position",
            ),
            Fields("vllm.multimodal.inputs:PlaceholderRange", "offset", "length"),
        ),
    ),
    Probe(
        "model",
        "to tell one model's KV from another's",
        (
            Fields(
                "vllm.config:VllmConfig",
                "additional_config",
                "attention_config",
                "cache_config",
                "compilation_config",
                "device_config",
                "kv_events_config",
                "kv_transfer_config",
                "load_config",
                "lora_config",
                "max_concurrent_batches",
                "model_config",
                "parallel_config",
                "scheduler_config",
                "speculative_config",
                "use_v2_model_runner",
            ),
            Fields(
                "vllm.config:ModelConfig",
                "architecture",
                "code_revision",
                "dtype",
                "enable_sleep_mode",
                "get_hidden_size",
                "get_sliding_window",
                "get_total_num_kv_heads",
                "hf_config",
                "hf_config_path",
                "hf_text_config",
                "max_model_len",
                "model",
                "model_impl",
                "multimodal_config",
                "quantization",
                "quantization_config",
                "revision",
                "trust_remote_code",
                "use_mla",
            ),
            Fields("vllm.config:LoadConfig", "load_format", "model_loader_extra_config"),
            Fields(
                "vllm.config:ParallelConfig",
                "data_parallel_rank",
                "data_parallel_size",
                "decode_context_parallel_size",
                "nnodes_within_dp",
                "pipeline_parallel_size",
                "prefill_context_parallel_size",
                "rank",
                "tensor_parallel_size",
                "world_size",
            ),
            Fields(
                "vllm.config:KVTransferConfig",
                "kv_connector_extra_config",
                "kv_load_failure_policy",
                "kv_role",
            ),
            Fields("vllm.config:CompilationConfig", "cudagraph_mode", "static_forward_context"),
            Has("vllm.config.compilation:CUDAGraphMode.has_full_cudagraphs"),
            Fields("vllm.config:DeviceConfig", "device_type"),
            Fields("vllm.config:KVEventsConfig", "enable_kv_cache_events"),
            Fields("vllm.config:SchedulerConfig", "max_num_batched_tokens"),
            Fields(
                "vllm.config:SpeculativeConfig",
                "draft_model_config",
                "draft_parallel_config",
                "method",
                "use_eagle",
            ),
            Binds("vllm.distributed.parallel_state:get_pp_group"),
            Binds("vllm.model_executor.models.utils:extract_layer_index", 1),
        ),
    ),
    Probe(
        "prefix cache",
        "to know whether vLLM's own cache still holds KV of weights from before a change",
        (Fields("vllm.v1.core.block_pool:BlockPool", "cached_block_hash_to_block"),),
        without="after weights were changed in place, what goes on from that cache is not saved",
    ),
    Probe(
        "pages",
        "to know the layout of a page and which layers share one",
        (
            Fields(
                f"{_SPECS}:KVCacheConfig",
                "kv_cache_groups",
                "kv_cache_tensors",
                "needs_kv_cache_zeroing",
            ),
            Fields(
                f"{_SPECS}:KVCacheGroupSpec",
                "enable_kv_transfer",
                "host_resident",
                "kv_cache_spec",
                "layer_names",
                "role",
            ),
            *(
                Fields(
                    f"{_SPECS}:{spec}",
                    "block_size",
                    "dtype",
                    "head_size",
                    "head_size_v",
                    "kv_quant_mode",
                    "num_kv_heads",
                    "page_size_padded",
                    "state_content_bytes",
                    "tokens_per_state",
                    "unpadded_page_size_bytes",
                )
                for spec in ("FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec")
            ),
            Has(f"{_SPECS}:AttentionSpec", f"{_SPECS}:MLAAttentionSpec"),
            Fields(f"{_SPECS}:UniformTypeKVCacheSpecs", "kv_cache_specs"),
            Fields(_ATTENTION, "attn_backend", "impl", "kv_cache"),
        ),
    ),
    Probe(
        STATES,
        "to learn where the states of layers without KV are, and of which token",
        (
            Fields(f"{_OUTPUT}:KVConnectorBlockState", "boundary_state_offloads"),
            Fields(
                f"{_SPECS}:MambaSpec",
                "block_size",
                "dtypes",
                "mamba_cache_mode",
                "mamba_type",
                "shapes",
                "state_content_size_bytes",
            ),
            Binds("vllm.v1.core.kv_cache_utils:resolve_kv_cache_block_sizes", 2),
        ),
        without="models with states run untouched",
    ),
    Probe(
        CONTEXT,
        "to learn how many tokens a page stands for, and which of them a rank has",
        (
            Fields(
                "vllm.config:ParallelConfig",
                "cp_kv_cache_interleave_size",
                "dcp_kv_cache_interleave_size",
            ),
            Fields("vllm.config:KVTransferConfig", "has_connector"),
            Binds("vllm.v1.core.kv_cache_utils:resolve_dcp_kv_block_size", 2),
        ),
        without="models with context parallelism run untouched",
    ),
    Probe(
        "metrics",
        "to add kvcore's counters to vLLM's",
        (
            Overrides(
                (f"{_STATS}:KVConnectorStats",),
                "kvcore_vllm.stats:KVCoreStats",
            ),
            Overrides(
                (f"{_STATS}:KVConnectorPromMetrics",),
                "kvcore_vllm.stats:KVCorePromMetrics",
            ),
            Fields(
                f"{_STATS}:KVConnectorPromMetrics",
                "_counter_cls",
                "_gauge_cls",
                "_histogram_cls",
                "_labelnames",
                "per_engine_labelvalues",
            ),
        ),
    ),
    Probe(
        "events",
        "to publish which blocks are stored",
        (
            Has(
                "vllm.distributed.kv_events:MEDIUM_CPU",
                "vllm.distributed.kv_events:MEDIUM_STORAGE",
                "vllm.distributed.kv_events:KVCacheEvent",
                "vllm.v1.core.kv_cache_utils:BlockHash",
                "vllm.v1.core.kv_cache_utils:ExternalBlockHash",
            ),
            Binds("vllm.v1.core.kv_cache_utils:maybe_convert_block_hash", count=1),
            Binds(
                "vllm.distributed.kv_events:BlockStored",
                keywords=(
                    "block_hashes",
                    "parent_block_hash",
                    "token_ids",
                    "block_size",
                    "lora_id",
                    "medium",
                    "lora_name",
                    "ownership",
                ),
            ),
            Binds(
                "vllm.distributed.kv_events:BlockRemoved",
                keywords=("block_hashes", "medium", "ownership"),
            ),
        ),
    ),
    Probe(
        "hit sources",
        "to tell vLLM from which tier tokens came",
        (
            Has(
                "vllm.v1.metrics.cache_hit_source:CacheHitSource.HOST",
                "vllm.v1.metrics.cache_hit_source:CacheHitSource.DISK",
                "vllm.v1.metrics.cache_hit_source:CacheHitSource.EXTERNAL_UNSPECIFIED",
            ),
        ),
        without="its metrics do not tell tiers apart",
    ),
    Probe(
        "weights",
        "to learn that weights were changed in place",
        (
            Has(
                "vllm.v1.worker.gpu_worker:Worker.reload_weights",
                "vllm.v1.worker.gpu_worker:Worker.update_weights",
                "vllm.v1.worker.gpu_worker:Worker.get_model",
            ),
        ),
        without="KV from before a change that comes without a reset is found after it",
    ),
    Probe(
        TIER_PROBE,
        "for kvcore as a tier below vLLM's own offloading",
        (
            Overrides(
                (f"{_OFFLOAD}.tiering.base:SecondaryTierManager",),
                "kvcore_vllm.tier:KVCoreTier",
            ),
            Binds(f"{_OFFLOAD}.tiering.base:SecondaryTierManager", 3),
            Fields(
                f"{_OFFLOAD}.tiering.base:TransferJob",
                "chunk_ids",
                "job_id",
                "keys",
                "req_context",
            ),
            Binds(
                f"{_OFFLOAD}.tiering.base:JobResult",
                keywords=("job_id", "success", "successful_keys", "transfer_time"),
            ),
            Has(
                f"{_OFFLOAD}.base:LookupResult.HIT",
                f"{_OFFLOAD}.base:LookupResult.MISS",
                f"{_OFFLOAD}.base:LookupResult.RETRY",
                f"{_OFFLOAD}.base:Medium.STORAGE",
                f"{_OFFLOAD}.base:Locality",
            ),
            Binds(f"{_OFFLOAD}.base:RequestOffloadingContext"),
            Fields(f"{_OFFLOAD}.base:ReqContext", "req_id"),
            Binds(f"{_OFFLOAD}.base:OffloadingCounterMetadata", keywords=("documentation",)),
            Binds(f"{_OFFLOAD}.base:OffloadingGaugeMetadata", keywords=("documentation",)),
            Binds(f"{_OFFLOADING}.metrics:OffloadingConnectorStats.increase_counter", 2),
            Binds(f"{_OFFLOADING}.metrics:OffloadingConnectorStats.set_gauge", 2),
            Takes(
                f"{_OFFLOADING}.scheduler:OffloadingConnectorScheduler.__init__",
                ("self", "spec", "vllm_config", "kv_cache_config"),
            ),
            Fields(
                f"{_OFFLOAD}.config:OffloadingConfig",
                "cache",
                "canonical_layout",
                "groups",
                "kv_cache_layout",
                "parallel",
                "replicated_layout",
            ),
            Fields(
                f"{_OFFLOAD}.config:OffloadingParallelConfig",
                "data_parallel_size",
                "dcp_size",
                "pcp_size",
                "pp_size",
                "tp_size",
                "world_size",
            ),
            Fields(f"{_OFFLOAD}.config:OffloadingCacheConfig", "blocks_per_chunk"),
            Fields("vllm.config:CacheConfig", "prefix_caching_hash_algo"),
            Binds("vllm.utils.hashing:get_hash_fn_by_name", 1),
            Binds("vllm.v1.core.kv_cache_utils:resolve_none_hash_seed", 1),
        ),
        without="not below vLLM's own offloading",
    ),
    Probe(
        FUSION,
        "to run decoder layers outside a forward",
        (
            Takes(
                f"{_ATTENTION}.forward",
                ("self", "query", "key", "value", "output_shape", "output_dtype"),
            ),
            Fields(_ATTENTION, "head_size", "head_size_v", "num_heads", "num_kv_heads"),
            Fields("vllm.v1.request:Request", "_block_hasher", "block_hashes"),
            Fields("vllm.v1.worker.worker_base:WorkerBase", "get_model", "vllm_config"),
            Has("vllm.v1.attention.backend:AttentionBackend.forward_includes_kv_cache_update"),
            *(Binds(f"{_BACKENDS}.{writer}.do_kv_cache_update", 5) for writer in _WRITERS),
        ),
        without="exact prefixes only",
    ),
    Probe(
        SWITCH_PROBE,
        "to be used where vLLM's arguments name no connector",
        (
            Takes(
                "vllm.engine.arg_utils:EngineArgs.create_engine_config",
                ("self", "usage_context", "headless"),
            ),
            Fields("vllm.engine.arg_utils:EngineArgs", "kv_transfer_config", "kv_offloading_size"),
            Fields(
                "vllm.config:KVTransferConfig",
                "kv_connector",
                "kv_role",
                "kv_load_failure_policy",
            ),
        ),
        without="vllm.switch_on has no effect",
    ),
    Probe(
        LORA,
        "to apply a request's adapter in a blend",
        (
            Binds("vllm.lora.layers:LoRAMapping", 2, ("is_prefill",)),
            Fields("vllm.lora.request:LoRARequest", "lora_int_id"),
            Fields(
                "vllm.lora.model_manager:LoRAModelManager", "_last_mapping", "set_adapter_mapping"
            ),
            Fields("vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin", "lora_manager"),
            Fields("vllm.lora.worker_manager:LRUCacheWorkerLoRAManager", "_adapter_manager"),
        ),
        without="no blends in an engine with LoRA",
    ),
)
