"""Faults at every seam of a real SGLang: answers stay right, come in time, and reuse comes back.

The matrix with every pair of fault and seam is the reference engine's
(tests/unit/testing/test_fault_matrix.py).
"""

import pytest

from kvcore.testing.faults import Seam
from kvcore.testing.faults.contract import FaultContract

pytestmark = pytest.mark.engine


class TestFaults(FaultContract):
    engine = "sglang"
    store_plugin = "memory-store"
    silent = frozenset({Seam.CANCEL})
    """What an aborted request had asked for goes on: it touches no page, and others may want it."""
