"""A clear is final, even if the engine dies, or its disk fails, before it is carried out."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvcore.config import load_config
from kvcore.errors import TierUnavailable
from kvcore.model.keys import KEY_BYTES
from kvcore.model.shape import BlockShape
from kvcore.testing.engine import EngineArgs, ReferenceEngine, random_llama
from kvcore.tiers.base import BlockWrite
from kvcore.tiers.disk import DiskTier, Geometry, prepare_store
from kvcore.tiers.disk.tombstones import Stamps
from kvcore_devtools.server_fixture import serve, words
from support.disk import open_tier

SHAPE = BlockShape(layers=2, kv_heads=2, head_dim=16, block_tokens=16, dtype="bfloat16")
ONE = Geometry(SHAPE, b"model", ((0, 2),))
TWO = Geometry(SHAPE, b"model", ((0, 1), (1, 2)))
ANN, BOB = b"a" * KEY_BYTES, b"b" * KEY_BYTES


def key(n: int) -> bytes:
    return n.to_bytes(KEY_BYTES, "little")


class Run:
    """One run of an engine over ``path``. A block's key is its slot's number."""

    def __init__(self, path: Path, geometry: Geometry = ONE) -> None:
        self.store = prepare_store(path, geometry, 1 << 20, wait_s=0)
        shards = range(len(geometry.heads))
        self.tiers = [open_tier(self.store, geometry, shard) for shard in shards]

    @property
    def found(self) -> set[int]:
        return {int.from_bytes(record.key, "little") for record in self.store.records}

    def write(self, numbers: Sequence[int], space: bytes = ANN) -> None:
        for tier in self.tiers:
            data = memoryview(bytearray(tier.slot_nbytes))
            writes = [BlockWrite(n, key(n), key(n), space, [data]) for n in numbers]
            assert tier.write(writes) == [None] * len(numbers)

    def end(self) -> None:
        for tier in self.tiers:
            tier.close()
        self.store.close()


def test_what_was_cleared_is_not_found_though_nobody_erased_it(tmp_path: Path) -> None:
    """Blocks that were written after the clear are found."""
    run = Run(tmp_path)
    run.write([1, 2])
    run.store.tombstones.cleared(None)
    run.write([3])
    run.end()
    run = Run(tmp_path)
    assert run.found == {3}
    assert not (run.store.folder / "cleared").exists(), "it is carried out"
    assert {int.from_bytes(r.key, "little") for r in run.tiers[0].scan()} == {3}, "erased for good"
    run.end()
    again = Run(tmp_path)
    assert again.found == {3}
    again.end()


def test_one_namespace_is_cleared_and_the_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)
    run.write([1], ANN)
    run.write([2], BOB)
    run.store.tombstones.cleared(BOB)
    run.write([3], BOB)
    run.end()
    run = Run(tmp_path)
    assert run.found == {1, 3}
    monkeypatch.setattr("kvcore.tiers.disk.tombstones.MAX_ENTRIES", 16)
    for number in range(40):  # more than the file distinguishes
        run.store.tombstones.cleared(number.to_bytes(KEY_BYTES, "little"))
    run.end()
    run = Run(tmp_path)
    assert run.found == set()
    run.end()


@pytest.mark.parametrize("ended", [False, True])
def test_a_write_that_lands_after_the_clear_is_void_and_nothing_beside_it(
    tmp_path: Path, ended: bool
) -> None:
    """Also if the engine is killed before it learns that the write has ended."""
    run = Run(tmp_path)
    run.write([1])
    run.store.tombstones.cleared(ANN, [2, 3])
    run.write([2, 3, 4])
    if ended:
        run.store.tombstones.landed([2, 3])
        run.write([3])  # the slot is free again, and has another block
    run.end()
    run = Run(tmp_path)
    assert run.found == ({3, 4} if ended else {4})
    run.end()


def test_slots_are_those_of_the_own_store(tmp_path: Path) -> None:
    """A store of another size that is only read has slots of the same numbers."""
    run = Run(tmp_path, TWO)
    run.write([1, 2])
    run.end()
    run = Run(tmp_path, ONE)
    run.write([3])
    run.store.tombstones.cleared(BOB, [1, 2, 3])
    run.end()
    run = Run(tmp_path, ONE)
    assert run.found == {1, 2}
    run.end()


def test_more_slots_than_the_file_tells_apart_clear_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)
    run.write([1])
    monkeypatch.setattr("kvcore.tiers.disk.tombstones.MAX_ENTRIES", 4)
    run.store.tombstones.landed([2, 3, 4, 5, 6])
    run.end()
    run = Run(tmp_path)
    assert run.found == set()
    run.end()


def test_a_write_under_way_is_void_though_the_file_clears_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stamp is newer than the clear."""
    run = Run(tmp_path)
    monkeypatch.setattr("kvcore.tiers.disk.tombstones.MAX_ENTRIES", 4)
    run.store.tombstones.cleared(None, writing=[1])
    run.store.tombstones.landed([2, 3, 4, 5, 6])
    run.write([1, 7])
    run.end()
    run = Run(tmp_path)
    assert run.found == {7}
    run.end()


def test_stores_of_other_sizes_that_were_read_owe_it_too(tmp_path: Path) -> None:
    run = Run(tmp_path, TWO)
    run.write([1, 2])
    run.end()
    run = Run(tmp_path, ONE)
    assert run.found == {1, 2}
    run.store.tombstones.cleared(None)
    run.end()
    for geometry in (TWO, ONE):
        run = Run(tmp_path, geometry)
        assert run.found == set()
        run.end()


def test_a_clock_that_was_ahead_takes_nothing_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks from a run whose clock was ahead are older than a later clear, despite their stamp."""
    run = Run(tmp_path)
    run.tiers[0]._stamps._ahead += 10**18
    run.write([1])
    run.end()
    run = Run(tmp_path)
    assert run.found == {1}
    run.store.tombstones.cleared(None)
    run.end()
    run = Run(tmp_path)
    assert run.found == set()
    run.end()


def test_ranks_that_start_when_the_clock_is_ahead_take_nothing_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock steps forward after the leader's start, and back after that of its ranks."""
    right = time.time_ns
    store = prepare_store(tmp_path, ONE, 1 << 20, wait_s=0)
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[__name__], "prepare_store", lambda *_, **__: store)
        patch.setattr("time.time_ns", lambda: right() + 3600 * 10**9)
        run = Run(tmp_path)
    run.write([1])
    run.store.tombstones.cleared(None)
    run.write([2])
    run.end()
    run = Run(tmp_path)
    assert run.found == {2}
    run.end()


def test_a_clock_that_was_set_back_between_two_lives_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that are stored after a clear stay, although the cleared ones seem younger."""
    right = time.time_ns
    with monkeypatch.context() as patch:
        patch.setattr("time.time_ns", lambda: right() + 3600 * 10**9)
        run = Run(tmp_path)
        run.write([1])
        run.end()
    run = Run(tmp_path)
    run.store.tombstones.cleared(None)
    run.write([2])
    run.end()
    run = Run(tmp_path)
    assert run.found == {2}
    run.end()


def test_ranks_of_another_machine_have_its_clock() -> None:
    origin = Stamps().origin
    assert next(Stamps.of(origin | {"ahead": 0})) < 10**18
    assert next(Stamps.of({"boot": "another", "ahead": 0})) > 10**18


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"[]",
        b"{",
        b'{"x": 1}',
        b'{"": null}',
        b'{"": Infinity}',
        b'{"": 1e400}',
        b'{"abcd": 1}',
        b"\xff",
        b'{"slots": [[1]]}',
        b'{"slots": ' + b"[" * 200_000,
        b'{"": 1, "x": "' + b"x" * (5 << 20) + b'"}',
    ],
    ids=range(12),
)
def test_a_damaged_note_clears_everything(
    tmp_path: Path, damaged: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path)
    run.write([1])
    run.end()
    (run.store.folder / "cleared").write_bytes(damaged)
    run = Run(tmp_path)
    assert run.found == set()
    assert "all of the store is cleared" in caplog.text
    run.end()


def test_a_store_that_cannot_be_cleared_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)
    run.write([1])
    run.store.tombstones.cleared(None)
    run.end()

    def fails(*_: Any) -> None:
        raise OSError(30, "read-only")

    with monkeypatch.context() as patch:
        patch.setattr("kvcore.tiers.disk.tombstones.IndexFile.erase", fails)
        with pytest.raises(TierUnavailable, match="what was cleared cannot be erased"):
            Run(tmp_path)
    run = Run(tmp_path)
    assert run.found == set()
    run.end()


def test_a_clear_survives_a_loss_of_power(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is flushed before it has its name, and its name in the folder after that."""
    run = Run(tmp_path)
    flushed: list[tuple[bool, bool]] = []

    def fsync(file: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(file).st_mode)
        flushed.append((is_folder, (run.store.folder / "cleared").exists()))

    monkeypatch.setattr("kvcore.tiers.disk.tombstones.os.fsync", fsync)
    run.store.tombstones.cleared(None)
    run.store.tombstones.close()
    assert flushed == [(False, False), (True, True)]
    run.end()


def test_that_it_could_not_be_written_down_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path)
    (run.store.folder / "cleared.new").mkdir()
    run.store.tombstones.cleared(None)
    run.end()
    assert "a restart may undo it" in caplog.text
    (run.store.folder / "cleared.new").rmdir()


def test_what_could_not_be_written_down_is_tried_once_more_at_the_end(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.write([1])
    (run.store.folder / "cleared.new").mkdir()
    run.store.tombstones.cleared(None)
    while run.store.tombstones._thread is not None:
        time.sleep(0.001)
    (run.store.folder / "cleared.new").rmdir()
    run.end()
    run = Run(tmp_path)
    assert run.found == set()
    run.end()


def test_a_clear_of_a_removed_store_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is found in it after a restart."""
    run = Run(tmp_path)
    shutil.rmtree(run.store.folder)
    run.store.tombstones.cleared(None)
    run.end()
    assert not caplog.records


def test_a_clear_follows_a_store_that_is_moved(tmp_path: Path) -> None:
    """Otherwise it would be undone by moving the folder back."""
    run = Run(tmp_path)
    run.write([1])
    folder, away = run.store.folder, tmp_path / "away"
    folder.rename(away)
    run.store.tombstones.cleared(None)
    run.end()
    away.rename(folder)
    run = Run(tmp_path)
    assert run.store.folder == folder
    assert run.found == set()
    run.end()


# -- engines ------------------------------------------------------------------------------------

PROMPT = words(1, 100)

KILLED = """
import os, signal, sys
from kvcore.config import load_config
from kvcore.testing.engine import EngineArgs, ReferenceEngine, random_llama
from kvcore_devtools.server_fixture import serve, words
from kvcore.testing.waiting import until
from kvcore.tiers.disk import DiskTier
config = load_config(None, {"disk": {"path": sys.argv[1], "capacity": "64MiB"}})
engine = ReferenceEngine(random_llama(), EngineArgs(prefix_cache=False), config)
serve(engine, words(1, 100))
engine.settle()
until(lambda: any(tier.scan() for made in engine.workers for tier in made.worker.tiers.values()))
engine.leader.manager.transport.invalidate = lambda *_: None  # it would go with the next step
engine.leader.manager.clear()
from pathlib import Path
until(lambda: list(Path(sys.argv[1]).rglob("cleared")))
os.kill(os.getpid(), signal.SIGKILL)
"""


def reused(path: Path) -> dict[str, int]:
    config = load_config(None, {"disk": {"path": str(path), "capacity": "64MiB"}})
    engine = ReferenceEngine(random_llama(), EngineArgs(prefix_cache=False), config)
    try:
        return serve(engine, PROMPT)[1]
    finally:
        engine.settle()
        engine.close()


@pytest.mark.slow
def test_an_engine_that_is_killed_before_its_ranks_hear_of_it(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], timeout=300)
    assert done.returncode == -signal.SIGKILL
    assert reused(tmp_path) == {}
    assert reused(tmp_path) == {"disk": 96}, "what was stored since is there"


def test_a_disk_that_fails_while_it_is_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reused(tmp_path)
    assert reused(tmp_path) == {"disk": 96}
    config = load_config(None, {"disk": {"path": str(tmp_path), "capacity": "64MiB"}})
    engine = ReferenceEngine(random_llama(), EngineArgs(prefix_cache=False), config)

    def fails(*_: Any) -> None:
        raise TierUnavailable("the disk is down")

    with monkeypatch.context() as patch:
        patch.setattr(DiskTier, "invalidate", fails)
        engine.leader.manager.clear()
        engine.settle()
    assert "could not invalidate" in caplog.text
    engine.close()
    assert reused(tmp_path) == {}
