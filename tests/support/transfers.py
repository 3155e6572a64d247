"""Plans and launches in one call, for tests that are about neither."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcore.manager import Hit, Manager
from kvcore.manager.base import Lane
from kvcore.transfer.graph import Span, TransferGraph, UnitTable


def load_blocks(
    manager: Manager,
    hit: Hit,
    start: int,
    stop: int,
    units: Sequence[UnitTable],
    *,
    layers: Sequence[Span] = (),
    on_end: Callable[[], object] | None = None,
    lane: Lane | None = None,
) -> TransferGraph:
    """Launch a load of blocks [start, stop) of ``hit``. Raises KVCoreError as the manager does."""
    planned = manager.plan_load(hit, Span(start, stop), layers=layers)
    return manager.launch(planned, units, lane=lane, on_end=on_end)


def save_blocks(
    manager: Manager,
    keys: Sequence[bytes],
    namespace: bytes,
    stop: int,
    units_of: Callable[[int, int], Sequence[UnitTable]],
    *,
    lane: Lane | None = None,
) -> TransferGraph | None:
    """Launch a save of the blocks of ``keys[:stop]`` that host memory lacks; None if none is."""
    planned = manager.plan_save(keys, namespace, stop)
    if planned is None:
        return None
    return manager.launch(planned, units_of(*planned.blocks), lane=lane)
