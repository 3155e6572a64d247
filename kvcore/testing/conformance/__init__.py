"""The conformance kit: one set of cases for every engine that kvcore supports.

    kvcore conformance --engine reference            a table, or JSON
    class TestMine(ConformanceSuite): ...            the same cases under pytest (see `.suite`)

A `Driver` starts an engine and sends it requests; `docs/conformance.md` shows how to write one.
Importing this package registers the cases. It imports no engine and no pytest.
"""

from kvcore.testing.conformance import cases
from kvcore.testing.conformance.driver import (
    Answer,
    Ask,
    Capability,
    Driver,
    Engine,
    Setup,
    find_driver,
)
from kvcore.testing.conformance.kit import CASES, SECTIONS, Case, Kit, Result, case, run

__all__ = [
    "CASES",
    "SECTIONS",
    "Answer",
    "Ask",
    "Capability",
    "Case",
    "Driver",
    "Engine",
    "Kit",
    "Result",
    "Setup",
    "case",
    "cases",
    "find_driver",
    "run",
]
