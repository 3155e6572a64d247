"""Faults at every seam of a real vLLM: answers stay right, come in time, and reuse comes back.

One engine without kvcore, one over a disk, one over a store; the last two take the cells one after
another. The matrix with every pair of fault and seam is the reference engine's
(tests/unit/test_fault_matrix.py).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvcore.testing.asking import Reference, answers, same
from kvcore.testing.asking import small_engine as engine
from kvcore.testing.engine_process import EngineDied, EngineFailed
from kvcore.testing.faults import Fault, Rule, Seam
from kvcore.testing.faults.cells import (
    BLENDS,
    DISK,
    EXACT,
    STORE,
    STORE_THREADS,
    Bench,
    Cell,
    cell_id,
    settings,
)
from kvcore.testing.faults.process import Planted, plant
from kvcore.testing.models import tiny_model
from kvcore.testing.prompts import windows
from kvcore.testing.served import until

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def model() -> Path:
    return tiny_model("llama", layers=4, heads=4, kv_heads=2, head_dim=64)


@pytest.fixture(scope="module")
def right(model: Path) -> Iterator[Reference]:
    with engine(model, None, enable_prefix_caching=False) as plain:
        yield Reference(plain)


@contextmanager
def bench(
    model: Path, right: Reference, folder: Path, tier: str, kvcore: dict[str, Any]
) -> Iterator[Bench]:
    planted = plant(folder / "plugin")
    with engine(model, kvcore, env=with_faults(planted)) as process:
        yield Bench(process, planted, model, right, tier, fuses="fusion" in kvcore)


def with_faults(planted: Planted) -> dict[str, str]:
    path = [str(planted.folder), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(path)}


def over_disk(folder: Path) -> dict[str, Any]:
    disk = {"path": str(folder / "kv"), "capacity": "512MiB", "sync_interval_s": 0.01}
    return settings({"disk": disk}, fusion={"enabled": True})


@pytest.fixture(scope="module")
def disk(
    model: Path, right: Reference, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("disk")
    with bench(model, right, folder, "disk", over_disk(folder)) as made:
        yield made


@pytest.fixture(scope="module")
def store(
    model: Path, right: Reference, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("store")
    options = {
        "url": f"file://{folder}/objects",
        "lookup_s": 0.5,
        "deadline_s": 0.5,
        "retries": 1,
        "parallel": STORE_THREADS // 2,
    }
    shelf = {"plugin": "objects", "capacity": "512MiB", "options": options}
    with bench(model, right, folder, "shelf", settings({"tiers": {"shelf": shelf}})) as made:
        yield made


@pytest.mark.parametrize("cell", [*DISK, *BLENDS], ids=lambda c: f"{c.by}-{cell_id(c)}")
def test_over_a_disk(disk: Bench, cell: Cell) -> None:
    disk.run(cell)


@pytest.mark.parametrize("cell", STORE, ids=cell_id)
def test_over_a_store(store: Bench, cell: Cell) -> None:
    store.run(cell)


def test_killed_in_the_middle_of_a_write(model: Path, right: Reference, tmp_path: Path) -> None:
    """What the next engine finds on the disk is whole."""
    planted = plant(tmp_path / "plugin")
    asked = windows(model, 6, 200, 350, seed=5)
    with engine(model, over_disk(tmp_path), env=with_faults(planted)) as process:
        same(answers(process, asked[:3], fusion=EXACT), right(asked[:3]))
        planted.rest()
        with planted.wrong(Rule(Fault.KILL, Seam.FILE_WRITE, skip=5)):
            living = planted.processes
            with contextlib.suppress(EngineDied, EngineFailed):
                answers(process, asked, fusion=EXACT)
            until(lambda: planted.processes < living)
        process.kill()
    with engine(model, over_disk(tmp_path)) as process:
        got = answers(process, asked, fusion=EXACT)
        same(got, right(asked))
        assert sum(one.tiers.get("disk", 0) for one in got[:3]) > 0
