"""Faults at every seam of a real vLLM: answers stay right, come in time, and reuse comes back.

Many faults strike in each run, over a disk: an engine does not see from which tier a load comes.
With asynchronous scheduling on Model Runner V1, all of them do. With synchronous scheduling, where
loads are part of a step, and on Model Runner V2, whose steps are slow in Triton's interpreter, a
covering set does: each configuration meets each kind of request and each family of faults once.
On Model Runner V2 aborts and clears are left out, for they take the most steps, and what comes
late. `make test-all` runs the faults one by one in each configuration, over a store too, and kills
engines while they write; in `make test` SGLang has a store and is killed (test_sglang_faults.py).
The matrix with every pair of fault and seam is the reference engine's
(tests/unit/testing/test_fault_matrix.py).
"""

from __future__ import annotations

import pytest

from kvcore.testing.faults.cells import BLENDS, DISK, Bench, Cell, cell_id, together
from kvcore.testing.faults.contract import FaultContract, FaultsTogether
from kvcore.testing.faults.plan import Seam
from kvcore_vllm.testing.rig import V2
from support.pairs import covering

pytestmark = pytest.mark.engine

COPIES = [
    cell
    for cell in [*DISK, *BLENDS]
    if {rule.seam for rule in cell.rules} & {Seam.LOAD, Seam.SAVE, Seam.DEVICE}
]
CELLS = {(cell.by, cell.family): cell for cell in together([*DISK, *BLENDS])}


def seen(cell: Cell) -> bool:
    """Return True if the engine itself sees which fault it was.

    Whatever spoils a tier's bytes, the engine sees a failed read. Of writes that hang it sees
    nothing: they are of host memory to a tier, after its pages have been copied.
    """
    return not cell.family.startswith("spoilt") and cell.family != "hanging-write"


LEFT_OUT = {("v2", "aborting"), ("v2", "clearing")}
SAME_ON_V2 = ("late", "hanging-read")
"""Families that Model Runner V2 does not see: a load that is given up is one that failed."""
CHOSEN = covering(
    [
        (runs, *key)
        for runs in ("sync", "v2")
        for key, cell in CELLS.items()
        if seen(cell) and (runs, cell.by) not in LEFT_OUT
        if runs != "v2" or cell.family not in SAME_ON_V2
    ],
    given=[("async", *key) for key in CELLS],
)


def chosen(runs: str) -> list[Cell]:
    """Return the cells of the covering set for a configuration."""
    return [CELLS[row[1:]] for row in CHOSEN if row[0] == runs]


class TestFaults(FaultsTogether):
    engine = "vllm"
    test_killed_in_the_middle_of_a_write = None
    test_over_a_store = None


class TestFaultsOnModelRunnerV2(FaultsTogether):
    engine = "vllm"
    environment = V2
    test_killed_in_the_middle_of_a_write = None
    test_over_a_store = None

    @pytest.mark.parametrize("cell", chosen("v2"), ids=cell_id)
    def test_over_a_disk(self, disk: Bench, cell: Cell) -> None:
        disk.run(cell)


class TestFaultsOfLoadsInAStep(FaultsTogether):
    engine = "vllm"
    engine_args = {"asynchronous": False}  # noqa: RUF012 - not changed
    test_killed_in_the_middle_of_a_write = None
    test_over_a_store = None

    @pytest.mark.parametrize("cell", chosen("sync"), ids=cell_id)
    def test_over_a_disk(self, disk: Bench, cell: Cell) -> None:
        disk.run(cell)


@pytest.mark.exhaustive
class TestEachFault(FaultContract):
    engine = "vllm"


@pytest.mark.exhaustive
class TestEachFaultOnModelRunnerV2(FaultContract):
    engine = "vllm"
    environment = V2


@pytest.mark.exhaustive
class TestEachFaultOfLoadsInAStep(FaultContract):
    engine = "vllm"
    engine_args = {"asynchronous": False}  # noqa: RUF012 - not changed
    test_killed_in_the_middle_of_a_write = None

    @pytest.mark.parametrize("cell", COPIES, ids=cell_id)
    def test_over_a_disk(self, disk: Bench, cell: Cell) -> None:
        disk.run(cell)
