"""Position recovery, against Transformers' own models and against arithmetic in float64."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.fusion.rope import (
    _FAMILIES,
    Linear,
    Llama3,
    Pairing,
    Rope,
    Scaling,
    Unscaled,
    Yarn,
    rope_of,
)
from support.budget import examples

transformers = pytest.importorskip("transformers")

TOKENS = 12
FARTHEST = 100_000
# Transformers rounds angles to float32: half a unit in the last place of an angle of 100,000 is
# 0.004 radians, once for each of the two positions.
FAR = 0.012
NEAR = 2e-3  # positions below 1000, all layers: an error of one layer grows in the next

TINY = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 131_072,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
THREE_WINDOWS = ["sliding_attention"] * 3 + ["full_attention"]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 4096,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.5}
GEMMA3 = {
    "full_attention": {**LINEAR, "rope_theta": 1_000_000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}

# What each architecture's config needs beyond `TINY`. Every one of `_FAMILIES` is here.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "cohere": {},
    "cohere2": {"layer_types": THREE_WINDOWS, "num_hidden_layers": 4},
    "ernie4_5": {},
    "exaone4": {"layer_types": THREE_WINDOWS, "num_hidden_layers": 4},
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "glm": {"partial_rotary_factor": 0.5},
    "glm4": {"partial_rotary_factor": 0.5},
    "gpt_neox": {"rotary_pct": 0.25},
    "gpt_oss": LOCAL_EXPERTS,
    "gptj": {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_inner": 64, "rotary_dim": 8},
    "granite": {},
    "granitemoe": LOCAL_EXPERTS,
    "llama": {},
    "llama4_text": {
        **LOCAL_EXPERTS,
        "intermediate_size_mlp": 64,
        "num_hidden_layers": 4,
        "no_rope_layers": [1, 1, 0, 1],
    },
    "mistral": {},
    "mixtral": LOCAL_EXPERTS,
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": {"layer_types": ["sliding_attention", "full_attention"]},
    "olmoe": EXPERTS,
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": {"partial_rotary_factor": 0.75},
    "qwen2": {},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "seed_oss": {},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 1]},
    "stablelm": {},
    "starcoder2": {},
}
SCALED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama, linear": ("llama", {"rope_parameters": LINEAR}),
    "qwen2, yarn": ("qwen2", {"rope_parameters": YARN}),
    "yarn, not rounded": ("qwen3", {"rope_parameters": {**YARN, "truncate": False}}),
    "yarn, betas": ("llama", {"rope_parameters": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0}}),
    "yarn, magnitude": ("llama", {"rope_parameters": {**YARN, "attention_factor": 1.7}}),
    "yarn, mscale": ("llama", {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}}),
    "phi, linear": ("phi", {"rope_parameters": {**LINEAR, "partial_rotary_factor": 0.5}}),
    "gemma3, linear": ("gemma3_text", {**ARCHITECTURES["gemma3_text"], "rope_parameters": GEMMA3}),
    "cohere, linear": ("cohere", {"rope_parameters": LINEAR}),
    "theta": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}}),
}
CASES = {name: (name, extra) for name, extra in ARCHITECTURES.items()} | SCALED


class Subject(NamedTuple):
    """A tiny model with random weights, and its ropes as kvcore reads them from its config."""

    config: dict[str, Any]
    model: Any
    ropes: list[Rope | None]

    def keys(self, start: int) -> list[torch.Tensor]:
        """K of each layer, [kv_heads, tokens, head_dim]: fixed tokens from ``start`` on."""
        tokens = torch.arange(7, 7 + TOKENS)[None]
        positions = torch.arange(start, start + TOKENS)[None]
        with torch.no_grad():
            cache = self.model(tokens, position_ids=positions, use_cache=True).past_key_values
        return [layer.keys[0] for layer in cache.layers]


def pairing_told(model_type: str) -> Pairing | None:
    """What the engine (here: Transformers) must tell, where kvcore cannot know."""
    return Pairing.GPTJ if _FAMILIES[model_type].pairing is None else None


@functools.cache
def subject(case: str) -> Subject:
    model_type, extra = CASES[case]
    torch.manual_seed(0)
    settings = {"n_positions": TINY["max_position_embeddings"], **TINY, **extra}
    if model_type == "gptj":
        settings = {name: settings[name] for name in ("vocab_size", "n_positions", *extra)}
    config = transformers.AutoConfig.for_model(model_type, **settings)
    config._attn_implementation = "eager"
    model = transformers.AutoModel.from_config(config).eval().float()
    for parameter in model.parameters():  # small initial weights would make all tokens alike
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    written = config.to_dict()
    count = written.get("num_hidden_layers") or written["n_layer"]
    told = pairing_told(model_type)
    return Subject(written, model, [rope_of(written, i, told) for i in range(count)])


def worst(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference as a share of the largest value."""
    return float((ours - theirs).abs().max() / theirs.abs().max())


def moved(rope: Rope | None, keys: torch.Tensor, distance: int) -> torch.Tensor:
    return keys if rope is None else rope.shift(keys, distance)


# ---------------------------------------------------------------------------------------------
# against Transformers


def test_every_architecture_is_tried() -> None:
    assert set(ARCHITECTURES) == set(_FAMILIES)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_keys_move_as_transformers_computes_them(case: str) -> None:
    tried = subject(case)
    rng = np.random.default_rng(len(case))
    for old, new in [(0, 517), *rng.integers(0, 1000, (2, 2)).tolist()]:
        pairs = zip(tried.ropes, tried.keys(old), tried.keys(new), strict=True)
        for rope, before, after in pairs:
            assert worst(moved(rope, before, new - old), after) < NEAR
    for old, new in rng.integers(0, FARTHEST, (3, 2)).tolist():
        before, after = tried.keys(old)[0], tried.keys(new)[0]
        assert worst(moved(tried.ropes[0], before, new - old), after) < FAR


@pytest.mark.parametrize("case", sorted(set(CASES) - {"gptj"}))
def test_frequencies_are_those_of_transformers_to_the_bit(case: str) -> None:
    tried = subject(case)
    for layer, rope in enumerate(tried.ropes):
        if rope is not None:
            module = tried.model.rotary_emb
            layered = isinstance(module.rope_type, dict)
            name = f"{tried.config['layer_types'][layer]}_inv_freq" if layered else "inv_freq"
            theirs = getattr(module, name)
            assert torch.equal(torch.tensor(rope.frequencies, dtype=torch.float32), theirs)


@pytest.mark.parametrize(
    ("case", "nope"), [("smollm3", 1), ("llama4_text", 2), ("cohere2", 3), ("exaone4", 3)]
)
def test_layers_without_positions_have_no_rope(case: str, nope: int) -> None:
    """And moving such a layer's K would be wrong, which the comparison above must notice."""
    tried = subject(case)
    assert [rope is None for rope in tried.ropes] == [layer == nope for layer in range(4)]
    rope = tried.ropes[0]
    assert rope is not None
    before, after = tried.keys(3)[nope], tried.keys(90)[nope]
    assert worst(before, after) < NEAR
    assert worst(rope.shift(before, 87), after) > 10 * NEAR


def default_theta(rope: Rope) -> Rope:
    return dataclasses.replace(rope, theta=10_000.0)


def other_pairing(rope: Rope) -> Rope:
    other = Pairing.GPTJ if rope.pairing is Pairing.NEOX else Pairing.NEOX
    return dataclasses.replace(rope, pairing=other)


def whole_head(rope: Rope) -> Rope:
    return dataclasses.replace(rope, rotary_dim=rope.head_dim)


def not_scaled(rope: Rope) -> Rope:
    return dataclasses.replace(rope, scaling=Unscaled())


@pytest.mark.parametrize(
    ("case", "mistake"),
    [
        ("theta", default_theta),
        ("qwen2", other_pairing),
        ("gptj", other_pairing),
        ("glm4", other_pairing),
        ("phi", whole_head),
        ("llama, linear", not_scaled),
        ("llama, llama3", not_scaled),
        ("qwen2, yarn", not_scaled),
    ],
)
def test_another_rope_is_noticed(case: str, mistake: Callable[[Rope], Rope]) -> None:
    tried = subject(case)
    rope = tried.ropes[0]
    assert rope is not None
    before, after = tried.keys(40)[0], tried.keys(900)[0]
    assert worst(rope.shift(before, 860), after) < NEAR
    assert worst(mistake(rope).shift(before, 860), after) > 10 * NEAR


@pytest.mark.parametrize("case", ["llama", "gptj", "phi", "qwen2, yarn"])
@pytest.mark.parametrize(
    ("mistake", "distance"),
    [("one too far", 861), ("one too near", 859), ("wrong sign", -860), ("not moved", 0)],
)
def test_another_distance_is_noticed(case: str, mistake: str, distance: int) -> None:
    tried = subject(case)
    rope = tried.ropes[0]
    assert rope is not None
    before, after = tried.keys(40)[0], tried.keys(900)[0]
    assert worst(rope.shift(before, distance), after) > 10 * NEAR, mistake


@pytest.mark.parametrize("case", ["yarn, magnitude", "yarn, mscale", "qwen2, yarn"])
def test_the_magnitude_of_yarn_is_in_the_keys_and_cancels_out(case: str) -> None:
    tried = subject(case)
    rope = tried.ropes[0]
    assert rope is not None
    magnitude = tried.model.rotary_emb.attention_scaling
    assert rope.scaling.magnitude == pytest.approx(magnitude)
    assert magnitude != 1.0
    before, after = tried.keys(40)[0], tried.keys(900)[0]
    assert worst(rope.shift(before, 860), after) < NEAR
    assert worst(rope.shift(before, 860) * magnitude, after) > 10 * NEAR


# ---------------------------------------------------------------------------------------------
# against float64

SCALINGS: list[Scaling] = [
    Unscaled(),
    Linear(4.0),
    Llama3(8.0, 1.0, 4.0, 8192),
    Yarn(factor=4.0, original_positions=4096, magnitude=1.14),
]


@st.composite
def ropes(draw: st.DrawFn) -> Rope:
    rotary_dim = 2 * draw(st.integers(1, 16))
    return Rope(
        head_dim=rotary_dim + draw(st.integers(0, 9)),
        rotary_dim=rotary_dim,
        pairing=draw(st.sampled_from(Pairing)),
        theta=draw(st.sampled_from([10_000.0, 500_000.0, 1e7])),
        scaling=draw(st.sampled_from(SCALINGS)),
    )


def exactly(
    rope: Rope, keys: npt.NDArray[np.float64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """The definition: pairs as complex numbers, one at a time. [tokens, head_dim]."""
    out: npt.NDArray[np.float64] = keys.copy()
    half = rope.rotary_dim // 2
    for pair in range(half):
        x, y = (pair, pair + half) if rope.pairing is Pairing.NEOX else (2 * pair, 2 * pair + 1)
        turned = (keys[:, x] + 1j * keys[:, y]) * np.exp(1j * positions * rope.frequencies[pair])
        out[:, x], out[:, y] = turned.real, turned.imag
    return out


positions_strategy = st.integers(0, 1_000_000)


@given(ropes(), positions_strategy, positions_strategy, st.integers(0, 2**32 - 1))
def test_moves_are_exact_up_to_a_million_positions(
    rope: Rope, old: int, new: int, seed: int
) -> None:
    plain = np.random.default_rng(seed).standard_normal((5, rope.head_dim))
    tokens = np.arange(5)
    before = torch.tensor(exactly(rope, plain, old + tokens))
    after = torch.tensor(exactly(rope, plain, new + tokens))
    torch.testing.assert_close(rope.shift(before, new - old), after, rtol=0, atol=1e-8)
    single = rope.shift(before.float(), new - old)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), after, rtol=0, atol=2e-6)


@given(ropes(), st.integers(-100_000, 100_000), st.integers(-100_000, 100_000))
def test_there_and_back_and_in_two_moves(rope: Rope, first: int, second: int) -> None:
    keys = torch.randn(3, 4, rope.head_dim, generator=torch.Generator().manual_seed(first & 0xFF))
    back = rope.shift(rope.shift(keys, first), -first)
    torch.testing.assert_close(back, keys, rtol=0, atol=1e-5)
    twice = rope.shift(rope.shift(keys, first), second)
    torch.testing.assert_close(twice, rope.shift(keys, first + second), rtol=0, atol=1e-5)


@given(ropes(), st.lists(st.integers(-5000, 5000), min_size=1, max_size=6))
@settings(max_examples=examples(40, 1))
def test_a_distance_for_each_token(rope: Rope, distances: list[int]) -> None:
    keys = torch.randn(2, len(distances), rope.head_dim, generator=torch.Generator().manual_seed(1))
    together = rope.shift(keys, torch.tensor(distances))
    for token, distance in enumerate(distances):
        alone = rope.shift(keys[:, token : token + 1], distance)
        assert torch.equal(together[:, token : token + 1], alone)


ROPE = Rope(head_dim=12, rotary_dim=8, pairing=Pairing.NEOX, theta=10_000.0)
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("distances", [0, torch.tensor([0, 3, 0])])
def test_rows_that_do_not_move_keep_every_bit(
    dtype: torch.dtype, distances: int | torch.Tensor
) -> None:
    keys = torch.randn(2, 3, 12, generator=torch.Generator().manual_seed(2)).to(dtype)
    keys[:, ::2, 0] = torch.tensor([float("inf"), -0.0])
    keys[:, ::2, 1] = torch.tensor([float("nan"), 1e-7])
    keys[:, ::2, 9] = float("nan")
    bits = keys.view(torch.uint8).clone()
    shifted = ROPE.shift(keys, distances)
    assert shifted.dtype == dtype
    assert torch.equal(keys.view(torch.uint8), bits)
    assert torch.equal(shifted.view(torch.uint8)[:, ::2], bits[:, ::2])
    if isinstance(distances, torch.Tensor):
        assert not torch.equal(shifted.view(torch.uint8)[:, 1], bits[:, 1])


@pytest.mark.parametrize("distance", [0, 5])
def test_what_is_given_is_not_changed_and_not_shared(distance: int) -> None:
    """A chunk used twice in one request moves twice from the same stored bytes."""
    pool = torch.randn(3, 12, generator=torch.Generator().manual_seed(3))
    stored = pool.clone()
    first = ROPE.shift(pool, distance)
    kept = first.clone()
    second = ROPE.shift(pool, distance)
    assert torch.equal(pool, stored)
    assert torch.equal(first, second)
    second.zero_()
    assert torch.equal(pool, stored)
    assert torch.equal(first, kept)


def test_any_strides_and_any_leading_dimensions() -> None:
    paged = torch.randn(4, 7, 2, 12, generator=torch.Generator().manual_seed(4))
    keys = paged.transpose(1, 2)  # [pages, heads, tokens, dim], not contiguous
    shifted = ROPE.shift(keys, torch.arange(7))
    assert torch.equal(shifted, ROPE.shift(keys.contiguous(), torch.arange(7)))
    assert torch.equal(shifted[3, 1], ROPE.shift(keys[3, 1], torch.arange(7)))
    assert ROPE.shift(torch.empty(0, 12), 3).shape == (0, 12)


def test_dimensions_that_are_not_rotated_pass_through() -> None:
    keys = torch.randn(5, 12, generator=torch.Generator().manual_seed(5)).bfloat16()
    assert torch.equal(ROPE.shift(keys, 77)[:, 8:], keys[:, 8:])


def test_cos_sin_are_those_of_the_angles() -> None:
    cos, sin = ROPE.cos_sin(torch.tensor([0, 1, -7, 1_000_000]))
    assert cos.shape == sin.shape == (4, 4)
    assert cos.dtype == sin.dtype == torch.float32
    angles = np.outer([0, 1, -7, 1_000_000], ROPE.frequencies)
    np.testing.assert_allclose(cos.numpy(), np.cos(angles), rtol=0, atol=1e-7)
    np.testing.assert_allclose(sin.numpy(), np.sin(angles), rtol=0, atol=1e-7)
    one_cos, one_sin = ROPE.cos_sin(-7)
    assert torch.equal(one_cos[0], cos[2])
    assert torch.equal(one_sin[0], sin[2])


def test_one_rotation_loses_less_than_two() -> None:
    """Why chunks keep the offset they were computed at: bfloat16 rounds at each rotation."""
    rope = Rope(head_dim=64, rotary_dim=64, pairing=Pairing.NEOX, theta=10_000.0)
    rng = np.random.default_rng(6)
    plain, old, new = rng.standard_normal((2000, 64)), rng.integers(0, 30_000), 12_345
    tokens = np.arange(2000)
    stored = torch.tensor(exactly(rope, plain, old + tokens)).bfloat16()
    wanted = torch.tensor(exactly(rope, plain, new + tokens))

    def loss(keys: torch.Tensor) -> float:
        return float((keys.double() - wanted).square().mean())

    once = loss(rope.shift(stored, int(new - old)))
    at_zero = rope.shift(stored, torch.tensor(-(old + tokens)))
    twice = loss(rope.shift(at_zero, torch.tensor(new + tokens)))
    assert 1.3 < twice / once < 1.7


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("start", "distance"), [(500, 1000), (4000, -3500)])
def test_keeping_chunks_with_their_offset_loses_less_than_turning_them_to_zero(
    dtype: torch.dtype, start: int, distance: int
) -> None:
    """An engine's K comes rotated and rounded; each further rounding adds to what is lost."""
    config = {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": 576,
        "num_attention_heads": 9,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
    }
    rope = rope_of(config, 0)
    assert rope is not None
    plain = torch.randn(3, 256, 64, dtype=torch.float64, generator=torch.manual_seed(0))
    truth = rope.shift(plain, start + distance)
    stored = rope.shift(plain, start).to(dtype)

    def lost(keys: torch.Tensor) -> float:
        return float((keys.double() - truth).norm() / truth.norm())

    moved, through_zero = rope.shift(stored, distance), rope.shift(stored, -start)
    assert lost(truth.to(dtype)) < lost(moved)
    assert lost(moved) < 0.9 * lost(rope.shift(through_zero, start + distance))
