"""LoRA weights in PEFT's format, for the reference engine.

    y = W x + (alpha / r) up (down x)       for q, k, v and o of each layer that the folder has

A rank applies the part of its own heads: rows of ``up`` for q, k and v, columns of ``down`` for o.
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
    """The update of one matrix [out, in]: ``up`` [out, r], scaled, after ``down`` [r, in]."""

    down: Tensor
    up: Tensor

    def of(self, rows: Tensor) -> Tensor:
        """Apply the update: [rows, in] -> [rows, out]."""
        return functional.linear(functional.linear(rows, self.down), self.up)

    @property
    def matrix(self) -> Tensor:
        """The update as one matrix, [out, in]."""
        return self.up @ self.down


@dataclass(frozen=True)
class Adapter:
    """The updates of a model, by layer and by "q", "k", "v" or "o"."""

    deltas: Mapping[tuple[int, str], Delta]

    def shared(self, cut: Callable[[str, Delta], Delta]) -> Adapter:
        """Return one rank's part, as ``cut`` takes it from each update."""
        return Adapter({place: cut(place[1], delta) for place, delta in self.deltas.items()})


def read_lora(folder: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> Adapter:
    """Read the weights in ``folder``. Raises UnsupportedError if some are not of attention."""
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
            raise UnsupportedError(
                f"given LoRA weights for {stem}; only {', '.join(_TARGETS)} are supported"
            )
        down, up = found[name].to(dtype), found[f"{stem}.lora_B.weight"].to(dtype)
        deltas[int(layer), target.removeprefix("self_attn.")[0]] = Delta(down, up * scale)
    return Adapter(deltas)


def adapt(
    made: Tensor, given: Tensor, place: tuple[int, str], runs: Sequence[tuple[slice, Adapter]]
) -> Tensor:
    """Add the updates for ``given`` [rows, in] to ``made`` [rows, out], run by run."""
    for rows, adapter in runs:
        delta = adapter.deltas.get(place)
        if delta is not None:
            made[rows] += delta.of(given[rows])
    return made
