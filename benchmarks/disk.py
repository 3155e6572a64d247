"""Reads and writes of whole blocks through the disk tier, against raw methods.

`python -m benchmarks.disk`. All ways move the same slots of host memory (on huge pages if allowed),
in random order and past the page cache. They use one file that was written before, the tier's own.
In a round each way moves the same blocks once, in turn, and its ratio is to the best raw method of
the round. The tier also checksums, keeps records and verifies; the raw methods only move bytes.
NIXL takes part if it can be imported (``pip install nixl-cu13``). The bar is 90%.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import random
import shutil
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from benchmarks._report import Report, Row
from kvcore.memory.arena import HostArena
from kvcore.memory.copy import builtin_ops
from kvcore.memory.device_region import DeviceRegion
from kvcore.model.shape import BlockShape
from kvcore.tiers.base import BlockRead, BlockWrite, DeviceRead
from kvcore.tiers.disk import DiskAccess, DiskTier, Geometry, MountedStore, prepare_store
from kvcore.tiers.disk.format import shard_files
from kvcore.tiers.guard import BlockCipher, BlockGuard, BlockMac

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BAR = 0.9
COLUMNS = ("block", "KiB", "way", "read GB/s", "of raw read", "write GB/s", "of raw write")
KVCORE = "kvcore disk tier"
WITH_MAC = "kvcore disk tier, AES-256-GMAC"
ENCRYPTED = "kvcore disk tier, AES-256-GCM"
STRAIGHT = "kvcore disk tier, to_device"
STAGING_NBYTES = 64 << 20
SHAPES = {
    "SmolLM2, 16 tokens": BlockShape(30, 3, 64, 16, "bfloat16"),
    "Llama-3-8B, 16 tokens": BlockShape(32, 8, 128, 16, "bfloat16"),
}


class Way(NamedTuple):
    """One way to move the blocks of all slots: slot i of memory from or to place i on disk.

    Both calls return when done, and raise if anything failed.
    """

    read: Callable[[], None]
    write: Callable[[], None]


class Setting(NamedTuple):
    folder: Path
    store: Path
    """The folder of the tier's own files."""
    arena: HostArena
    order: Sequence[int]

    def buffer(self, slot: int) -> memoryview:
        return self.arena.slot_buffers(slot)[0]

    def place(self, slot: int) -> int:
        return slot * self.arena.slot_nbytes


# -- the ways -------------------------------------------------------------------------------


def drain(results: Iterator[None]) -> None:
    """Wait for all results. Raise the first error."""
    deque(results, maxlen=0)


@contextmanager
def one_file(setting: Setting) -> Iterator[int]:
    """Open the tier's own data file for direct I/O. Its bytes are not changed.

    The place of a file on the medium makes up to twice the difference, so all ways share one file.
    """
    data, _ = shard_files(setting.store, 0)
    file = os.open(data, os.O_RDWR | os.O_DIRECT)
    try:
        yield file
    finally:
        os.close(file)


@contextmanager
def threads(setting: Setting, count: int) -> Iterator[Way]:
    """Move each block by a call of its own, from ``count`` threads."""
    size = setting.arena.slot_nbytes
    with one_file(setting) as file, ThreadPoolExecutor(count) as pool:

        def read(slot: int) -> None:
            assert os.preadv(file, [setting.buffer(slot)], setting.place(slot)) == size

        def write(slot: int) -> None:
            assert os.pwritev(file, [setting.buffer(slot)], setting.place(slot)) == size

        yield Way(
            lambda: drain(pool.map(read, setting.order)),
            lambda: drain(pool.map(write, setting.order)),
        )


@contextmanager
def file_per_block(setting: Setting) -> Iterator[Way]:
    """Keep each block in a file of its own, made anew at each write, as most caches do."""
    folder = setting.folder / "objects"
    folder.mkdir()
    size = setting.arena.slot_nbytes

    def write(slot: int) -> None:
        path = folder / f"{slot}.new"
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
        assert os.writev(file, [setting.buffer(slot)]) == size
        os.close(file)
        path.replace(folder / str(slot))

    def read(slot: int) -> None:
        file = os.open(folder / str(slot), os.O_RDONLY | os.O_DIRECT)
        assert os.readv(file, [setting.buffer(slot)]) == size
        os.close(file)

    with ThreadPoolExecutor(4) as pool:
        yield Way(
            lambda: drain(pool.map(read, setting.order)),
            lambda: drain(pool.map(write, setting.order)),
        )


def nixl() -> Any:
    """Return NIXL's Python module, or None if it is not installed."""
    for name in ("nixl_cu13", "nixl_cu12", "nixl"):
        if importlib.util.find_spec(name) is not None:
            return importlib.import_module(name)
    return None


@contextmanager
def nixl_posix(setting: Setting, module: Any, queue: str) -> Iterator[Way]:
    """Move all blocks by one request, through NIXL's POSIX plugin and its ``queue``."""
    agent = module.nixl_agent(f"bench-{queue}", module.nixl_agent_config(backends=[]))
    agent.create_backend("POSIX", {f"use_{queue}": "true"})
    size = setting.arena.slot_nbytes
    addresses = {
        slot: np.frombuffer(setting.buffer(slot), np.uint8).__array_interface__["data"][0]
        for slot in setting.order
    }
    with one_file(setting) as file:
        start = addresses[0]
        agent.register_memory([(start, setting.arena.nbytes, 0, "")], "DRAM")
        agent.register_memory([(0, setting.arena.nbytes, file, "")], "FILE")
        memory = agent.get_xfer_descs([(addresses[s], size, 0) for s in setting.order], "DRAM")
        places = agent.get_xfer_descs(
            [(setting.place(s), size, file) for s in setting.order], "FILE"
        )

        def move(direction: str) -> None:
            handle = agent.initialize_xfer(direction, memory, places, agent.name)
            state = agent.transfer(handle)
            while state == "PROC":
                time.sleep(0)
                state = agent.check_xfer_state(handle)
            assert state == "DONE", state
            agent.release_xfer_handle(handle)

        yield Way(lambda: move("READ"), lambda: move("WRITE"))


@contextmanager
def tier(
    setting: Setting,
    geometry: Geometry,
    io_threads: int,
    guard: BlockGuard | None = None,
    region: DeviceRegion | None = None,
) -> Iterator[Way]:
    """Open the disk tier as a worker does.

    It has written all blocks once before it is measured: the first write allocates, and the file
    grows.
    """
    disk = DiskTier(
        MountedStore(setting.store, setting.arena.num_slots),
        geometry,
        shard=0,
        slot_nbytes=setting.arena.slot_nbytes,
        access=DiskAccess(io_threads=io_threads, device_sums=region is not None),
        guard=guard,
    )
    if region is not None:
        disk.attach_device(region)
    key = {slot: slot.to_bytes(16, "little") for slot in setting.order}

    def write() -> None:
        requests = [
            BlockWrite(s, key[s], key[s], key[s], [setting.buffer(s)]) for s in setting.order
        ]
        assert not any(disk.write(requests))

    def read() -> None:
        if region is not None:
            for first in range(0, len(setting.order), region.num_slots):
                some = setting.order[first : first + region.num_slots]
                reads = [DeviceRead(slot, key[slot], place) for place, slot in enumerate(some)]
                assert not any(disk.read_device(reads))
            return
        assert not any(
            disk.read([BlockRead(s, key[s], [setting.buffer(s)]) for s in setting.order])
        )

    try:
        write()
        yield Way(read, write)
    finally:
        disk.close()


@contextmanager
def guarded(
    setting: Setting, geometry: Geometry, io_threads: int, guard: BlockGuard
) -> Iterator[Way]:
    """Open the same tier with a MAC or with encryption."""
    folder = setting.folder / guard.name.partition("/")[0]
    folder.mkdir()
    geometry = geometry.guarded(guard)
    geometry.save(folder)
    setting = setting._replace(store=folder)
    with tier(setting, geometry, io_threads, guard) as way:
        yield way


def straight(
    setting: Setting, geometry: Geometry, io_threads: int, stack: ExitStack
) -> dict[str, Way]:
    """Return the tier with reads straight into device memory; empty without NIXL.

    Reads bypass kvcore's host memory and go into a staging on the device, which is host memory
    here. Each block is verified there, in one thread, batch by batch.
    """
    if nixl() is None:
        return {}
    arena, slots = setting.arena, max(1, STAGING_NBYTES // setting.arena.slot_nbytes)
    ops = max(builtin_ops(), key=lambda one: one.priority)
    region = DeviceRegion(arena.shape, min(slots, arena.num_slots), ops)
    stack.callback(region.close)
    store = setting.folder / "straight"
    store.mkdir()
    geometry.save(store)
    apart = setting._replace(store=store)
    return {STRAIGHT: stack.enter_context(tier(apart, geometry, io_threads, region=region))}


def all_ways(
    setting: Setting, geometry: Geometry, io_threads: int, stack: ExitStack
) -> dict[str, Way]:
    key = os.urandom(32)
    guards: dict[str, BlockGuard] = {WITH_MAC: BlockMac(key), ENCRYPTED: BlockCipher(key)}
    ways = {
        KVCORE: stack.enter_context(tier(setting, geometry, io_threads)),
        **straight(setting, geometry, io_threads, stack),
        **{
            name: stack.enter_context(guarded(setting, geometry, io_threads, guard))
            for name, guard in guards.items()
        },
        "4 threads, preadv": stack.enter_context(threads(setting, 4)),
        "8 threads, preadv": stack.enter_context(threads(setting, 8)),
    }
    module = nixl()
    if module is not None:
        for queue in ("aio", "uring"):
            name = f"NIXL POSIX, {queue}"
            ways[name] = stack.enter_context(nixl_posix(setting, module, queue))
    ways["a file a block"] = stack.enter_context(file_per_block(setting))
    return ways


# -- measuring ------------------------------------------------------------------------------


def timed(act: Callable[[], None], nbytes: int) -> float:
    """Return the rate of a call in GB/s."""
    start = time.perf_counter()
    act()
    return nbytes / (time.perf_counter() - start) / 1e9


def is_raw(name: str) -> bool:
    return name not in (KVCORE, WITH_MAC, ENCRYPTED, STRAIGHT, "a file a block")


def measure(ways: dict[str, Way], rounds: int, nbytes: int) -> dict[str, tuple[float, ...]]:
    """Return for each way the medians of (read, ratio to the best raw way, write, ratio)."""
    rates: dict[str, list[tuple[float, ...]]] = {name: [] for name in ways}
    for way in ways.values():
        way.write()
    for number in range(rounds):
        names = sorted(ways)
        random.Random(number).shuffle(names)
        read = {name: timed(ways[name].read, nbytes) for name in names}
        write = {name: timed(ways[name].write, nbytes) for name in names}
        best_read = max(rate for name, rate in read.items() if is_raw(name))
        best_write = max(rate for name, rate in write.items() if is_raw(name))
        for name in ways:
            row = (read[name], read[name] / best_read, write[name], write[name] / best_write)
            rates[name].append(row)
    return {
        name: tuple(statistics.median(column) for column in zip(*rows, strict=True))
        for name, rows in rates.items()
    }


def draw(figure: Figure, rows: Sequence[Row]) -> None:
    """Plot reads and writes side by side, a group for each way."""
    axes = figure.subplots(1, len(SHAPES), sharex=True)
    for ax, name in zip(axes, SHAPES, strict=True):
        mine = [row for row in rows if row["block"] == name]
        where = np.arange(len(mine))
        for shift, kind in ((-0.2, "read GB/s"), (0.2, "write GB/s")):
            ax.barh(where + shift, [row[kind] for row in mine], height=0.4, label=kind)
        ax.set_yticks(where, [row["way"] for row in mine], fontsize="x-small")
        ax.invert_yaxis()
        ax.set(title=name, xlabel="GB/s")
        ax.legend(fontsize="x-small")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.disk")
    parser.add_argument("--folder", type=Path, help="folder on the disk to measure (temporary)")
    parser.add_argument("--mib", type=int, default=256, help="MiB of blocks that a pass moves")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--io-threads", type=int, default=4, help="I/O threads of the tier")
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    notes = {name: getattr(options, name) for name in ("mib", "rounds", "io_threads")}
    report = Report("disk", COLUMNS, "the best raw method of each round", notes)
    for name, shape in SHAPES.items():
        folder = Path(tempfile.mkdtemp(prefix="kvcore-disk-", dir=options.folder))
        try:
            for row in run(folder, shape, options):
                report.add(**dict(zip(COLUMNS, (name, shape.nbytes // 1024, *row), strict=True)))
        finally:
            shutil.rmtree(folder)
    report.finish(options.out, draw)
    mine = [row for row in report.rows if row["way"] == KVCORE]
    low = sum(row[f"of raw {what}"] < BAR for row in mine for what in ("read", "write"))
    print(f"{low} of {2 * len(mine)} below {BAR:.0%} of the best raw method")


def run(folder: Path, shape: BlockShape, options: Any) -> Iterator[tuple[object, ...]]:
    """Yield (way, read, ratio, write, ratio) for blocks of ``shape``."""
    slots = (options.mib << 20) // shape.nbytes
    arena = HostArena(shape, slots)
    arena.tensor().fill_(1)  # so that all of it is in memory
    order = random.Random(1).sample(range(slots), slots)
    geometry = Geometry(shape, b"benchmark", ((0, shape.kv_heads),))
    capacity = slots * geometry.per_slot + 4096
    with (
        closing(prepare_store(folder / "kvcore", geometry, capacity)) as store,
        ExitStack() as stack,
    ):
        setting = Setting(folder, store.folder, arena, order)
        ways = all_ways(setting, geometry, options.io_threads, stack)
        for way, numbers in measure(ways, options.rounds, arena.nbytes).items():
            yield (way, *numbers)
    arena.close()


if __name__ == "__main__":
    main()
