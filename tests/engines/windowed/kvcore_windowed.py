"""A window in layers of vLLM's LFM2: a model with states, full attention and windows.

Put this folder on PYTHONPATH, and vLLM finds it by its entry point. The environment variable
``KVCORE_WINDOW`` is the window in tokens. All layers with attention but the last one have it. So it
is in some checkpoints of Nemotron-H, which vLLM's CPU build cannot run as they are.
"""

from __future__ import annotations

import os
from typing import Any

WINDOW = int(os.environ.get("KVCORE_WINDOW", "0"))


def install() -> None:
    """Give layers of LFM2 that are made from now on a window."""
    if not WINDOW:
        return
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.models import lfm2
    from vllm.model_executor.models.utils import extract_layer_index

    right = lfm2.Attention

    def made(*args: Any, **named: Any) -> Any:
        kinds = get_current_vllm_config().model_config.hf_config.layer_types
        last = max(layer for layer, kind in enumerate(kinds) if kind == "full_attention")
        if extract_layer_index(named["prefix"]) != last:
            named["per_layer_sliding_window"] = WINDOW
        return right(*args, **named)

    lfm2.Attention = made
