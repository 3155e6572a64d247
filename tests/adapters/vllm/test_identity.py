"""Each setting of vLLM that changes KV changes what KV is stored under, alone."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config.lora import LoRAConfig
from vllm.config.mamba import MambaBackendEnum
from vllm.config.quantization import QuantizationConfigArgs
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVQuantMode,
    MambaSpec,
    SlidingWindowSpec,
)

from kvcore.errors import UnsupportedError
from kvcore.harness.models import tiny_model, tiny_vision_model
from kvcore.model.identity import weights_identity
from kvcore.model.ingredients import MediaIdentity, ModelIdentity, ingredients
from kvcore.model.packed import PackedPages
from kvcore_vllm.build import _media
from kvcore_vllm.identity import media_identity, model_identity, packed_identity

LONGROPE = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0], "rope_theta": 1e4}


@cache
def folder() -> Path:
    return tiny_model("llama", layers=2, heads=4, kv_heads=2, head_dim=64)


@cache
def _config(path: Path, given: str) -> Any:
    args = {"dtype": "float32", "enforce_eager": True, **json.loads(given)}
    return EngineArgs(str(path), **args).create_engine_config()


def config(path: Path | None = None, **given: Any) -> Any:
    """A config of its own, which a test may change."""
    return copy.deepcopy(_config(path or folder(), json.dumps(given)))


def spec(kind: Any = FullAttentionSpec, **given: Any) -> Any:
    plain = {"block_size": 32, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
    return kind(**plain | given)


EIGHT_BIT = spec(dtype=torch.uint8, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)


def identity(made: Any, *specs: Any) -> ModelIdentity:
    return model_identity(made, list(specs or [spec()]))


def states(**given: Any) -> MambaSpec:
    plain: dict[str, Any] = {
        "block_size": 64,
        "shapes": ((3, 64), (4, 8, 16)),
        "dtypes": (torch.bfloat16, torch.float32),
        "mamba_cache_mode": "align",
    }
    return MambaSpec(**plain | given)


def hybrid(*specs: MambaSpec, backend: str | None = None) -> ModelIdentity:
    """Return the identity of a model with attention and with these states."""
    made = config()
    if backend is not None:
        made.mamba_config.backend = MambaBackendEnum[backend.upper()]
    return model_identity(made, [spec()], specs)


def on_device(name: str, make: Callable[[], ModelIdentity]) -> ModelIdentity:
    """Return an identity as it is on another kind of device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(current_platform), "device_name", name)
        return make()


def packed(*nbytes: int, tokens: int = 32, cache_dtype: str = "auto") -> ModelIdentity:
    """Return the identity of a model whose pages are stored as they are."""
    made, names = config(), [f"model.layers.{i}.attn" for i in range(len(nbytes))]
    made.cache_config.cache_dtype = cache_dtype
    told = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[])
    format_of = packed_identity(made, told, PackedPages(tokens, nbytes), names)
    return model_identity(made, [spec()], packed=format_of)


def edited(tmp_path: Path) -> Path:
    """Write a copy of the model with one other norm."""
    from safetensors.torch import load_file, save_file

    path = tmp_path / "edited"
    shutil.copytree(folder(), path)
    [file] = path.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.layers.1.input_layernorm.weight"][3] += 1
    save_file(tensors, file, {"format": "pt"})
    return path


def having(change: Callable[[Any], None], base: Any = None) -> Any:
    made = base or config()
    change(made)
    return made


def _set(path: str, value: Any) -> Callable[[Any], None]:
    def change(made: Any) -> None:
        *way, last = path.split(".")
        for name in way:
            made = getattr(made, name)
        object.__setattr__(made, last, value)

    return change


LONG = having(_set("model_config.hf_text_config.rope_parameters", LONGROPE))
LORA = having(_set("lora_config", LoRAConfig(max_lora_rank=16, lora_dtype=torch.float32)))

DRAFT = {"method": "draft_model", "model": str(folder()), "num_speculative_tokens": 2}


def other() -> str:
    """Return a model of the same shape with other weights."""
    return str(tiny_model("llama", layers=2, heads=4, kv_heads=2, head_dim=64, seed=1))


def drafted(change: Callable[[Any], None] = lambda made: None) -> ModelIdentity:
    """Return the identity of the model beside itself as a draft model."""
    return identity(having(change, config(speculative_config=DRAFT)))


def of_vllm(version: str, make: Callable[[], ModelIdentity]) -> ModelIdentity:
    """Return what ``make`` makes in that version."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm.__version__", version)
        return make()


CHANGES: dict[str, list[Callable[[], tuple[ModelIdentity, ModelIdentity]]]] = {
    "config": [
        lambda: (identity(config()), identity(config(hf_overrides={"rms_norm_eps": 0.5}))),
        lambda: (
            identity(config()),
            identity(having(_set("model_config.hf_config.quantization_config", {"bits": 4}))),
        ),
    ],
    "load": [
        lambda: (identity(config()), identity(config(load_format="pt"))),
        lambda: (identity(config()), identity(config(load_format="dummy"))),
    ],
    "code": [
        lambda: (
            identity(config()),
            identity(having(_set("model_config.model_impl", "terratorch"))),
        ),
        lambda: (
            identity(config()),
            identity(having(_set("model_config.model_class_overrides", {"Llama": "mine:Llama"}))),
        ),
        lambda: (
            identity(config()),
            identity(having(_set("model_config.trust_remote_code", True))),
        ),
    ],
    "compute_dtype": [lambda: (identity(config()), identity(config(dtype="bfloat16")))],
    "quantization": [
        lambda: (identity(config()), identity(having(_set("model_config.quantization", "fp8")))),
        lambda: tuple(  # type: ignore[return-value]
            identity(
                having(
                    _set("model_config.quantization_config", QuantizationConfigArgs(ignore=ignore)),
                    having(_set("model_config.quantization", "online")),
                )
            )
            for ignore in ([], ["lm_head"])
        ),
    ],
    "kv_dtype": [
        lambda: (identity(config()), identity(config(), spec(dtype=torch.bfloat16))),
        lambda: (
            identity(config(kv_cache_dtype="fp8_e4m3"), EIGHT_BIT),
            identity(config(kv_cache_dtype="fp8_e5m2"), EIGHT_BIT),
        ),
    ],
    "kv_scales": [
        lambda: (
            identity(config(), EIGHT_BIT),
            identity(having(_set("cache_config.kv_cache_dtype_skip_layers", ["0"])), EIGHT_BIT),
        ),
    ],
    "draft": [
        lambda: (identity(config()), drafted()),
        lambda: (
            drafted(),
            drafted(_set("speculative_config.draft_model_config.dtype", torch.bfloat16)),
        ),
        lambda: (
            drafted(),
            drafted(
                _set(
                    "speculative_config.draft_model_config.hf_config.quantization_config", {"b": 4}
                )
            ),
        ),
        lambda: (drafted(), drafted(_set("speculative_config.method", "eagle"))),
        lambda: (drafted(), drafted(_set("speculative_config.draft_model_config.model", other()))),
    ],
    "rope": [
        lambda: (
            identity(LONG),
            identity(having(_set("model_config.max_model_len", 64), copy.deepcopy(LONG))),
        ),
    ],
    "windows": [
        lambda: (
            identity(config()),
            identity(config(), spec(SlidingWindowSpec, sliding_window=64)),
        ),
        lambda: (identity(config()), identity(config(), spec(sliding_window=64))),
        lambda: (
            identity(config()),
            identity(config(), spec(), spec(SlidingWindowSpec, sliding_window=32)),
        ),
    ],
    "attention": [
        lambda: (
            identity(config()),
            identity(having(_set("attention_config.use_non_causal", True))),
        ),
        lambda: (
            identity(config()),
            identity(having(_set("attention_config.indexer_kv_dtype", "fp8"))),
        ),
    ],
    "lora": [
        lambda: (
            identity(LORA),
            identity(having(_set("lora_config.target_modules", ["q_proj"]), copy.deepcopy(LORA))),
        ),
        lambda: (
            identity(LORA),
            identity(having(_set("lora_config.lora_dtype", torch.float16), copy.deepcopy(LORA))),
        ),
    ],
    "states": [
        lambda: (identity(config()), hybrid(states())),
        lambda: (hybrid(states()), hybrid(states(), states())),
        lambda: (hybrid(states()), hybrid(states(shapes=((3, 64), (2, 8, 16))))),
        lambda: (hybrid(states()), hybrid(states(shapes=((4, 8, 16), (3, 64))))),
        lambda: (hybrid(states()), hybrid(states(dtypes=(torch.bfloat16, torch.bfloat16)))),
        lambda: (
            hybrid(states()),
            hybrid(states(mamba_type=MambaAttentionBackendEnum.SHORT_CONV)),
        ),
        lambda: (hybrid(states()), of_vllm("0.31.7", lambda: hybrid(states()))),
        lambda: (hybrid(states()), on_device("cuda", lambda: hybrid(states()))),
        lambda: (hybrid(states()), hybrid(states(), backend="flashinfer")),
    ],
    "packed": [
        lambda: (identity(config()), packed(64, 32)),
        lambda: (packed(64, 32), packed(32, 64)),
        lambda: (packed(64, 32), packed(64, 32, tokens=16)),
        lambda: (packed(64, 32), packed(64, 32, cache_dtype="fp8_ds_mla")),
        lambda: (packed(64, 32), of_vllm("0.31.7", lambda: packed(64, 32))),
    ],
    "own": [
        lambda: (identity(config()), identity(having(_set("additional_config", {"x": 1})))),
    ],
}


@pytest.mark.parametrize(
    ("name", "pair"),
    [(name, number) for name, pairs in CHANGES.items() for number in range(len(pairs))],
)
def test_a_setting_changes_its_own_ingredient_and_the_fingerprint(name: str, pair: int) -> None:
    one, other = CHANGES[name][pair]()
    assert getattr(one, name) != getattr(other, name)
    assert one.fingerprint != other.fingerprint


def test_every_ingredient_is_changed_by_a_test() -> None:
    told = {each.name for each in ingredients(ModelIdentity)}
    assert told == {*CHANGES, "weights"}
    assert {each.name for each in fields(ModelIdentity)} == told | {"alone"}


def test_where_states_are_kept_is_no_ingredient() -> None:
    """Their pages may be larger, or hold more tokens: the states are the same."""
    one = hybrid(states())
    assert hybrid(states(page_size_padded=1 << 20)).fingerprint == one.fingerprint
    assert hybrid(states(block_size=128)).fingerprint == one.fingerprint


def test_a_model_without_states_is_stored_as_before() -> None:
    """On every version of vLLM."""
    plain = identity(config())
    assert plain.states is None
    assert of_vllm("0.31.7", lambda: identity(config())).fingerprint == plain.fingerprint


def test_an_edited_tensor_is_other_weights(tmp_path: Path) -> None:
    one, other = identity(config()), identity(config(edited(tmp_path)))
    assert one.config == other.config
    assert one.weights != other.weights


def test_settings_without_effect_on_kv_share() -> None:
    plain = identity(config())
    assert plain.alone == ()
    assert identity(LORA) == plain
    others = [
        config(load_format="safetensors"),
        config(max_model_len=64),
        config(block_size=64),
        config(hf_overrides={"use_cache": False}),
    ]
    assert all(identity(other) == plain for other in others)


def test_a_folder_with_weights_in_two_formats_says_which_are_read(tmp_path: Path) -> None:
    path = tmp_path / "twice"
    shutil.copytree(folder(), path)
    [file] = path.glob("*.safetensors")
    shutil.copy(file, path / "consolidated.safetensors")
    ways = {way: identity(config(path, load_format=way)).load for way in ("auto", "safetensors")}
    assert ways == {"auto": "mistral", "safetensors": None}


def test_what_workers_write_into_the_config_does_not_part_them_from_the_leader() -> None:
    told = {"quant_method": "compressed-tensors", "config_groups": {}}
    leader = having(_set("model_config.hf_config.quantization_config", dict(told)))
    told |= {"total_num_heads": 4, "total_num_kv_heads": 2}
    assert identity(leader) == identity(
        having(_set("model_config.hf_config.quantization_config", told))
    )


def test_a_rope_that_workers_rename_does_not_part_them_from_the_leader() -> None:
    """DeepSeek's models rename it while they load. A disk that both open then was refused."""
    told = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}
    where = "model_config.hf_config.rope_parameters"
    leader = identity(having(_set(where, dict(told))))
    worker = identity(having(_set(where, told | {"rope_type": "deepseek_yarn"})))
    assert worker == leader
    assert leader.rope is None
    assert identity(having(_set(where, told | {"rope_type": "linear"}))) != leader


def test_what_a_draft_writes_into_its_config_does_not_part_workers_from_the_leader() -> None:
    draft = "speculative_config.draft_model_config.hf_config"
    for name in ("draft_vocab_size", "target_layer_count"):
        assert drafted(_set(f"{draft}.{name}", 7)) == drafted()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_set("load_config.load_format", "dummy"), "load_format='dummy'"),
        (_set("load_config.load_format", "tensorizer"), "load_format='tensorizer'"),
        (_set("load_config.load_format", "of_a_plugin"), "load_format='of_a_plugin'"),
        (_set("model_config.model_weights", "s3://bucket/model"), "s3://bucket/model"),
        (_set("model_config.model", "org/model"), "no commit"),
    ],
)
def test_weights_that_cannot_be_told_apart_are_named(
    change: Callable[[Any], None], why: str
) -> None:
    [said] = identity(having(change)).alone
    assert why in said


def test_a_drafts_weights_that_cannot_be_told_apart_are_named() -> None:
    [said] = drafted(_set("speculative_config.draft_model_config.model", "org/draft")).alone
    assert "no commit" in said


def test_scales_of_the_first_prompt_are_named() -> None:
    made = having(_set("cache_config.calculate_kv_scales", True))
    assert identity(made).alone == ()
    [said] = identity(made, EIGHT_BIT).alone
    assert "calculate_kv_scales" in said


def test_a_hubs_commit_pins_the_weights() -> None:
    found = []
    for commit in ("a" * 40, "b" * 40):
        made = having(_set("model_config.hf_config._commit_hash", commit))
        made = having(_set("model_config.model", "org/model"), made)
        found.append(identity(made))
    elsewhere = having(_set("model_config.hf_config_path", "org/other"), copy.deepcopy(made))
    assert identity(elsewhere).alone
    assert found[0].weights != found[1].weights
    assert found[0].alone == found[1].alone == ()


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="no model weights"):
        identity(having(_set("model_config.model", str(tmp_path))))


# -- media ---------------------------------------------------------------------------------------


@cache
def pictures() -> Any:
    return _config(tiny_vision_model(), "{}")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("config", _set("model_config.hf_config.vision_config.layer_norm_eps", 0.5)),
        ("encoder", _set("model_config.multimodal_config.mm_encoder_attn_dtype", "fp8")),
        ("encoder", _set("model_config.multimodal_config.video_pruning_rate", 0.5)),
        ("encoder", _set("model_config.multimodal_config.mm_device_do_normalize", True)),
    ],
)
def test_settings_of_the_encoder_count_for_media_and_not_for_text(
    name: str, change: Callable[[Any], None]
) -> None:
    one, other = copy.deepcopy(pictures()), copy.deepcopy(pictures())
    change(other)
    assert getattr(media_identity(one), name) != getattr(media_identity(other), name)
    assert media_identity(one).medium(b"") != media_identity(other).medium(b"")
    assert identity(one) == identity(other)


def test_every_ingredient_of_media_is_changed_by_a_test() -> None:
    assert {each.name for each in ingredients(MediaIdentity)} == {"config", "encoder"}


def test_a_config_outside_the_text_models_counts_for_text() -> None:
    other = copy.deepcopy(pictures())
    other.model_config.hf_config.scale_factor = 3
    assert identity(pictures()).config != identity(other).config


def test_scales_of_the_encoder_are_content(tmp_path: Path) -> None:
    found = []
    for value in (1, 2):
        (path := tmp_path / f"{value}.json").write_text(json.dumps({"q": value}))
        made = copy.deepcopy(pictures())
        made.model_config.multimodal_config.mm_encoder_fp8_scale_path = str(path)
        found.append(media_identity(made).medium(b""))
    assert len(set(found)) == 2


def test_embeddings_of_other_engines_are_left_alone() -> None:
    made = copy.deepcopy(pictures())
    assert isinstance(_media(made), MediaIdentity)
    made.ec_transfer_config = object()
    assert "embeddings" in str(_media(made))
    assert isinstance(_media(config()), MediaIdentity)


@pytest.fixture(autouse=True)
def no_weights_remembered() -> None:
    weights_identity.cache_clear()
