"""The naive twin: torch's index operations, one plane at a time."""

from __future__ import annotations

from kvcore.memory.copy.base import Copy
from kvcore.memory.copy.reference import ReferenceOps

__all__ = ["copy_units"]


def copy_units(copy: Copy) -> None:
    """Compute `kvcore_kernels.copy.launch.copy_units` with kvcore's reference operations."""
    ReferenceOps().copy(copy)
