"""Position recovery: the rope of a model's layers, read from its config.

Cached K is stored after RoPE. A rotation moves it together with its chunk (`Rope.shift`), provided
that the frequencies depend only on the pair of dimensions. If they depend on the prompt's length,
or if a position is more than one number, `rope_of` raises `UnsupportedError` with the reason. Which
dimensions form a pair depends on the architecture's code and is not in its config: see `_FAMILIES`.

Store chunks with the offset at which they were computed, and rotate once, at load. Rotating to zero
at store and again at load would round twice (a test shows the error).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from kvcore.errors import ConfigError, UnsupportedError
from kvcore.fusion._rotation import UNSCALED, Linear, Llama3, Pairing, Rope, Scaling, Unscaled, Yarn

__all__ = ["Linear", "Llama3", "Pairing", "Rope", "Scaling", "Unscaled", "Yarn", "rope_of"]

Config = Mapping[str, Any]

# ---------------------------------------------------------------------------------------------
# architectures


def _every_layer(config: Config, layer: int) -> bool:
    return True


def _as_listed(config: Config, layer: int) -> bool:
    """Read ``no_rope_layers``, which has 1 (sic) for a layer that rotates and 0 for others."""
    listed = config.get("no_rope_layers")
    if not isinstance(listed, (list, tuple)) or layer >= len(listed):
        _decline(config, "no_rope_layers does not name every layer", _LOAD)
    return bool(listed[layer])


def _sliding_layers(config: Config, layer: int) -> bool:
    """Follow Cohere2, in which a layer without a window has no positions."""
    if config.get("sliding_window") is None:
        _decline(
            config, "sliding_window is not set, and engines then differ in which layers rotate"
        )
    return _layer_type(config, layer) == "sliding_attention"


def _sliding_layers_if_any(config: Config, layer: int) -> bool:
    """Follow EXAONE 4: like Cohere2, but a model without windows rotates in every layer."""
    sliding = "sliding_attention" in (config.get("layer_types") or ())
    if sliding != (config.get("sliding_window") is not None):
        _decline(
            config,
            "sliding_window and layer_types disagree, and engines differ in which they follow",
        )
    return not sliding or _layer_type(config, layer) == "sliding_attention"


def _as_is(config: Config) -> Config:
    return config


def _gptj_config(config: Config) -> Config:
    """Translate GPT-J's field names; its theta is fixed in the code."""
    heads, hidden = _count(config, "n_head"), _count(config, "n_embd")
    head_dim = hidden // heads
    rotary_dim = head_dim if config.get("rotary_dim") is None else _count(config, "rotary_dim")
    return {
        "rope_theta": 10000.0,
        **config,
        "num_hidden_layers": _count(config, "n_layer"),
        "head_dim": head_dim,
        "partial_rotary_factor": rotary_dim / head_dim,
    }


def _gpt_neox_config(config: Config) -> Config:
    """Translate rotary_emb_base and rotary_pct of files from before Transformers 5."""
    old = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
    found = {new: config[name] for new, name in old.items() if config.get(name) is not None}
    return {**found, **config}


def _gemma3_config(config: Config) -> Config:
    """Translate files from before Transformers 5: a theta per layer type, scaling in full ones."""
    if config.get("rope_parameters"):
        return config
    full = {"rope_theta": config.get("rope_theta"), **(config.get("rope_scaling") or {})}
    window = {"rope_theta": config.get("rope_local_base_freq")}
    return {
        **config,
        "rope_scaling": None,
        "rope_parameters": {"full_attention": full, "sliding_attention": window},
    }


@dataclass(frozen=True)
class _Family:
    """What the code of an architecture does and its config does not say.

    ``pairing`` is None if some engines reorder the weights and others do not, so that only the
    engine knows.
    """

    pairing: Pairing | None = Pairing.NEOX
    partial: bool = False  # uses partial_rotary_factor, whose default is not always 1
    layered: bool = False  # has rope parameters for each layer type
    rotates: Callable[[Config, int], bool] = _every_layer
    reread: Callable[[Config], Config] = _as_is
    scalings: Collection[str] = ("default", "linear", "llama3", "yarn")


_NEOX = _Family()
_INTERLEAVED = _Family(Pairing.GPTJ)
_PARTIAL = _Family(partial=True)

# By ``model_type``. Each was checked in the source of Transformers 5.19, and in vLLM 0.32 if it has
# its own model (vLLM runs arcee, glm, gpt_neox, olmo, olmo2, olmo3, phi, seed_oss, smollm3 and
# starcoder2 on Transformers' code). tests/unit/fusion/test_rope.py runs every one.
_FAMILIES: dict[str, _Family] = {
    "apertus": _NEOX,
    "arcee": _NEOX,
    "cohere": _INTERLEAVED,
    "cohere2": _Family(Pairing.GPTJ, rotates=_sliding_layers),
    "ernie4_5": _INTERLEAVED,
    "exaone4": _Family(rotates=_sliding_layers_if_any),
    "gemma": _NEOX,
    "gemma2": _NEOX,
    "gemma3_text": _Family(layered=True, reread=_gemma3_config),
    "glm": _Family(Pairing.GPTJ, partial=True),
    "glm4": _Family(Pairing.GPTJ, partial=True),
    "gpt_neox": _Family(partial=True, reread=_gpt_neox_config),
    "gpt_oss": _Family(scalings=("yarn",)),
    "gptj": _Family(Pairing.GPTJ, partial=True, reread=_gptj_config, scalings=("default",)),
    "granite": _NEOX,
    "granitemoe": _NEOX,
    "llama": _NEOX,
    "llama4_text": _Family(None, rotates=_as_listed),
    "mistral": _NEOX,
    "mixtral": _NEOX,
    "nemotron": _PARTIAL,
    "olmo": _NEOX,
    "olmo2": _NEOX,
    "olmo3": _Family(layered=True),
    "olmoe": _NEOX,
    "phi": _PARTIAL,
    "phi3": _Family(partial=True, scalings=("default",)),
    "qwen2": _NEOX,
    "qwen2_moe": _NEOX,
    "qwen3": _NEOX,
    "qwen3_moe": _NEOX,
    "seed_oss": _NEOX,
    "smollm3": _Family(rotates=_as_listed),
    "stablelm": _PARTIAL,
    "starcoder2": _NEOX,
}


# ---------------------------------------------------------------------------------------------
# reading a config

_EXACT = "serve exact prefixes only for this model"
_LOAD = "pass the text config as Transformers 5 writes it (config.to_dict())"
_LENGTH = "its frequencies depend on the prompt's length, so cached K does not move by a rotation"
_IMAGE = "a token's position is more than one number (multimodal rope)"

_DECLINED_TYPES = {
    "dynamic": f"dynamic NTK: {_LENGTH}",
    "longrope": f"longrope: {_LENGTH}",
    "su": f"longrope under its old name: {_LENGTH}",
    "mrope": _IMAGE,
}
_DECLINED_FIELDS = {
    "qk_rope_head_dim": "multi-head latent attention stores K differently (kv_lora_rank)",
    "kv_lora_rank": "multi-head latent attention stores K differently (kv_lora_rank)",
    "dual_chunk_attention_config": "dual chunk attention rotates by positions within a chunk",
    "layer_rope_theta": "theta by layer is read by some engines and ignored by others",
    "mrope_section": _IMAGE,
    "xdrope_section": _IMAGE,
    "alibi": "its positions are not rotations (ALiBi)",
}
_DECLINED_PARAMETERS = {
    "mrope_section": _IMAGE,
    "xdrope_section": _IMAGE,
    "mrope_interleaved": _IMAGE,
}
_COMMON = frozenset(
    {"rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
)


def rope_of(config: Config, layer: int, pairing: Pairing | None = None) -> Rope | None:
    """Return the rope of ``layer`` (from 0) of a Hugging Face text config; None if it has none.

    ``config`` is a dict as Transformers 5 writes it (``rope_parameters``), or an older one
    (``rope_theta``, ``rope_scaling``) that states its theta; nothing is guessed. ``pairing`` is the
    pairing of the running engine, if it is known. It is required if engines differ (Llama 4), and
    otherwise checked against what this module expects.

    Raises `UnsupportedError`, with the reason, if K is not known to move by a rotation.
    Raises `ConfigError` for a layer that the model does not have.
    """
    for name, reason in _DECLINED_FIELDS.items():
        if config.get(name):
            _decline(config, f"{name} is set: {reason}")
    family = _family(config)
    config = family.reread(config)
    layers = _count(config, "num_hidden_layers")
    if not 0 <= layer < layers:
        raise ConfigError(f"layer {layer} of a model of {layers} layers: give 0 to {layers - 1}")
    if not family.rotates(config, layer):
        return None
    parameters = _parameters(config, layer, family)
    head_dim = _head_dim(config)
    return Rope(
        head_dim=head_dim,
        rotary_dim=_rotary_dim(config, parameters, head_dim, family),
        pairing=_pairing(config, family, pairing),
        theta=_number(config, parameters, "rope_theta"),
        scaling=_scaling(config, parameters, family),
    )


def _decline(config: Config, reason: str, change: str = _EXACT) -> NoReturn:
    raise UnsupportedError(f"rope of {config.get('model_type')!r}: {reason}; {change}")


def _family(config: Config) -> _Family:
    family = _FAMILIES.get(config.get("model_type", ""))
    if family is None:
        _decline(
            config,
            "which dimensions it pairs has not been checked; "
            f"checked are the text configs {', '.join(sorted(_FAMILIES))}",
        )
    return family


def _layer_type(config: Config, layer: int) -> str:
    types = config.get("layer_types")
    if isinstance(types, (list, tuple)) and layer < len(types):
        return str(types[layer])
    every = config.get("sliding_window_pattern")  # before Transformers 5: every n-th layer is full
    if isinstance(every, int) and every > 0:
        return "sliding_attention" if (layer + 1) % every else "full_attention"
    _decline(config, f"layer_types does not name layer {layer}", _LOAD)


def _parameters(config: Config, layer: int, family: _Family) -> dict[str, Any]:
    """Return a layer's rope parameters as one flat dict, whichever form the config has."""
    new, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if new and old and dict(new) != dict(old):
        _decline(config, "rope_parameters and rope_scaling are both set and differ", _LOAD)
    stated = dict(new or old)
    by_type = any(isinstance(value, Mapping) for value in stated.values())
    if by_type != family.layered:
        forms = {True: "one for each layer type", False: "one for all layers"}
        _decline(
            config, f"its rope parameters are {forms[by_type]}, not {forms[not by_type]}", _LOAD
        )
    if by_type:
        stated = dict(stated.get(_layer_type(config, layer)) or {})
    elif config.get("original_max_position_embeddings") is not None:
        stated["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    for name in ("rope_theta", "partial_rotary_factor"):
        if stated.get(name) is None and config.get(name) is not None:
            stated[name] = config[name]
    return stated


def _pairing(config: Config, family: _Family, given: Pairing | None) -> Pairing:
    if family.pairing is None and given is None:
        _decline(
            config,
            "some engines reorder its K to pair halves and some keep it interleaved",
            "pass pairing= as the engine's attention layer has it",
        )
    if family.pairing is not None and given not in (None, family.pairing):
        _decline(config, f"the engine's pairing is {given}; {family.pairing} was expected")
    return given or family.pairing or Pairing.NEOX


def _head_dim(config: Config) -> int:
    if config.get("head_dim"):
        return _count(config, "head_dim")
    return _count(config, "hidden_size") // _count(config, "num_attention_heads")


def _rotary_dim(config: Config, parameters: Config, head_dim: int, family: _Family) -> int:
    share = parameters.get("partial_rotary_factor")
    if not family.partial:
        if share not in (None, 1):
            _decline(config, f"only some engines use partial_rotary_factor ({share!r})")
        return head_dim
    share = _number(config, parameters, "partial_rotary_factor")
    rotary_dim = int(head_dim * share)
    if share > 1 or rotary_dim < 2 or rotary_dim % 2:
        _decline(config, f"{share} of {head_dim} dimensions is not a whole number of pairs")
    return rotary_dim


def _count(config: Config, name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        _decline(config, f"{name} is {value!r}; it must be a positive integer", _LOAD)
    return value


def _number(config: Config, parameters: Config, name: str, default: float | None = None) -> float:
    """Return a positive number; ``default``, if given, replaces a value that is None or absent."""
    value = parameters.get(name)
    value = default if value is None else value
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is None or not number or not 0 < value < math.inf:
        _decline(config, f"{name} is {value!r}; it must be a positive number", _LOAD)
    return float(value)


def _scaling(config: Config, parameters: Config, family: _Family) -> Scaling:
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if parameters.get("type", kind) != kind:
        _decline(config, f"rope_type {kind!r} and type {parameters['type']!r} differ", _LOAD)
    if kind in _DECLINED_TYPES:
        _decline(config, f"rope type {kind!r}: {_DECLINED_TYPES[kind]}")
    if kind not in family.scalings:
        _decline(config, f"rope type {kind!r} is not one of {', '.join(family.scalings)}")
    if family.layered and parameters.get("truncate") is False:
        _decline(config, "only some engines use truncate for one layer type")
    read, known = _SCALINGS[kind]
    for name in sorted(set(parameters) - _COMMON - known):
        if parameters[name] is not None:
            reason = _DECLINED_PARAMETERS.get(name, "not known to kvcore")
            _decline(config, f"rope parameter {name} of type {kind!r}: {reason}")
    return read(config, parameters)


def _read_default(config: Config, parameters: Config) -> Scaling:
    return UNSCALED


def _read_linear(config: Config, parameters: Config) -> Scaling:
    return Linear(_number(config, parameters, "factor"))


def _original_positions(config: Config, parameters: Config) -> float:
    """Return the trained context length; by default the maximum, as in Transformers."""
    name = "original_max_position_embeddings"
    return _number(config, parameters, name, default=config.get("max_position_embeddings"))


def _read_llama3(config: Config, parameters: Config) -> Scaling:
    low = _number(config, parameters, "low_freq_factor")
    high = _number(config, parameters, "high_freq_factor")
    if high <= low:
        _decline(config, f"high_freq_factor {high} is not above low_freq_factor {low}", _LOAD)
    factor = _number(config, parameters, "factor")
    return Llama3(factor, low, high, _original_positions(config, parameters))


def _read_yarn(config: Config, parameters: Config) -> Scaling:
    truncate = parameters.get("truncate", True)
    if not isinstance(truncate, bool):
        _decline(config, f"truncate is {truncate!r}; it must be true or false", _LOAD)
    factor = _number(config, parameters, "factor")
    return Yarn(
        factor=factor,
        original_positions=_original_positions(config, parameters),
        beta_fast=_number(config, parameters, "beta_fast", 32.0),
        beta_slow=_number(config, parameters, "beta_slow", 1.0),
        truncate=truncate,
        magnitude=_yarn_magnitude(config, parameters, factor),
    )


def _yarn_magnitude(config: Config, parameters: Config, factor: float) -> float:
    if parameters.get("attention_factor") is not None:
        return _number(config, parameters, "attention_factor")

    def grown(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        weights = (_number(config, parameters, name) for name in ("mscale", "mscale_all_dim"))
        over, under = map(grown, weights)
        return over / under
    return grown(1.0)


_YARN_KEYS = "factor beta_fast beta_slow truncate attention_factor mscale mscale_all_dim"
_SCALINGS: dict[str, tuple[Callable[[Config, Config], Scaling], frozenset[str]]] = {
    "default": (_read_default, frozenset()),
    "linear": (_read_linear, frozenset({"factor"})),
    "llama3": (_read_llama3, frozenset({"factor", "low_freq_factor", "high_freq_factor"})),
    "yarn": (_read_yarn, frozenset(_YARN_KEYS.split())),
}
