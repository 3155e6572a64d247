"""Faults under a real vLLM's disk tier: answers stay right, come in time, and reuse comes back.

One engine, and one without kvcore. The matrix of all seams is the reference engine's
(tests/unit/test_fault_matrix.py): messages, copies and the clock lie in vLLM's own processes here,
where nothing of the kit gets between.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from kvcore.testing.asking import Reference, answers, counted, same, settled
from kvcore.testing.asking import small_engine as engine
from kvcore.testing.engine_process import EngineProcess
from kvcore.testing.faults import Fault, Rule, Seam, write_rules
from kvcore.testing.faults.plugin import FAULTY_DISK, write_plugin
from kvcore.testing.models import tiny_model
from kvcore.testing.prompts import windows

pytestmark = pytest.mark.engine

IN_TIME_S = 50.0
"""What hangs would take 60 s."""
CELLS = [
    (Rule(Fault.BIT_FLIP, Seam.FILE_READ, rate=0.3), "corrupt"),
    (Rule(Fault.SHORT_READ, Seam.FILE_READ, rate=0.3), "corrupt"),
    (Rule(Fault.TORN_WRITE, Seam.FILE_WRITE, rate=0.5), "corrupt"),
    (Rule(Fault.TORN_WRITE, Seam.RECORD, rate=0.3), "corrupt"),
    (Rule(Fault.ERROR, Seam.FILE_READ, rate=0.3), "io"),
    (Rule(Fault.FULL, Seam.FILE_WRITE), "io"),
    (Rule(Fault.HANG, Seam.TIER_READ, limit=2, seconds=1000), ""),
]
"""Those after which the tier is left alone for a while come last."""


class Served(NamedTuple):
    """Two engines, and the file whose rules the tier of the first one follows."""

    process: EngineProcess
    rules: Path
    model: Path
    right: Reference


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = write_plugin(tmp_path_factory.mktemp("faults"))
    rules = folder / "rules"
    model = tiny_model("llama", layers=4, heads=4, kv_heads=2, head_dim=64)
    kvcore = {
        "host": {"capacity": "4MiB"},
        "tiers": {
            "shelf": {
                "plugin": FAULTY_DISK,
                "capacity": "512MiB",
                "options": {"rules": str(rules), "path": str(folder / "kv")},
            }
        },
        "transfer": {"load_deadline_s": 2.0},
    }
    env = {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
    with engine(model, None, enable_prefix_caching=False) as plain:
        right = Reference(plain)
        with engine(model, kvcore, env) as process:
            yield Served(process, rules, model, right)


@pytest.mark.parametrize(
    ("rule", "reason"), CELLS, ids=[f"{rule.seam.value}-{rule.fault.value}" for rule, _ in CELLS]
)
def test_cell(served: Served, rule: Rule, reason: str) -> None:
    """New documents, more than fit host memory, are written and read with the fault; then read
    without it."""
    process, rules, model, right = served
    place = CELLS.index((rule, reason))
    documents = windows(model, 5, 300, 600, seed=40 + place)
    before = counted(process, "kvcore_failures_total", error=reason) if reason else 0
    write_rules(rules, rule)
    try:
        for _ in range(2):
            started = time.monotonic()
            same(answers(process, documents, batch=5), right(documents))
            assert time.monotonic() - started < IN_TIME_S
            if rule.fault is not Fault.HANG:  # what hangs is not waited for
                settled(process)
    finally:
        write_rules(rules)
    settled(process)
    same(answers(process, documents, batch=5), right(documents))
    if reason:
        assert counted(process, "kvcore_failures_total", error=reason) > before
