"""Faults at every seam of a real vLLM: answers stay right, come in time, and reuse comes back.

Each runs with asynchronous scheduling on Model Runner V1. On V2, whose steps take long in Triton's
interpreter, a fault strikes at several seams at once, and those below a tier's call are left out:
the runner sees a failed read, whatever failed it. `make test-all` runs each alone on V2 too. Faults
of copies run with synchronous scheduling, where loads are part of a step. The matrix with every
pair of fault and seam is the reference engine's (tests/unit/testing/test_fault_matrix.py).
"""

from __future__ import annotations

import pytest

from kvcore.testing.faults.cells import BLENDS, DISK, Bench, Cell, cell_id, together
from kvcore.testing.faults.contract import FaultContract, FaultsTogether
from kvcore.testing.faults.plan import Seam
from kvcore_vllm.testing.rig import V2

pytestmark = pytest.mark.engine

COPIES = [
    cell
    for cell in [*DISK, *BLENDS]
    if {rule.seam for rule in cell.rules} & {Seam.LOAD, Seam.SAVE, Seam.DEVICE}
]


BELOW = {Seam.FILE_READ, Seam.FILE_WRITE, Seam.RECORD, Seam.SYNC}
SEEN = [
    cell for cell in together([*DISK, *BLENDS]) if not {rule.seam for rule in cell.rules} <= BELOW
]


class TestFaults(FaultContract):
    engine = "vllm"


class TestFaultsOnModelRunnerV2(FaultsTogether):
    engine = "vllm"
    environment = V2

    @pytest.mark.parametrize("cell", SEEN, ids=lambda cell: f"{cell.by}-{cell_id(cell)}")
    def test_over_a_disk(self, disk: Bench, cell: Cell) -> None:
        disk.run(cell)


@pytest.mark.exhaustive
class TestEachFaultOnModelRunnerV2(FaultContract):
    engine = "vllm"
    environment = V2
    test_killed_in_the_middle_of_a_write = None


class TestFaultsOfLoadsInAStep(FaultContract):
    engine = "vllm"
    engine_args = {"asynchronous": False}  # noqa: RUF012 - not changed
    test_over_a_store = None
    test_killed_in_the_middle_of_a_write = None

    @pytest.mark.parametrize("cell", COPIES, ids=lambda cell: f"{cell.by}-{cell_id(cell)}")
    def test_over_a_disk(self, disk: Bench, cell: Cell) -> None:
        disk.run(cell)
