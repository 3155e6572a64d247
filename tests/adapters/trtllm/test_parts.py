"""Parts of the TensorRT-LLM adapter that need no model: settings, layouts, messages, identity."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvcore.connector.messages import StepReport  # noqa: E402
from kvcore.errors import ConfigError, FormatError, UnsupportedError  # noqa: E402
from kvcore.model.spec import LayerGroup  # noqa: E402
from kvcore.transfer.graph import OpReport, RowError  # noqa: E402
from kvcore_trtllm.describe import check_settings, check_weights, describe  # noqa: E402
from kvcore_trtllm.layout import of_pool, of_regions  # noqa: E402
from kvcore_trtllm.messages import KVCoreMetadata, News, StepPlan  # noqa: E402
from kvcore_trtllm.worker import Tally  # noqa: E402
from support.trtllm_parts import args, facts, make_graph  # noqa: E402

# --- settings ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"kv_cache_config__enable_block_reuse": False}, "enable_block_reuse"),
        ({"kv_cache_config__enable_partial_reuse": True}, "enable_partial_reuse"),
        ({"kv_cache_config__host_cache_size": 1 << 30}, "host_cache_size"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"context_parallel_size": 2}, "context_parallel_size"),
        ({"max_beam_width": 4}, "max_beam_width"),
        ({"enable_attention_dp": True}, "enable_attention_dp"),
        (
            {"scheduler_config__capacity_scheduler_policy": "MAX_UTILIZATION"},
            "capacity_scheduler_policy",
        ),
    ],
)
def test_settings_under_which_kv_would_be_wrong(change: dict[str, Any], named: str) -> None:
    check_settings(args())
    with pytest.raises(ConfigError, match=named):
        check_settings(args(**change))


@pytest.mark.parametrize(
    ("weights_change", "change", "named"),
    [
        ("any_time", {}, "weights_change"),
        ("on_reset", {"ray_worker_extension_cls": "rlhf_utils.WorkerExtension"}, "ray_worker"),
    ],
)
def test_weights_that_change_in_place_are_refused(
    weights_change: str, change: dict[str, Any], named: str
) -> None:
    """TensorRT-LLM resets its own cache after a change, and no connector learns of it."""
    check_weights(args(), "on_reset")
    check_weights(args(ray_worker_extension_cls="mine.Extension"), "never")
    with pytest.raises(UnsupportedError, match=named):
        check_weights(args(**change), weights_change)


def test_a_llama_is_described(checkpoint: Callable[..., Path]) -> None:
    found = describe(args(checkpoint(dtype="bfloat16")))
    assert (found.layers, found.kv_heads, found.head_dim, found.kv_factor) == (3, 4, 8, 2)
    assert (found.kv_dtype, found.order, found.page_tokens) == ("bfloat16", "HND", 32)


def test_mla_is_one_latent_head(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("DeepseekV3Config", kv_lora_rank=24, qk_rope_head_dim=8, n_routed_experts=4)
    found = describe(args(folder))
    assert (found.kv_heads, found.head_dim, found.kv_factor) == (1, 32, 1)
    with pytest.raises(UnsupportedError, match="tensor_parallel_size=2"):
        describe(args(folder, tensor_parallel_size=2))


@pytest.mark.parametrize(
    ("fields", "change", "named"),
    [
        ({"kind": "MistralConfig", "sliding_window": 64}, {}, "window"),
        ({}, {"kv_cache_config__max_attention_window": [512]}, "window"),
        ({}, {"speculative_config": object()}, "draft"),
        ({}, {"attn_backend": "FLASHINFER_STAR_ATTENTION"}, "attn_backend"),
        ({}, {"kv_cache_config__dtype": "nvfp4"}, "NVFP4"),
        ({}, {"sparse_attention_config": object()}, "sparse attention"),
        ({"index_topk": 2048}, {}, "sparse attention"),
    ],
)
def test_models_that_are_left_alone(
    checkpoint: Callable[..., Path], fields: dict[str, Any], change: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedError, match=named):
        describe(args(checkpoint(**fields), **change))


def test_kv_types(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint()
    asked = SimpleNamespace(kv_cache_quant_algo="FP8", quant_algo=None)
    assert describe(args(folder, kv_cache_config__dtype="fp8")).kv_dtype == "float8_e4m3fn"
    assert describe(args(folder, quant_config=asked)).kv_dtype == "float8_e4m3fn"
    assert describe(args(folder, dtype="float16")).kv_dtype == "float16"


@pytest.mark.parametrize(("told", "memory"), [("int8", "uint8"), ("float8_e4m3fn", "int8")])
def test_bytes_of_another_type_than_the_settings_are_left_alone(told: str, memory: str) -> None:
    pool = torch.zeros(4, 3, 2, 32 * 4 * 8, dtype=getattr(torch, memory))
    with pytest.raises(UnsupportedError, match=f"{memory} in memory, and {told}"):
        of_pool(pool, facts(kv_dtype=told), 0)
    same = torch.zeros(4, 3, 2, 32 * 4 * 8, dtype=getattr(torch, told))
    assert of_pool(same, facts(kv_dtype=told), 0).facts.kv_dtype == told


# --- layouts ----------------------------------------------------------------------------------


def numbered(*shape: int) -> Any:
    return torch.arange(int(np.prod(shape)), dtype=torch.float32).view(*shape)


@pytest.mark.parametrize("order", ["HND", "NHD"])
@pytest.mark.parametrize(("world", "rank"), [(1, 0), (2, 1), (8, 5)])
def test_the_pool_is_read_as_the_engine_writes_it(order: str, world: int, rank: int) -> None:
    given = facts(order=order, world_size=world)
    start, stop = given.head_range(rank)
    heads = stop - start
    pool = numbered(5, 3, 2, heads * 32 * 8)
    inner = (heads, 32, 8) if order == "HND" else (32, heads, 8)
    elements = pool.view(5, 3, 2, *inner)
    elements = elements if order == "HND" else elements.transpose(3, 4)
    memory = of_pool(pool, given, rank)
    layout = memory.views[0].layout
    picks = np.random.default_rng(0)
    for _ in range(50):
        page, layer, kv, head, token, dim = (
            int(picks.integers(n)) for n in (5, 3, 2, heads, 32, 8)
        )
        place = layout.offset(layer, kv, page, head, token, dim)
        assert pool.flatten()[place] == elements[page, layer, kv, head, token, dim]
    assert memory.groups == (LayerGroup(0, 32, (0, 1, 2)),)


def test_pages_are_as_large_as_the_memory_says() -> None:
    latent = facts(kv_heads=1, kv_factor=1)
    pool = numbered(4, 3, 1, 64 * 8)
    assert of_pool(pool, latent, 0).facts.page_tokens == 64  # FlashMLA
    with pytest.raises(UnsupportedError, match="pages of 64 tokens"):
        of_pool(numbered(4, 3, 2, 64 * 4 * 8), facts(), 0)
    with pytest.raises(UnsupportedError, match="pages of 16 tokens"):  # two values a byte
        of_pool(numbered(4, 3, 2, 16 * 4 * 8), facts(), 0)


@pytest.mark.parametrize("shape", [(4, 2, 2, 1024), (4, 3, 1, 1024), (4, 3, 2048), (4, 3, 2, 1023)])
def test_pools_of_another_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedError, match="kvcore expects"):
        of_pool(numbered(*shape), facts(), 0)


def region(tensor: Any, buffers: list[tuple[int, str]], expansion: int = 1) -> SimpleNamespace:
    """A region of the newer interface over ``tensor`` [slots, elements]."""
    return SimpleNamespace(
        size=tensor.shape[1] * tensor.element_size(),
        num_slots=tensor.shape[0],
        buffers=[SimpleNamespace(layer_id=i, role=r, expansion=expansion) for i, r in buffers],
        as_tensor=lambda dtype: tensor.view(dtype) if tensor.dtype != dtype else tensor,
    )


def layout_of(*groups: tuple[tuple[int, ...], list[Any]], page_tokens: int = 32) -> SimpleNamespace:
    return SimpleNamespace(
        tokens_per_block=page_tokens,
        groups=[
            SimpleNamespace(layer_ids=layers, regions=regions, replicated_regions=())
            for layers, regions in groups
        ],
    )


def test_regions_by_layer_group() -> None:
    part = 4 * 32 * 8
    full = numbered(6, 4 * part)
    keys, values = numbered(5, part), numbered(5, part) + 1
    layout = layout_of(
        ((0, 2), [region(full, [(0, "key"), (0, "value"), (2, "key"), (2, "value")])]),
        ((1,), [region(keys, [(1, "DataRole.KEY")]), region(values, [(1, "DataRole.VALUE")])]),
    )
    memory = of_regions(layout, facts(), 0)
    assert memory.groups == (LayerGroup(0, 32, (0, 2)), LayerGroup(1, 32, (1,)))
    first, second = memory.views
    elements = full.view(6, 2, 2, 4, 32, 8)
    place = first.layout.offset(1, 0, 3, 2, 7, 5)
    assert full.flatten()[place] == elements[3, 1, 0, 2, 7, 5]
    assert second.layout.planes[0][1].tensor == 1
    place = second.layout.offset(0, 1, 4, 1, 2, 3)
    assert values.flatten()[place] == values.view(5, 4, 32, 8)[4, 1, 2, 3]


def test_regions_that_kvcore_does_not_know() -> None:
    part = 4 * 32 * 8
    both = [(i, role) for i in range(3) for role in ("key", "value")]
    good = numbered(4, 6 * part)
    of_regions(layout_of(((0, 1, 2), [region(good, both)])), facts(), 0)
    bad = [
        layout_of(((0, 1), [region(numbered(4, 4 * part), both[:4])])),
        layout_of(((0, 1, 2), [region(numbered(4, 6 * part + 8), both)])),
        layout_of(((0, 1, 2), [region(good, [*both[:5], (2, "index_k")])])),
        layout_of(((0, 1, 2), [region(good, both, expansion=2)])),
    ]
    for layout in bad:
        with pytest.raises(UnsupportedError):
            of_regions(layout, facts(), 0)


# --- messages ---------------------------------------------------------------------------------


def test_metadata_survives_a_broadcast() -> None:
    plan = StepPlan(fence=[1, 2], lost_loads=[7], broken="because")
    sent = pickle.loads(pickle.dumps(KVCoreMetadata.of(plan)))
    assert sent.plan() == plan
    assert KVCoreMetadata.of(StepPlan()).payload == b""
    assert KVCoreMetadata().plan() == StepPlan()
    with pytest.raises(FormatError, match="step plan"):
        KVCoreMetadata(b"\xc1").plan()


def test_an_op_has_ended_when_all_ranks_say_so() -> None:
    queues: list[list[bytes]] = [[], []]

    def gather(mine: bytes) -> list[bytes]:
        return [mine, queues[1].pop(0)]

    tally = Tally(2, gather)
    assert not tally.open  # no word to the others
    tally.expect(make_graph(1, ops=2))
    encode = msgspec.msgpack.encode

    def exchange(*own: OpReport) -> News:
        return tally.exchange(encode(StepReport(list(own))))

    good, bad = OpReport(1, 0), OpReport(1, 1, {0: RowError.IO})
    queues[1] = [encode(StepReport([bad])), encode(StepReport([good])), encode(StepReport())]
    assert exchange(good) == ([], [{}, {}], "")
    assert exchange() == ([good], [{}, {}], "")
    assert exchange(OpReport(1, 1)) == ([bad], [{}, {}], "")
    assert not tally.open
