"""A real small model over paged KV in TensorRT-LLM's layout, on a CPU.

The layers' steps are those of `kvcore.fusion.reference.Decoder`. KV is written to one tensor for
each rank,

    [pages, layers, 2, heads of the rank * page_tokens * head_dim]     inner order HND or NHD

and attention reads it from there, so what a connector copies into a page decides the output. Pages
are NaN at first, so that missing KV shows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvcore.errors import ConfigError
from kvcore.fusion.plan import LayerKV
from kvcore.fusion.reference import Decoder
from kvcore.testing.engine.lora import read_lora
from kvcore.testing.engine.model import Rows

__all__ = ["PagedModel", "load", "merged"]

Hook = Callable[[int], None]


def load(folder: Path, dtype: str = "float32") -> Any:
    """Load the checkpoint in ``folder`` as a Hugging Face model."""
    import transformers

    hf: Any = transformers
    return hf.AutoModelForCausalLM.from_pretrained(str(folder), dtype=getattr(torch, dtype)).eval()


def merged(model: Any, lora: Path) -> Any:
    """Return a copy of ``model`` with the LoRA weights in the folder ``lora`` added to its own."""
    made = copy.deepcopy(model)
    adapter = read_lora(lora, model.dtype)
    with torch.no_grad():
        for (layer, name), delta in adapter.deltas.items():
            attention = made.model.layers[layer].self_attn
            getattr(attention, f"{name}_proj").weight += delta.matrix
    return made


class PagedModel:
    """A Hugging Face ``model`` with its KV in ``num_pages`` pages, split by heads over ``ranks``.

    ``pools[rank]`` is the tensor that a rank's connector gets.
    """

    def __init__(
        self, model: Any, num_pages: int, page_tokens: int, ranks: int = 1, order: str = "HND"
    ) -> None:
        config = model.config
        heads, dim = config.num_key_value_heads, config.head_dim
        if heads % ranks:
            raise ConfigError(f"{heads} KV heads over {ranks} ranks; supported is a divisor")
        self.decoder = Decoder(model)
        self._adapted: dict[Path | None, Decoder] = {None: self.decoder}
        self.page_tokens = page_tokens
        own = heads // ranks
        shape = (num_pages, config.num_hidden_layers, 2, own * page_tokens * dim)
        self.pools = [torch.full(shape, torch.nan, dtype=model.dtype) for _ in range(ranks)]
        inner = (own, page_tokens, dim) if order == "HND" else (page_tokens, own, dim)
        views = [pool.view(*shape[:3], *inner) for pool in self.pools]
        # [pages, layers, 2, tokens, heads, dim] for any order in memory
        self._views = [v.transpose(3, 4) if order == "HND" else v for v in views]

    def _decoder(self, rows: Rows) -> Decoder:
        """Return the model with a request's LoRA weights. Built when they are first used."""
        if rows.lora is not None and rows.lora not in self._adapted:
            self._adapted[rows.lora] = Decoder(merged(self.decoder.model, rows.lora))
        return self._adapted[rows.lora]

    @torch.inference_mode()
    def forward(self, batch: Sequence[Rows], before: Hook, after: Hook) -> list[int]:
        """Return the greedy next token of each request.

        ``before`` and ``after`` are called around each layer, once for the whole batch.
        """
        hidden = [self.decoder.embed(torch.tensor(rows.tokens)) for rows in batch]
        for layer in range(self.decoder.layers):
            before(layer)
            hidden = [self._layer(layer, h, r) for h, r in zip(hidden, batch, strict=True)]
            after(layer)
        return [int(self.decoder.logits(h[-1:])[0].argmax()) for h in hidden]

    def _layer(self, layer: int, hidden: Tensor, rows: Rows) -> Tensor:
        stop = rows.start + len(rows.tokens)
        positions = torch.arange(rows.start, stop)
        decoder = self._decoder(rows)
        own = decoder.project(layer, hidden, positions)
        table = torch.tensor(rows.pages)
        pages, offsets = table[positions // self.page_tokens], positions % self.page_tokens
        for kv, values in enumerate((own.keys, own.values)):
            parts = values.chunk(len(self.pools), dim=1)
            for view, part in zip(self._views, parts, strict=True):
                view[pages, layer, kv, offsets] = part
        everything = torch.arange(stop)
        pages, offsets = table[everything // self.page_tokens], everything % self.page_tokens
        keys, values = (
            torch.cat([view[pages, layer, kv, offsets] for view in self._views], dim=1)
            for kv in (0, 1)
        )
        attended = decoder.attend(layer, own.queries, positions, LayerKV(keys, values))
        return decoder.finish(layer, hidden, attended)
