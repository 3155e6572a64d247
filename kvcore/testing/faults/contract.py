"""What a serving engine with kvcore must survive, as pytest tests to subclass in a test file.

class TestFaults(FaultContract):
    engine = "vllm"                     # one of `kvcore.harness.compare.ENGINES`

Faults are injected at every seam of the engine. The fixtures are:

    right                               an engine without kvcore and prefix cache, for the answers
    disk                                an engine with a disk tier below host memory, and fusion
    store                               an engine with an object store below host memory

``test_killed_in_the_middle_of_a_write`` kills an engine and starts the next one on its disk. Five
engines start in all; those with a disk and a store run their cells one after another.
`FaultsTogether` has a third of the cells, in which many faults strike. Needs pytest.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvcore.harness.compare import (
    Reference,
    answers,
    assert_same_answers,
    keep_on_reset,
    small_engine,
)
from kvcore.harness.engine_process import EngineDied, EngineFailed, EngineProcess
from kvcore.harness.models import tiny_model
from kvcore.harness.prompts import windows
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
    together,
)
from kvcore.testing.faults.plan import Fault, Rule, Seam
from kvcore.testing.faults.process import FaultControl, write_injector
from kvcore.testing.waiting import until

__all__ = ["FaultContract", "FaultsTogether"]

_UNCACHED: dict[str, dict[str, Any]] = {
    "vllm": {"enable_prefix_caching": False},
    "sglang": {"disable_radix_cache": True},
}


class FaultContract:
    """Whatever fails, answers are right and in time, nothing leaks, and reuse recovers."""

    engine: ClassVar[str]
    engine_args: ClassVar[Mapping[str, Any]] = {}
    """Arguments of the engine in addition to those of `kvcore.harness.compare.small_engine`."""
    environment: ClassVar[Mapping[str, str]] = {}
    """Environment variables of the engine with kvcore."""
    store_plugin: ClassVar[str] = "objects"
    """The store's plugin: "objects", in a folder, or "memory-store".

    Use the latter if the engine's environment lacks obstore, and its leader and only worker are one
    process.
    """
    silent: ClassVar[frozenset[Seam]] = frozenset()
    """Seams of messages that the engine's leader never sends, and whose rules are left out."""

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls) -> Path:
        return tiny_model("llama", layers=4, heads=4, kv_heads=2, head_dim=64)

    @pytest.fixture(scope="class")
    @classmethod
    def right(cls, model: Path) -> Iterator[Reference]:
        with small_engine(model, None, engine=cls.engine, **_UNCACHED[cls.engine]) as plain:
            yield Reference(plain)

    @pytest.fixture(scope="class")
    @classmethod
    def disk(
        cls, model: Path, right: Reference, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[Bench]:
        folder = tmp_path_factory.mktemp("disk")
        control = write_injector(folder / "plugin")
        with cls._over(model, _on_disk(folder), control) as process:
            yield Bench(process, control, model, right, "disk", fuses=True)

    @pytest.fixture(scope="class")
    @classmethod
    def store(
        cls, model: Path, right: Reference, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[Bench]:
        folder = tmp_path_factory.mktemp("store")
        control = write_injector(folder / "plugin")
        with cls._over(model, _in_store(cls.store_plugin, folder), control) as process:
            yield Bench(process, control, model, right, "shelf")

    @classmethod
    @contextmanager
    def _over(
        cls, model: Path, kvcore: dict[str, Any], control: FaultControl | None = None
    ) -> Iterator[EngineProcess]:
        path = [str(control.folder)] if control is not None else []
        env = {"PYTHONPATH": os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")])}
        env.update(cls.environment)
        kvcore = keep_on_reset(cls.engine, kvcore)
        if cls.engine == "vllm":  # a cell's clear is to reach every tier
            kvcore["vllm"] = {**kvcore.get("vllm", {}), "keep_on_reset": False}
        with small_engine(model, kvcore, env, cls.engine, **cls.engine_args) as process:
            yield process

    @pytest.mark.parametrize("cell", [*DISK, *BLENDS], ids=cell_id)
    def test_over_a_disk(self, disk: Bench, cell: Cell) -> None:
        if (seam := cell.rules[0].seam) in self.silent:
            pytest.skip(f"{self.engine}'s leader never sends {seam.value}")
        rules = tuple(rule for rule in cell.rules if rule.seam not in self.silent)
        disk.run(cell._replace(rules=rules))

    @pytest.mark.parametrize("cell", STORE, ids=cell_id)
    def test_over_a_store(self, store: Bench, cell: Cell) -> None:
        store.run(cell)

    def test_killed_in_the_middle_of_a_write(
        self, model: Path, right: Reference, tmp_path: Path
    ) -> None:
        """Kill the engine while it writes. The next one finds only intact blocks on disk."""
        control, kvcore = write_injector(tmp_path / "plugin"), _on_disk(tmp_path)
        asked = windows(model, 6, 200, 350, seed=5)
        with self._over(model, kvcore, control) as process:
            assert_same_answers(answers(process, asked[:3], fusion=EXACT), right(asked[:3]))
            control.rest()
            with control.inject(Rule(Fault.KILL, Seam.FILE_WRITE, skip=5)):
                living = control.processes
                with contextlib.suppress(EngineDied, EngineFailed):
                    answers(process, asked, fusion=EXACT)
                until(lambda: control.processes < living)
            process.kill()
        with self._over(model, kvcore) as process:
            got = answers(process, asked, fusion=EXACT)
            assert_same_answers(got, right(asked))
            assert sum(one.tiers.get("disk", 0) for one in got[:3]) > 0


class FaultsTogether(FaultContract):
    """The same faults in a third of the runs: many strike in each (`cells.together`)."""

    @pytest.mark.parametrize("cell", together([*DISK, *BLENDS]), ids=cell_id)
    def test_over_a_disk(self, disk: Bench, cell: Cell) -> None:
        super().test_over_a_disk(disk, cell)

    @pytest.mark.parametrize("cell", together(STORE), ids=cell_id)
    def test_over_a_store(self, store: Bench, cell: Cell) -> None:
        super().test_over_a_store(store, cell)


def _on_disk(folder: Path) -> dict[str, Any]:
    disk = {"path": str(folder / "kv"), "capacity": "512MiB", "sync_interval_s": 0.01}
    return settings({"disk": disk}, fusion={"enabled": True})


def _in_store(plugin: str, folder: Path) -> dict[str, Any]:
    place = {"objects": ("url", f"file://{folder}/objects"), "memory-store": ("name", str(folder))}
    options = {
        **dict([place[plugin]]),
        "lookup_s": 0.5,
        "deadline_s": 0.5,
        "retries": 1,
        "parallel": STORE_THREADS // 2,
    }
    shelf = {"plugin": plugin, "capacity": "512MiB", "options": options}
    return settings({"tiers": {"shelf": shelf}})
