"""A vLLM on a CPU that does what vLLM does for other models or on other devices only.

Put this folder on PYTHONPATH and kvcore imports it before the engine has pages. ``VARIANT`` names
what is wanted:

    fewer    the scheduler takes whole scheduler blocks of what kvcore offers, as with a replayed
             window (``Scheduler.prefix_replay_tokens``)
    half     the scheduler takes half of what kvcore offers
    none     the scheduler takes nothing of what kvcore offers, as for prompt logprobs
    kernel   the attention backend takes pages of 32 tokens, as FlashInfer's and FlashMLA's do
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

TAKEN: dict[str, Callable[[int, int], int]] = {
    "fewer": lambda offered, page: offered - offered % page,
    "half": lambda offered, page: offered // 2,
    "none": lambda offered, page: 0,
}


def _take(taken: Callable[[int, int], int]) -> None:
    from kvcore_vllm.connector import KVCoreConnector

    ask = KVCoreConnector.get_num_new_matched_tokens

    def asked(self: Any, request: Any, computed: int) -> tuple[int | None, bool]:
        offered, waits = ask(self, request, computed)
        if not offered:
            return offered, waits
        count = taken(offered, self._vllm_config.cache_config.block_size)
        return count, waits and count > 0

    setattr(KVCoreConnector, "get_num_new_matched_tokens", asked)  # noqa: B010


def _split_pages() -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes = staticmethod(lambda kv_cache_spec=None: [32])
    setattr(CPUAttentionBackend, "get_supported_kernel_block_sizes", sizes)  # noqa: B010


wanted = os.environ.get("VARIANT", "")
if wanted in TAKEN:
    _take(TAKEN[wanted])
elif wanted == "kernel":
    _split_pages()
