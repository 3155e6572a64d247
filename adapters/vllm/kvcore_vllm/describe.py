"""What kvcore needs to know of a model served by vLLM, and whether it can serve it right.

Both roles of the connector (scheduler and worker) derive the same description from the same
configs, so that they agree on canonical layer order, block shape and slots without a handshake.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvcore.adapting.identity import rope_length, weights_identity
from kvcore.adapting.model import LayerGroup, ModelDescription
from kvcore.block import model_fingerprint
from kvcore.errors import UnsupportedError
from kvcore.layout import BlockShape

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_SERVED_SPECS = (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)


def describe(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, block_tokens: int
) -> ModelDescription:
    """Describe the model, or raise UnsupportedError saying what kvcore does not serve and why."""
    _check_parallelism(vllm_config)
    _check_speculation(vllm_config)
    groups = _groups(kv_cache_config)
    spec = _uniform_spec(kv_cache_config)
    tp = vllm_config.parallel_config.tensor_parallel_size
    mla = isinstance(spec, MLAAttentionSpec)
    if mla and tp > 1:
        raise UnsupportedError(
            f"MLA with tensor_parallel_size={tp}: every rank holds the same latent; use 1"
        )
    total_heads = 1 if mla else vllm_config.model_config.get_total_num_kv_heads()
    if max(total_heads // tp, 1) != spec.num_kv_heads:
        raise UnsupportedError(
            f"{spec.num_kv_heads} KV heads a rank with {total_heads} heads over {tp} ranks: "
            "kvcore expects heads split evenly over tensor-parallel ranks"
        )
    shape = BlockShape(
        layers=sum(len(group.layers) for group in groups),
        kv_heads=total_heads,
        head_dim=spec.head_size,
        v_head_dim=spec.head_size if mla else spec.head_size_v,
        kv_factor=1 if mla else 2,
        block_tokens=block_tokens,
        dtype=str(spec.dtype).removeprefix("torch."),
    )
    return ModelDescription(shape, groups, _fingerprint(vllm_config, spec), tp)


def _check_parallelism(vllm_config: VllmConfig) -> None:
    parallel = vllm_config.parallel_config
    for name in (
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        size = getattr(parallel, name, 1)
        if size > 1:
            raise UnsupportedError(f"{name}={size}; kvcore serves {name}=1 on vLLM")
    if parallel.nnodes > 1:
        raise UnsupportedError(f"nnodes={parallel.nnodes}; the embedded mode serves one machine")


def _check_speculation(vllm_config: VllmConfig) -> None:
    speculative = vllm_config.speculative_config
    if speculative is None:
        return
    if speculative.method not in ("ngram", "suffix", "ngram_gpu"):
        raise UnsupportedError(
            f"speculative decoding by {speculative.method!r} keeps KV of a draft model, which "
            "kvcore does not store; 'ngram' and 'suffix' are served"
        )


def _groups(kv_cache_config: KVCacheConfig) -> tuple[LayerGroup, ...]:
    from vllm.model_executor.models.utils import extract_layer_index

    order: dict[int, str] = {}
    for group in kv_cache_config.kv_cache_groups:
        if not group.enable_kv_transfer or group.is_eagle_group:
            raise UnsupportedError("a cache group that is rebuilt or belongs to a draft model")
        for name in group.layer_names:
            layer = extract_layer_index(name)
            if layer in order:
                raise UnsupportedError(f"two caches in layer {layer}: {order[layer]} and {name}")
            order[layer] = name
    canonical = {order[layer]: i for i, layer in enumerate(sorted(order))}
    groups = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        names = tuple(sorted(group.layer_names, key=canonical.__getitem__))
        layers = tuple(canonical[name] for name in names)
        groups.append(LayerGroup(index, group.kv_cache_spec.block_size, layers, names))
    return tuple(groups)


def _uniform_spec(kv_cache_config: KVCacheConfig) -> AttentionSpec:
    """The one spec all layers share but for the window; raises UnsupportedError otherwise."""
    specs = [spec for group in kv_cache_config.kv_cache_groups for spec in _leaf_specs(group)]
    if not specs:
        raise UnsupportedError("a model without a KV cache")
    for spec in specs:
        if not isinstance(spec, _SERVED_SPECS) or type(spec).__name__ == "RSWASpec":
            raise UnsupportedError(
                f"a cache of type {type(spec).__name__}: kvcore serves full, sliding-window, "
                "chunked-local and multi-head latent attention"
            )
        if spec.state_content_bytes is not None or spec.tokens_per_state != 1:
            raise UnsupportedError(f"{type(spec).__name__} with packed or compressed states")
        if spec.page_size_padded not in (None, spec.unpadded_page_size_bytes):
            raise UnsupportedError(f"{type(spec).__name__} with padded pages")
        if str(spec.kv_quant_mode.name) != "NONE" and spec.dtype.itemsize != 1:
            raise UnsupportedError(f"KV quantisation {spec.kv_quant_mode.name}")
    kinds = {(s.num_kv_heads, s.head_size, s.head_size_v, s.dtype) for s in specs}
    if len(kinds) > 1:
        raise UnsupportedError(f"layers with unlike heads or dtypes: {sorted(map(str, kinds))}")
    first: AttentionSpec = specs[0]
    return first


def _leaf_specs(group: Any) -> list[Any]:
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return list(spec.kv_cache_specs.values())
    return [spec]


def _fingerprint(vllm_config: VllmConfig, spec: AttentionSpec) -> bytes:
    model = vllm_config.model_config
    config = model.hf_text_config.to_dict()
    config["kvcore_quantization"] = model.quantization
    config["kvcore_max_model_len"] = rope_length(config, model.max_model_len)
    config["kvcore_compute_dtype"] = str(model.dtype)
    weights = weights_identity(model.model, model.revision)
    return model_fingerprint(config, weights, str(spec.dtype))
