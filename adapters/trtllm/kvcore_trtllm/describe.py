"""The description of a model that TensorRT-LLM serves, and the checks that kvcore can serve it.

Facts come from the engine's arguments and the checkpoint's own config. The page size and the type
of KV come from the memory that the engine registers (`kvcore_trtllm.layout`), never from a setting:
the engine may have changed them, as it does for FlashMLA.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcore.errors import ConfigError, UnsupportedError
from kvcore.model.ingredients import ModelIdentity
from kvcore.model.shape import ITEM_BYTES, BlockShape
from kvcore.model.spec import LayerGroup, ModelDescription, head_range
from kvcore_trtllm.identity import model_identity, overridden

ORDERS = {"TRTLLM": "HND", "FLASHINFER": "HND", "VANILLA": "NHD"}
"""The inner order of a page, by attention backend."""

FLASH_MLA_PAGE = 64


@dataclass(frozen=True)
class ModelFacts:
    """Facts from the checkpoint and the engine's arguments. ``kv_heads`` are those of all ranks.

    ``config`` is the text model's, as the engine applies it.
    """

    layers: int
    kv_heads: int
    head_dim: int
    kv_factor: int
    order: str
    world_size: int
    page_tokens: int
    kv_dtype: str
    config: Mapping[str, Any]
    identity: ModelIdentity

    @property
    def mla(self) -> bool:
        """True if a token's KV is one latent, of multi-head latent attention."""
        return self.kv_factor == 1

    def head_range(self, rank: int) -> tuple[int, int]:
        """Return the KV heads [start, stop) of ``rank``."""
        return head_range(self.kv_heads, self.world_size, rank)


@dataclass(frozen=True)
class Description(ModelDescription):
    """The model as both halves see it, with the facts that it was derived from."""

    facts: ModelFacts


# -- settings -------------------------------------------------------------------------------


def check_settings(llm_args: Any) -> None:
    """Raise ConfigError for a setting of the engine that would make a connector's KV wrong.

    Called on every rank before anything is built, so that all ranks stop with the same message.
    """
    cache = llm_args.kv_cache_config
    if not cache.enable_block_reuse:
        raise ConfigError(
            "kv_cache_config.enable_block_reuse is off; the engine then does not ask the connector "
            "for cached blocks: turn it on"
        )
    if cache.enable_partial_reuse:
        raise ConfigError(
            "kv_cache_config.enable_partial_reuse is on; a request may then begin inside a page "
            "that the engine copies without the connector's knowledge: set it to false"
        )
    if getattr(cache, "host_cache_size", 0):
        raise ConfigError(
            f"kv_cache_config.host_cache_size is {cache.host_cache_size}; block ids may then name "
            "pages in the engine's own host memory: set it to 0, kvcore keeps KV in host memory"
        )
    for name in ("pipeline_parallel_size", "context_parallel_size", "max_beam_width"):
        value = getattr(llm_args, name, 1) or 1
        if value > 1:
            raise ConfigError(f"{name} is {value}; kvcore serves {name}=1 on TensorRT-LLM")
    if getattr(llm_args, "enable_attention_dp", False):
        raise ConfigError("enable_attention_dp is on; kvcore serves tensor parallelism without it")
    scheduler = getattr(llm_args, "scheduler_config", None)
    policy = getattr(scheduler, "capacity_scheduler_policy", "GUARANTEED_NO_EVICT")
    if "GUARANTEED_NO_EVICT" not in str(getattr(policy, "value", policy)):
        raise ConfigError(
            f"scheduler_config.capacity_scheduler_policy is {policy}; a paused request changes its "
            "pages and the connector does not learn of it: use GUARANTEED_NO_EVICT"
        )


def check_weights(llm_args: Any, weights_change: str) -> None:
    """Raise UnsupportedError if weights may be changed in place: no connector learns of it.

    TensorRT-LLM's own extension for RL resets the engine's cache after it, and nothing else.
    """
    given = []
    if weights_change == "any_time":
        given.append('namespace.weights_change = "any_time"')
    extension = getattr(llm_args, "ray_worker_extension_cls", None)
    if extension and weights_change != "never":
        given.append(f"ray_worker_extension_cls = {extension!r}")
    if given:
        raise UnsupportedError(
            f"{' and '.join(given)}: weights may be changed in place, and TensorRT-LLM tells no "
            'connector; if they stay, set namespace.weights_change to "never"'
        )


# -- the model ------------------------------------------------------------------------------


def describe(llm_args: Any) -> ModelFacts:
    """Return the facts of the model. Raises UnsupportedError if kvcore cannot serve it."""
    if getattr(llm_args, "speculative_config", None) is not None:
        raise UnsupportedError(
            "speculative decoding: TensorRT-LLM does not report draft tokens to a connector"
        )
    config, folder = _checkpoint(llm_args)
    config = overridden(config, llm_args)
    _check_layers(config, llm_args)
    world_size = int(llm_args.tensor_parallel_size or 1)
    mla = config.get("kv_lora_rank") is not None
    if mla and world_size > 1:
        raise UnsupportedError(
            f"MLA with tensor_parallel_size={world_size}: every rank holds the same latent; use 1"
        )
    heads = config["num_attention_heads"]
    kv_dtype = _kv_dtype(llm_args, config)
    return ModelFacts(
        layers=config["num_hidden_layers"],
        kv_heads=1 if mla else config.get("num_key_value_heads") or heads,
        head_dim=(
            config["kv_lora_rank"] + config["qk_rope_head_dim"]
            if mla
            else config.get("head_dim") or config["hidden_size"] // heads
        ),
        kv_factor=1 if mla else 2,
        order=_order(llm_args),
        world_size=world_size,
        page_tokens=int(llm_args.kv_cache_config.tokens_per_block),
        kv_dtype=kv_dtype,
        config=config,
        identity=model_identity(
            llm_args, config, folder, _compute_dtype(llm_args, config), kv_dtype
        ),
    )


def whole(facts: ModelFacts, groups: tuple[LayerGroup, ...], block_tokens: int) -> Description:
    """Return the description of a model whose pages are laid out in ``groups``."""
    shape = BlockShape(
        layers=facts.layers,
        kv_heads=facts.kv_heads,
        head_dim=facts.head_dim,
        kv_factor=facts.kv_factor,
        block_tokens=block_tokens,
        dtype=facts.kv_dtype,
    )
    told = facts.identity
    return Description(shape, groups, told.fingerprint, facts.world_size, facts, alone=told.alone)


def _checkpoint(llm_args: Any) -> tuple[dict[str, Any], str]:
    """Return the text model's config, and the checkpoint's folder, or "" if it is not local."""
    import transformers

    hf: Any = transformers
    places = [getattr(llm_args, "_hf_model_dir", None), llm_args.model]
    folder = next((str(place) for place in places if place and Path(place).is_dir()), "")
    try:
        loaded = hf.AutoConfig.from_pretrained(
            folder or str(llm_args.model),
            revision=getattr(llm_args, "revision", None),
            trust_remote_code=bool(getattr(llm_args, "trust_remote_code", False)),
        )
    except (OSError, ValueError) as error:
        raise UnsupportedError(
            f"the config of {llm_args.model} cannot be read: {error}; give a checkpoint in "
            "Hugging Face's format"
        ) from error
    return dict(loaded.get_text_config().to_dict()), folder


def _check_layers(config: Mapping[str, Any], llm_args: Any) -> None:
    kinds = set(config.get("layer_types") or ["full_attention"])
    windows = getattr(llm_args.kv_cache_config, "max_attention_window", None)
    windowed = config.get("sliding_window") and config.get("use_sliding_window", True)
    if kinds != {"full_attention"} or windowed or windows:
        raise UnsupportedError(
            f"layers of type {', '.join(sorted(kinds))} with a window of "
            f"{windows or config.get('sliding_window')}: on TensorRT-LLM kvcore serves full and "
            "multi-head latent attention"
        )
    if getattr(llm_args, "sparse_attention_config", None) or config.get("index_topk"):
        raise UnsupportedError(
            "sparse attention: its index is in a pool beside K and V that connectors do not get"
        )
    if getattr(llm_args, "kv_cache_compression_config", None) is not None:
        raise UnsupportedError(
            "kv_cache_compression_config: what it keeps of a prompt's KV depends on more than the "
            "prompt"
        )
    for name in ("num_hidden_layers", "num_attention_heads", "hidden_size"):
        if not isinstance(config.get(name), int):
            raise UnsupportedError(f"a config without {name}: not a decoder that kvcore knows")


def _order(llm_args: Any) -> str:
    backend = str(getattr(llm_args, "attn_backend", "TRTLLM"))
    if backend not in ORDERS:
        raise UnsupportedError(
            f"attn_backend {backend!r}: kvcore knows how {', '.join(ORDERS)} lay out a page"
        )
    return ORDERS[backend]


_NAMED_DTYPES = {"fp8": "float8_e4m3fn", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


def _kv_dtype(llm_args: Any, config: Mapping[str, Any]) -> str:
    """Return the torch name of KV's type. "auto" is the model's, or what its weights ask for."""
    name = str(llm_args.kv_cache_config.dtype).lower()
    algorithm = getattr(getattr(llm_args, "quant_config", None), "kv_cache_quant_algo", None)
    if name == "auto" and algorithm is not None:
        name = str(getattr(algorithm, "value", algorithm)).lower()
    if name in ("nvfp4", "fp4"):
        raise UnsupportedError(
            "KV in NVFP4: its block scales are in a pool that connectors do not get; use fp8"
        )
    found = _NAMED_DTYPES.get(name, _compute_dtype(llm_args, config) if name == "auto" else name)
    if found not in ITEM_BYTES:
        raise UnsupportedError(
            f"KV of type {name!r}; kvcore serves {', '.join(sorted(ITEM_BYTES))}"
        )
    return found


def _compute_dtype(llm_args: Any, config: Mapping[str, Any]) -> str:
    name = str(getattr(llm_args, "dtype", "auto") or "auto")
    if name == "auto":
        name = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    return name.removeprefix("torch.")
