"""Context parallelism on a CPU, for which vLLM has no attention kernel.

Put this folder on PYTHONPATH, and vLLM finds it by its entry point. Each rank keeps K and V of its
own tokens only, where vLLM's slots say. To attend, the ranks of a group gather the pages of all,
and each computes its own heads from them, in torch. Pages have a format of their own: for each
token K, then V.

Model Runner V2 computes the slots with vLLM's own kernel, in Triton's interpreter. V1 without
Triton has a kernel that knows no context parallelism, so here is another one.

While the file exists that the environment variable ``KVCORE_CONTEXT`` names, loads of the last rank
take the bytes of another block.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

MISTAKE = os.environ.get("KVCORE_CONTEXT", "")


def install() -> None:
    """Have vLLM's attention on CPUs serve context parallelism, in pages of 8 tokens too."""
    from vllm.v1.attention.backend import MultipleOf
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

    sizes = staticmethod(lambda kv_cache_spec=None: [MultipleOf(8)])
    setattr(CPUAttentionBackend, "get_supported_kernel_block_sizes", sizes)  # noqa: B010
    attention: Any = CPUAttentionBackendImpl
    attention.supports_dcp = attention.can_return_lse_for_decode = True
    attention.do_kv_cache_update = _write
    attention.forward = _attend
    _remember_interleave(attention)
    _gather_latents()
    _map_slots()
    if os.environ.get("TRITON_INTERPRET") == "1":
        _keep_masks()
    if MISTAKE:
        _read_wrong_pages()


def _gather_latents() -> None:
    """Have latent attention read the pages of all ranks, as if one rank had them.

    There each gathered page is cut into as many of the kernel's as there are ranks.
    """
    import torch
    from vllm.distributed import get_dcp_group
    from vllm.model_executor.layers.attention import mla_attention
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

    module: Any = mla_attention
    kind: Any = CPUMLAImpl
    kind.supports_dcp = kind.can_return_lse_for_decode = True
    _remember_interleave(kind)

    def one_rank() -> None:
        raise AssertionError

    module.get_dcp_group = one_rank  # it plans for the pages of one rank
    _cut_pages(module.MLACommonMetadataBuilder)

    def gathered(right: Any) -> Any:
        def read(self: Any, q: Any, cache: Any, *rest: Any, **named: Any) -> Any:
            group = get_dcp_group()
            pages = group.all_gather(cache[None].contiguous(), dim=0)
            count, size = group.world_size, cache.shape[1]
            _, rank, slot = place(torch.arange(count * size), size, count, self.interleave)
            whole = pages[rank, :, slot].transpose(0, 1).reshape(-1, size, cache.shape[2])
            return right(self, q, whole, *rest, **named)

        return read

    for name in ("forward_mqa", "_compute_prefill_context"):
        setattr(kind, name, gathered(getattr(kind, name)))


def _cut_pages(builder: Any) -> None:
    import torch
    from vllm.distributed import get_dcp_group

    right = builder.build

    def build(self: Any, *args: Any, **named: Any) -> Any:
        made, count = right(self, *args, **named), get_dcp_group().world_size
        for part in (made.prefill, made.decode):
            if part is not None:
                table = part.block_table[..., None] * count + torch.arange(count)
                part.block_table = table.flatten(1).to(part.block_table.dtype)
        return made

    builder.build = build


def _remember_interleave(attention: Any) -> None:
    from vllm.config import get_current_vllm_config

    right = attention.__init__

    def made(self: Any, *args: Any, **named: Any) -> None:
        right(self, *args, **named)
        self.interleave = get_current_vllm_config().parallel_config.cp_kv_cache_interleave_size

    attention.__init__ = made


def _map_slots() -> None:
    from vllm.utils import cpu_triton_utils

    module: Any = cpu_triton_utils
    if (older := getattr(module, "compute_slot_mapping_kernel", None)) is not None:  # vLLM 0.30
        older.func = functools.wraps(older.func)(_older_slots)
    else:  # workers register it where Triton is missing
        module._compute_slot_mapping_kernel_impl = _slots


def _keep_masks() -> None:
    """Let loads take a mask that was put together from others, as the kernel of V2's slots does.

    The interpreter keeps these as numbers 0 and 1, and its loads want truth values.
    """
    from triton.runtime import interpreter  # type: ignore[import-untyped]

    builder: Any = interpreter.InterpreterBuilder
    right = builder.create_masked_load

    def load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        mask.data = mask.data.astype(bool)
        return right(self, pointers, mask, *rest)

    builder.create_masked_load = load


def place(token: Any, page_tokens: int, ranks: int, interleave: int) -> tuple[Any, Any, Any]:
    """Return the page of a token in its request, the rank that has it, and its slot there."""
    page, turn = token // (page_tokens * ranks), token % (page_tokens * ranks)
    rank = turn // interleave % ranks
    slot = turn // (ranks * interleave) * interleave + turn % interleave
    return page, rank, slot


def _slots(
    num_tokens: int,
    max_num_tokens: int,
    query_start_loc: Any,
    positions: Any,
    block_table: Any,
    block_table_stride: int,
    slot_mapping: Any,
    KV_CACHE_BLOCK_SIZE: int,
    TOTAL_CP_WORLD_SIZE: int,
    TOTAL_CP_RANK: int,
    CP_KV_CACHE_INTERLEAVE_SIZE: int,
    PAD_ID: int,
    BLOCK_SIZE: int,
) -> None:
    slot_mapping[num_tokens:max_num_tokens] = PAD_ID
    for request in range(len(query_start_loc) - 1):
        start, stop = int(query_start_loc[request]), int(query_start_loc[request + 1])
        if stop <= start:
            continue
        page, rank, slot = place(
            positions[start:stop],
            KV_CACHE_BLOCK_SIZE,
            TOTAL_CP_WORLD_SIZE,
            CP_KV_CACHE_INTERLEAVE_SIZE,
        )
        found = block_table[request, page].long() * KV_CACHE_BLOCK_SIZE + slot
        slot_mapping[start:stop] = found.where(rank == TOTAL_CP_RANK, PAD_ID)


def _older_slots(**named: Any) -> None:
    if named.pop("BLOCKS_PER_KV_BLOCK", 1) != 1:
        raise NotImplementedError("pages that kernels cut")
    del named["block_size"]
    _slots(**named)


def _write(self: Any, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
    import torch

    slots = slot_mapping[: len(key)]
    own = slots >= 0
    page_tokens = kv_cache.shape[2]
    rows = torch.cat([key, value], dim=-1)[: len(slots)][own].to(kv_cache.dtype)
    kv_cache[slots[own] // page_tokens, :, slots[own] % page_tokens] = rows


def _attend(
    self: Any,
    layer: Any,
    query: Any,
    key: Any,
    value: Any,
    kv_cache: Any,
    attn_metadata: Any,
    output: Any,
    *rest: Any,
    **named: Any,
) -> Any:
    import torch
    from vllm.distributed import get_dcp_group

    if attn_metadata is None:
        return output
    group = get_dcp_group()
    size, dim = kv_cache.shape[2], self.head_size
    starts = attn_metadata.query_start_loc.tolist()
    for request, tokens in enumerate(attn_metadata.seq_lens.tolist()):
        start, stop = starts[request : request + 2]
        if stop <= start:
            continue
        count = -(-tokens // (size * group.world_size))
        own = kv_cache[attn_metadata.block_table[request, :count].long()].contiguous()
        pages = group.all_gather(own[None], dim=0)
        page, rank, slot = place(torch.arange(tokens), size, group.world_size, self.interleave)
        kept = pages[rank, page, :, slot]  # [tokens, heads, K then V]
        kept = kept.repeat_interleave(self.num_queries_per_kv, dim=1).transpose(0, 1)
        asked = query[start:stop].view(stop - start, -1, dim).transpose(0, 1)
        scores = asked @ kept[..., :dim].transpose(1, 2) * self.scale
        later = torch.ones(stop - start, tokens).triu(tokens - (stop - start) + 1).bool()
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        found = (weights @ kept[..., dim:]).transpose(0, 1)
        output[start:stop] = found.reshape(output[start:stop].shape)
    return output


def _read_wrong_pages() -> None:
    import numpy as np
    from vllm.distributed import get_dcp_group

    from kvcore.worker.executors import DeviceCopy

    right = DeviceCopy._copy

    def wrong(self: Any, view: Any, units: Any, arena: Any, slots: Any, *rest: Any) -> None:
        if self._to_device and Path(MISTAKE).exists() and get_dcp_group().is_last_rank:
            slots = np.bitwise_xor(slots, 1)
        right(self, view, units, arena, slots, *rest)

    setattr(DeviceCopy, "_copy", wrong)  # noqa: B010
