"""What makes the KV of one vLLM engine differ from another's, as kvcore's list of ingredients.

Leader and workers derive the same identity from the same configs. A worker's process may have
loaded the model already, which changes the config that it holds: such fields are left out.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import platform
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import AttentionSpec

from kvcore.model.identity import Weights, rope_rule, weights_identity
from kvcore.model.ingredients import MediaIdentity, ModelIdentity, kv_fields, split_config
from kvcore.model.weights import fingerprint_code, fingerprint_files
from kvcore_vllm.context import context_sizes
from kvcore_vllm.specs import layout_of

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvcore.model.packed import PackedPages
    from kvcore.model.points import PageWindow, WindowGroup
    from kvcore_vllm.shares import StateShares

__all__ = [
    "WITHOUT_DRAFT",
    "device_kind",
    "draft_of",
    "media_identity",
    "model_identity",
    "packed_identity",
    "quantised_type",
    "state_kernels",
]

_FILE_FORMATS = frozenset(
    {"auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer", "mistral"}
)
"""Ways to load that give the same tensors for one folder, or fail."""

_MISTRAL = "consolidated*.safetensors"

_OTHER_FILES = frozenset({"pt", "npcache", "sharded_state", "bitsandbytes", "gguf"})
"""Ways that read other files of a folder, or read them otherwise."""

WITHOUT_DRAFT = ("ngram", "ngram_gpu", "suffix")
"""Methods of speculative decoding that keep no KV of their own."""

_WRITTEN_BY_WORKERS = frozenset({"total_num_heads", "total_num_kv_heads"})
"""Fields that vLLM adds to a quantisation config while it loads the weights."""

_FORMATS = re.compile("ATT|MLA|ROCM|AITER|GEMM|FLASH|KV_CACHE_LAYOUT|CPU_(?!KVCACHE|OMP)")
"""Environment variables of vLLM that may choose kernels, and with them the format of a page."""

_ROPES_WRITTEN = {"deepseek_yarn": "yarn", "deepseek_llama_scaling": "yarn"}
"""Types of rope that vLLM's DeepSeek models write into their config while they load, for those that
were there."""

_V4 = "deepseek_v4"
"""The type of a model of DeepSeek V4, in its config."""

_WRITTEN_BY_DRAFTS = frozenset(
    {"draft_vocab_size", "image_token_index", "layer_types", "no_rope_layers", "target_layer_count"}
)
"""Fields that vLLM's draft models change in their config while they load, from the target's."""


def model_identity(
    vllm_config: VllmConfig,
    specs: list[AttentionSpec],
    states: Sequence[Any] = (),
    windows: Sequence[WindowGroup] = (),
    stages: Sequence[Collection[str]] = (),
    packed: object | None = None,
    shares: Sequence[StateShares] = (),
) -> ModelIdentity:
    """Return what shapes all KV of the engine, whose attention has caches of ``specs``.

    ``states`` are the specs of the caches of its states, one a group, ``shares`` how these are cut
    by heads, if they are, and ``windows`` what resume points keep of windows. ``stages`` are the
    names of the layers of each pipeline stage, if there are several. ``packed`` is the
    `packed_identity` of pages that are stored as they are. Raises UnsupportedError if the weights
    cannot be read.
    """
    model = vllm_config.model_config
    whole, text = _configs(model)
    config, _ = split_config(whole, text)
    weights, alone = _weights(model, vllm_config.load_config)
    draft, unknown = _draft(vllm_config)
    plain = not specs or specs[0].kv_quant_mode.name == "NONE"
    scales, unscaled = (None, "") if plain else _kv_scales(vllm_config)
    return ModelIdentity(
        config=config,
        weights=weights.digest,
        load=_load(model, vllm_config.load_config),
        code=_code(model),
        compute_dtype=str(model.dtype),
        quantization=_quantization(model, vllm_config.load_config),
        kv_dtype=_stored_type(vllm_config, specs[0]) if specs else str(model.dtype),
        kv_scales=scales,
        rope=rope_rule(text, "vllm", model.max_model_len),
        windows=_windows(specs, windows),
        attention=_attention(vllm_config),
        lora=_lora(vllm_config),
        draft=draft,
        states=_points(vllm_config, states, windows, stages, shares),
        packed=packed,
        own=_own(vllm_config),
        alone=tuple(why for why in (weights.alone, alone, unscaled, *unknown) if why),
    )


def media_identity(vllm_config: VllmConfig) -> MediaIdentity:
    """Return what shapes the KV of media, beside their content and the model."""
    _, media = split_config(*_configs(vllm_config.model_config))
    told = vllm_config.model_config.multimodal_config
    names = ("mm_encoder_attn_dtype", "video_pruning_rate", "mm_device_do_normalize")
    encoder = {name: getattr(told, name, None) for name in names}
    if encoder["video_pruning_rate"]:
        encoder["video_pruning_method"] = getattr(told, "video_pruning_method", None)
    if path := getattr(told, "mm_encoder_fp8_scale_path", None):
        encoder["scales"] = fingerprint_files(path)
    return MediaIdentity(config=media, encoder=kv_fields(encoder))


def draft_of(vllm_config: VllmConfig) -> ModelConfig | None:
    """Return the config of the model that drafts tokens and keeps KV for it; None if none does."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method in WITHOUT_DRAFT:
        return None
    return speculative.draft_model_config


def _draft(vllm_config: VllmConfig) -> tuple[object | None, tuple[str, ...]]:
    """Return what shapes the KV of the draft model, and why it cannot be told from other KV."""
    draft, speculative = draft_of(vllm_config), vllm_config.speculative_config
    if draft is None or speculative is None:
        return None, ()
    load = getattr(speculative, "draft_load_config", None) or vllm_config.load_config
    weights, alone = _weights(draft, load)
    whole, text = (_as_told(told) for told in _configs(draft))
    config, _ = split_config(whole, text)
    found = {
        "method": str(speculative.method),
        "parallel": bool(getattr(speculative, "parallel_drafting", False)),
        "config": config,
        "file": _config_file(draft),
        "weights": weights.digest,
        "load": _load(draft, load),
        "code": _code(draft),
        "dtype": str(draft.dtype),
        "quantization": _quantization(draft, load),
        "rope": rope_rule(text, "vllm", draft.max_model_len),
    }
    return found, (weights.alone, alone)


def _as_told(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a draft model's config as it was before the model was loaded, at every depth."""
    return {
        name: _as_told(item) if isinstance(item, Mapping) else item
        for name, item in config.items()
        if name not in _WRITTEN_BY_DRAFTS
    }


def _config_file(model: ModelConfig) -> str | None:
    """Return the digest of the config in a model's folder; None if it has no folder."""
    path = Path(model.model) / "config.json"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _configs(model: ModelConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the checkpoint's config with its overrides, and its text model's.

    A worker, which has loaded the model, returns the same as the leader, which has not.
    """
    whole, text = model.hf_config.to_dict(), model.hf_text_config.to_dict()
    for config in (whole, text):
        config |= _with_ropes_as_told(config)
        told = config.get("quantization_config")
        if isinstance(told, Mapping):
            config["quantization_config"] = {
                name: item for name, item in told.items() if name not in _WRITTEN_BY_WORKERS
            }
    return whole, text


def _with_ropes_as_told(config: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, item in config.items():
        if isinstance(item, Mapping):
            found[name] = _with_ropes_as_told(item)
        else:
            found[name] = _ROPES_WRITTEN.get(str(item), item) if name == "rope_type" else item
    return found


def _weights(model: ModelConfig, load: LoadConfig) -> tuple[Weights, str]:
    """Return the digest of the weights, and why the engine does not use them as they are."""
    way = str(load.load_format)
    remote = getattr(model, "model_weights", "") or ""
    if way not in _FILE_FORMATS | _OTHER_FILES:
        told = f"weights by load_format={way!r} are not those of the files: use 'auto'"
        return Weights(f"{model.model} {remote}".encode()), told
    if remote and not Path(remote).exists():
        told = f"the weights at {remote} may change under that name: use a local folder"
        return Weights(remote.encode()), told
    commit = getattr(model.hf_config, "_commit_hash", None)
    if model.hf_config_path:
        commit = None  # of another repository
    return weights_identity(remote or model.model, model.revision, commit), ""


def _load(model: ModelConfig, load: LoadConfig) -> str | None:
    """Return the way that weights are loaded, if it can give other ones than the folder's usual.

    A folder may have the weights twice. vLLM then takes the consolidated files, unless it is told.
    """
    way = str(load.load_format)
    if way in ("auto", "mistral"):
        return "mistral" if any(Path(model.model).glob(_MISTRAL)) else None
    return None if way in _FILE_FORMATS else way


def _code(model: ModelConfig) -> object | None:
    found: dict[str, object] = {}
    if (way := str(getattr(model.model_impl, "value", model.model_impl))) != "auto":
        found["model_impl"] = way
    if overrides := getattr(model, "model_class_overrides", None):
        found["classes"] = kv_fields(overrides)
    if model.trust_remote_code:
        folder = Path(model.model)
        remote = f"{model.code_revision or model.revision}".encode()
        found["files"] = fingerprint_code(folder) if folder.is_dir() else remote
    return found or None


def _quantization(model: ModelConfig, load: LoadConfig) -> object | None:
    if model.quantization is None and not model.quantization_config:
        return None
    told = model.quantization_config
    if dataclasses.is_dataclass(told) and not isinstance(told, type):
        told = dataclasses.asdict(told)
    extra = load.model_loader_extra_config
    return [str(model.quantization), kv_fields(told), kv_fields(extra or {})]


def _windows(specs: list[AttentionSpec], windows: Sequence[WindowGroup]) -> object | None:
    """Return the windows of the layers' caches."""
    found = {f"sliding_window={window.before + 1}" for window in windows}
    for spec in specs:
        for name in ("sliding_window", "attention_chunk_size"):
            if window := getattr(spec, name, None):
                found.add(f"{name}={window}")
    return sorted(found) or None


def _points(
    vllm_config: VllmConfig,
    states: Sequence[Any],
    windows: Sequence[WindowGroup],
    stages: Sequence[Collection[str]],
    shares: Sequence[StateShares],
) -> object | None:
    """Return what resume points hold, layer by layer of each group, and the stages.

    Where points are not `by heads <PointShape>`, it is what one rank holds, and the number of
    ranks is named: their parts differ. None if the model keeps blocks only.
    """
    if not states and not windows:
        return None
    by_heads = len(shares) == len(states) and all(window.by_heads for window in windows)
    found = [
        [
            window.before + 1,
            "as blocks" if by_heads else window.shape.kv_heads,
            window.shape.dims(),
            window.shape.dtype,
            window.names,
        ]
        for window in windows
    ]
    told: dict[str, object] = {"states": _states(vllm_config, states, shares), "windows": found}
    if not by_heads:
        told["ranks"] = vllm_config.parallel_config.tensor_parallel_size
    if stages:
        told["stages"] = _split(stages)
    return told


def _split(stages: Sequence[Collection[str]]) -> object:
    """Return which layers each pipeline stage has."""
    return [sorted(names) for names in stages]


def _states(
    vllm_config: VllmConfig, specs: Sequence[Any], shares: Sequence[StateShares]
) -> object | None:
    """Return the shapes and types of the states of a layer, group by group.

    They are those of one rank. With ``shares`` they are the model's, with the bytes of a share's
    sections, which tell the number of shares too.

    How vLLM arranges a state of one shape may change with its version, with the kind of device
    (gated delta nets on a CPU have two dims the other way round) and with the kernels, which are
    therefore named.
    """
    import vllm
    from vllm.platforms import current_platform

    found: list[dict[str, object]] = [
        {
            "kind": str(getattr(spec.mamba_type, "name", spec.mamba_type)),
            "shapes": [list(shape) for shape in spec.shapes],
            "types": [str(dtype) for dtype in spec.dtypes],
        }
        for spec in specs
    ]
    if not found:
        return None
    for own, cut in zip(found, shares, strict=False):
        own["shapes"], own["share"] = [list(shape) for shape in cut.shapes], list(cut.share)
    device, kernels = str(current_platform.device_name), state_kernels(vllm_config)
    return ["vllm", vllm.__version__, device, kernels, *found]


def state_kernels(vllm_config: VllmConfig) -> object:
    """Return vLLM's settings of the kernels that write states (`--mamba-backend` and its like)."""
    return kv_fields(dataclasses.asdict(vllm_config.mamba_config))


def packed_identity(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    packed: PackedPages,
    names: Sequence[str],
    windows: Sequence[PageWindow] = (),
    stages: Sequence[Collection[str]] = (),
) -> object:
    """Return what decides the format of pages that are stored as vLLM has them.

    ``windows`` are the pages of layers with a window, and ``stages`` the names of the layers of
    each pipeline stage, if there are several. The leader knows the window of one layer of a group
    only, so that of the model is named too.
    """
    import vllm

    attention = vllm_config.attention_config
    found = {
        "vllm": vllm.__version__,
        "device": device_kind(),
        "settings": kv_fields(dataclasses.asdict(attention)),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith("VLLM_") and _FORMATS.search(name)
        },
        "types": [_cache_type(vllm_config), str(vllm_config.model_config.dtype)],
        "layout": layout_of(vllm_config, kv_cache_config),
        "ranks": vllm_config.parallel_config.tensor_parallel_size,
        "window": vllm_config.model_config.get_sliding_window(),
        "tokens": packed.page_tokens,
        "pages": [[name, n] for name, n in zip(names, packed.page_nbytes, strict=True)],
    }
    if context := context_sizes(vllm_config):
        found["context"] = context
    if stages:
        found["stages"] = _split(stages)
    if windows:
        found["windows"] = [
            [window.before + 1, window.page_tokens, window.names, window.page_nbytes]
            for window in windows
        ]
    return found


def _cache_type(vllm_config: VllmConfig) -> str:
    """Return vLLM's name of the type of its caches, the same in the scheduler and in the workers.

    DeepSeek V4 has one format for 8 bits. Its workers write that name into their config while they
    load the model.
    """
    told = str(vllm_config.cache_config.cache_dtype)
    if getattr(vllm_config.model_config.hf_config, "model_type", "") != _V4:
        return told
    return "fp8_ds_mla" if told == "auto" or told.startswith("fp8") else told


def device_kind() -> list[str]:
    """Return the kind of the device, which decides how attention arranges its cache."""
    import torch
    from vllm.platforms import current_platform

    found = [str(current_platform.device_type)]
    if found == ["cpu"]:
        return [*found, platform.machine(), torch.backends.cpu.get_cpu_capability(), str(_amx())]
    try:
        found.append(str(current_platform.get_device_capability()))
    except Exception as error:  # noqa: BLE001 - a platform of a plugin may not tell
        found.append(type(error).__name__)
    return found


def _amx() -> bool:
    import torch

    told = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return bool(told is not None and told())


def _attention(vllm_config: VllmConfig) -> object | None:
    """Return the settings of attention that differ from their defaults and change its result."""
    told = vllm_config.attention_config
    plain = type(told)()
    names = ("use_non_causal", "indexer_kv_dtype", "indexer_sparse_logits", "hisparse_config")
    found = {name: getattr(told, name, None) for name in names}
    return kv_fields({n: v for n, v in found.items() if v != getattr(plain, n, None)}) or None


def _lora(vllm_config: VllmConfig) -> object | None:
    """Return the settings that change what an adapter does, where they differ from the defaults."""
    told = vllm_config.lora_config
    if told is None:
        return None
    found: dict[str, object] = {}
    if (dtype := str(told.lora_dtype)) not in ("auto", str(vllm_config.model_config.dtype)):
        found["dtype"] = dtype
    names = ("target_modules", "enable_tower_connector_lora")
    shapes = ("enable_mixed_moe_lora_format", "enable_moe_shared_loras")
    found |= {n: v for n in names + shapes if (v := getattr(told, n, None))}
    return kv_fields(found) or None


def _own(vllm_config: VllmConfig) -> object | None:
    found: dict[str, object] = {}
    if vllm_config.additional_config:
        found["additional_config"] = kv_fields(vllm_config.additional_config)
    media = vllm_config.model_config.multimodal_config
    if media is not None and getattr(media, "language_model_only", False):
        found["language_model_only"] = True
    return found or None


# -- the numbers of the cache -------------------------------------------------------------------


def _stored_type(vllm_config: VllmConfig, spec: AttentionSpec) -> str:
    """Return the name of the numbers in which KV is stored.

    vLLM keeps every 8-bit format as bytes, so a quantised cache is named by its format as well.
    The name is the same in the scheduler and in the workers: a checkpoint with a scheme for its
    cache changes "auto" to "fp8" in the workers' config only.
    """
    mode = spec.kv_quant_mode.name
    if mode == "NONE":
        return str(spec.dtype)
    return f"{spec.dtype} {mode} {quantised_type(_cache_type(vllm_config))}"


def quantised_type(cache_dtype: str) -> str:
    """Return the torch name of the 8-bit numbers that vLLM means by ``cache_dtype``.

    A name that stands for no such type is returned as it is.
    """
    from vllm.platforms import current_platform

    e4m3 = str(current_platform.fp8_dtype())  # of ROCm's two formats, the one of this GPU
    named = {"auto": e4m3, "fp8": e4m3, "fp8_e4m3": e4m3, "fp8_e5m2": "torch.float8_e5m2"}
    return named.get(cache_dtype, cache_dtype)


def _kv_scales(vllm_config: VllmConfig) -> tuple[object | None, str]:
    """Return what decides the scales of quantised KV beside the weights, and why it is unknown."""
    cache = vllm_config.cache_config
    backend = vllm_config.attention_config.backend
    found = {
        "engine": "vllm",
        "backend": getattr(backend, "name", None),
        "plain layers": sorted(map(str, getattr(cache, "kv_cache_dtype_skip_layers", None) or ())),
    }
    if getattr(cache, "calculate_kv_scales", False):
        return (
            found,
            "calculate_kv_scales takes the scales of KV from the first prompt: turn it off",
        )
    return found, ""
