"""The interfaces of SGLang that kvcore uses, as probes (`kvcore.engines.probes`).

There are two entrances: the external cache linker, and the storage of HiCache. Older versions have
only the second. The hooks in `kvcore_sglang.hooks` are checked once more, on the functions
themselves, when they are registered. Whoever uses a new name of SGLang in this package adds it
here. `make test-compat` checks several releases.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvcore.engines.probes import Binds, Either, Fields, Has, Overrides, Probe, Takes, Want
from kvcore_sglang.hooks import (
    FUSION_HOOKS,
    HOLD_HOOKS,
    HOOKS,
    PUBLISHING,
    SAVE_HOOKS,
    TIME_HOOKS,
    WEIGHT_HOOKS,
    Hook,
)

LINKER_PROBE, STORAGE_PROBE = "linker", "storage"
"""The names of the probes of SGLang's two entrances."""

_UNIFIED = "sglang.srt.mem_cache.unified_cache"
_LINKER = f"{_UNIFIED}.unified_cache_linker"
_STORAGE = "sglang.srt.mem_cache.hicache_storage"
_POOLS = "sglang.srt.mem_cache.memory_pool"
_REQUEST = "sglang.srt.managers.schedule_batch:Req"
_RUNNER = "sglang.srt.model_executor.model_runner:ModelRunner"
_BATCH = "sglang.srt.model_executor.forward_batch_info"
_ATTENTION = "sglang.srt.layers.radix_attention:RadixAttention"


def _hooked(hooks: Iterable[Hook]) -> tuple[Takes, ...]:
    return tuple(Takes(_target(hook.target), hook.parameters) for hook in hooks)


def _target(path: str) -> str:
    module, name, method = path.rsplit(".", 2)
    return f"{module}:{name}.{method}"


_AS_LINKER: tuple[Want, ...] = (
    Has(f"{_UNIFIED}.linker_config:UnifiedCacheLinkerConfig.linker_extra_config"),
    Overrides(
        (f"{_LINKER}:UnifiedCacheLinker",),
        "kvcore_sglang.linker:KVCoreLinker",
        beside=(
            "abandon_insert",
            "ask",
            "asked",
            "begin_insert",
            "blends",
            "control_of",
            "end_insert",
            "ended",
            "holds",
            "keeps_out",
            "leader",
            "place",
            "refuse",
            "saving",
            "stages",
            "state",
            "stop",
            "vocabulary",
            "wants_inserts",
            "weights_changed",
        ),
    ),
    *_hooked(HOOKS),
    Binds("sglang.srt.plugins.hook_registry:HookRegistry.register", 3),
    Has("sglang.srt.plugins.hook_registry:HookType.AROUND"),
    Fields(
        f"{_LINKER}:UnifiedCacheLinkerWrapper",
        "cache",
        "cache_linker",
        "inflight_load_rids",
        "pending_offloads",
        "private_load_indices",
    ),
    Fields(
        "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache",
        "linker",
        "root_node_handle",
        "tree_core",
    ),
    Fields(
        "sglang.srt.mem_cache.unified_cache.unified_tree_core:UnifiedTreeCore",
        "collect_full_device_indices",
    ),
    Fields("sglang.srt.mem_cache.base_prefix_cache:InsertParams", "key"),
    Fields("sglang.srt.mem_cache.base_prefix_cache:MatchResult", "device_prefix_len"),
    Fields(
        "sglang.srt.mem_cache.radix_cache:RadixKey",
        "cache_salt",
        "extra_key",
        "is_bigram",
        "raw_token_ids",
    ),
    Fields(f"{_STORAGE}:PoolTransfer", "device_indices", "keys"),
    Fields(
        _REQUEST,
        "finished",
        "finished_output",
        "init_next_round_input",
        "origin_input_ids",
        "output_ids",
        "rid",
        "sampling_params",
        "skip_radix_cache_insert",
        "to_finish",
    ),
    Fields("sglang.srt.managers.scheduler:Scheduler", "tree_cache", "waiting_queue"),
    Fields(
        "sglang.srt.mem_cache.cache_init_params:CacheInitParams",
        "attn_cp_size",
        "attn_tp_cache_group",
        "enable_metrics",
        "is_eagle",
        "page_size",
        "pp_size",
        "token_to_kv_pool_allocator",
        "tp_cache_group",
    ),
    Has(f"{_UNIFIED}.component_type:ComponentType.FULL"),
    Fields(f"{_POOLS}:MHATokenToKVPool", "dtype", "k_buffer", "store_dtype", "v_buffer"),
    Fields(f"{_POOLS}:MLATokenToKVPool", "dtype", "kv_buffer", "store_dtype"),
)

_AS_STORAGE: tuple[Want, ...] = (
    Overrides(
        (f"{_STORAGE}:HiCacheStorage",),
        "kvcore_sglang.storage:KVCoreStorage",
        beside=("close", "store", "weights_changed"),
    ),
    Fields(
        f"{_STORAGE}:HiCacheStorageConfig",
        "attn_cp_rank",
        "attn_cp_size",
        "extra_config",
        "is_mla_model",
        "pp_rank",
        "pp_size",
        "tp_rank",
        "tp_size",
    ),
    Binds("sglang.srt.runtime_context:get_server_args"),
    Binds(
        "sglang.srt.mem_cache.pool_host.base:HostKVCache.get_data_page",
        1,
        ("flat",),
    ),
)

PROBES = (
    Probe(
        "entrance",
        "for SGLang to call kvcore at all",
        (Either(_AS_LINKER, _AS_STORAGE),),
    ),
    Probe(
        "model",
        "to tell one model's KV from another's",
        (
            Binds(
                "sglang.srt.configs.model_config:ModelConfig.from_server_args",
                1,
            ),
            Fields(
                "sglang.srt.configs.model_config:ModelConfig",
                "context_len",
                "dtype",
                "get_total_num_kv_heads",
                "hf_config",
                "is_multimodal",
                "model_path",
                "quantization",
                "vocab_size",
            ),
            Fields(_RUNNER, "is_draft_worker", "model", "token_to_kv_pool"),
            Fields(_ATTENTION, "sliding_window_size", "use_irope"),
        ),
    ),
    Probe(
        LINKER_PROBE,
        "for kvcore as SGLang's external cache linker",
        _AS_LINKER,
        without="only as the storage of HiCache, because it cannot be SGLang's cache linker",
    ),
    Probe(
        STORAGE_PROBE,
        "for kvcore as the storage of HiCache",
        _AS_STORAGE,
        without="not as the storage of HiCache",
    ),
    Probe(
        "blends",
        "to run decoder layers outside a forward",
        (
            *_hooked(FUSION_HOOKS),
            Has(*(f"sglang.srt.mem_cache.common:{name}" for name in PUBLISHING)),
            Takes(
                f"{_ATTENTION}.forward",
                ("self", "q", "k", "v", "forward_batch", "save_kv_cache"),
                more=True,
            ),
            Binds(
                f"{_BATCH}:ForwardBatch",
                keywords=(
                    "forward_mode",
                    "batch_size",
                    "input_ids",
                    "req_pool_indices",
                    "seq_lens",
                    "out_cache_loc",
                    "seq_lens_sum",
                    "positions",
                ),
            ),
            Binds(f"{_BATCH}:PPProxyTensors", 1),
            Has(f"{_BATCH}:ForwardMode.EXTEND"),
            Binds("sglang.srt.layers.layer_boundary.residual.batch:start", 1),
            Binds("sglang.srt.layers.layer_boundary.residual.batch:to_pp", 2),
        ),
        without="exact prefixes only",
    ),
    Probe(
        "holding",
        "to let others go first while a request's KV is read",
        _hooked(HOLD_HOOKS),
        without="a request uses only the KV that is in host memory when its turn comes",
    ),
    Probe(
        "saving",
        "to tell whose KV SGLang's tree takes",
        _hooked(SAVE_HOOKS),
        without="a request that asks kvcore not to save it is kept out of SGLang's tree",
    ),
    Probe(
        "weights",
        "to tell weights changed in place from a flush that a client asked for",
        _hooked(WEIGHT_HOOKS),
        without="every flush counts as one for new weights",
    ),
    Probe(
        "timing",
        "to time prefill",
        _hooked(TIME_HOOKS),
        without="the time that loads save is not counted",
    ),
)
