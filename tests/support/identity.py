"""An identity of a plain model, whose ingredients tests replace one at a time."""

from __future__ import annotations

from typing import Any

from kvcore.model.ingredients import ModelIdentity

_PLAIN: dict[str, Any] = {
    "config": {"text": {"model_type": "llama"}},
    "weights": b"w",
    "load": None,
    "code": None,
    "compute_dtype": "torch.float32",
    "quantization": None,
    "kv_dtype": "torch.float32",
    "kv_scales": None,
    "rope": None,
    "windows": None,
    "attention": None,
    "lora": None,
    "draft": None,
    "states": None,
    "own": None,
    "alone": (),
}


def plain(**changes: Any) -> ModelIdentity:
    """Return the identity with some ingredients replaced."""
    return ModelIdentity(**{**_PLAIN, **changes})
