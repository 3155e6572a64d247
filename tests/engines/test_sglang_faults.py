"""Faults at every seam of a real SGLang: answers stay right, come in time, and reuse comes back.

A fault strikes at all its seams at once; `make test-all` runs each alone too. The matrix with every
pair of fault and seam is the reference engine's (tests/unit/testing/test_fault_matrix.py).
"""

from __future__ import annotations

import pytest

from kvcore.testing.faults import Seam
from kvcore.testing.faults.contract import FaultContract, FaultsTogether

pytestmark = pytest.mark.engine

SILENT = frozenset({Seam.CANCEL})
"""What an aborted request had asked for goes on: it touches no page, and others may want it."""


class TestFaults(FaultsTogether):
    engine = "sglang"
    store_plugin = "memory-store"
    silent = SILENT


@pytest.mark.exhaustive
class TestEachFault(FaultContract):
    engine = "sglang"
    store_plugin = "memory-store"
    silent = SILENT
    test_killed_in_the_middle_of_a_write = None
