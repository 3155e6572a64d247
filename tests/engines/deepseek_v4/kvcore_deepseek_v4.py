"""What vLLM 0.32 needs to run DeepSeek V4 on a CPU, beside Triton's interpreter.

Put this folder on PYTHONPATH, and vLLM finds it by its entry point. Its path for CPUs leaves out
two kinds of layers that V4.1 has, and then fails to name them. The kernels below are replaced by
torch, because the interpreter takes a second for each of them at every prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def install() -> None:
    """Complete vLLM's path for CPUs, in this process."""
    from vllm.models.deepseek_v4.cpu import cpu_mla
    from vllm.v1.attention.backends.mla import compressor_utils, sparse_swa
    from vllm.v1.attention.ops import metadata

    builder = cpu_mla.DeepseekV4CPUSparseSWAMetadataBuilder
    right = builder.build_tile_scheduler

    def complete(self: Any, tokens: int) -> dict[str, Any]:
        return {"c1a": None, "c2a": None, **right(self, tokens)}

    builder.build_tile_scheduler = complete
    metadata._token_request_mapping_kernel = _Requests()
    compressor_utils._COMPRESSED_SLOT_MAPPING_KERNEL = _compressed_slots
    # The attention of CPUs computes again what these return, and does not read it.
    sparse_swa._COMPUTE_SWA_INDICES_AND_LENS_KERNEL = _nothing
    sparse_swa._COMPUTE_PREFILL_METADATA_KERNEL = _nothing


def _nothing(*_: Any, **__: Any) -> None:
    pass


class _Requests:
    """The request of each token, called as a kernel of Triton is."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._fill

    @staticmethod
    def _fill(starts: Any, output: Any, requests: int, mapped: int, tokens: int, **_: Any) -> None:
        import torch

        token = torch.arange(tokens, dtype=starts.dtype)
        found = torch.searchsorted(starts[1:], token, right=True).clamp(max=requests - 1)
        output[:tokens] = torch.where(token < mapped, found, 0)


def _compressed_slots(
    output: Any,
    slots: Any,
    starts: Any,
    lengths: Any,
    pages: Any,
    page_states: int,
    ratio: int,
    ranks: int,
    interleave: int,
    **_: Any,
) -> None:
    """Give the last of every ``ratio`` tokens the slot of their common state, and others -1."""
    import torch

    assert ranks == 1
    for request in range(pages.shape[0]):
        start, stop = int(starts[request]), int(starts[request + 1])
        position = torch.arange(stop - start) + int(lengths[request]) - (stop - start)
        state = position // ratio
        own = pages[request, (state // page_states).clamp(max=pages.shape[1] - 1)].long()
        last = ((position + 1) % ratio == 0) & (slots[start:stop] != -1)
        output[start:stop] = torch.where(last, own * page_states + state % page_states, -1)
