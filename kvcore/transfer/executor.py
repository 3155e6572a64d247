"""What moves the bytes of one path: the engine calls it, the worker implements it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from kvcore.transfer.graph import RowError, TransferGraph, TransferOp

__all__ = ["Executor", "Issued", "JoiningExecutor", "OpPart"]


class Issued(Protocol):
    """Work in a queue of a device."""

    def wait(self) -> None:
        """Block, without spinning, until the work has ended. Raises if the device has failed."""
        ...

    def seconds(self) -> float:
        """Return how long the device was at work. Call after `wait`."""
        ...


class Executor(Protocol):
    """Moves the bytes of one path."""

    def run(
        self, graph: TransferGraph, op: TransferOp, rows: list[int]
    ) -> dict[int, RowError] | Issued:
        """Copy ``rows`` of ``op``.

        Blocks until they are copied and returns the rows that failed. Or returns what to wait for,
        once a device has all copies in a queue.
        """
        ...


class OpPart(NamedTuple):
    """An op among several that are carried out at once: ``rows`` of ``op`` of ``graph``."""

    graph: TransferGraph
    op: TransferOp
    rows: list[int]


@runtime_checkable
class JoiningExecutor(Executor, Protocol):
    """An executor that can copy rows of several graphs at once."""

    def run_joined(self, parts: Sequence[OpPart]) -> Issued | None:
        """Copy all rows of ``parts``, or raise.

        Returns None once they are copied, or what to wait for, once a device has all copies in a
        queue. If it raises, what it has issued has ended; any of the parts may be run again.
        """
        ...
