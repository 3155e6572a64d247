"""The bytes of one block in host memory, in one piece or several."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Buffers", "nbytes_of"]

Buffers = Sequence[memoryview]
"""The bytes of one block in order, in one piece or several (a layerwise arena).

There are as many as the block has, or up to ``slot_nbytes``; bytes after the block are padding."""


def nbytes_of(buffers: Buffers) -> int:
    """Return the number of bytes in ``buffers``."""
    return buffers[0].nbytes if len(buffers) == 1 else sum(part.nbytes for part in buffers)
