"""Reading a rope from a model's config: what is refused by name, old forms, and identity."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from kvcore.errors import ConfigError, LayoutError, UnsupportedError
from kvcore.fusion.rope import Linear, Pairing, Rope, Unscaled, Yarn, rope_of

transformers = pytest.importorskip("transformers")

ROPE = Rope(head_dim=12, rotary_dim=8, pairing=Pairing.NEOX, theta=10_000.0)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
GEMMA3 = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}

# ---------------------------------------------------------------------------------------------
# what is refused

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}


def llama(**parameters: Any) -> dict[str, Any]:
    return {**LLAMA, "rope_parameters": {**LLAMA["rope_parameters"], **parameters}}


def changed(base: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {**base, **fields}


FACTORS = [1.0] * 8
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown architecture": (changed(LLAMA, model_type="mamba9"), "mamba9"),
    "no architecture": (changed(LLAMA, model_type=None), "has not been checked"),
    "dynamic": (llama(rope_type="dynamic", factor=2.0), "dynamic NTK"),
    "longrope": (
        llama(rope_type="longrope", short_factor=FACTORS, long_factor=FACTORS),
        "longrope",
    ),
    "su": (llama(type="su", rope_type="su"), "longrope"),
    "old dynamic": (
        changed(LLAMA, rope_parameters=None, rope_theta=1e4, rope_scaling={"type": "dynamic"}),
        "dynamic NTK",
    ),
    "mrope": (llama(mrope_section=[2, 3, 3]), "multimodal"),
    "mrope by type": (llama(rope_type="mrope"), "multimodal"),
    "mrope interleaved": (llama(mrope_interleaved=True), "multimodal"),
    "latent attention": (
        changed(LLAMA, model_type="deepseek_v3", qk_rope_head_dim=64),
        "latent attention",
    ),
    "dual chunks": (changed(LLAMA, dual_chunk_attention_config={"chunk_size": 9}), "dual chunk"),
    "theta by layer": (changed(LLAMA, layer_rope_theta=[1e4, 0]), "layer_rope_theta"),
    "unknown type": (llama(rope_type="ntk"), "'ntk'"),
    "unknown parameter": (llama(use_fope=True), "use_fope"),
    "parameter of another type": (llama(factor=2.0), "factor"),
    "no theta": (changed(LLAMA, rope_parameters={"rope_type": "default"}), "rope_theta"),
    "nothing about rope": (changed(LLAMA, rope_parameters=None), "rope_theta"),
    "theta not a number": (llama(rope_theta="10000"), "rope_theta"),
    "two sources": (changed(LLAMA, rope_scaling={"type": "linear", "factor": 2.0}), "both set"),
    "two types": (llama(type="linear"), "differ"),
    "partial where it is not heeded": (llama(partial_rotary_factor=0.5), "partial_rotary_factor"),
    "partial not stated": (changed(LLAMA, model_type="phi"), "partial_rotary_factor"),
    "odd share": (
        changed(llama(partial_rotary_factor=0.2), model_type="phi"),
        "whole number of pairs",
    ),
    "linear without factor": (llama(rope_type="linear"), "factor"),
    "llama3, no ramp": (
        llama(rope_type="llama3", factor=8.0, low_freq_factor=4.0, high_freq_factor=4.0),
        "high_freq_factor",
    ),
    "by layer type": (
        changed(LLAMA, rope_parameters={"full_attention": LLAMA["rope_parameters"]}),
        "layer type",
    ),
    "not by layer type": (changed(LLAMA, model_type="gemma3_text"), "layer type"),
    "layer types missing": (
        changed(LLAMA, model_type="gemma3_text", rope_parameters=GEMMA3),
        "layer_types",
    ),
    "phi3 with yarn": (
        changed(llama(partial_rotary_factor=1.0, rope_type="yarn", factor=4.0), model_type="phi3"),
        "'yarn'",
    ),
    "Llama 4 without the engine's word": (
        changed(LLAMA, model_type="llama4_text", no_rope_layers=[1, 1]),
        "pass pairing=",
    ),
    "NoPE layers not listed": (changed(LLAMA, model_type="smollm3"), "no_rope_layers"),
    "EXAONE 4 in doubt": (
        changed(LLAMA, model_type="exaone4", sliding_window=64, layer_types=["full_attention"] * 2),
        "disagree",
    ),
    "Cohere 2 in doubt": (
        changed(LLAMA, model_type="cohere2", layer_types=["sliding_attention"] * 2),
        "sliding_window",
    ),
    "no layers": (changed(LLAMA, num_hidden_layers=None), "num_hidden_layers"),
    "no heads": (changed(LLAMA, num_attention_heads=0), "num_attention_heads"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_known_to_compose_is_declined_by_name(case: str) -> None:
    config, words = REFUSED[case]
    with pytest.raises(UnsupportedError) as raised:
        rope_of(config, 0)
    assert words in str(raised.value)
    assert repr(config["model_type"]) in str(raised.value)


def test_the_base_of_the_refused_is_accepted() -> None:
    assert rope_of(LLAMA, 1) == Rope(16, 16, Pairing.NEOX, 10_000.0)


def test_the_engine_may_tell_its_pairing_and_must_not_contradict() -> None:
    assert rope_of(LLAMA, 0, Pairing.NEOX) == rope_of(LLAMA, 0)
    with pytest.raises(UnsupportedError, match="pairing is"):
        rope_of(LLAMA, 0, Pairing.GPTJ)
    four = changed(LLAMA, model_type="llama4_text", no_rope_layers=[1, 0])
    for pairing in Pairing:
        rope = rope_of(four, 0, pairing)
        assert rope is not None
        assert rope.pairing is pairing
    assert rope_of(four, 1) is None


@pytest.mark.parametrize("layer", [-1, 2])
def test_layers_the_model_does_not_have(layer: int) -> None:
    with pytest.raises(ConfigError, match="2 layers"):
        rope_of(LLAMA, layer)


@pytest.mark.parametrize(
    ("keys", "distance", "error"),
    [
        (torch.zeros(3, 8), 1, LayoutError),
        (torch.zeros(12), 1, LayoutError),
        (torch.zeros(3, 12), torch.zeros(2, dtype=torch.int64), LayoutError),
        (torch.zeros(3, 12), torch.zeros(3), LayoutError),
        (torch.zeros(3, 12), torch.zeros(3, dtype=torch.bool), LayoutError),
        (torch.zeros(3, 12).to(torch.float8_e4m3fn), 1, UnsupportedError),
        (torch.zeros(3, 12, dtype=torch.uint8), 1, UnsupportedError),
    ],
)
def test_keys_and_distances_that_do_not_fit(
    keys: torch.Tensor, distance: int | torch.Tensor, error: type[Exception]
) -> None:
    with pytest.raises(error):
        ROPE.shift(keys, distance)


@pytest.mark.parametrize("rotary_dim", [0, 3, 18])
def test_a_rope_of_half_pairs_is_refused(rotary_dim: int) -> None:
    with pytest.raises(ConfigError, match="rotary_dim"):
        Rope(16, rotary_dim, Pairing.NEOX, 10_000.0)


# ---------------------------------------------------------------------------------------------
# old forms of a config, identity

OLD = {
    "llama": changed(
        LLAMA,
        rope_parameters=None,
        rope_theta=10_000.0,
        rope_scaling={"type": "linear", "factor": 2.0},
    ),
    "llama, llama3": changed(
        LLAMA,
        rope_parameters=None,
        rope_theta=500_000.0,
        rope_scaling={name: value for name, value in LLAMA3.items() if name != "rope_theta"},
    ),
    "llama, not scaled": changed(LLAMA, rope_parameters=None, rope_theta=5e5, rope_scaling=None),
    "qwen2, yarn of the card": changed(
        LLAMA,
        model_type="qwen2",
        rope_parameters=None,
        rope_theta=1e6,
        rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    ),
    "yarn without its original length": changed(
        LLAMA, rope_parameters=None, rope_theta=1e6, rope_scaling={"type": "yarn", "factor": 4.0}
    ),
    "gpt_neox": changed(
        LLAMA, model_type="gpt_neox", rope_parameters=None, rotary_pct=0.25, rotary_emb_base=20_000
    ),
    "phi": changed(
        LLAMA, model_type="phi", rope_parameters=None, rope_theta=1e4, partial_rotary_factor=0.5
    ),
    "gemma3_text": changed(
        LLAMA,
        model_type="gemma3_text",
        head_dim=16,
        num_key_value_heads=2,
        num_hidden_layers=8,
        rope_parameters=None,
        sliding_window_pattern=3,
        rope_theta=1e6,
        rope_local_base_freq=10_000.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    ),
}


@pytest.mark.parametrize("case", OLD)
def test_old_forms_read_as_transformers_reads_them(case: str) -> None:
    old = {name: value for name, value in OLD[case].items() if value is not None}
    given = {name: value for name, value in old.items() if name != "model_type"}
    given = {k: dict(v) if isinstance(v, dict) else v for k, v in given.items()}
    new = transformers.AutoConfig.for_model(old["model_type"], **given).to_dict()
    for layer in range(old["num_hidden_layers"]):
        rope = rope_of(OLD[case], layer)
        assert rope is not None
        assert rope == rope_of(new, layer)
    assert len({rope_of(new, layer) for layer in range(old["num_hidden_layers"])}) == (
        2 if case == "gemma3_text" else 1
    )


def test_identity_tells_ropes_apart_and_stays_the_same() -> None:
    base = Rope(64, 64, Pairing.NEOX, 10_000.0, Yarn(4.0, 4096))
    others = [
        dataclasses.replace(base, head_dim=80),
        dataclasses.replace(base, rotary_dim=32),
        dataclasses.replace(base, pairing=Pairing.GPTJ),
        dataclasses.replace(base, theta=10_001.0),
        dataclasses.replace(base, scaling=Unscaled()),
        dataclasses.replace(base, scaling=Linear(4.0)),
        *(
            dataclasses.replace(base, scaling=dataclasses.replace(base.scaling, **change))
            for change in (
                {"factor": 4.5},
                {"original_positions": 2048},
                {"beta_fast": 31.0},
                {"beta_slow": 2.0},
                {"truncate": False},
                {"magnitude": 1.1},
            )
        ),
    ]
    assert len({rope.identity for rope in [base, *others]}) == len(others) + 1
    again = Rope(64, 64, Pairing("neox"), 10_000, Yarn(4, 4096.0))
    assert again.identity == base.identity
    assert again == base
    assert hash(again) == hash(base)
    # known answer: namespaces of stored blocks hang on it
    assert Rope(64, 64, Pairing.NEOX, 10_000.0).identity.hex() == "9e5d438af61641792e6a93511624bd7b"
