"""The cores on which kvcore's threads run. The kernel is played by a table of masks."""

import os
from collections.abc import Set
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore._util import cpus

CORES = st.frozensets(st.integers(0, 7), min_size=1)


class Kernel:
    """Cores by process; 0 is the calling thread."""

    def __init__(self, own: Set[int], parent: Set[int] | None = None) -> None:
        self.masks = {0: frozenset(own)}
        if parent is not None:
            self.masks[77] = frozenset(parent)
        self.parent = None if parent is None else self

    pid = 77

    def get(self, pid: int) -> frozenset[int]:
        if pid not in self.masks:
            raise ProcessLookupError(pid)
        return self.masks[pid]

    def set(self, pid: int, cores: Set[int]) -> None:
        if not cores:
            raise OSError(22, "no core")
        self.masks[pid] = frozenset(cores)


def play(patch: pytest.MonkeyPatch, kernel: Kernel, at_import: Set[int]) -> Kernel:
    patch.setattr(os, "sched_getaffinity", kernel.get)
    patch.setattr(os, "sched_setaffinity", kernel.set)
    patch.setattr("multiprocessing.parent_process", lambda: kernel.parent)
    patch.setattr(cpus, "_AT_IMPORT", frozenset(at_import))
    return kernel


@given(CORES, CORES, CORES)
def test_a_thread_never_leaves_the_cores_that_somebody_gave(
    own: Set[int], at_import: Set[int], near: Set[int]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        kernel = play(patch, Kernel(own), at_import)
        cpus.settle_thread(near=near)
        given_cores = own if len(own) > 1 or len(at_import) == 1 else at_import
        assert kernel.get(0) == (given_cores & near or given_cores)


def test_an_engines_binding_to_one_core_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = play(monkeypatch, Kernel({2}), {1, 2, 3})
    cpus.settle_thread()
    assert kernel.get(0) == {1, 2, 3}


def test_imported_after_the_binding_a_child_takes_its_parents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = play(monkeypatch, Kernel({2}, parent={0, 1}), {2})
    cpus.settle_thread()
    assert kernel.get(0) == {0, 1, 2}
    kernel = play(monkeypatch, Kernel({2}, parent={0, 1}), {2})
    del kernel.masks[77]  # the parent has ended
    cpus.settle_thread()
    assert kernel.get(0) == {2}


def test_the_operators_cores_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = play(monkeypatch, Kernel({4, 5}), {*range(8)})
    cpus.settle_thread()
    assert kernel.get(0) == {4, 5}, "taskset, or a binding to the node that the engine chose"


@given(CORES, CORES)
def test_a_block_runs_near_and_then_as_before(own: Set[int], near: Set[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        kernel = play(patch, Kernel(own), own)
        with cpus.running_on(near):
            assert kernel.get(0) == (own & near or own)
        assert kernel.get(0) == own


def test_the_nodes_cores_are_read_from_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpus, "_NODES", tmp_path)
    (tmp_path / "node1").mkdir()
    (tmp_path / "node1" / "cpulist").write_text("4-6,12\n")
    assert cpus.node_cores(1) == {4, 5, 6, 12}
    assert cpus.node_cores(0) == cpus.node_cores(None) == cpus.node_cores(-1) == frozenset()
    (tmp_path / "node2").mkdir()
    (tmp_path / "node2" / "cpulist").write_text("\n")  # memory without cores
    assert cpus.node_cores(2) == frozenset()


def test_kvcore_notes_the_cores_as_it_is_imported() -> None:
    import subprocess
    import sys

    said: Any = subprocess.run(
        [sys.executable, "-c", "import sys, kvcore; print('kvcore._util.cpus' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.strip() == "True"
