"""Faults at every seam of a real vLLM: answers stay right, come in time, and reuse comes back.

The matrix with every pair of fault and seam is the reference engine's
(tests/unit/testing/test_fault_matrix.py).
"""

import pytest

from kvcore.testing.faults.contract import FaultContract

pytestmark = pytest.mark.engine


class TestFaults(FaultContract):
    engine = "vllm"
