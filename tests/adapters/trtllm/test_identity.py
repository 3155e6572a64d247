"""What makes KV differ on TensorRT-LLM: each ingredient changed alone finds nothing."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from kvcore.config import Config
from kvcore.errors import UnsupportedError
from kvcore.model.adapter_files import AdapterFiles
from kvcore.model.identity import Namespaces, weights_identity
from kvcore.model.ingredients import ModelIdentity
from kvcore.model.keys import Namespace
from kvcore.telemetry.metrics import MissReason
from kvcore.testing.waiting import PATIENCE_S, until
from kvcore_trtllm import identity
from kvcore_trtllm.describe import describe
from kvcore_trtllm.requests import RequestNamespaces, excluded
from support.trtllm_parts import args, request

Checkpoint = Callable[..., Path]


class LoadFormat(Enum):
    AUTO = 0
    DUMMY = 1
    GMS = 3


class Nested(BaseModel):
    """Other arguments as TensorRT-LLM declares them, of which only the changed ones are told."""

    model_config = ConfigDict(arbitrary_types_allowed=True)
    max_num_tokens: int = 8192
    moe_config: dict[str, Any] = {}
    argument_of_next_year: int = 0


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    weights_identity.cache_clear()
    monkeypatch.delenv(identity.SCALES, raising=False)


def told(folder: Path, **changes: Any) -> ModelIdentity:
    return describe(args(folder, **{"dtype": "float16", **changes})).identity


QUANTISED = SimpleNamespace(quant_algo="FP8", kv_cache_quant_algo=None, exclude_modules=None)


@pytest.mark.parametrize(
    ("ingredient", "fields", "change"),
    [
        ("config", {"rms_norm_eps": 0.5}, {}),
        ("config", {}, {"model_kwargs": {"rope_parameters": {"rope_theta": 7.0}}}),
        ("config", {}, {"model_kwargs": {"rms_norm_eps": 0.25}}),
        ("config", {}, {"model_kwargs": {"text_config": {"rms_norm_eps": 0.25}}}),
        ("load", {}, {"load_format": "dummy"}),
        ("load", {}, {"load_format": LoadFormat.DUMMY}),
        ("load", {}, {"load_format": LoadFormat.GMS}),
        ("load", {}, {"checkpoint_format": "MX"}),
        ("load", {}, {"checkpoint_format": "mistral"}),
        ("code", {}, {"trust_remote_code": True}),
        ("code", {"architectures": ["MixtralForCausalLM"]}, {}),
        ("compute_dtype", {}, {"dtype": "bfloat16", "kv_cache_config__dtype": "float16"}),
        ("quantization", {}, {"quant_config": QUANTISED}),
        ("quantization", {}, {"force_dynamic_quantization": True}),
        ("quantization", {"quantization_config": {"quant_method": "fp8"}}, {}),
        ("kv_dtype", {}, {"kv_cache_config__dtype": "fp8"}),
        ("kv_scales", {}, {"kv_cache_config__dtype": "fp8"}),
        ("rope", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, {"max_seq_len": 64}),
        ("rope", {}, {"model_kwargs": {"rope_parameters": {"full": {"rope_type": "longrope"}}}}),
        ("own", {}, {"moe_config": {"backend": "TRITON"}}),
        ("own", {}, {"argument_of_next_year": 5}),
        ("own", {}, {"env_overrides": {"TRTLLM_ENABLE_ATTENTION_NVFP4_OUTPUT": "1"}}),
        ("own", {}, {"env_overrides": {"OVERRIDE_QUANT_ALGO": "W4A16_MXFP4"}}),
    ],
)
def test_each_change_is_another_identity(
    checkpoint: Checkpoint, ingredient: str, fields: dict[str, Any], change: dict[str, Any]
) -> None:
    llama: dict[str, Any] = {"architectures": ["LlamaForCausalLM"]}
    plain = told(checkpoint(**llama))
    other = told(checkpoint(**{**llama, **fields}), **change)
    assert getattr(other, ingredient) != getattr(plain, ingredient)
    assert other.fingerprint != plain.fingerprint
    assert told(checkpoint(**llama)).fingerprint == plain.fingerprint


def test_other_weights_are_another_identity(checkpoint: Checkpoint) -> None:
    folder = checkpoint()
    plain = told(folder).fingerprint
    (folder / "model.bin").write_bytes(b"other weights")
    weights_identity.cache_clear()
    assert told(folder).fingerprint != plain


@pytest.mark.parametrize("name", ["hf_quant_config.json", "dtypes.json"])
def test_files_that_configure_the_model_count(checkpoint: Checkpoint, name: str) -> None:
    folder, found = checkpoint(), set()
    for content in (None, "{}", '{"kv_cache_quant_algo": "FP8"}'):
        if content is not None:
            (folder / name).write_text(content)
        found.add(told(folder).fingerprint)
    assert len(found) == 3


def test_overrides_shape_what_is_described(checkpoint: Checkpoint) -> None:
    found = describe(args(checkpoint(), model_kwargs={"num_hidden_layers": 2}))
    assert found.layers == 2
    with pytest.raises(UnsupportedError, match="window"):
        describe(args(checkpoint("MistralConfig", sliding_window=None), model_kwargs=WINDOWED))


WINDOWED = {"sliding_window": 64}


def test_arguments_that_cannot_change_kv_do_not_count(checkpoint: Checkpoint) -> None:
    folder = checkpoint()
    plain = told(folder)
    other = told(
        folder, max_num_tokens=4, cuda_graph_config=None, enable_chunked_prefill=True,
        tensor_parallel_size=2, print_iter_log=True,
    )  # fmt: skip
    assert other == plain
    assert told(folder, moe_config=None, force_dynamic_quantization=False) == plain


def test_of_the_engines_own_arguments_those_off_their_defaults_count() -> None:
    assert identity._given(Nested()) == {}
    assert identity._given(Nested(max_num_tokens=5)) == {}
    assert identity._given(Nested(moe_config={"backend": "X"})) == {"moe_config": {"backend": "X"}}
    assert identity._given(Nested(argument_of_next_year=1)) == {"argument_of_next_year": 1}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"load_format": "dummy"}, "load_format='dummy'"),
        ({"load_format": LoadFormat.GMS}, "load_format='gms'"),
        ({"checkpoint_format": "MX"}, "another engine"),
        ({"checkpoint_loader": object()}, "checkpoint_loader"),
    ],
)
def test_weights_that_the_files_do_not_tell_are_alone(
    checkpoint: Checkpoint, change: dict[str, Any], why: str
) -> None:
    assert not told(checkpoint()).alone
    [reason] = told(checkpoint(), **change).alone
    assert why in reason


def test_a_name_on_a_hub_without_a_commit_is_alone(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads((checkpoint() / "config.json").read_text())
    found = identity.model_identity(
        SimpleNamespace(model="owner/name", revision=None), config, "", "float16", "float16"
    )
    assert "no commit" in found.alone[0]


def test_eight_bit_kv_with_other_scales_is_other_kv(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the variable the version decides; any text but 1 means scales of 1."""
    folder, found = checkpoint(), {}
    for kind in ("auto", "fp8"):
        for release in ("1.2.0", "1.3.0"):
            monkeypatch.setattr(identity, "_version", lambda release=release: release)
            for scales in (None, "0", "1"):
                over = {} if scales is None else {identity.SCALES: scales}
                given = told(folder, kv_cache_config__dtype=kind, env_overrides=over)
                found[kind, release, scales] = given.fingerprint
    assert len({value for (kind, *_), value in found.items() if kind == "auto"}) == 1
    eight = {key[1:]: value for key, value in found.items() if key[0] == "fp8"}
    assert eight["1.2.0", None] != eight["1.3.0", None]
    assert eight["1.2.0", "1"] == eight["1.3.0", "1"] != eight["1.2.0", "0"]
    monkeypatch.setenv(identity.SCALES, "1")
    assert told(folder, kv_cache_config__dtype="fp8").fingerprint == eight["1.2.0", "1"]


def test_latents_and_quantised_weights_are_not_shared_with_other_engines(
    checkpoint: Checkpoint,
) -> None:
    latent = told(checkpoint("DeepseekV3Config", kv_lora_rank=24, qk_rope_head_dim=8))
    assert latent.attention == ["trtllm", "latent"]
    assert told(checkpoint(), quant_config=QUANTISED).quantization[0] == "trtllm"  # type: ignore[index]
    plain = told(checkpoint(architectures=["LlamaForCausalLM"]))
    assert (plain.code, plain.attention, plain.quantization, plain.own) == (None,) * 4


# -- requests -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "alone"),
    [
        ({}, False),
        ({"py_multimodal_data": {"mrope_config": {}}}, False),
        ({"py_multimodal_data": {"image": {"pixel_values": []}}}, True),
        ({"py_multimodal_data": {"multimodal_embedding": [object()]}}, True),
        ({"multimodal_hashes": [[1, 2]]}, True),
        ({"multimodal_hashes": []}, False),
        ({"multimodal_embedding": object()}, True),
        ({"prompt_embedding_table": object()}, True),
        ({"is_attention_dp_dummy": True}, True),
    ],
)
def test_requests_whose_tokens_do_not_tell_their_kv(fields: dict[str, Any], alone: bool) -> None:
    assert excluded(request(**fields)) is alone


def spaces() -> RequestNamespaces:
    return RequestNamespaces(Namespaces(Config().namespace, b"model"), wait_s=PATIENCE_S)


@pytest.fixture
def adapter(tmp_path: Path) -> Callable[..., str]:
    """Makes a LoRA adapter's folder, or writes it anew."""

    def make(name: str = "one", alpha: int = 8, content: bytes = b"weights") -> str:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "adapter_config.json").write_text(json.dumps({"r": 8, "lora_alpha": alpha}))
        (folder / "adapter_model.bin").write_bytes(content)
        return str(folder)

    return make


def test_namespaces_differ_by_what_the_version_tells(adapter: Callable[..., str]) -> None:
    given = [
        request(),
        request(cache_salt="a"),
        request(cache_salt=None, cache_salt_id=5),
        request(lora_task_id=1),
        request(lora_task_id=2),
        request(lora_task_id=3, py_lora_path=adapter("one")),
        request(lora_task_id=4, py_lora_path=adapter("two")),
        request(lora_task_id=5, py_lora_path="owner/hub"),
    ]
    first, again = spaces(), spaces()
    found = [first.of(one) for one in given]
    assert len({one.digest for one in found if isinstance(one, Namespace)}) == len(given)
    assert first.of(request()) is first.of(request(cache_salt=None))

    def digests(of: RequestNamespaces, numbers: list[int]) -> list[bytes]:
        found = (of.of(given[number]) for number in numbers)
        return [one.digest for one in found if isinstance(one, Namespace)]

    assert digests(again, [1, 6]) == digests(first, [1, 6])
    for number in (3, 7):  # a number means nothing in another process, nor what cannot be read
        assert digests(again, [number]) != digests(first, [number])


@pytest.mark.parametrize("change", ["alpha", "weights", "folder"])
def test_an_adapter_that_is_not_what_its_number_was_is_left_alone(
    adapter: Callable[..., str], caplog: pytest.LogCaptureFixture, change: str
) -> None:
    """The engine goes on with the adapter that it has loaded under the number, or with neither."""
    given = spaces()
    before = request(lora_task_id=1, py_lora_path=adapter())
    assert isinstance(given.of(before), Namespace)
    if change == "folder":
        after = request(lora_task_id=1, py_lora_path=adapter("two"))
    else:
        after = before
        adapter(**({"alpha": 9} if change == "alpha" else {"content": b"changed"}))
    assert given.of(after) is MissReason.UNSUPPORTED
    assert given.of(after) is MissReason.UNSUPPORTED
    assert caplog.text.count("answered without kvcore") == 1
    assert isinstance(given.of(request(lora_task_id=2, py_lora_path=adapter("new"))), Namespace)


def test_an_adapter_on_a_disk_that_hangs_is_waited_for_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its requests alone are computed without kvcore, until the disk answers."""
    answers = threading.Event()

    def look(name: str, path: str) -> str:
        assert path == "/fast/a" or answers.wait(PATIENCE_S)
        return f"{name}:1"

    files = AdapterFiles(look)
    given = RequestNamespaces(Namespaces(Config().namespace, b"model"), 0.05, files)
    slow = request(lora_task_id=1, py_lora_path="/slow/a")
    assert given.of(slow) is MissReason.UNAVAILABLE
    given._wait_s = 10 * PATIENCE_S
    assert given.of(slow) is MissReason.UNAVAILABLE, "no second request waits for it"
    assert isinstance(given.of(request(lora_task_id=2, py_lora_path="/fast/a")), Namespace)
    assert isinstance(given.of(request()), Namespace)
    assert caplog.text.count("are not read in time") == 1
    answers.set()
    until(lambda: isinstance(given.of(slow), Namespace))
