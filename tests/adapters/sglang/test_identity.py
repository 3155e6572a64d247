"""What makes KV differ on SGLang: each ingredient changed alone finds nothing.

The arguments and the model are stand-ins. tests/engines/test_sglang_identity.py has the engine's.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
transformers: Any = pytest.importorskip("transformers")

from kvcore.errors import UnsupportedError  # noqa: E402
from kvcore.model.identity import weights_identity  # noqa: E402
from kvcore.model.ingredients import ModelIdentity  # noqa: E402
from kvcore_sglang.arguments import given, number_formats  # noqa: E402
from kvcore_sglang.identity import model_identity  # noqa: E402


@dataclass
class ServerArgs:
    """Some of SGLang's arguments, with their defaults."""

    model_path: str
    revision: str | None = None
    load_format: str = "auto"
    trust_remote_code: bool = False
    json_model_override_args: str = "{}"
    weight_cache_mode: str = "off"
    model_loader_extra_config: str = "{}"
    model_impl: str = "auto"
    forward_hooks: list[dict[str, Any]] | None = None
    modelopt_quant: str | None = None
    quantize_and_serve: bool = False
    rl_quant_profile: str | None = None
    quantization_param_path: str | None = None
    checkpoint_engine_wait_weights_before_ready: bool = False
    decrypted_config_file: str | None = None
    moe_runner_backend: str = "auto"
    tp_size: int = 1
    attention_backend: str | None = None
    cuda_graph_bs_decode: list[int] = dataclasses.field(default_factory=list)
    argument_of_next_year: bool = False


class RadixAttention:
    def __init__(self, window: int = -1, irope: bool = False) -> None:
        self.sliding_window_size, self.use_irope = window, irope


def model(name: str = "LlamaForCausalLM", where: str = "llama", *layers: RadixAttention) -> Any:
    """Return a loaded model of SGLang's class ``name``, with these layers."""
    kind = type(name, (), {"modules": lambda self: iter((self, object(), *layers))})
    kind.__module__ = where if "." in where else f"sglang.srt.models.{where}"
    return kind()


@pytest.fixture(autouse=True)
def sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    weights_identity.cache_clear()
    attention: Any = ModuleType("sglang.srt.layers.radix_attention")
    attention.RadixAttention = RadixAttention
    for name in ("sglang", "sglang.srt", "sglang.srt.layers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, attention.__name__, attention)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Makes a folder with a config and a few bytes of weights."""

    def make(**fields: Any) -> Path:
        sizes = {"num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 128}
        transformers.LlamaConfig(**sizes, **fields).save_pretrained(tmp_path)
        (tmp_path / "model.bin").write_bytes(b"weights")
        return tmp_path

    return make


def told(folder: Path, loaded: Any = None, **changes: Any) -> ModelIdentity:
    """Return the identity of an engine. ``changes`` are arguments, or fields of SGLang's config."""
    config: dict[str, Any] = {
        "model_path": str(folder), "dtype": "torch.float16", "context_len": 2048,
        "quantization": None, "hf_config": SimpleNamespace(),
    }  # fmt: skip
    for name in config.keys() & changes.keys():
        config[name] = changes.pop(name)
    kv_dtype = changes.pop("kv_dtype", "float16")
    args = ServerArgs(**{"model_path": str(folder), **changes})
    return model_identity(args, SimpleNamespace(**config), kv_dtype, loaded or model())


LONG = {"rope_type": "longrope", "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("ingredient", "change"),
    [
        ("config", {"json_model_override_args": '{"rope_theta": 7}'}),
        ("load", {"load_format": "dummy"}),
        ("load", {"load_format": "gguf"}),
        ("load", {"load_format": "presharded"}),
        ("load", {"load_format": "of a plugin"}),
        ("code", {"loaded": model("MixtralForCausalLM", "mixtral")}),
        ("code", {"loaded": model("TransformersForCausalLM", "transformers")}),
        ("code", {"loaded": model(where="my_models.llama")}),
        ("compute_dtype", {"dtype": "torch.bfloat16"}),
        ("quantization", {"quantization": "fp8"}),
        ("kv_dtype", {"kv_dtype": "bfloat16"}),
        ("rope", {"json_model_override_args": json.dumps({"rope_scaling": LONG})}),
        ("rope", {"json_model_override_args": '{"rope_scaling": {"full": {"type": "dynamic"}}}'}),
        ("windows", {"loaded": model("LlamaForCausalLM", "llama", RadixAttention(255))}),
        ("windows", {"loaded": model("LlamaForCausalLM", "llama", RadixAttention(-1, True))}),
        ("own", {"model_loader_extra_config": '{"qlora_adapter_name_or_path": "x"}'}),
        ("own", {"quantize_and_serve": True}),
        ("own", {"modelopt_quant": "fp8"}),
        ("own", {"rl_quant_profile": "profile"}),
        ("own", {"quantization_param_path": "scales"}),
        ("own", {"moe_runner_backend": "flashinfer_mxfp4"}),
        ("own", {"argument_of_next_year": True}),
    ],
)
def test_each_change_is_another_identity(
    checkpoint: Callable[..., Path], ingredient: str, change: dict[str, Any]
) -> None:
    folder = checkpoint()
    plain, other = told(folder), told(folder, **change)
    assert getattr(other, ingredient) != getattr(plain, ingredient)
    assert other.fingerprint != plain.fingerprint


def test_checkpoints_differ_by_config_weights_and_the_files_that_sglang_reads(
    checkpoint: Callable[..., Path],
) -> None:
    folder = checkpoint()
    found = [told(folder), told(checkpoint(rms_norm_eps=0.5))]
    (folder / "model.bin").write_bytes(b"others!")
    weights_identity.cache_clear()
    found.append(told(folder))
    for name in ("params.json", "hf_quant_config.json"):
        (folder / name).write_text("{}")
        found.append(told(folder))
    (folder / "params.json").write_text('{"rope_theta": 7}')
    found.append(told(folder))
    assert len({each.fingerprint for each in found}) == len(found)


def test_an_adapter_that_is_merged_at_the_start_counts(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """SGLang names the base as the model, and the arguments name the adapter."""
    folder, merged = checkpoint(), tmp_path / "merged"
    merged.mkdir()
    found = {told(folder).fingerprint}
    for content in (b"one", b"two"):
        (merged / "adapter_model.bin").write_bytes(content)
        weights_identity.cache_clear()
        args = ServerArgs(str(merged))
        config = SimpleNamespace(
            model_path=str(folder), dtype="torch.float16", context_len=2048, quantization=None,
            hf_config=SimpleNamespace(),
        )  # fmt: skip
        found.add(model_identity(args, config, "float16", model()).fingerprint)
    assert len(found) == 3


def test_what_cannot_change_kv_does_not_count(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint()
    plain = told(folder)
    same = {"load_format": "safetensors", "tp_size": 2, "attention_backend": "fa3"}
    assert told(folder, **same, cuda_graph_bs_decode=[1, 2], context_len=1024) == plain
    assert told(folder, json_model_override_args=" { } ") == plain
    spaced = [told(folder, json_model_override_args=text) for text in ('{"a":1}', '{ "a" : 1 }')]
    assert spaced[0] == spaced[1]
    assert (plain.code, plain.windows, plain.own, plain.rope, plain.alone) == (*[None] * 4, ())


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"load_format": "dummy"}, "load_format='dummy'"),
        ({"load_format": "remote_instance"}, "load_format='remote_instance'"),
        ({"weight_cache_mode": "client"}, "weight cache"),
        ({"forward_hooks": [{"target": "layers.*"}]}, "forward_hooks"),
        ({"modelopt_quant": "fp8"}, "calibration"),
        ({"checkpoint_engine_wait_weights_before_ready": True}, "checkpoint engine"),
        ({"decrypted_config_file": "/config.json"}, "decrypted"),
        ({"loaded": model(where="my_models.llama")}, "my_models.llama"),
    ],
)
def test_what_cannot_be_told_apart_is_alone(
    checkpoint: Callable[..., Path], change: dict[str, Any], why: str
) -> None:
    [reason] = told(checkpoint(), **change).alone
    assert why in reason


@pytest.mark.parametrize("nested", [False, True])
def test_a_longrope_whose_factors_a_batch_decides_is_refused(
    checkpoint: Callable[..., Path], nested: bool
) -> None:
    """SGLang takes the long factors for every request of a batch in which one is long."""
    rope = {"rope_scaling": {"full": LONG} if nested else LONG}
    served = {"json_model_override_args": json.dumps(rope)}
    assert told(checkpoint(), **served, context_len=4096).rope == ["sglang", ["longrope"], 4096]
    with pytest.raises(UnsupportedError, match="up to 4096"):
        told(checkpoint(), **served, context_len=4097)


def test_windows_are_counted_as_vllm_counts_them() -> None:
    """Tokens that a token sees, itself among them."""
    from kvcore_sglang.identity import _windows

    layers = (RadixAttention(255), RadixAttention(-1), RadixAttention(255))
    assert _windows(model("LlamaForCausalLM", "llama", *layers)) == ["sliding_window=256"]


# -- arguments ----------------------------------------------------------------------------------


def test_a_file_counts_by_its_content(tmp_path: Path) -> None:
    scales = tmp_path / "scales.json"
    found = []
    for content in ("{}", '{"k": 1}'):
        scales.write_text(content)
        found.append(given(ServerArgs("model", quantization_param_path=str(scales))))
    assert found[0] != found[1]
    assert set(found[0]) == {"quantization_param_path"}


def test_of_arguments_of_unknown_kind_all_that_are_set_count() -> None:
    args = SimpleNamespace(model_path="m", tp_size=4, rl_quant_profile="p", modelopt_quant=None)
    assert given(args) == {"rl_quant_profile": "p"}


def test_variables_that_choose_numbers_count() -> None:
    environment = {
        "SGLANG_INT4_WEIGHT": "1", "SGLANG_FP8_IGNORED_LAYERS": "a", "SGLANG_PORT": "1",
        "SGLANG_SKIP_SOFTMAX_PREFILL_THRESHOLD_SCALE_FACTOR": "2", "PATH": "FP8",
    }  # fmt: skip
    assert set(number_formats(environment)) == {
        "SGLANG_INT4_WEIGHT", "SGLANG_FP8_IGNORED_LAYERS",
        "SGLANG_SKIP_SOFTMAX_PREFILL_THRESHOLD_SCALE_FACTOR",
    }  # fmt: skip
