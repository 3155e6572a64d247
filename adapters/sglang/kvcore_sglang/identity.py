"""What makes the KV of one SGLang engine differ from another's, as kvcore's list of ingredients.

Facts come from the arguments, from the checkpoint, and from the model that SGLang has loaded: only
its layers tell which windows they apply, and only its class tells whose code it is.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvcore.connector.engine_layers import live_objects
from kvcore.errors import UnsupportedError
from kvcore.model.identity import Weights, rope_rule, weights_identity
from kvcore.model.ingredients import ModelIdentity, split_config
from kvcore.model.weights import fingerprint_code
from kvcore_sglang.arguments import given, number_formats

__all__ = ["checkpoint_configs", "find_model", "model_identity", "serving_model"]

_FILE_FORMATS = frozenset(
    {"auto", "safetensors", "fastsafetensors", "instanttensor", "layered", "mistral"}
)
"""Ways to load that give the same tensors for one folder, or fail."""

_OTHER_FILES = frozenset({"pt", "npcache", "sharded_state", "bitsandbytes", "gguf"})
"""Ways that read other files of a folder, or read them otherwise."""

_ALIKE = frozenset(
    {
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
    }
)
"""Models whose code was compared with vLLM's. Others are not shared with other engines."""

_OWN_CODE = "sglang.srt.models."
_GENERIC_CODE = "sglang.srt.models.transformers"
"""SGLang's models, and the one among them that runs the checkpoint's own code."""

_CONFIG_FILES = ("params.json", "hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""Files of a checkpoint beside ``config.json`` from which SGLang configures the model."""

_NOT_THE_FILES = {
    "checkpoint_engine_wait_weights_before_ready": "weights come from a checkpoint engine",
    "custom_weight_loader": "weights may be loaded by other code",
    "debug_tensor_dump_input_file": "the model's inputs are replaced by a dump",
    "decrypted_config_file": "the configuration is decrypted from elsewhere",
    "forward_hooks": "hooks may change what the layers compute",
    "kt_weight_path": "the experts' weights come from another place",
    "modelopt_checkpoint_restore_path": "weights come from another place",
    "modelopt_quant": "weights are quantised by a calibration at each start",
}
"""Arguments with which the files do not tell what the model computes."""


# -- the loaded model ---------------------------------------------------------------------------


def find_model(pool: Any) -> Any:
    """Return the model of this process whose KV is in ``pool``.

    Raises UnsupportedError if there is none.
    """
    return _found(lambda runner: vars(runner).get("token_to_kv_pool") is pool)


def serving_model() -> Any:
    """Return the model of this process that answers, not a draft model.

    Raises UnsupportedError if there is none.
    """
    return _found(lambda runner: not runner.is_draft_worker)


def _found(fits: Any) -> Any:
    from sglang.srt.model_executor.model_runner import ModelRunner

    for runner in live_objects(ModelRunner):
        if fits(runner):
            return runner.model
    raise UnsupportedError("the model of this process was not found")


# -- the identity -------------------------------------------------------------------------------


def model_identity(server_args: Any, config: Any, dtype: str, model: Any) -> ModelIdentity:
    """Return what shapes all KV of the engine.

    ``config`` is SGLang's ModelConfig, ``dtype`` the torch name of KV's type, ``model`` the loaded
    model. Raises UnsupportedError if the weights cannot be read, or if the tokens do not determine
    the KV.
    """
    whole, text = checkpoint_configs(server_args, config)
    shared, _ = split_config(whole, text)
    overrides = _overrides(server_args)
    if overrides:
        shared["overrides"] = overrides
        text = {**text, **overrides, **(overrides.get("text_config") or {})}
    weights, alone = _weights(server_args, config)
    code, unknown = _code(server_args, config, model)
    reasons = (weights.alone, alone, unknown, *_unseen(server_args))
    return ModelIdentity(
        config=shared,
        weights=weights.digest,
        load=_load(server_args),
        code=code,
        compute_dtype=str(config.dtype),
        quantization=_quantization(config),
        kv_dtype=f"torch.{dtype}",
        kv_scales=None,
        rope=_rope(text, config.context_len),
        windows=_windows(model),
        attention=None,
        lora=None,
        draft=None,
        states=None,
        own=_own(server_args, config),
        alone=tuple(why for why in reasons if why),
    )


def checkpoint_configs(server_args: Any, config: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the checkpoint's config and its text model's, as its files have them.

    SGLang changes the config that it works with. In every config that is read it also writes an
    older name beside a rope's type; that name is removed here.
    """
    import transformers

    hf: Any = transformers
    try:
        loaded = hf.AutoConfig.from_pretrained(
            str(config.model_path),
            revision=getattr(server_args, "revision", None),
            trust_remote_code=bool(getattr(server_args, "trust_remote_code", False)),
        )
        text = loaded.get_text_config()
    except (OSError, ValueError):  # not a Hugging Face checkpoint: use what SGLang works with
        loaded, text = config.hf_config, config.hf_text_config
    return _without_alias(loaded.to_dict()), _without_alias(text.to_dict())


def _without_alias(config: Mapping[str, Any]) -> dict[str, Any]:
    alias = "type" if "type" in config and config["type"] == config.get("rope_type") else None
    return {
        name: _without_alias(item) if isinstance(item, Mapping) else item
        for name, item in config.items()
        if name != alias
    }


def _overrides(server_args: Any) -> dict[str, Any]:
    """Return the fields that replace those of the config. SGLang has read them as JSON before."""
    return dict(json.loads(str(getattr(server_args, "json_model_override_args", None) or "{}")))


def _way(server_args: Any) -> str:
    way = getattr(server_args, "load_format", None) or "auto"
    return str(getattr(way, "value", way))


def _load(server_args: Any) -> str | None:
    way = _way(server_args)
    return None if way in _FILE_FORMATS else way


def _weights(server_args: Any, config: Any) -> tuple[Weights, str]:
    """Return the digest of the weights, and why the engine does not use them as they are."""
    path, revision = str(config.model_path), getattr(server_args, "revision", None)
    way = _way(server_args)
    if way not in _FILE_FORMATS | _OTHER_FILES:
        told = f"weights by load_format={way!r} are not those of the files: use 'auto'"
        return Weights(path.encode()), told
    if getattr(server_args, "weight_cache_mode", None) not in (None, "", "off"):
        told = "weights come from a weight cache, which may hold others: use weight_cache_mode=off"
        return Weights(path.encode()), told
    found = weights_identity(path, revision, getattr(config.hf_config, "_commit_hash", None))
    asked = str(getattr(server_args, "model_path", path))
    if asked != path and Path(asked).is_dir():  # an adapter that is merged into another checkpoint
        merged = weights_identity(asked, revision, None)
        return Weights(found.digest + merged.digest, found.alone or merged.alone), ""
    return found, ""


def _unseen(server_args: Any) -> list[str]:
    return [
        f"{name}: {why}"
        for name, why in _NOT_THE_FILES.items()
        if getattr(server_args, name, None) not in (None, False, "", [], {})
    ]


def _code(server_args: Any, config: Any, model: Any) -> tuple[object | None, str]:
    """Return whose code runs the model, and why it cannot be told from other code."""
    kind = type(model)
    if kind.__module__.startswith(_GENERIC_CODE):
        found: dict[str, object] = {"sglang": kind.__name__}
        if getattr(server_args, "trust_remote_code", False):
            folder = Path(str(config.model_path))
            remote = str(getattr(server_args, "revision", None)).encode()
            found["files"] = fingerprint_code(folder) if folder.is_dir() else remote
        return found, ""
    if not kind.__module__.startswith(_OWN_CODE):
        name = f"{kind.__module__}.{kind.__qualname__}"
        return name, f"the model runs in {name}, which may change: use a model of SGLang's own"
    return (None if kind.__name__ in _ALIKE else {"sglang": kind.__name__}), ""


def _quantization(config: Any) -> object | None:
    method = getattr(config, "quantization", None)
    return None if method is None else ["sglang", str(method)]


def _rope(text: Mapping[str, Any], served: int) -> object | None:
    """Return what decides the rope's frequencies beside the config.

    Raises UnsupportedError for a longrope whose factors the other requests of a batch decide.
    """
    for rope in _ropes(text.get("rope_parameters")) + _ropes(text.get("rope_scaling")):
        if rope.get("rope_type", rope.get("type")) != "longrope":
            continue
        trained = rope.get("original_max_position_embeddings") or text.get(
            "original_max_position_embeddings"
        )
        if trained is None or served > int(trained):
            raise UnsupportedError(
                f"longrope over {served} tokens: SGLang chooses the factors of a whole batch by "
                "its longest request, so that tokens do not determine their KV; kvcore serves "
                f"--context-length up to {trained}"
            )
    return rope_rule(text, "sglang", served)


def _ropes(told: Any) -> list[Mapping[str, Any]]:
    """Return a rope and those nested in it, by type of layer."""
    if not isinstance(told, Mapping):
        return []
    return [told, *(inner for item in told.values() for inner in _ropes(item))]


def _windows(model: Any) -> object | None:
    """Return the windows that the layers of the loaded model apply, each as SGLang counts it.

    A window of SGLang leaves out the token itself, and vLLM's counts it.
    """
    from sglang.srt.layers.radix_attention import RadixAttention

    found = set()
    for layer in model.modules():
        if isinstance(layer, RadixAttention):
            before = layer.sliding_window_size
            if before is not None and before >= 0:
                found.add(f"sliding_window={int(before) + 1}")
            if layer.use_irope:
                found.add("chunks of positions")
    return sorted(found) or None


def _own(server_args: Any, config: Any) -> object | None:
    """Return the settings and files that only SGLang reads; None if they are as in any engine."""
    found: dict[str, object] = {}
    if arguments := given(server_args):
        found["arguments"] = arguments
    if environment := number_formats(os.environ):
        found["environment"] = environment
    folder = Path(str(config.model_path))
    files = {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
        for name in _CONFIG_FILES
        if (folder / name).is_file()
    }
    if files:
        found["files"] = files
    return found or None
