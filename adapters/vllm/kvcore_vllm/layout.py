"""The layout of vLLM's K and V, as strides of its own tensors.

vLLM gives every layer a logical view ``[pages, heads, tokens, K|V content]``. The physical order is
in the view's strides. The CPU attention kernels pack that memory again, depending on the
instruction set: "vec" has K column-major, "amx" has K and V in tiles. Latents (MLA) lie as the view
says, on CPUs too. `kvcore_vllm.round_trip` checks what is said here against the engine's own write
operation before anything is stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvcore.errors import UnsupportedError
from kvcore.memory.layout import KVView, from_strides, vllm_cpu_layout
from kvcore.model.shape import BlockShape

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from kvcore.model.spec import LayerGroup

_CPU_ISAS = ("vec", "vec16", "amx")


def group_view(
    vllm_config: VllmConfig,
    kv_caches: dict[str, torch.Tensor],
    group: LayerGroup,
    shape: BlockShape,
) -> KVView:
    """Return the pages of one group's layers on this rank. ``shape`` is this rank's block.

    Raises UnsupportedError if kvcore does not know the layout.
    """
    tensors = [_kernel_view(vllm_config, kv_caches, name) for name in group.names]
    first = tensors[0]
    content = sum(shape.dims())
    for name, tensor in zip(group.names, tensors, strict=True):
        if tensor.dim() != 4 or tensor.shape[1] != shape.kv_heads or tensor.shape[3] != content:
            raise UnsupportedError(
                f"the cache of {name} has shape {tuple(tensor.shape)}; kvcore expects "
                f"[pages, {shape.kv_heads} heads, tokens, {content} of K and V content]"
            )
        if tensor.shape[2] < 1 or group.page_tokens % tensor.shape[2]:
            raise UnsupportedError(
                f"the cache of {name} has pages of {tensor.shape[2]} tokens, into which vLLM's "
                f"blocks of {group.page_tokens} tokens cannot be cut"
            )
    if first.device.type == "cpu" and shape.kv_factor == 2:
        isa = _cpu_isa(vllm_config, group.names[0])
        layout = vllm_cpu_layout(
            isa,
            layers=len(tensors),
            num_pages=first.shape[0],
            page_tokens=first.shape[2],
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            dtype=shape.dtype,
        )
        view = KVView(layout, tensors)
    else:
        view = KVView(from_strides(tensors, shape), tensors)
    view.check()
    return view


def _kernel_view(
    vllm_config: VllmConfig, kv_caches: dict[str, torch.Tensor], name: str
) -> torch.Tensor:
    """Return the tensor that the layer's attention reads.

    Its pages may be smaller than a scheduler block.
    """
    layer = vllm_config.compilation_config.static_forward_context.get(name)
    bound = getattr(layer, "kv_cache", None)
    return bound if isinstance(bound, torch.Tensor) and bound.dim() == 4 else kv_caches[name]


def _cpu_isa(vllm_config: VllmConfig, name: str) -> str:
    layer: Any = vllm_config.compilation_config.static_forward_context[name]
    isa = getattr(layer, "isa", None)
    if isa not in _CPU_ISAS:
        raise UnsupportedError(
            f"vLLM's CPU attention packs KV for {isa!r} here; kvcore knows {', '.join(_CPU_ISAS)}"
        )
    return str(isa)
