"""A vLLM on a CPU that does what vLLM does for other models or on other devices only.

Put this folder on PYTHONPATH and kvcore imports it before the engine has pages. ``VARIANT`` names
what is wanted:

    fewer    the scheduler takes whole scheduler blocks of what kvcore offers, as with a replayed
             window (``Scheduler.prefix_replay_tokens``)
    half     the scheduler takes half of what kvcore offers
    none     the scheduler takes nothing of what kvcore offers, as for prompt logprobs
    kernel   the attention backend takes pages of 32 tokens, as FlashInfer's and FlashMLA's do

``SEEN`` names a file to which a hook around attention writes the pages of each prefill.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcore.plugins import AttentionPlugin, hookimpl

if TYPE_CHECKING:
    from kvcore.model.shape import BlockShape
    from kvcore.plugins.attention import AttentionHook

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


@hookimpl
def kvcore_attention() -> list[AttentionPlugin]:
    return [AttentionPlugin("pages", _seeing)] if "SEEN" in os.environ else []


def _seeing(shape: BlockShape, rank: int) -> AttentionHook:
    """Made when asked for: a plugin's module imports nothing heavy."""
    from kvcore.plugins.attention import AttentionCall, AttentionHook

    class Seeing(AttentionHook):
        name = "pages"

        def before(self, call: AttentionCall) -> None:
            batch = call.batch
            rows = len(batch.positions)
            if call.layer == 0 and rows > 1:
                pages = batch.pages[0][: -(-rows // batch.page_tokens)].tolist()
                with Path(os.environ["SEEN"]).open("a") as file:
                    file.write(f"{[batch.page_tokens, *pages]}\n")

    return Seeing()


wanted = os.environ.get("VARIANT", "")
if wanted in TAKEN:
    _take(TAKEN[wanted])
elif wanted == "kernel":
    _split_pages()
