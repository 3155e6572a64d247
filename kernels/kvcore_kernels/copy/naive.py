"""The naive twin: torch's index operations, one plane at a time."""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.memory.copy.base import HeadRange, Units
from kvcore.memory.copy.reference import ReferenceOps
from kvcore.memory.layout import KVView

__all__ = ["copy_units"]


def copy_units(
    src: KVView,
    src_units: Units,
    dst: KVView,
    dst_units: Units,
    layers: Sequence[int],
    unit_tokens: int,
    heads: HeadRange,
) -> None:
    """Compute `kvcore_kernels.copy.launch.copy_units` with kvcore's reference operations."""
    ReferenceOps().copy(src, src_units, dst, dst_units, layers, unit_tokens, heads)
