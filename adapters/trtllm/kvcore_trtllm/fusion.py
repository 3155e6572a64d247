"""Fusion on TensorRT-LLM: the engine's decoder layers, run for a blend.

A decoder layer takes (position_ids, hidden_states, attn_metadata, residual). Its attention module
makes q, k and v, applies RoPE and calls ``forward_impl``. During a blend's call kvcore replaces
that method. If the backend's kernel would apply RoPE (`rope_fusion`), the module does so instead.
The rest of the layer is the engine's. kvcore calls the modules' ``forward`` directly, because the
connector's own hooks wrap ``__call__``.

This holds for TensorRT-LLM 1.2 and 1.3. A model that does not fit raises UnsupportedError, and
kvcore serves exact prefixes only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvcore.connector.engine_layers import (
    PREFIXES_ONLY,
    check_architecture,
    check_arguments,
    check_count,
    refuse_unlike,
)
from kvcore.connector.fusion_worker import EngineLayers, ServedRequest
from kvcore.errors import UnsupportedError
from kvcore.fusion.attend import Attention
from kvcore.fusion.decoder import Attend, HiddenState
from kvcore.fusion.plan import LayerKV
from kvcore.fusion.rope import Rope, rope_of
from kvcore.memory.layout import KVView
from kvcore.model.shape import ITEM_BYTES
from kvcore_trtllm.describe import ModelFacts

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
"""Models whose forward is the embedding and then every layer, with nothing in between."""

KNOWN = "TensorRT-LLM 1.2 and 1.3"
LAYER_ARGUMENTS = ("position_ids", "hidden_states", "attn_metadata", "residual")
ATTENTION_ARGUMENTS = ("q", "k", "v", "attn_metadata")

Gather = Callable[[bytes], list[bytes]]
"""Returns the bytes that each rank passed, in order of rank. A collective."""


def ropes_of(llm_args: Any, facts: ModelFacts) -> tuple[Rope | None, ...]:
    """Return the rope of every layer. Raises UnsupportedError if the model cannot be blended."""
    check_architecture(facts.config.get("architectures") or [], ARCHITECTURES)
    unlike = {
        "latent attention": facts.mla,
        f"K kept as {facts.kv_dtype}": ITEM_BYTES[facts.kv_dtype] == 1,
        "quantised weights": facts.identity.quantization,
        "torch_compile_config": getattr(llm_args, "torch_compile_config", None),
        "sparse_attention_config": getattr(llm_args, "sparse_attention_config", None),
    }
    refuse_unlike(unlike, "a model with")
    return tuple(rope_of(facts.config, layer) for layer in range(facts.layers))


class TrtllmLayers(EngineLayers):
    """The decoder of a loaded model on one rank, and its pages. Executor's thread only.

    ``view`` is the rank's pages of all layers. ``rotary`` returns the engine's rotary embedding for
    a module that leaves RoPE to its kernel. ``max_rows`` is the most rows of one call. ``gather``
    is None for a rank that is alone.
    """

    def __init__(
        self,
        model: Any,
        view: KVView,
        rotary: Callable[[Any], Any],
        *,
        max_rows: int | None,
        gather: Gather | None,
    ) -> None:
        decoder = model.model
        self.layers = view.layout.layers
        self._embed = decoder.embed_tokens
        self._modules: list[Any] = list(decoder.layers)[: self.layers]
        check_count(self._modules, self.layers)
        self._attention: list[Any] = [module.self_attn for module in self._modules]
        for module in self._modules:
            check_arguments(module.forward, LAYER_ARGUMENTS, KNOWN)
            check_arguments(module.self_attn.forward_impl, ATTENTION_ARGUMENTS, KNOWN)
        self.attention = tuple(_attention(module) for module in self._attention)
        self._rotary = [_rotating(module, rotary) for module in self._attention]
        self._planes = [
            [_rows_of(view, layer, kv) for kv in (0, 1)] for layer in range(self.layers)
        ]
        self._page_tokens = view.layout.page_tokens
        self.max_rows = max_rows  # the engine has measured its memory for so many
        self._gather = gather
        self.collective = gather is not None

    def serving(self, served: ServedRequest) -> AbstractContextManager[None]:
        """Return an empty context: requests with a LoRA adapter are not blended."""
        return nullcontext()

    def embed(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self._embed(tokens.to(torch.int32))
        return embedded

    def run(self, layer: int, positions: Tensor, state: HiddenState, attend: Attend) -> HiddenState:
        rows = len(positions)
        metadata = SimpleNamespace(num_tokens=rows, num_contexts=1, all_rank_num_tokens=None)
        with _answered(self._attention[layer], self._rotary[layer], attend):
            hidden, residual = self._modules[layer].forward(
                position_ids=positions.to(torch.int32)[None],
                hidden_states=state.hidden,
                attn_metadata=metadata,
                residual=state.residual,
            )
        if not isinstance(hidden, Tensor):
            raise UnsupportedError(f"a decoder layer that returns a {type(hidden).__name__}")
        return HiddenState(hidden, residual)

    def reduce(self, scores: Tensor) -> Tensor:
        """Return the sum over all ranks, in order of rank, so that every rank has the same bits."""
        if self._gather is None:
            return scores
        own = scores.detach().to("cpu", torch.float32).contiguous()
        parts = self._gather(own.numpy().tobytes())
        total = np.sum([np.frombuffer(part, dtype=np.float32) for part in parts], axis=0)
        return torch.from_numpy(total).view(own.shape).to(scores.device)

    def agree(self, well: bool) -> bool:
        return well if self._gather is None else all(map(any, self._gather(bytes([well]))))

    def write(self, layer: int, kv: LayerKV, slots: Tensor) -> None:
        pages, offsets = slots // self._page_tokens, slots % self._page_tokens
        for plane, rows in zip(self._planes[layer], (kv.keys, kv.values), strict=True):
            plane[pages, offsets] = rows.to(plane.dtype)


def _attention(module: Any) -> Attention:
    """Return what a module's attention computes. Raises UnsupportedError if kvcore's would not."""
    if getattr(module, "attention_chunk_size", None) is not None:
        raise UnsupportedError(f"chunked attention is not supported by fusion; {PREFIXES_ONLY}")
    for name in ("head_dim", "q_size", "kv_size", "rope_fusion", "split_qkv"):
        if not hasattr(module, name):
            raise UnsupportedError(f"{type(module).__name__} has no {name}: fusion knows {KNOWN}")
    return Attention(1.0 / (module.head_dim**0.5 * getattr(module, "q_scaling", 1.0)))


def _rotating(module: Any, rotary: Callable[[Any], Any]) -> Any:
    """Return what a module applies RoPE with if its kernel would; None if the module does so."""
    if not module.rope_fusion:
        return None
    if getattr(module, "pos_embd_params", None) is None:
        raise UnsupportedError(
            f"{type(module).__name__} does not say which RoPE its kernel applies"
        )
    return rotary(module)


def _rows_of(view: KVView, layer: int, kv: int) -> Tensor:
    """Return K or V of a layer in the engine's memory as [pages, page_tokens, heads, dim]."""
    layout, plane = view.layout, view.layout.planes[layer][kv]
    if plane.token.inner != 1 or plane.dim.inner != 1:
        raise UnsupportedError(
            f"pages with packed elements are not supported by fusion; {PREFIXES_ONLY}"
        )
    tensor = view.tensors[plane.tensor]
    size = (layout.num_pages, layout.page_tokens, layout.kv_heads, plane.head_dim)
    stride = (plane.page, plane.token.stride, plane.head, plane.dim.stride)
    return tensor.as_strided(size, stride, tensor.storage_offset() + plane.offset)


@contextmanager
def _answered(module: Any, rotary: Any, attend: Attend) -> Iterator[None]:
    """In this block, replace a module's attention by ``attend`` and its RoPE by ``rotary``."""

    def answer(q: Tensor, k: Tensor | None, v: Tensor | None, *rest: Any, **named: Any) -> Tensor:
        if named.get("attention_sinks") is not None:
            raise UnsupportedError(f"attention sinks are not supported by fusion; {PREFIXES_ONLY}")
        q, k, v = module.split_qkv(q, k, v)
        assert k is not None
        assert v is not None
        heads = (len(q), -1, module.head_dim)
        return attend(q.reshape(heads), k.reshape(heads), v.reshape(heads)).flatten(1)

    # Set in the instance's dictionary: a module's __setattr__ would register what it is given.
    own = vars(module)
    changed: dict[str, Any] = {"forward_impl": answer}
    if rotary is not None:
        changed |= {"rope_fusion": False, "rotary_emb": rotary}
    before = {name: own[name] for name in changed if name in own}
    own.update(changed)
    try:
        yield
    finally:
        for name in changed:
            del own[name]
        own.update(before)
