"""LoRA weights in PEFT's format, as the reference engines apply them.

    y = W x + (alpha / r) up (down x)       for q, k, v and o of every layer that the folder names

A rank computes its own heads: rows of ``up`` for q, k and v, columns of ``down`` for o.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kvcore.errors import UnsupportedError

__all__ = ["Adapter", "Delta", "adapt", "read_lora"]

_PREFIX = "base_model.model.model.layers."
_TARGETS = tuple(f"self_attn.{name}_proj" for name in "qkvo")


class Delta(NamedTuple):
    """What is added to one matrix [out, in]: ``up`` [out, r], scaled, after ``down`` [r, in]."""

    down: Tensor
    up: Tensor

    def of(self, rows: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]."""
        return functional.linear(functional.linear(rows, self.down), self.up)

    @property
    def matrix(self) -> Tensor:
        """[out, in]."""
        return self.up @ self.down


@dataclass(frozen=True)
class Adapter:
    """Deltas by layer and by "q", "k", "v" or "o"."""

    deltas: Mapping[tuple[int, str], Delta]

    def shared(self, cut: Callable[[str, Delta], Delta]) -> Adapter:
        """One rank's part, as ``cut`` makes it."""
        return Adapter({place: cut(place[1], delta) for place, delta in self.deltas.items()})


def read_lora(folder: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> Adapter:
    """The weights in ``folder``. Raises UnsupportedError for some that are not of attention."""
    from safetensors.torch import load_file

    settings = json.loads((folder / "adapter_config.json").read_text())
    scale = settings["lora_alpha"] / settings["r"]
    found = load_file(folder / "adapter_model.safetensors", device=str(device))
    deltas: dict[tuple[int, str], Delta] = {}
    for name in sorted(found):
        if not name.endswith(".lora_A.weight"):
            continue
        stem = name.removesuffix(".lora_A.weight")
        layer, _, target = stem.removeprefix(_PREFIX).partition(".")
        if target not in _TARGETS:
            raise UnsupportedError(f"LoRA on {stem}; supported are {', '.join(_TARGETS)}")
        down, up = found[name].to(dtype), found[f"{stem}.lora_B.weight"].to(dtype)
        deltas[int(layer), target.removeprefix("self_attn.")[0]] = Delta(down, up * scale)
    return Adapter(deltas)


def adapt(
    made: Tensor, given: Tensor, place: tuple[int, str], runs: Sequence[tuple[slice, Adapter]]
) -> Tensor:
    """Add to ``made`` [rows, out] what adapters make of ``given`` [rows, in], each for its rows."""
    for rows, adapter in runs:
        delta = adapter.deltas.get(place)
        if delta is not None:
            made[rows] += delta.of(given[rows])
    return made
