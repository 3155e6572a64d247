"""The collectives that a connector may use, among the ranks of its harness."""

from __future__ import annotations

from typing import TypeVar

from kvcore.errors import UnsupportedError
from kvcore.testing.ranks import Ranks, here

__all__ = ["allgather", "rank"]

_T = TypeVar("_T")


def _place() -> tuple[Ranks, int]:
    found = here()
    if found is None:
        raise UnsupportedError(
            "a stand-in for TensorRT-LLM was used outside its harness: it tests connectors and "
            "serves nothing. Install tensorrt_llm, or use kvcore_trtllm.testing.Harness"
        )
    return found


def rank() -> int:
    """Return the rank that this thread acts as. Raises UnsupportedError outside a harness."""
    return _place()[1]


def allgather(value: _T) -> list[_T]:
    """Return every rank's value, in order of rank. Blocks until all ranks have called it."""
    ranks, number = _place()
    return ranks.gather(number, value)
