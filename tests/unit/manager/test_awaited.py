"""An idle engine goes on with its steps for some graphs only; a pause waits for those."""

from __future__ import annotations

import pytest

from kvcore.transfer.graph import OpReport, Path, RowError
from support.manager import HOST, ManagerRig, chain

KEYS = chain(1, 2, 3, 4)


def on_disk() -> ManagerRig:
    """A rig with a prompt that is on disk alone."""
    rig = ManagerRig()
    rig.save(KEYS)
    rig.drain()
    rig.manager.invalidation.delete(HOST, KEYS[:1])
    return rig


def test_a_load_that_was_given_up_is_not_waited_for() -> None:
    """Its read may hang forever."""
    rig = on_disk()
    graph = rig.load(KEYS)
    assert graph is not None
    rig.now += 100
    assert rig.manager.awaited, "its deadline comes with a report"
    copies = [op for op in graph.ops if op.path.touches_device]
    for op in copies:
        failed = dict.fromkeys(range(*op.rows), RowError.DEADLINE)
        rig.manager.complete(OpReport(graph.graph_id, op.op_id, failed))
    assert rig.manager.in_flight
    assert not rig.manager.awaited


@pytest.mark.parametrize("path", [Path.H2DISK, Path.DISK2H])
def test_a_medium_that_ends_nothing_is_waited_for_only_a_while(path: Path) -> None:
    if path is Path.H2DISK:
        rig = ManagerRig()
        graph = rig.save(KEYS)
        assert graph is not None
        for op in graph.ops:
            if op.path is Path.D2H:
                rig.manager.complete(OpReport(graph.graph_id, op.op_id, {}))
    else:
        rig = on_disk()
        assert rig.fetch(KEYS, lambda: None)
    assert rig.manager.awaited
    rig.now += 100
    assert rig.manager.in_flight
    assert not rig.manager.awaited


def test_an_idle_manager_waits_for_nothing() -> None:
    assert not ManagerRig().manager.awaited
