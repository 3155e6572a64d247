"""A vLLM on a CPU that does what vLLM does for other models or on other devices only.

Put this folder on PYTHONPATH, and another one with a file ``kvcore_wanted.py``. kvcore imports it
before the engine has pages. ``VARIANT`` in that file names what is wanted:

    taken    the scheduler takes of what kvcore offers what the first word of a request's salt says:
             fewer   whole scheduler blocks, as with a replayed window
                     (``Scheduler.prefix_replay_tokens``)
             half    half of it
             none    nothing, as for prompt logprobs
    kernel   the attention backend takes pages of 32 tokens, as FlashInfer's and FlashMLA's do

``SEEN`` names a file to which a hook around attention writes the pages of each prefill, or "".
They are not environment variables, because engines with equal ones can be forks of one process.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvcore_wanted

from kvcore.plugins import AttentionPlugin, hookimpl

if TYPE_CHECKING:
    from kvcore.model.shape import BlockShape
    from kvcore.plugins.attention import AttentionHook

TAKEN: dict[str, Callable[[int, int], int]] = {
    "fewer": lambda offered, page: offered - offered % page,
    "half": lambda offered, page: offered // 2,
    "none": lambda offered, page: 0,
}


def _take() -> None:
    from kvcore_vllm.connector import KVCoreConnector

    ask = KVCoreConnector.get_num_new_matched_tokens

    def asked(self: Any, request: Any, computed: int) -> tuple[int | None, bool]:
        offered, waits = ask(self, request, computed)
        taken = TAKEN.get((request.cache_salt or "").partition(" ")[0])
        if not offered or taken is None:
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
    return [AttentionPlugin("pages", _seeing)] if kvcore_wanted.SEEN else []


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
                with Path(kvcore_wanted.SEEN).open("a") as file:
                    file.write(f"{[batch.page_tokens, *pages]}\n")

    return Seeing()


if kvcore_wanted.VARIANT == "taken":
    _take()
else:
    _split_pages()
