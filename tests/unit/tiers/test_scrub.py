"""`kvcore scrub`: damaged blocks are found, reported and removed, and nothing else is touched."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvcore.cli.app import app
from kvcore.errors import ConfigError
from kvcore.fusion.segments import Segments
from kvcore.memory.arena import slot_bytes
from kvcore.testing.tier_contract import Block, read_back, write_blocks
from kvcore.tiers.disk import Geometry, prepare_store
from kvcore.tiers.disk.scrub import StoreReport, StoreState, scrub
from kvcore.tiers.geometry import RECORD_NBYTES
from support.budget import examples
from support.disk import GEOMETRY as ONE
from support.disk import ROOM, SHAPE, flip, open_tier

TWO = Geometry(SHAPE, b"model", ((0, 1), (1, 2)))
runner = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})


def fill(path: Path, geometry: Geometry, count: int) -> tuple[Path, list[Block]]:
    """Fill every shard of a store with ``count`` blocks. Return (its folder, shard 0's blocks)."""
    store = prepare_store(path, geometry, ROOM, wait_s=0)
    shards = []
    for shard in range(len(geometry.heads)):
        tier = open_tier(store, geometry, shard)
        shards.append([Block(slot, slot, tier.slot_nbytes) for slot in range(count)])
        write_blocks(tier, shards[-1])
        tier.close()
    store.close()
    return store.folder, shards[0]


def contents(path: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


def only(path: Path, **options: Any) -> StoreReport:
    (report,) = scrub(path, **options)
    return report


@pytest.mark.parametrize("geometry", [ONE, TWO])
def test_a_whole_store_is_left_as_it_is(tmp_path: Path, geometry: Geometry) -> None:
    fill(tmp_path, geometry, 5)
    before = contents(tmp_path)
    heard: list[int] = []
    report = only(tmp_path, done=heard.append)
    assert (report.state, report.blocks, report.num_bad, report.partial) == (
        StoreState.WHOLE,
        5,
        0,
        0,
    )
    assert report.nbytes == sum(heard) == 5 * SHAPE.nbytes
    assert contents(tmp_path) == before


@pytest.mark.usefixtures("kept_queues")
@settings(max_examples=examples(30, 1))
@given(slots=st.sets(st.integers(0, 6)), seed=st.integers(0, 1 << 20))
def test_every_damaged_block_and_no_other_is_taken_out(
    slots: set[int], seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("kv")
    folder, blocks = fill(path, ONE, 7)
    rng, slot = random.Random(seed), slot_bytes(SHAPE)
    for number in slots:
        flip(folder / "shard-0.data", number * slot + rng.randrange(SHAPE.nbytes), 1 << seed % 8)
    before = contents(path)
    looked = only(path, erase=False)
    assert contents(path) == before
    assert {bad.slot for bad in looked.bad} == slots
    assert {bad.key for bad in looked.bad} == {blocks[number].key for number in slots}
    assert (looked.blocks, looked.erased) == (7 - len(slots), 0)
    assert only(path).erased == len(slots)
    again = only(path)
    assert (again.state, again.blocks) == (StoreState.WHOLE, 7 - len(slots))
    store = prepare_store(path, ONE, ROOM, wait_s=0)
    assert {record.slot for record in store.records} == set(range(7)) - slots
    tier = open_tier(store, ONE)
    for number in set(range(7)) - slots:
        assert read_back(tier, blocks[number]) == blocks[number].data
    tier.close()
    store.close()


def test_damage_in_one_shard_takes_the_block_out_of_all(tmp_path: Path) -> None:
    folder, _ = fill(tmp_path, TWO, 3)
    flip(folder / "shard-1.data", slot_bytes(TWO.shard_shape(1)))
    report = only(tmp_path)
    assert [(bad.shard, bad.slot) for bad in report.bad] == [(1, 1)]
    assert (report.blocks, report.partial) == (2, 0)
    for shard in (0, 1):
        index = (folder / f"shard-{shard}.index").read_bytes()
        assert not any(index[RECORD_NBYTES : 2 * RECORD_NBYTES])


def test_a_block_that_one_shard_lacks_is_no_damage(tmp_path: Path) -> None:
    """An engine that is killed between the writes of two ranks leaves such a block."""
    folder, _ = fill(tmp_path, TWO, 3)
    index = folder / "shard-1.index"
    index.write_bytes(index.read_bytes()[: 2 * RECORD_NBYTES])
    report = only(tmp_path)
    assert (report.state, report.blocks, report.partial) == (StoreState.WHOLE, 2, 1)


def test_torn_records_and_blocks_beyond_the_data_are_taken_out(tmp_path: Path) -> None:
    folder, _ = fill(tmp_path, ONE, 4)
    flip(folder / "shard-0.index", RECORD_NBYTES + 20)
    with (folder / "shard-0.data").open("r+b") as data:
        data.truncate(3 * slot_bytes(SHAPE))
    with (folder / "shard-0.index").open("ab") as index:
        index.write(b"half a record")
    report = only(tmp_path)
    assert (report.torn, report.num_bad, report.blocks) == (2, 1, 2)
    assert "the data file ends before it" in report.bad[0].why
    again = only(tmp_path)
    assert (again.state, again.blocks, again.torn) == (StoreState.WHOLE, 2, 0)


def test_stores_in_use_and_of_other_versions_are_named_and_left(tmp_path: Path) -> None:
    folder, _ = fill(tmp_path, ONE, 2)
    store = prepare_store(tmp_path, ONE, ROOM, wait_s=0)
    assert only(tmp_path).state is StoreState.IN_USE
    store.close()
    told = json.loads((folder / "store.json").read_text())
    (folder / "store.json").write_text(json.dumps(told | {"version": 7}))
    flip(folder / "shard-0.data", 0)
    before = contents(tmp_path)
    report = only(tmp_path)
    assert report.state is StoreState.NOT_READ
    assert "version 7; this kvcore reads 1" in report.why
    assert contents(tmp_path) == before


def test_no_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"disk\.path"):
        list(scrub(tmp_path / "nowhere"))


def run(*args: str) -> tuple[int, Any]:
    result = runner.invoke(app, ["scrub", *args, "--json"])
    return result.exit_code, json.loads(result.stdout)


@pytest.mark.slow
def test_the_command_tells_by_its_exit_code(tmp_path: Path) -> None:
    folder, _ = fill(tmp_path, ONE, 3)
    assert run(str(tmp_path))[0] == 0
    flip(folder / "shard-0.data", 1)
    code, told = run(str(tmp_path), "--keep")
    assert (code, told["changed"]) == (1, False)
    (store,) = told["stores"]
    assert (store["state"], store["blocks"], store["bad_blocks"]) == ("damaged", 2, 1)
    assert store["bad"][0]["slot"] == 0
    assert run("--set", f"disk.path={tmp_path}")[0] == 1
    assert run(str(tmp_path))[0] == 0
    held = prepare_store(tmp_path, ONE, ROOM, wait_s=0)
    assert run(str(tmp_path))[0] == 3
    held.close()
    assert "whole" in runner.invoke(app, ["scrub", str(tmp_path)]).stdout
    nothing = runner.invoke(app, ["scrub"])
    assert nothing.exit_code == 2
    assert "no disk.path" in nothing.stderr


def test_segments_are_verified_too(tmp_path: Path) -> None:
    file = tmp_path / "segments-0011223344556677-16"
    segments = Segments(16, path=file)
    rng = random.Random(0)
    for _ in range(3):
        tokens = [rng.randrange(1 << 16) for _ in range(64)]
        segments.add(b"n" * 16, [rng.randbytes(16) for _ in range(4)], 0, tokens)
    segments.close()
    code, told = run(str(tmp_path))
    assert (code, told["segments"][0]["records"]) == (0, 3)
    size = (file.stat().st_size - 32) // 3
    flip(file, 32 + size + 100)
    before = file.read_bytes()
    code, told = run(str(tmp_path), "--keep")
    assert (code, told["segments"][0]["bad_records"]) == (1, 1)
    assert file.read_bytes() == before
    assert run(str(tmp_path))[0] == 1
    code, told = run(str(tmp_path))
    assert (code, told["segments"][0]["records"]) == (0, 2)
    reopened = Segments(16, path=file)
    assert run(str(tmp_path))[0] == 3
    reopened.close()
    file.write_bytes(b"something else that somebody put here")
    assert run(str(tmp_path))[0] == 3
