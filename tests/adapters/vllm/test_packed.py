"""Models whose pages are stored as they are, from vLLM's own specs and its own plans of memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config, get_kv_cache_configs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from kvcore.errors import UnsupportedError
from kvcore.harness.models import tiny_model
from kvcore.model.spec import ModelDescription
from kvcore_vllm.build import loads_layerwise
from kvcore_vllm.describe import describe
from kvcore_vllm.packed import packed_view, raw_pages
from kvcore_vllm.stages import Stages

Specs = Mapping[str, Any]
LAYERS, PAGES = 3, 5
INT8 = KVQuantMode.INT8_PER_TOKEN_HEAD


@cache
def model() -> Path:
    return tiny_model("llama", layers=LAYERS, heads=4, kv_heads=2, head_dim=64)


@cache
def plain_config() -> VllmConfig:
    args = EngineArgs(str(model()), enforce_eager=True, max_model_len=512)
    return args.create_engine_config()


def config(layout: str = "LBHNC", ranks: int = 1) -> VllmConfig:
    made = copy.deepcopy(plain_config())
    made.cache_config.kv_cache_layout = layout  # type: ignore[assignment]
    made.parallel_config.tensor_parallel_size = ranks
    return made


def full(heads: int = 2, dim: int = 64, dtype: Any = torch.bfloat16, **more: Any) -> Any:
    return FullAttentionSpec(block_size=32, num_kv_heads=heads, head_size=dim, dtype=dtype, **more)


def latent(dim: int = 576, dtype: Any = torch.bfloat16, **more: Any) -> Any:
    given: dict[str, Any] = {"block_size": 64, "num_kv_heads": 1, "head_size": dim, "dtype": dtype}
    return MLAAttentionSpec(**given | more)


def layers(*kinds: tuple[str, Callable[[int], Any]]) -> Specs:
    """Specs by name: each of ``kinds`` in every layer for which it makes one."""
    found = {}
    for layer in range(LAYERS):
        for name, make in kinds:
            if (spec := make(layer)) is not None:
                found[f"model.layers.{layer}.self_attn.{name}"] = spec
    return found


def sparse(dtype: Any = torch.bfloat16, **more: Any) -> Specs:
    """Return specs as of DeepSeek V3.2: every layer has latents, and an index: keys and scales."""
    index = latent(132, torch.uint8)
    return layers(
        ("attn", lambda _: latent(dtype=dtype, **more)), ("indexer.k_cache", lambda _: index)
    )


def window(tokens: int, dim: int, size: int, dtype: Any, **more: Any) -> Any:
    """Return the spec of latents, or of a compressor's states, of the last ``size`` tokens."""
    return SlidingWindowMLASpec(
        block_size=tokens, num_kv_heads=1, head_size=dim, dtype=dtype, sliding_window=size,
        max_tp_shards=1, **more,
    )  # fmt: skip


def deepseek_v4(dtype: Any = torch.uint8, **more: Any) -> Specs:
    """Return specs as of DeepSeek V4's layers: one of windows only, one of each compression.

    ``more`` is told of all windows. With bytes each token has 584, and pages are multiples of 576.
    """
    packed = dtype is torch.uint8
    aligned = {"alignment": 576 if packed else 512}
    named = {"cache_dtype_str": "fp8_ds_mla", "model_version": "deepseek_v4", **aligned}
    if packed:
        named |= {"state_content_bytes": 584, "kv_quant_mode": KVQuantMode.FP8_PER_TENSOR}
    ratios = (1, 4, 128)

    def compressed(layer: int) -> Any:
        ratio = ratios[layer]
        told = {"block_size": 256, "tokens_per_state": ratio, "max_tp_shards": 1, **named}
        return latent(512, dtype, **told) if ratio > 1 else None

    def index(layer: int) -> Any:
        told = {"block_size": 256, "tokens_per_state": 4, "max_tp_shards": 1, **aligned}
        return latent(132, torch.uint8, **told) if ratios[layer] == 4 else None

    def states(layer: int, dim: int) -> Any:
        tokens, size, width = {1: (0, 0, 0), 4: (4, 8, 2), 128: (8, 128, 1)}[ratios[layer]]
        told = {**aligned, **more}
        return window(tokens, 2 * width * dim, size, torch.float32, **told) if size else None

    return layers(
        ("swa_cache", lambda _: window(64, 512, 128, dtype, **named, **more)),
        ("indexer.k_cache", index),
        ("attn", compressed),
        (
            "indexer.compressor.state_cache",
            lambda layer: states(layer, 128) if ratios[layer] == 4 else None,
        ),
        ("compressor.state_cache", lambda layer: states(layer, 512)),
    )


def window_of_heads(**more: Any) -> Any:
    """Return the spec of K and V of the last 100 tokens."""
    given = {"block_size": 32, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
    return SlidingWindowSpec(sliding_window=100, **given | more)


MEMORY = 32 << 20
"""Bytes that vLLM is given for its KV."""
PACKED = {
    "sparse": sparse(),
    "sparse fp8": sparse(torch.uint8, cache_dtype_str="fp8_ds_mla", state_content_bytes=656),
    "latents in fp8": layers(
        ("attn", lambda _: latent(dtype=torch.uint8, state_content_bytes=656)),
    ),
    "heads": layers(("attn", lambda layer: full(2 if layer else 4))),
    "two caches": layers(("attn", lambda _: full()), ("side", lambda _: full(1, 32))),
    "an index in some layers": layers(
        ("attn", lambda _: latent()),
        ("indexer.k_cache", lambda layer: latent(132, torch.uint8) if layer else None),
    ),
    "padded": layers(("attn", lambda _: full(page_size_padded=20480))),
    "compressed": layers(("attn", lambda _: latent(tokens_per_state=4))),
    **{
        mode.name: layers(
            ("attn", lambda _, mode=mode: full(dtype=torch.uint8, kv_quant_mode=mode))
        )
        for mode in KVQuantMode
        if mode.name not in ("NONE", "FP8_PER_TENSOR")
    },
}


def planned(specs: Specs, made: VllmConfig) -> tuple[KVCacheConfig, KVCacheConfig]:
    """What vLLM tells a worker, and what it tells the scheduler."""
    [worker] = get_kv_cache_configs(made, [dict(specs)], [MEMORY])
    return worker, generate_scheduler_kv_cache_config([worker])


def memory(told: KVCacheConfig, specs: Specs) -> dict[str, torch.Tensor]:
    """The layers' tensors, as vLLM cuts them from its memory: ``[pages, content]`` of bytes."""
    words = torch.randint(-(1 << 63), (1 << 63) - 1, (-(-told.kv_cache_tensors[0].size // 8),))
    whole = words.view(torch.uint8)
    return {
        name: whole.as_strided(
            (told.num_blocks, specs[name].unpadded_page_size_bytes),
            (part.block_stride, 1),
            part.offset + place * part.layer_stride,
        )
        for part in told.kv_cache_tensors
        for place, name in enumerate(part.layers)
    }


@pytest.mark.parametrize("layout", ["LBHNC", "BLNHC"])
@pytest.mark.parametrize("kind", PACKED)
def test_leader_and_workers_say_the_same_of_every_kind(kind: str, layout: str) -> None:
    """The leader is told one spec for all layers that share a page table."""
    made, specs = config(layout), PACKED[kind]
    worker, scheduler = planned(specs, made)
    found = describe(made, worker, 16)
    assert found == describe(made, scheduler, 16)
    packed = found.packed
    assert packed is not None
    names = found.groups[0].names
    assert sorted(names) == sorted(specs)
    assert packed.page_nbytes == tuple(specs[name].page_size_bytes for name in names)
    [size] = {spec.block_size for spec in specs.values()}
    assert found.shape.block_tokens == packed.page_tokens == size
    assert loads_layerwise(_layerwise(), made, found) is False


def _layerwise() -> Any:
    from kvcore.config import load_config

    return load_config(overrides={"vllm": {"layerwise": True}}, env={})


@pytest.mark.parametrize("layout", ["LBHNC", "BLNHC"])
@pytest.mark.parametrize("kind", PACKED)
def test_a_view_has_each_byte_of_each_page(kind: str, layout: str) -> None:
    made, specs = config(layout), PACKED[kind]
    worker, _ = planned(specs, made)
    found = describe(made, worker, 16)
    [group], packed = found.groups, found.packed
    assert packed is not None
    caches = memory(worker, specs)
    view = packed_view(caches, group, packed, worker.num_blocks)
    for position, name in enumerate(group.names):
        [plane] = view.layout.planes[position]
        data = view.tensors[plane.tensor].numpy()
        for page in (0, worker.num_blocks - 1):
            content = caches[name][page].numpy()
            assert np.array_equal(data[page, : len(content)], content), name
            assert len(data[page]) == specs[name].page_size_bytes


WINDOWED = {
    "DeepSeek V4": (deepseek_v4(), 256, {64: 2, 4: 2, 8: 16}, 1),
    "DeepSeek V4 in bfloat16": (deepseek_v4(torch.bfloat16), 256, {64: 2, 4: 2, 8: 16}, 1),
    "8 bits with scales beside windows": (
        layers(
            ("attn", lambda layer: full(dtype=torch.uint8, kv_quant_mode=INT8) if layer else None),
            (
                "window",
                lambda layer: None
                if layer
                else window_of_heads(dtype=torch.uint8, kv_quant_mode=INT8),
            ),
        ),
        32,
        {32: 4},
        128 - 99,
    ),
}  # fmt: skip
"""Specs, the tokens of a block, by the tokens of a window's page how many a point has, and how far
before its boundary the model may go on."""


@pytest.mark.parametrize("kind", WINDOWED)
def test_points_have_each_byte_of_the_last_pages_of_windows(kind: str) -> None:
    """The leader is told one spec for all layers that share a page table."""
    specs, block, pages, spare = WINDOWED[kind]
    made = config("BLHNC")
    worker, scheduler = planned(specs, made)
    found = describe(made, worker, 16)
    assert found == describe(made, scheduler, 16)
    assert found.shape.block_tokens == block
    assert found.point is not None
    seen = found.point.page_windows
    assert {window.page_tokens: window.pages for window in seen} == pages
    assert found.point.spare == spare
    caches = memory(worker, specs)
    names = [name for group in found.groups for name in group.names]
    for window in seen:
        raw = raw_pages(caches, window.names, window.page_nbytes, worker.num_blocks)
        for name, whole in zip(window.names, raw, strict=True):
            names.append(name)
            assert whole.shape == (worker.num_blocks, specs[name].page_size_bytes)
            content = caches[name]
            assert torch.equal(whole[:, : content.shape[1]], content), name
    assert sorted(names) == sorted(specs)


def beside_states(specs: Specs, tokens: int) -> Specs:
    """Add layers with states, in pages of ``tokens`` tokens."""
    state = MambaSpec(
        block_size=tokens,
        shapes=((3, 96), (2, 16, 16)),
        dtypes=(torch.bfloat16, torch.float32),
        mamba_cache_mode="align",
    )
    return {**specs, **{f"model.layers.{LAYERS + i}.mixer": state for i in range(4)}}


INDEX = "sparse"
BESIDE = {
    INDEX: (PACKED["sparse"], 64),
    "scales": (PACKED["INT8_PER_TOKEN_HEAD"], 32),
    "NVFP4": (PACKED["NVFP4"], 32),
    "two caches": (layers(("attn", lambda _: full()), ("side", lambda _: full())), 32),
    "scales and windows": (WINDOWED["8 bits with scales beside windows"][0], 32),
    "latents": (layers(("attn", lambda _: latent())), 64),
    "windows": (
        layers(
            ("attn", lambda layer: full() if layer else None),
            ("window", lambda layer: None if layer else window_of_heads()),
        ),
        32,
    ),
}  # fmt: skip
"""Specs of layers with KV, and the tokens of a page."""


@pytest.mark.parametrize("layout", ["LBHNC", "BLNHC"])
@pytest.mark.parametrize("kind", BESIDE)
def test_states_are_beside_every_kind(kind: str, layout: str) -> None:
    """vLLM tells workers of states in another way where all groups lie in one block."""
    if (kind, layout) == (INDEX, "LBHNC"):
        pytest.skip("vLLM has no such layout: the pages differ")
    specs, tokens = BESIDE[kind]
    made = config(layout)
    made.cache_config.enable_prefix_caching = True
    worker, scheduler = planned(beside_states(specs, tokens), made)
    found = describe(made, worker, 16)
    assert found == describe(made, scheduler, 16)
    point = found.point
    assert point is not None
    plain = kind in ("latents", "windows")
    assert (found.packed is None) is plain
    assert found.shape.block_tokens * point.every == tokens
    assert sum(len(group.names) for group in point.states) == 4
    assert {group.nbytes for group in point.states} == {3 * 96 * 2 + 2 * 16 * 16 * 4}
    assert bool(point.seen) is ("windows" in kind)
    of_blocks = [name for group in found.groups for name in group.names]
    assert sorted([*of_blocks, *(n for w in point.seen for n in w.names)]) == sorted(specs)


def test_each_rank_of_deepseek_v4_has_all_of_it() -> None:
    made = config("BLHNC", ranks=2)
    worker, _ = planned(deepseek_v4(), made)
    found = describe(made, worker, 16)
    assert found.shape.kv_heads == 1
    assert found.rank_shape(0) == found.rank_shape(1)


def test_windows_of_packed_pages_need_points() -> None:
    made = config("BLHNC")
    worker, _ = planned(deepseek_v4(), made)
    with pytest.raises(UnsupportedError, match="only resume points keep, and vllm"):
        describe(made, worker, 16, 'vllm.windows is "dense"')


def test_windows_that_vllm_computes_again_are_refused() -> None:
    """DeepSeek V4.1 has them: vLLM keeps no prefix of their KV."""
    made = config("BLHNC")
    worker, _ = planned(deepseek_v4(bounded_replay=True), made)
    with pytest.raises(UnsupportedError, match="computes again after each hit"):
        describe(made, worker, 16)


def test_the_type_of_a_cache_of_deepseek_v4_is_what_its_workers_make_of_it() -> None:
    """The leader's config says what the user has told."""
    made = config("BLHNC")
    made.model_config.hf_config.model_type = "deepseek_v4"
    worker, _ = planned(deepseek_v4(), made)
    found = set()
    for told in ("auto", "fp8", "fp8_ds_mla", "bfloat16"):
        made.cache_config.cache_dtype = told  # type: ignore[assignment]
        found.add(describe(made, worker, 16).fingerprint)
    assert len(found) == 2


def test_the_fingerprint_names_the_windows() -> None:
    made, found = config("BLHNC"), set()
    for size in (100, 101):
        specs = dict(WINDOWED["8 bits with scales beside windows"][0])
        [name] = [name for name in specs if "window" in name]
        specs[name] = replace(specs[name], sliding_window=size)
        found.add(describe(made, planned(specs, made)[0], 16).fingerprint)
    assert len(found) == 2


def test_pages_that_kernels_cut_are_whole_again() -> None:
    made, specs = config(), PACKED["two caches"]
    worker, _ = planned(specs, made)
    found = describe(made, worker, 16)
    assert found.packed is not None
    caches = memory(worker, specs)
    cut = {name: pages.reshape(4 * len(pages), -1) for name, pages in caches.items()}
    view = packed_view(cut, found.groups[0], found.packed, worker.num_blocks)
    assert view.layout.num_pages == worker.num_blocks
    for tensor, name in zip(view.tensors, found.groups[0].names, strict=True):
        assert torch.equal(tensor, caches[name])


def test_plain_models_are_not_packed() -> None:
    """Kernels may want more room between two pages; the pages are the same."""
    apart = layers(("attn", lambda _: full(block_stride_alignment=3 << 12)))
    assert apart["model.layers.0.self_attn.attn"].page_size_bytes % (3 << 12)
    for specs in (layers(("attn", lambda _: full())), layers(("attn", lambda _: latent())), apart):
        for layout in ("LBHNC", "LBNHC", "BLHNC", "LHBNC", "BHLNC"):
            if specs is apart and layout in ("LHBNC", "BHLNC"):
                continue  # vLLM pads whole pages only
            made = config(layout)
            for told in planned(specs, made):
                assert describe(made, told, 16).packed is None, layout


def described(specs: Specs, ranks: int = 1, tokens: int = 16) -> ModelDescription:
    made = config(ranks=ranks)
    worker, scheduler = planned(specs, made)
    found = describe(made, worker, tokens)
    assert found == describe(made, scheduler, tokens)
    return found


def test_ranks_have_shares_of_their_own_unless_all_keep_the_same() -> None:
    assert described(PACKED["sparse"], ranks=2).shape.kv_heads == 1
    found = described(PACKED["INT8_PER_TOKEN_HEAD"], ranks=2)
    assert found.shape.kv_heads == 2
    assert found.packed is not None
    assert found.rank_shape(1).nbytes >= sum(found.packed.page_nbytes)


def test_a_block_is_raised_to_whole_pages() -> None:
    tokens = [described(PACKED["sparse"], tokens=wanted).shape.block_tokens for wanted in (16, 100)]
    assert tokens == [64, 128]


def test_the_fingerprint_names_what_decides_the_format(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {kind: described(specs).fingerprint for kind, specs in PACKED.items()}
    assert len(set(found.values())) == len(found)
    before = found["sparse"]
    assert described(PACKED["sparse"]).fingerprint == before
    assert described(PACKED["sparse"], ranks=2).fingerprint != before
    with monkeypatch.context() as patch:
        patch.setattr("vllm.__version__", "0.99")
        assert described(PACKED["sparse"]).fingerprint != before
    with monkeypatch.context() as patch:
        patch.setattr("vllm.config.ModelConfig.get_sliding_window", lambda _: 64)
        assert described(PACKED["sparse"]).fingerprint != before
    with monkeypatch.context() as patch:
        patch.setenv("VLLM_ROCM_USE_AITER_MLA", "0")
        assert described(PACKED["sparse"]).fingerprint != before
    with monkeypatch.context() as patch:
        patch.setattr("kvcore_vllm.identity.device_kind", lambda: ["cuda", "(9, 0)"])
        assert described(PACKED["sparse"]).fingerprint != before
    other = config("BLNHC")
    assert describe(other, planned(PACKED["sparse"], other)[0], 16).fingerprint != before


@pytest.mark.parametrize(
    ("specs", "why"),
    [
        (
            layers(
                ("attn", lambda layer: full() if layer else None),
                ("side", lambda layer: full() if layer else None),
                ("sink", lambda layer: None if layer else SinkFullAttentionSpec(
                    block_size=32, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, sink_len=4,
                )),
            ),
            "beside a cache of type SinkFullAttentionSpec",
        ),
        (
            layers(
                ("attn", lambda layer: window(32, 576, 64, torch.bfloat16) if layer else None),
                ("a", lambda layer: None if layer else window(32, 576, 64, torch.bfloat16)),
                ("b", lambda layer: None if layer else window(32, 576, 64, torch.bfloat16)),
            ),
            "every layer has a window",
        ),
        (
            layers(
                ("attn", lambda _: full(dtype=torch.int8)),
                ("side", lambda _: full(1, dtype=torch.int8)),
            ),
            "no known format",
        ),
    ],
)  # fmt: skip
def test_what_is_no_whole_page_of_every_token_is_refused(specs: Specs, why: str) -> None:
    made = config()
    worker, _ = planned(specs, made)
    with pytest.raises(UnsupportedError, match=why):
        describe(made, worker, 16)


def in_stages(specs: Specs, *borders: int) -> tuple[Any, Any]:
    """The model as the leader and as a rank describe it, in stages with these borders."""
    made = config("BLHNC")
    made.parallel_config.pipeline_parallel_size = len(borders) - 1
    stages = [
        {name: spec for name, spec in specs.items() if extract_layer_index(name) in range(*pair)}
        for pair in pairwise(borders)
    ]
    told = Stages(get_kv_cache_configs(made, stages, [MEMORY] * len(stages)))
    return (
        describe(made, told.of_leader(), 16, stages=told.names),
        describe(made, told.whole(), 16, stages=told.names),
    )


@pytest.mark.parametrize("kind", ["sparse", "heads", "an index in some layers", "deepseek_v4"])
def test_stages_keep_the_pages_of_their_own_layers(kind: str) -> None:
    """However unlike they are, a block of each rank has room for its own."""
    specs = deepseek_v4() if kind == "deepseek_v4" else PACKED[kind]
    leader, rank = in_stages(specs, 0, 2, LAYERS)
    assert leader == rank
    assert (leader.world_size, len(leader.stages)) == (2, 2)
    assert leader.fingerprint != in_stages(specs, 0, LAYERS)[0].fingerprint
    block = leader.shape.block_tokens
    for number, (start, stop) in enumerate(leader.stages):
        offsets = leader.packed.offsets(block)
        assert offsets[stop] - offsets[start] <= leader.rank_shape(number).nbytes
        own = [name for group in leader.rank_groups(number) for name in group.names]
        if (point := leader.rank_point(number)) is not None:
            own += [name for window in point.page_windows for name in window.names]
        layers_ = range(2) if number == 0 else range(2, LAYERS)
        assert sorted(own) == sorted(n for n in specs if extract_layer_index(n) in layers_)
    if kind == "deepseek_v4":
        assert in_stages(specs, 0, 2, LAYERS)[0].point is not None


def test_a_layer_with_a_window_alone_on_another_stage_is_another_namespace() -> None:
    """The caches of blocks are divided as before, but the rows of points are not."""
    made = config("BLHNC")
    worker, _ = planned(deepseek_v4(), made)
    made.parallel_config.pipeline_parallel_size, found = 2, []
    first = {name for name in deepseek_v4() if extract_layer_index(name) < 2}
    for alone in ({name for name in first if extract_layer_index(name) == 0}, set()):
        own = first - alone
        found.append(describe(made, worker, 16, stages=[own, deepseek_v4().keys() - own]))
    assert found[0].stages == found[1].stages
    assert found[0].fingerprint != found[1].fingerprint


def test_latents_beside_other_caches_on_several_ranks_are_refused() -> None:
    mixed = layers(("attn", lambda _: full()), ("latent", lambda _: latent(block_size=32)))
    made = config(ranks=2)
    worker, _ = planned(mixed, made)
    with pytest.raises(UnsupportedError, match="latents beside K and V, on 2 ranks"):
        describe(made, worker, 16)


# -- context parallelism ------------------------------------------------------------------------


def divided(decode: int = 1, prefill: int = 1, **more: Any) -> VllmConfig:
    made = config(ranks=decode)
    parallel = made.parallel_config
    parallel.decode_context_parallel_size = decode
    parallel.prefill_context_parallel_size = prefill
    for name, value in more.items():
        setattr(parallel, name, value)
    return made


LATENTS = layers(("attn", lambda _: latent()))
DIVIDED: dict[str, Specs] = {
    "heads": layers(("attn", lambda _: full(1))),
    "latents": LATENTS,
    **{kind: PACKED[kind] for kind in ("sparse", "latents in fp8", "two caches", "NVFP4")},
}


@pytest.mark.parametrize(("decode", "prefill"), [(2, 1), (4, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("kind", DIVIDED)
def test_ranks_that_have_other_tokens_of_a_page_keep_parts_of_their_own(
    kind: str, decode: int, prefill: int
) -> None:
    """Each rank has a part of its own, of latents too, which all ranks keep alike elsewhere."""
    made, specs = divided(decode, prefill), DIVIDED[kind]
    worker, scheduler = planned(specs, made)
    found = describe(made, worker, 16)
    assert found == describe(made, scheduler, 16)
    [size] = {spec.block_size for spec in specs.values()}
    assert found.packed is not None
    assert found.packed.page_tokens == found.shape.block_tokens == decode * size
    assert {group.page_tokens for group in found.groups} == {decode * size}
    assert found.packed.page_nbytes == tuple(
        specs[name].page_size_bytes for name in found.groups[0].names
    )
    ranks = decode * prefill
    assert (found.world_size, found.shape.kv_heads) == (ranks, ranks)
    assert found.rank_shape(ranks - 1).kv_heads == 1
    assert found.rank_shape(0).nbytes >= sum(found.packed.page_nbytes)


def test_another_division_of_a_page_is_another_namespace() -> None:
    made = [
        divided(2),
        divided(4),
        divided(2, tensor_parallel_size=4),
        divided(2, cp_kv_cache_interleave_size=4),
        divided(2, dcp_kv_cache_interleave_size=8),
        divided(1, 2),
        divided(2, 2),
        config(),
    ]
    found = {describe(one, planned(LATENTS, one)[0], 64).fingerprint for one in made}
    assert len(found) == len(made)


class _Told:
    """A transfer config that names NixlConnector among its connectors."""

    kv_connector_extra_config: Mapping[str, Any] = {}

    def has_connector(self, name: str) -> bool:
        return name == "NixlConnector"


def test_divided_pages_that_are_refused() -> None:
    """vLLM refuses most windows itself, and keeps a draft model's KV whole in some cases."""
    whole = layers(
        ("attn", lambda layer: full() if layer else None),
        ("draft", lambda layer: None if layer else full(dcp_sharded=False)),
    )
    refused: list[tuple[VllmConfig, Specs, str]] = [
        (divided(2), beside_states(LATENTS, 64), "beside a cache of type MambaSpec"),
        (divided(2), WINDOWED["8 bits with scales beside windows"][0], "of type SlidingWindowSpec"),
        (divided(2), whole, r"in pages of \[32, 64\] tokens"),
        (divided(1, 2, nnodes=2), LATENTS, "on 2 machines: kvcore serves it in one stage"),
    ]
    for made, specs, why in refused:
        made.cache_config.enable_prefix_caching = True
        plain = config()
        plain.cache_config.enable_prefix_caching = True
        worker, _ = planned(specs, plain)
        with pytest.raises(UnsupportedError, match=why):
            describe(made, worker, 16)
    beside = divided(2)
    beside.kv_transfer_config = _Told()  # type: ignore[assignment]
    with pytest.raises(UnsupportedError, match="beside NixlConnector"):
        describe(beside, planned(LATENTS, config())[0], 16)
    stages = divided(1, 2, pipeline_parallel_size=2)
    names = [name for name in LATENTS if "layers.0" in name], list(LATENTS)[1:]
    with pytest.raises(UnsupportedError, match="in 2 pipeline stages on 1 machines"):
        describe(stages, planned(LATENTS, config())[0], 16, stages=names)
