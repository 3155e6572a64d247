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

from kvcore.config import Config  # noqa: E402
from kvcore.connector.messages import StepReport  # noqa: E402
from kvcore.errors import ConfigError, FormatError, UnsupportedError  # noqa: E402
from kvcore.model.identity import Namespaces, weights_identity  # noqa: E402
from kvcore.model.spec import LayerGroup  # noqa: E402
from kvcore.transfer.graph import OpReport, RowError  # noqa: E402
from kvcore_trtllm.describe import ModelFacts, check_settings, check_weights, describe, whole  # noqa: E402
from kvcore_trtllm.layout import of_pool, of_regions  # noqa: E402
from kvcore_trtllm.messages import KVCoreMetadata, StepPlan  # noqa: E402
from kvcore_trtllm.requests import RequestNamespaces, excluded, extras  # noqa: E402
from kvcore_trtllm.worker import Tally  # noqa: E402
from support.trtllm_parts import facts, make_graph, request  # noqa: E402

# --- settings ---------------------------------------------------------------------------------


def args(folder: Path | str = "", **changes: Any) -> SimpleNamespace:
    made = SimpleNamespace(
        model=str(folder),
        revision=None,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        context_parallel_size=1,
        enable_attention_dp=False,
        max_beam_width=1,
        attn_backend="TRTLLM",
        dtype="auto",
        quant_config=None,
        speculative_config=None,
        scheduler_config=SimpleNamespace(capacity_scheduler_policy="GUARANTEED_NO_EVICT"),
        kv_cache_config=SimpleNamespace(
            enable_block_reuse=True,
            enable_partial_reuse=False,
            tokens_per_block=32,
            dtype="auto",
            host_cache_size=0,
            max_attention_window=None,
        ),
    )
    for name, value in changes.items():
        *path, last = name.split("__")
        place: Any = made
        for part in path:
            place = getattr(place, part)
        setattr(place, last, value)
    return made


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
    with pytest.raises(UnsupportedError, match=named):
        check_weights(args(**change), weights_change)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """A folder with a config and one byte of weights."""
    transformers: Any = pytest.importorskip("transformers")

    def make(kind: str = "LlamaConfig", **fields: Any) -> Path:
        sizes = {
            "num_hidden_layers": 3,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "hidden_size": 64,
            "intermediate_size": 64,
            "vocab_size": 128,
        }
        getattr(transformers, kind)(**{**sizes, **fields}).save_pretrained(tmp_path)
        (tmp_path / "model.bin").write_bytes(b"weights")
        return tmp_path

    return make


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


def test_fingerprints_tell_models_apart(checkpoint: Callable[..., Path]) -> None:
    groups = (LayerGroup(0, 32, (0, 1, 2)),)

    def fingerprint(given: ModelFacts) -> bytes:
        return whole(given, groups, 16).fingerprint

    base = describe(args(checkpoint(), dtype="float16"))
    assert fingerprint(base) == fingerprint(describe(args(checkpoint(), dtype="float16")))
    others = [
        describe(args(checkpoint(rms_norm_eps=0.5), dtype="float16")),
        describe(args(checkpoint(), dtype="bfloat16")),
        describe(args(checkpoint(), dtype="float16", kv_cache_config__dtype="fp8")),
    ]
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    stretched = checkpoint(rope_parameters=rope)
    others += [describe(args(stretched, dtype="float16", max_seq_len=n)) for n in (64, 128)]
    folder = checkpoint()
    (folder / "model.bin").write_bytes(b"other weights")
    weights_identity.cache_clear()
    others.append(describe(args(folder, dtype="float16")))
    found = {fingerprint(base), *map(fingerprint, others)}
    assert len(found) == 7


def test_eight_bit_kv_with_other_scales_is_other_kv(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, groups = checkpoint(), (LayerGroup(0, 32, (0, 1, 2)),)
    found = {}
    for scales in (None, "0", "1"):
        if scales is not None:
            monkeypatch.setenv("TRTLLM_LOAD_KV_SCALES", scales)
        for kind in ("auto", "fp8"):
            given = describe(args(folder, dtype="float16", kv_cache_config__dtype=kind))
            found[kind, scales] = whole(given, groups, 16).fingerprint
    assert len({found["fp8", scales] for scales in (None, "0", "1")}) == 3
    assert len({found["auto", scales] for scales in (None, "0", "1")}) == 1


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
    assert tally.exchange(StepReport()) is None  # nothing open: no word to the others
    tally.expect(make_graph(1, ops=2))
    encode = msgspec.msgpack.encode
    good, bad = OpReport(1, 0), OpReport(1, 1, {0: RowError.IO})
    queues[1] = [encode(StepReport([bad])), encode(StepReport([good])), encode(StepReport())]
    assert tally.exchange(StepReport([good])) == ([], [{}, {}])
    assert tally.exchange(StepReport()) == ([good], [{}, {}])
    assert tally.exchange(StepReport([OpReport(1, 1)])) == ([bad], [{}, {}])
    assert tally.exchange(StepReport()) is None


def test_namespaces_differ_by_what_the_version_tells() -> None:
    spaces = RequestNamespaces(Namespaces(Config().namespace, b"model"))
    given = [
        request(),
        request(cache_salt="a"),
        request(cache_salt=None, cache_salt_id=5),
        request(lora_task_id=1),
        request(lora_task_id=2),
        request(lora_task_id=1, py_lora_path="/weights/a"),
    ]
    assert len({spaces.of(one).digest for one in given}) == len(given)
    assert spaces.of(request()) is spaces.of(request(cache_salt=None))
    again = RequestNamespaces(Namespaces(Config().namespace, b"model"))
    assert again.of(given[1]).digest == spaces.of(given[1]).digest
    assert again.of(given[5]).digest == spaces.of(given[5]).digest
    assert again.of(given[3]).digest != spaces.of(given[3]).digest  # a number means nothing there


def test_pictures_and_what_cannot_be_told() -> None:
    picture = request(multimodal_hashes=[[1, 2]], multimodal_positions=[3], multimodal_lengths=[4])
    assert [tuple(extra) for extra in extras(picture)] == [(3, 4, b"1,2")]
    assert extras(request()) == []
    assert not excluded(picture)
    assert excluded(request(multimodal_embedding=object()))
    assert excluded(request(is_attention_dp_dummy=True))
    assert excluded(request(prompt_embedding_table=object()))
