"""What kvcore makes of vLLM's own cache specs: whose KV it serves, and under which identity."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheConfig,
    KVCacheGroupRole,
    KVCacheGroupSpec,
    KVQuantMode,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    get_kv_quant_mode,
)

from kvcore.errors import UnsupportedError
from kvcore.harness.models import tiny_model
from kvcore.testing.engine.model import load
from kvcore_vllm.describe import describe, lookahead

LAYERS, HEADS, DIM = 2, 2, 64
NAMES = [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]


@cache
def model() -> Path:
    return tiny_model("llama", layers=LAYERS, heads=4, kv_heads=HEADS, head_dim=DIM)


@cache
def vllm_config(cache_dtype: Any = "auto", dtype: Any = "float32") -> Any:
    args = EngineArgs(str(model()), dtype=dtype, kv_cache_dtype=cache_dtype, enforce_eager=True)
    return args.create_engine_config()


def spec_of(kind: type[AttentionSpec] = FullAttentionSpec, **fields: Any) -> Any:
    given: dict[str, Any] = {
        "block_size": 32,
        "num_kv_heads": HEADS,
        "head_size": DIM,
        "dtype": torch.float32,
    }
    return kind(**given | fields)


def told(spec: Any, **group: Any) -> KVCacheConfig:
    groups = [KVCacheGroupSpec(NAMES, spec, **group)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


def fingerprint(cache_dtype: str, told_dtype: str | None = None) -> bytes:
    """The fingerprint where the config says ``cache_dtype``, and the layers maybe another."""
    mode = get_kv_quant_mode(told_dtype or cache_dtype)
    dtype = torch.float32 if mode is KVQuantMode.NONE else torch.uint8
    spec = spec_of(dtype=dtype, kv_quant_mode=mode)
    return describe(vllm_config(cache_dtype), told(spec), 16).fingerprint


# -- identity ------------------------------------------------------------------------------------


def test_eight_bit_formats_are_different_kv() -> None:
    """All of them are bytes to torch."""
    assert len({fingerprint(name) for name in ("auto", "fp8_e4m3", "fp8_e5m2")}) == 3


def test_names_of_one_format_are_the_same_kv() -> None:
    """If a checkpoint asks for "fp8", the workers' config says so, and the scheduler's "auto"."""
    assert fingerprint("fp8") == fingerprint("fp8_e4m3") == fingerprint("auto", told_dtype="fp8")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plain_kv_is_shared_with_other_engines(dtype: str) -> None:
    stored = getattr(torch, dtype)
    found = describe(vllm_config(dtype=dtype), told(spec_of(dtype=stored)), 16)
    assert found.fingerprint == load(model(), dtype=stored).fingerprint
    assert found.alone == ()


def test_bytes_without_a_format_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"torch\.int8"):
        describe(vllm_config(), told(spec_of(dtype=torch.int8)), 16)


def test_layers_of_different_formats_are_refused() -> None:
    quantised = spec_of(dtype=torch.uint8, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)
    specs = UniformTypeKVCacheSpecs(
        block_size=32, kv_cache_specs=dict(zip(NAMES, (spec_of(), quantised), strict=True))
    )
    with pytest.raises(UnsupportedError, match="different heads or dtypes"):
        describe(vllm_config(), told(specs), 16)


def test_pages_that_vllm_zeroes_in_a_step_are_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runner V2 does so while a save may read them, and V1 while a load may have filled them."""
    monkeypatch.setattr(KVCacheConfig, "needs_kv_cache_zeroing", True)
    with pytest.raises(UnsupportedError, match="zeroes or copies within a step"):
        describe(vllm_config(), told(spec_of()), 16)


# -- kinds of caches -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [
        spec_of(SinkFullAttentionSpec, sink_len=4),
        spec_of(HiddenStateCacheSpec, head_size=DIM),
        spec_of(SlidingWindowMLASpec, sliding_window=64),
        spec_of(RSWASpec, rswa_window=64),
        spec_of(type("KpoolTailSpec", (SlidingWindowSpec,), {}), sliding_window=64),  # 0.30, 0.31
        spec_of(type("OtherSpec", (FullAttentionSpec,), {})),
    ],
    ids=lambda spec: type(spec).__name__,
)
def test_a_subclass_of_a_served_spec_is_refused(spec: Any) -> None:
    with pytest.raises(UnsupportedError, match=f"a cache of type {type(spec).__name__}:"):
        describe(vllm_config(), told(spec), 16)


def test_a_subclass_among_the_specs_of_a_group_is_refused() -> None:
    sinks = spec_of(SinkFullAttentionSpec, sink_len=4)
    specs = UniformTypeKVCacheSpecs(
        block_size=32, kv_cache_specs=dict(zip(NAMES, (spec_of(), sinks), strict=True))
    )
    with pytest.raises(UnsupportedError, match="SinkFullAttentionSpec"):
        describe(vllm_config(), told(specs), 16)


@pytest.mark.parametrize("spec", [spec_of(), spec_of(SlidingWindowSpec, sliding_window=64)])
def test_the_served_specs_are_described(spec: Any) -> None:
    assert describe(vllm_config(), told(spec), 16).groups[0].names == tuple(NAMES)


def test_latent_attention_is_served_by_its_own_spec() -> None:
    spec = spec_of(MLAAttentionSpec, num_kv_heads=1)
    assert describe(vllm_config(), told(spec), 16).shape.kv_factor == 1


@pytest.mark.parametrize(
    ("group", "why"),
    [
        ({"host_resident": True}, "host_resident"),
        ({"role": KVCacheGroupRole.HISPARSE_SOURCE}, "hisparse_source"),
        ({"role": KVCacheGroupRole.HISPARSE_INDEXER}, "hisparse_indexer"),
        ({"enable_kv_transfer": False}, "rebuilds"),
    ],
)
def test_a_group_that_is_not_the_models_own_kv_is_refused(group: Any, why: str) -> None:
    with pytest.raises(UnsupportedError, match=why):
        describe(vllm_config(), told(spec_of(), **group), 16)


# -- drafts --------------------------------------------------------------------------------------

OWN = [f"draft_model.model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]
"""The layers of a draft model that is a model of its own."""
HEAD = f"model.layers.{LAYERS}.self_attn.attn"
"""The layer of an EAGLE head or of MTP: it counts on."""


def drafting(**changes: Any) -> Any:
    """Return vLLM's config with a draft model, with other values at dotted paths."""
    args = EngineArgs(
        str(model()),
        dtype="float32",
        enforce_eager=True,
        speculative_config={
            "method": "draft_model",
            "model": str(model()),
            "num_speculative_tokens": 2,
        },
    )
    made = args.create_engine_config()
    for path, value in changes.items():
        *way, last = path.split("__")
        holder: Any = made
        for name in way:
            holder = getattr(holder, name)
        object.__setattr__(holder, last, value)
    return made


def drafted_names(extra: list[str]) -> tuple[str, ...]:
    names = [*reversed(NAMES), *extra]
    group = KVCacheGroupSpec(names, spec_of(), is_eagle_group=HEAD in extra)
    told = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[group])
    found = describe(drafting(), told, 16)
    assert found.shape.layers == LAYERS + len(extra)
    return found.groups[0].names


def test_layers_of_a_draft_follow_the_models_own_in_every_process() -> None:
    """Ranks and engines that name them in another order mean the same blocks."""
    assert drafted_names(OWN[::-1]) == (*NAMES, *OWN)
    assert drafted_names([HEAD]) == (*NAMES, HEAD)
    anew = "mtp.layers.0.self_attn.attn"
    assert drafted_names([anew]) == (*NAMES, anew)


def test_kv_beside_a_draft_is_other_kv() -> None:
    plain = describe(vllm_config(), told(spec_of()), 16)
    assert describe(drafting(), told(spec_of()), 16).fingerprint != plain.fingerprint


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"speculative_config__method": "medusa"}, "'medusa'; kvcore serves 'draft_model', 'ea"),
        ({"speculative_config__method": "mlp_speculator"}, "'mlp_speculator'"),
        (
            {
                "speculative_config__method": "custom_class",
                "speculative_config__draft_model_config": None,
            },
            "'custom_class'",
        ),
        ({"speculative_config__parallel_drafting": True}, "parallel_drafting"),
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline_parallel_size=2"),
        (
            {"speculative_config__draft_parallel_config__tensor_parallel_size": 2},
            "draft_tensor_parallel_size=2 with tensor_parallel_size=1",
        ),
    ],
)
def test_drafts_that_kvcore_cannot_serve_are_refused_by_name(
    changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(UnsupportedError, match=why):
        describe(drafting(**changes), told(spec_of()), 16)


def test_latents_beside_keys_and_values_of_the_same_width_are_refused() -> None:
    """A draft of latents beside a model of K and V, or the other way round."""
    latents = spec_of(MLAAttentionSpec)
    specs = UniformTypeKVCacheSpecs(
        block_size=32, kv_cache_specs=dict(zip(NAMES, (spec_of(), latents), strict=True))
    )
    with pytest.raises(UnsupportedError, match="different heads or dtypes"):
        describe(vllm_config(), told(specs), 16)


def test_the_tokens_that_a_draft_looks_ahead() -> None:
    assert lookahead(vllm_config()) == 0
    assert lookahead(drafting()) == 0
    for method in ("eagle", "eagle3", "mtp"):
        assert lookahead(drafting(speculative_config__method=method)) == 1, method
    several = drafting(speculative_config__method="mtp")
    several.speculative_config.draft_model_config.hf_config.n_predict = 3
    assert lookahead(several) == 3
