"""Every ingredient of KV: what changes its bytes, and where kvcore accounts for it.

    ModelIdentity   what the engine applies to every request      ─▶ fingerprint of the model
    MediaIdentity   what it applies to pictures, sound and video  ─▶ key of the blocks with a medium
    OTHER           what differs from request to request          ─▶ namespace, key, or left alone

This is the only list of them. The records have no defaults, so an adapter that forgets an
ingredient does not run. `tools.identity` writes docs/identity.md from it, and a test fails for an
ingredient that no test changes.

A value is in canonical form: two engines that apply the same give equal values, and engines that
apply something differently give different ones. None says that the engine applies nothing beyond
what the other ingredients say. What cannot be told apart is not shared: an identity names it in
``alone``, and all KV of such an engine is that engine's alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from kvcore.model.keys import KEY_BYTES, canonical_bytes

__all__ = [
    "OTHER",
    "Ingredient",
    "MediaIdentity",
    "ModelIdentity",
    "ingredients",
    "kv_fields",
    "split_config",
]

_FORMAT = b"kvcore-2"


class Ingredient(NamedTuple):
    """One thing that changes KV: what it is, and what each engine's adapter does with it."""

    name: str
    what: str
    vllm: str
    sglang: str
    trtllm: str


def _told(
    what: str, *, vllm: str, sglang: str, trtllm: str, younger: bool = False
) -> dict[str, Any]:
    """Describe an ingredient.

    One that is ``younger`` than the format is left out of a digest where it is None, so that what
    was stored before it existed is still found.
    """
    return {"told": (what, vllm, sglang, trtllm), "younger": younger}


def ingredients(record: type) -> tuple[Ingredient, ...]:
    """Return the ingredients that a record declares, in its order."""
    told = [(item.name, item.metadata.get("told")) for item in fields(record)]
    return tuple(Ingredient(name, *each) for name, each in told if each is not None)


def _digest(record: Any, kind: bytes) -> bytes:
    told = [(item, getattr(record, item.name)) for item in fields(record) if item.metadata]
    values = [
        [item.name, value]
        for item, value in told
        if value is not None or not item.metadata["younger"]
    ]
    return hashlib.sha256(_FORMAT + kind + canonical_bytes(values)).digest()[:KEY_BYTES]


@dataclass(frozen=True, kw_only=True)
class ModelIdentity:
    """What shapes the KV of every request of one engine.

    ``alone`` names what cannot be told from other KV, and what to do about it, one sentence each.
    """

    config: Mapping[str, object] = field(
        metadata=_told(
            "the checkpoint's configuration with its overrides, less the parts that only media use",
            vllm="as vLLM applies it, after `--hf-overrides`",
            sglang="as the checkpoint has it, and `--json-model-override-args`",
            trtllm="as the checkpoint has it, and `model_kwargs`",
        )
    )
    weights: bytes = field(
        metadata=_told(
            "the model's weights",
            vllm="samples of every tensor of a folder or file; name and commit on a hub, alone "
            "without a commit",
            sglang="as vLLM; an adapter that is merged at the start is added",
            trtllm="as vLLM",
        )
    )
    load: str | None = field(
        metadata=_told(
            "the way weights are loaded, unless it reads the files as they are",
            vllm="`--load-format`; alone if the weights are not those of the files: `dummy`, "
            "object stores, `tensorizer`, `ipc_cache`, loaders of plugins",
            sglang="`--load-format`; alone if the weights are not those of the files: `dummy`, "
            "`presharded`, `remote`, `remote_instance`, `flash_rl`, loaders of plugins, a weight "
            "cache, a checkpoint engine, ModelOpt's calibration at the start",
            trtllm="`load_format` and `checkpoint_format`; alone if the weights are not those of "
            "the files: `dummy`, `gms`, `MX`, a `checkpoint_loader`",
        )
    )
    code: object | None = field(
        metadata=_told(
            "model code that is not the engine's own for this architecture",
            vllm="`--model-impl`, model class overrides, and with `--trust-remote-code` the "
            "checkpoint's Python files",
            sglang="the class of the loaded model, unless it was compared with vLLM's (Llama, "
            "Mistral, Phi-3, Qwen2, Qwen3); the checkpoint's Python files where Transformers' "
            "code runs; alone for classes and `--forward-hooks` from outside SGLang",
            trtllm="the architecture, unless it was compared with vLLM's (Llama, Mistral, Qwen2, "
            "Qwen3); with `trust_remote_code` the checkpoint's Python files",
        )
    )
    compute_dtype: str = field(
        metadata=_told(
            "the type in which the model computes", vllm="yes", sglang="yes", trtllm="yes"
        )
    )
    quantization: object | None = field(
        metadata=_told(
            "quantisation of the weights that the configuration does not say",
            vllm="the method, `--quantization-config`, and the options of its loader",
            sglang="the engine and the method",
            trtllm="the engine, its version, the GPU's generation and all of `quant_config`, "
            "because the GPU decides types of activations",
        )
    )
    kv_dtype: str = field(
        metadata=_told(
            "the numbers in which KV is stored, with the variant of 8-bit formats",
            vllm="yes; formats with scales beside the values run untouched",
            sglang="yes; 8-bit KV runs untouched",
            trtllm="yes",
        )
    )
    kv_scales: object | None = field(
        metadata=_told(
            "the scales of quantised KV",
            vllm="those of the checkpoint are among its weights; the layers that keep plain KV and "
            "the attention backend are named; alone with `--calculate-kv-scales`",
            sglang="8-bit KV runs untouched",
            trtllm="whether the checkpoint's are loaded (`TRTLLM_LOAD_KV_SCALES`, or the "
            "version's default); never shared with other engines",
        )
    )
    rope: object | None = field(
        metadata=_told(
            "rope whose frequencies depend on the served length or on the engine (`longrope`, "
            "`dynamic`), for any type of layer",
            vllm="the engine and `--max-model-len`",
            sglang="the engine and the served length; a `longrope` that serves more than its "
            "original length runs untouched, because the other requests of a batch decide its "
            "factors",
            trtllm="the engine and `max_seq_len`",
        )
    )
    windows: object | None = field(
        metadata=_told(
            "windows of attention as the engine applies them; none is the default",
            vllm="those of its cache, so that an engine that ignores them does not share",
            sglang="those of the loaded layers: SGLang's Llama, Mistral and Phi-3 have none, "
            "whatever the configuration says; models with a pool of windows run untouched",
            trtllm="models with windows run untouched",
        )
    )
    attention: object | None = field(
        metadata=_told(
            "other settings of attention that change what it computes",
            vllm="non-causal attention, sparse indexers and their types",
            sglang="none: pools that hold anything but K and V run untouched",
            trtllm="the engine, for latent attention; sparse attention and "
            "`kv_cache_compression_config` run untouched",
        )
    )
    lora: object | None = field(
        metadata=_told(
            "settings of the engine that change what a LoRA adapter does",
            vllm="target modules, type, and the layout of experts",
            sglang="none: KV of an adapter is this engine's alone",
            trtllm="none: they choose memory and kernels",
        )
    )
    draft: object | None = field(
        metadata=_told(
            "the model that drafts tokens for speculation, if its KV is stored with the model's",
            vllm="method, configuration, weights, loading and types of the draft model, and "
            "whether it drafts in parallel",
            sglang="speculation runs untouched",
            trtllm="speculation runs untouched",
            younger=True,
        )
    )
    states: object | None = field(
        metadata=_told(
            "what resume points hold: the shapes and types of states (Mamba, gated "
            "delta net, convolutions), and of the ends of windows",
            vllm="yes, so that resume points are found by ranks of the same number only, unless "
            "states and windows are cut by the KV heads of the other layers; beside states the "
            "version of vLLM, the kind of device and the settings of its kernels "
            '(`--mamba-backend`); with `vllm.windows = "dense"` windows are part of blocks',
            sglang="models with states run untouched",
            trtllm="models with states run untouched",
            younger=True,
        )
    )
    packed: object | None = field(
        default=None,
        metadata=_told(
            "what decides the format of pages that are stored as the engine has them: two caches "
            "in a layer, layers with unlike heads, scales beside the values, packed latents, pages "
            "of which each rank has other tokens",
            vllm="its version, the device, the settings and variables that choose kernels, the "
            "layout, the number of ranks and the bytes of each layer's page, and with context "
            "parallelism both of its sizes and the interleave",
            sglang="such models run untouched",
            trtllm="such models run untouched",
            younger=True,
        ),
    )
    own: object | None = field(
        metadata=_told(
            "settings that only this engine has",
            vllm="`--additional-config`, language model without its media",
            sglang="every argument that is not known to be neutral and not at its default, "
            "environment variables that choose numbers, and `params.json`, `hf_quant_config.json` "
            "and the like",
            trtllm="as SGLang, with `env_overrides`",
        )
    )
    alone: tuple[str, ...]

    @property
    def fingerprint(self) -> bytes:
        """16 bytes over all ingredients, equal in all engines that apply the same."""
        return _digest(self, b"/model")


@dataclass(frozen=True, kw_only=True)
class MediaIdentity:
    """What shapes the KV of a medium beside its content and the model; text does not depend on it.

    It enters the key of every block with a medium, and of all blocks after it.
    """

    config: Mapping[str, object] = field(
        metadata=_told(
            "the parts of the checkpoint's configuration that only media use, such as "
            "`vision_config`",
            vllm="as vLLM applies it",
            sglang="left alone",
            trtllm="left alone",
        )
    )
    encoder: object | None = field(
        metadata=_told(
            "settings of the encoder: types, scales, pruning",
            vllm="type and scales of its attention, video pruning, normalising on the device",
            sglang="left alone",
            trtllm="left alone",
        )
    )

    def medium(self, content: bytes) -> bytes:
        """Return what identifies a medium in its blocks' keys, for the digest of its content."""
        return hashlib.sha256(_digest(self, b"/media") + content).digest()


OTHER = (
    Ingredient("tokens", "the prompt's tokens", "key", "key", "key"),
    Ingredient(
        "media content",
        "a picture, a sound or a video, as the model's encoder gets it",
        "key: a digest of the processed tensors, so that arguments and versions of the processor "
        "count. Never an identifier from a client. Left alone if the tensors are not at hand",
        "left alone; text before the medium is kept. HiCache's storage refuses such models",
        "left alone: versions tell a connector no digest, or one without shapes and arguments",
    ),
    Ingredient(
        "LoRA adapter",
        "weights and `adapter_config.json` of the adapter",
        "namespace: name and digest of its files. Left alone if they are not local, cannot be "
        "read, or changed without a reload",
        "alone: SGLang names adapters by numbers of its own. HiCache's storage refuses them",
        "namespace: name and digest; alone if the folder is not known or not local; left alone if "
        "it changed, or if its number was another adapter's",
    ),
    Ingredient(
        "tenant", "`cache_salt`, and `namespace.salt`", "namespace", "namespace", "namespace"
    ),
    Ingredient(
        "attention hooks",
        "plugins that change attention",
        "the model's fingerprint, by name and version",
        "not supported",
        "not supported",
    ),
    Ingredient(
        "order of the ranks' parts",
        "that a server has the parts of all ranks one by one where they are not cut by heads",
        "the model's fingerprint, of states that are not cut by heads, of windows with heads of "
        "their own, and of pages of vLLM's own format, if ranks have unlike parts",
        "such models run untouched",
        "such models run untouched",
    ),
    Ingredient(
        "weights in place",
        "weights that changed after the engine had started",
        "alone after a reset of the external cache, and after a reload that the workers see",
        "alone after an update of the weights, in HiCache's storage too",
        "runs untouched with `ray_worker_extension_cls`, through which they change, unless "
        '`namespace.weights_change` is "never"',
    ),
    Ingredient(
        "prompt embeddings",
        "vectors in place of tokens",
        "left alone",
        "left alone",
        "left alone",
    ),
    Ingredient(
        "streaming sessions",
        "prompts that grow while they run",
        "left alone",
        "left alone",
        "not supported",
    ),
)
"""What differs from request to request, or is accounted for outside the records."""


# ---------------------------------------------------------------------------------------------
# configurations

# Fields of a model's config that do not affect KV. All others count: a field that is missing here
# can cause a miss, but never a wrong hit. None of these names may mean anything else at any depth.
# fmt: off
_NOT_KV = frozenset({
    "_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "use_cache",
    "bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "sep_token_id",
    "cls_token_id", "initializer_range", "attention_dropout", "hidden_dropout", "embd_pdrop",
    "resid_pdrop", "attn_pdrop", "output_attentions", "output_hidden_states", "return_dict",
    "gradient_checkpointing", "problem_type", "id2label", "label2id", "finetuning_task",
    "task_specific_params", "tokenizer_class",
})
# fmt: on

_MEDIA = frozenset({"vision_config", "audio_config", "video_config", "speech_config"})
"""Parts of a config that only media use. Any other part counts for text as well."""


def kv_fields(value: object) -> object:
    """Return the part of a configuration that can change KV, as plain data.

    Fields that are None are left out, so that the result stays the same when a newer library writes
    more defaults of None.
    """
    if isinstance(value, Mapping):
        return {
            str(key): kv_fields(item)
            for key, item in value.items()
            if item is not None and key not in _NOT_KV
        }
    if isinstance(value, (list, tuple)):
        return [kv_fields(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(str(item) for item in value)
    return value if isinstance(value, (bool, int, float, str, bytes)) else str(value)


def split_config(
    whole: Mapping[str, Any], text: Mapping[str, Any]
) -> tuple[dict[str, object], dict[str, object]]:
    """Return the configuration that shapes all KV, and the parts that shape only that of media.

    ``whole`` is the checkpoint's configuration as the engine applies it, and ``text`` its text
    model's, which is the same for a model without media.
    """
    known, rest = kv_fields(text), kv_fields(whole)
    assert isinstance(rest, dict)
    media = {name: rest.pop(name) for name in sorted(_MEDIA & set(rest))}
    if rest == known:
        return {"text": known}, media
    return {"text": known, "outside": {k: v for k, v in rest.items() if v != known}}, media
