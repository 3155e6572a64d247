"""Time from a store on disk to an index that answers: an engine's start with a full disk.

    python -m benchmarks.index_rebuild [--blocks 1000000] [--out results]

This makes the index file of a store of ``--blocks`` blocks: prompts of 128 blocks, slots in random
order as after much traffic, and a sparse data file of full length. Then it does what a leader does
at its start: lock, make room and scan (`prepare_store`), and restore the index. Results are the
best of ``--rounds``, in this process, with the file in the page cache. The bar is 10 s for a
million blocks.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks._report import Report, Row
from kvcore.index import BlockIndex, TierSpec
from kvcore.model.shape import BlockShape
from kvcore.tiers.disk import Geometry, prepare_store
from kvcore.tiers.disk.format import Record, read_table, shard_files
from kvcore.tiers.geometry import RECORD_NBYTES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BAR_S = 10.0
CHAIN = 128
GEOMETRY = Geometry(BlockShape(1, 1, 16, 16, "bfloat16"), b"benchmark", ((0, 1),))
CAPACITY_SPARE = 1 << 20
COLUMNS = ("blocks", "step", "seconds", "CPU seconds", "us per block", "to plain read", "bar (s)")


def make_store(path: Path, blocks: int) -> Path:
    """Make a store of ``blocks`` blocks. Return its folder."""
    store = prepare_store(path, GEOMETRY, capacity(blocks))
    store.close()
    slots = list(range(blocks))
    random.Random(0).shuffle(slots)
    index = bytearray(blocks * RECORD_NBYTES)
    parent = bytes(16)
    for i, slot in enumerate(slots):
        parent = bytes(16) if i % CHAIN == 0 else parent
        key = hashlib.sha256(b"%d" % i).digest()[:16]
        record = Record(key, parent, b"n" * 16, b"c" * 16, GEOMETRY.shape.nbytes, i)
        index[slot * RECORD_NBYTES : (slot + 1) * RECORD_NBYTES] = record.pack()
        parent = key
    data, records = shard_files(store.folder, 0)
    records.write_bytes(index)
    with data.open("wb") as file:
        file.truncate(blocks * 4096)
    return store.folder


def capacity(blocks: int) -> int:
    return blocks * GEOMETRY.per_slot + CAPACITY_SPARE


class Times(NamedTuple):
    """The least seconds of some rounds. On a busy machine the CPU seconds are more reliable."""

    seconds: float
    cpu: float

    def __add__(self, other: object) -> Times:
        assert isinstance(other, Times)
        return Times(self.seconds + other.seconds, self.cpu + other.cpu)


def best(rounds: int, run: Callable[[], Any]) -> tuple[Times, Any]:
    """Return the least times of ``rounds`` calls, and what the last call returned."""
    times = []
    for _ in range(rounds):
        started = time.perf_counter(), time.process_time()
        made = run()
        times.append((time.perf_counter() - started[0], time.process_time() - started[1]))
    return Times(*map(min, zip(*times, strict=True))), made


def measure(report: Report, folder: Path, blocks: int, rounds: int) -> None:
    path = folder / str(blocks)
    _, records_file = shard_files(make_store(path, blocks), 0)
    plain, _ = best(rounds, records_file.read_bytes)

    def prepare() -> Any:
        store = prepare_store(path, GEOMETRY, capacity(blocks))
        store.close()
        return store

    def restore() -> BlockIndex:
        index = BlockIndex([TierSpec("disk", store.num_slots)])
        assert not index.admin.restore("disk", store.records)
        return index

    table_s, _ = best(rounds, lambda: read_table(records_file))
    prepare_s, store = best(rounds, prepare)
    assert len(store.records) == blocks
    restore_s, index = best(rounds, restore)
    assert len(index) == blocks
    steps = {
        "plain read of the file": plain,
        "of prepare: read, check": table_s,
        "prepare (lock, room, scan)": prepare_s,
        "restore the index": restore_s,
        "start: prepare and restore": prepare_s + restore_s,
    }
    for step, times in steps.items():
        report.add(
            **{
                "blocks": blocks,
                "step": step,
                "seconds": times.seconds,
                "CPU seconds": times.cpu,
                "us per block": times.seconds / blocks * 1e6,
                "to plain read": times.seconds / plain.seconds,
                "bar (s)": BAR_S if step.startswith("start") and blocks == 1_000_000 else None,
            }
        )


def draw(figure: Figure, rows: Sequence[Row]) -> None:
    axes = figure.subplots()
    for step in dict.fromkeys(row["step"] for row in rows):
        points = [row for row in rows if row["step"] == step]
        axes.loglog(
            [row["blocks"] for row in points],
            [row["seconds"] for row in points],
            marker="o",
            label=step,
        )
    axes.axhline(BAR_S, linestyle="--", color="grey")
    axes.set_xlabel("blocks in the store")
    axes.set_ylabel("seconds")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="folder in which stores are made temporarily")
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    report = Report(
        "index_rebuild",
        COLUMNS,
        baseline="one read of the index file",
        notes={"bytes a record": RECORD_NBYTES, "blocks a chain": CHAIN},
    )
    sizes = sorted({max(options.blocks // 100, CHAIN), options.blocks // 10, options.blocks})
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for blocks in sizes:
            measure(report, Path(folder), blocks, options.rounds)
    report.finish(options.out, draw)


if __name__ == "__main__":
    main()
