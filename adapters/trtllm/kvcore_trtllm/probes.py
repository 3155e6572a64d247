"""The interfaces of TensorRT-LLM that kvcore uses, as probes (`kvcore.engines.probes`).

Whoever uses a new name of TensorRT-LLM in this package adds it here.
"""

from __future__ import annotations

from kvcore.engines.probes import Binds, Fields, Has, Overrides, Probe

MODULES = (
    "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector",  # from 1.3
    "tensorrt_llm._torch.pyexecutor.kv_cache_connector",  # 1.2
)
MODEL_ENGINE = "tensorrt_llm._torch.pyexecutor.model_engine"
ROTARY = "tensorrt_llm._torch.modules.rotary_embedding"

_CONNECTOR = "|".join(MODULES)

PROBES = (
    Probe(
        "scheduler",
        "for TensorRT-LLM to ask kvcore what it has",
        (
            Overrides(
                (f"{_CONNECTOR}:KvCacheConnectorScheduler",),
                "kvcore_trtllm.connector:KVCoreScheduler",
                beside=(
                    "request_finished_by_layer_group",
                    "request_reset",
                    "shutdown",
                    "update_state_after_alloc_by_layer_group",
                ),
            ),
            Binds(f"{_CONNECTOR}:KvCacheConnectorScheduler", 1),
        ),
    ),
    Probe(
        "worker",
        "for TensorRT-LLM to let kvcore copy pages around a forward",
        (
            Overrides(
                (f"{_CONNECTOR}:KvCacheConnectorWorker",),
                "kvcore_trtllm.connector:KVCoreWorker",
                beside=("forward_ended", "register_kv_cache_layout", "shutdown"),
            ),
            Binds(f"{_CONNECTOR}:KvCacheConnectorWorker", 1),
            Fields(
                f"{_CONNECTOR}:KvCacheConnectorWorker",
                "_llm_args",
                "bind_connector_meta",
                "get_connector_meta",
            ),
        ),
    ),
    Probe(
        "steps",
        "to know which tokens a step computes and which pages it writes",
        (
            Fields(f"{_CONNECTOR}:SchedulerOutput", "cached_requests", "new_requests"),
            Fields(
                f"{_CONNECTOR}:RequestData",
                "computed_position",
                "new_block_ids",
                "new_tokens",
                "num_scheduled_tokens",
                "request_id",
            ),
        ),
    ),
    Probe(
        "ranks",
        "for the ranks to agree",
        (Has("tensorrt_llm._utils:mpi_rank", "tensorrt_llm._utils:mpi_allgather"),),
    ),
    Probe(
        "blends",
        "to run decoder layers outside a forward",
        (
            Fields(f"{MODEL_ENGINE}:PyTorchModelEngine", "mapping", "model"),
            Binds(f"{ROTARY}:RotaryEmbedding", 1, ("head_dim", "is_neox")),
        ),
        without="exact prefixes only",
    ),
)
