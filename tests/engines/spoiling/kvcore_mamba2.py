"""A mend for vLLM 0.32's CPU build, in which Mamba 2 ends at a state that it keeps inside a piece.

Put this folder on PYTHONPATH, and vLLM finds it by its entry point. A prompt is then computed in
pieces that end where a state is kept, as on earlier versions.
"""

from __future__ import annotations


def mend() -> None:
    """Let Mamba 2 keep states at the ends of pieces only."""
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    if "get_kv_cache_spec" in vars(MambaMixer2):
        del MambaMixer2.get_kv_cache_spec
