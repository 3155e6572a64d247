"""The search for a fault that a mistake, put back, must show."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest

from kvcore_devtools.gpu import Machine, installed

__all__ = ["expect_none", "find_fault"]

SEEDS = 64
"""Seeds of a search. It ends with the first one that shows the fault: most do so within eight.

How soon depends on how far the copy threads get, so on the machine.
"""
CLEAN_SEEDS = 8
"""Seeds without a fault that are enough to say that there is none."""


def find_fault(
    trial: Callable[[Machine, int], None],
    kind: str | tuple[str, ...],
    *words: str,
    seeds: int = SEEDS,
) -> None:
    """Run with one seed after the other until a fault of a kind has all these words.

    A trial closes what it has made, whatever happens. Raises AssertionError if there is no fault.
    """
    kinds, seen = (kind,) if isinstance(kind, str) else kind, set()
    for seed in range(seeds):
        with installed(Machine(seed, index=1)) as machine:
            with contextlib.suppress(AssertionError):  # wrong bytes were noticed, or the end was
                trial(machine, seed)
            machine.finish()
            for fault in machine.faults:
                seen.add(fault.kind)
                if fault.kind in kinds and all(word in fault.message for word in words):
                    return
    raise AssertionError(f"nothing of kind {kind!r} with {words} was found, but {seen}")


def expect_none(
    trial: Callable[[Machine, int], None], kind: str, *words: str, seeds: int = CLEAN_SEEDS
) -> None:
    """Check that the same trial without the mistake has no such fault."""
    with pytest.raises(AssertionError, match="nothing of kind"):
        find_fault(trial, kind, *words, seeds=seeds)
