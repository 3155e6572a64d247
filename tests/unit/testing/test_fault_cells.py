"""Merged cells of faults strike what the single ones do, and hide nothing from each other."""

from __future__ import annotations

import pytest

from kvcore.testing.faults.cells import BLENDS, DISK, STORE, Cell, cell_id, together
from kvcore.testing.faults.plan import Fault, Faults, Seam

MATRICES = [[*DISK, *BLENDS], STORE]
READS = {Seam.LOAD, Seam.FILE_READ, Seam.TIER_READ, Seam.STORE_GET, Seam.STORE_EXISTS}


def struck(cells: list[Cell]) -> set[tuple[str, Seam, Fault]]:
    return {(cell.by, rule.seam, rule.fault) for cell in cells for rule in cell.rules}


@pytest.mark.parametrize("cells", MATRICES, ids=["disk", "store"])
def test_every_fault_of_a_single_cell_is_in_a_merged_one(cells: list[Cell]) -> None:
    merged = together(cells)
    assert struck(merged) == struck(cells)
    assert sum(cell.hangs for cell in merged) == sum(cell.hangs for cell in cells)
    assert len({(cell.by, cell_id(cell)) for cell in merged}) == len(merged)
    assert 3 * len(merged) < len(cells) + 10


@pytest.mark.parametrize("cell", [cell for cells in MATRICES for cell in together(cells)])
def test_every_rule_of_a_merged_cell_strikes_though_others_come_first(cell: Cell) -> None:
    """The first rule that is due at a point strikes alone there."""
    faults = Faults(*cell.rules)
    missing = {(rule.seam, rule.fault) for rule in cell.rules}
    for _ in range(24):
        for seam in {rule.seam for rule in cell.rules}:
            if (strike := faults.at(seam)) is not None:
                missing.discard((seam, strike.fault))
    assert not missing


@pytest.mark.parametrize("cell", [cell for cells in MATRICES for cell in together(cells)])
def test_reads_that_go_wrong_are_apart_from_writes_that_do(cell: Cell) -> None:
    if cell.by != "asking" or cell.family == "late":
        return
    assert len({rule.seam in READS for rule in cell.rules}) == 1
    hang = {rule.fault is Fault.HANG for rule in cell.rules}
    spoil = {
        rule.fault in (Fault.BIT_FLIP, Fault.SHORT_READ, Fault.TORN_WRITE) for rule in cell.rules
    }
    assert len(hang) == len(spoil) == 1
