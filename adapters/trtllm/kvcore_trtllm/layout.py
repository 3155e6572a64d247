"""The layout of TensorRT-LLM's KV: views that kvcore can copy, from the memory it registers.

1.2 and 1.3   one tensor ``[pages, layers, kv, heads * tokens * dim]``
newer         regions by layer group; each is a run of (layer, role) buffers, repeated for each page
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvcore.errors import UnsupportedError
from kvcore.memory.layout import Axis, KVLayout, KVView, Plane, trtllm_layout
from kvcore.model.shape import ITEM_BYTES, BlockShape
from kvcore.model.spec import LayerGroup
from kvcore_trtllm.describe import FLASH_MLA_PAGE, ModelFacts

if TYPE_CHECKING:
    import torch

_log = logging.getLogger("kvcore.trtllm")

_ROLES = ("key", "value")


@dataclass(frozen=True)
class Memory:
    """The KV memory of one rank: ``facts`` corrected by the memory, and a view for each group."""

    facts: ModelFacts
    groups: tuple[LayerGroup, ...]
    views: tuple[KVView, ...]


def of_pool(pool: torch.Tensor, facts: ModelFacts, rank: int) -> Memory:
    """Read the one tensor of a rank. Raises UnsupportedError if it contradicts ``facts``."""
    start, stop = facts.head_range(rank)
    heads = stop - start
    expected = f"[pages, {facts.layers} layers, {facts.kv_factor}, n * {heads * facts.head_dim}]"
    shape = tuple(pool.shape)
    if len(shape) != 4 or shape[1:3] != (facts.layers, facts.kv_factor):
        raise UnsupportedError(f"a KV pool of shape {shape}; kvcore expects {expected}")
    page_tokens, rest = divmod(shape[3], heads * facts.head_dim)
    if rest or not page_tokens or not pool.is_contiguous():
        raise UnsupportedError(f"a KV pool of shape {shape}; kvcore expects {expected}, contiguous")
    _check_page(page_tokens, facts)
    facts = replace(facts, kv_dtype=_dtype(pool, facts.kv_dtype), page_tokens=page_tokens)
    block = BlockShape(
        facts.layers, heads, facts.head_dim, page_tokens, facts.kv_dtype, facts.kv_factor
    )
    view = KVView(trtllm_layout(block, shape[0], page_tokens, facts.order), [pool])
    view.check()
    return Memory(facts, (LayerGroup(0, page_tokens, tuple(range(facts.layers))),), (view,))


def _check_page(page_tokens: int, facts: ModelFacts) -> None:
    """Raise UnsupportedError if a page has another size than the setting, except for FlashMLA."""
    if page_tokens == facts.page_tokens:
        return
    if facts.mla and page_tokens == FLASH_MLA_PAGE:
        _log.info("pages hold %d tokens for FlashMLA, not %d", page_tokens, facts.page_tokens)
        return
    raise UnsupportedError(
        f"the KV pool has pages of {page_tokens} tokens and tokens_per_block is "
        f"{facts.page_tokens}: its elements are packed in an unknown way"
    )


def _dtype(tensor: torch.Tensor, told: str) -> str:
    """Return the type of the memory. It may differ from ``told`` only in plain types.

    The meaning of 8-bit numbers is known from the settings alone.
    """
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in ITEM_BYTES:
        raise UnsupportedError(f"KV of type {name}; kvcore moves {', '.join(ITEM_BYTES)}")
    if name != told and 1 in (ITEM_BYTES[name], ITEM_BYTES.get(told)):
        raise UnsupportedError(
            f"KV of type {name} in memory, and {told} by the settings: its format is unknown"
        )
    return name


def of_regions(layout: Any, facts: ModelFacts, rank: int) -> Memory:
    """Read the regions of a rank (the engine's ``KvCacheLayout``): one view for each layer group.

    Raises UnsupportedError if they contradict ``facts``.
    """
    import torch

    start, stop = facts.head_range(rank)
    facts = replace(facts, page_tokens=int(layout.tokens_per_block))
    names = sorted(layer for group in layout.groups for layer in group.layer_ids)
    if len(names) != facts.layers or len(set(names)) != facts.layers:
        raise UnsupportedError(f"a KV layout of layers {names}; the model has {facts.layers}")
    canonical = {layer: i for i, layer in enumerate(names)}
    dtype = getattr(torch, facts.kv_dtype)
    groups, views = [], []
    for index, group in enumerate(layout.groups):
        if getattr(group, "replicated_regions", ()):
            raise UnsupportedError("a KV layout with caches beside K and V")
        planes, tensors = _planes(group.regions, facts, stop - start, dtype)
        layers = tuple(sorted(planes, key=canonical.__getitem__))
        pages = min(region.num_slots for region in group.regions)
        made = KVLayout(
            facts.kv_dtype,
            pages,
            facts.page_tokens,
            stop - start,
            tuple(tuple(planes[layer]) for layer in layers),
        )
        view = KVView(made, tensors)
        view.check()
        views.append(view)
        order = tuple(canonical[layer] for layer in layers)
        groups.append(LayerGroup(index, facts.page_tokens, order))
    return Memory(facts, tuple(groups), tuple(views))


def _planes(
    regions: Sequence[Any], facts: ModelFacts, heads: int, dtype: torch.dtype
) -> tuple[dict[int, list[Plane]], list[torch.Tensor]]:
    """Return the planes of K and V by layer id, and the tensors that they index."""
    tokens, dim = facts.page_tokens, facts.head_dim
    part = heads * tokens * dim  # elements of one buffer in one page
    head, token = (tokens * dim, dim) if facts.order == "HND" else (dim, heads * dim)
    found: dict[int, dict[str, Plane]] = {}
    tensors = []
    for number, region in enumerate(regions):
        tensor = region.as_tensor(dtype)
        if region.size != len(region.buffers) * part * tensor.element_size():
            raise UnsupportedError(
                f"a KV region of {region.size} bytes a page for {len(region.buffers)} buffers of "
                f"{part * tensor.element_size()}: its buffers have another size"
            )
        for place, buffer in enumerate(region.buffers):
            role = str(buffer.role).lower().rpartition(".")[2]
            if role not in _ROLES or getattr(buffer, "expansion", 1) != 1:
                raise UnsupportedError(f"a KV buffer of role {buffer.role!r}; kvcore knows K and V")
            found.setdefault(buffer.layer_id, {})[role] = Plane(
                number, place * part, tensor.stride(0), head, Axis(token), Axis(1), dim
            )
        tensors.append(tensor)
    wanted = _ROLES[: facts.kv_factor]
    if any(set(planes) != set(wanted) for planes in found.values()):
        raise UnsupportedError(f"a layer whose buffers are not {' and '.join(wanted)}")
    return {layer: [planes[role] for role in wanted] for layer, planes in found.items()}, tensors
