"""Puts and gets of blocks in remote stores, by kvcore's tier and by the stores' own clients.

`python -m benchmarks.remote`. The store is on one host and the client on another. Hosts are network
namespaces with a virtual cable between them, which `--mib-s` can slow down; without namespaces both
are on localhost. All ways move the same blocks from and to the same memory, in calls of `--batch`
blocks. In a round each way has one turn, and ratios are to the best of the store's own ways in that
round. kvcore also frames, checksums and verifies blocks. Mooncake's own ways are its client's
zero-copy calls, by one thread and by four; Redis's are pipelines of its Python client. The bar is
80%.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from benchmarks._report import Report, Row
from kvcore.errors import UnsupportedError
from kvcore.memory.hugepages import Pages
from kvcore.model.shape import BlockShape
from kvcore.tiers.base import BlockRead, BlockWrite
from kvcore.tiers.geometry import Geometry
from kvcore.tiers.remote import Shard, StoreTier
from kvcore.tiers.remote.base import BlockStore
from kvcore.tiers.remote.mooncake import MooncakeOptions, MooncakeStore
from kvcore.tiers.remote.options import StoreOptions
from kvcore.tiers.remote.redis import RedisOptions, open_store
from kvcore_devtools.hosts import Host, Network
from kvcore_devtools.servers import Start, mooncake_lender, mooncake_master, redis_like, servers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BAR = 0.8
COLUMNS = ("store", "block", "KiB", "way", "get GB/s", "of own get", "put GB/s", "of own put")
KVCORE = "kvcore tier"
SHAPES = {
    "SmolLM2, 16 tokens": BlockShape(30, 3, 64, 16, "bfloat16"),
    "Llama-3-8B, 16 tokens": BlockShape(32, 8, 128, 16, "bfloat16"),
}
PATIENT = {"timeout_s": 120.0, "deadline_s": 120.0}


class Way(NamedTuple):
    """One way to move the blocks of some slots, under the names of a turn.

    Each call returns when done, and raises if anything failed. Names of a put are always new,
    because Mooncake does not replace a value.
    """

    put: Callable[[int, Sequence[int]], None]
    get: Callable[[int, Sequence[int]], None]
    drop: Callable[[int, Sequence[int]], None]


class Memory:
    """A memory of ``slots`` blocks of ``nbytes`` bytes each, which clients can register."""

    def __init__(self, slots: int, nbytes: int) -> None:
        self.slots, self.nbytes = slots, nbytes
        self.pages = Pages(slots * nbytes)
        noise = np.random.default_rng(0).integers(0, 256, slots * nbytes, dtype=np.uint8)
        np.frombuffer(self.pages.view, np.uint8)[:] = noise

    def block(self, slot: int) -> memoryview:
        return self.pages.view[slot * self.nbytes : (slot + 1) * self.nbytes]

    def address(self, slot: int) -> int:
        return self.pages.address + slot * self.nbytes


# -- the ways -------------------------------------------------------------------------------


@contextmanager
def kvcore_way(
    store: BlockStore, options: StoreOptions, shape: BlockShape, memory: Memory, batch: int
) -> Iterator[Way]:
    shard = Shard.of(Geometry(shape, b"benchmark", ((0, shape.kv_heads),)), 0, "kvcore")
    with closing(StoreTier(store, shard, options, slot_nbytes=shape.nbytes)) as tier:
        tier.attach(memory.pages.view)

        def key(turn: int, slot: int) -> bytes:
            return turn.to_bytes(8, "little") + slot.to_bytes(8, "little")

        def put(turn: int, slots: Sequence[int]) -> None:
            for part in batches(slots, batch):
                keys = {slot: key(turn, slot) for slot in part}
                writes = [BlockWrite(s, k, k, k, [memory.block(s)]) for s, k in keys.items()]
                succeeded(tier.write(writes))

        def get(turn: int, slots: Sequence[int]) -> None:
            for part in batches(slots, batch):
                reads = [BlockRead(s, key(turn, s), [memory.block(s)]) for s in part]
                succeeded(tier.read(reads))

        def drop(turn: int, slots: Sequence[int]) -> None:
            store.delete([shard.name(key(turn, slot)) for slot in slots])

        yield Way(put, get, drop)


@contextmanager
def mooncake_way(client: Any, memory: Memory, batch: int, threads: int) -> Iterator[Way]:
    """Use Mooncake's client directly: ``threads`` calls at a time, each with a share of a batch."""

    def names(turn: int, slots: Sequence[int]) -> list[str]:
        return [f"own-{threads}/{turn}/{slot}" for slot in slots]

    def each(call: Callable[..., list[int]], turn: int, slots: Sequence[int]) -> None:
        def move(part: Sequence[int]) -> None:
            places = [memory.address(slot) for slot in part]
            codes = call(names(turn, part), places, [memory.nbytes] * len(part))
            assert min(codes) >= 0, codes

        for part in batches(slots, batch):
            shares = batches(part, -(-len(part) // threads))
            list(pool.map(move, shares))

    with ThreadPoolExecutor(threads) as pool:
        yield Way(
            lambda turn, slots: each(client.batch_put_from, turn, slots),
            lambda turn, slots: each(client.batch_get_into, turn, slots),
            lambda turn, slots: check(client.batch_remove(names(turn, slots), True)),
        )


@contextmanager
def redis_way(client: Any, memory: Memory, batch: int, threads: int) -> Iterator[Way]:
    """Use pipelines of redis-py, ``threads`` at a time.

    A get returns the values as bytes objects: the client has no call that fills memory.
    """

    def name(turn: int, slot: int) -> str:
        return f"own-{threads}/{turn}/{slot}"

    def each(command: Callable[[Any, int], Any], slots: Sequence[int]) -> None:
        def move(part: Sequence[int]) -> None:
            pipeline = client.pipeline(transaction=False)
            for slot in part:
                command(pipeline, slot)
            assert all(pipeline.execute())

        for part in batches(slots, batch):
            shares = batches(part, -(-len(part) // threads))
            list(pool.map(move, shares))

    with ThreadPoolExecutor(threads) as pool:
        yield Way(
            lambda turn, slots: each(lambda p, s: p.set(name(turn, s), memory.block(s)), slots),
            lambda turn, slots: each(lambda p, s: p.get(name(turn, s)), slots),
            lambda turn, slots: client.unlink(*(name(turn, slot) for slot in slots)),
        )


def batches(slots: Sequence[int], size: int) -> list[Sequence[int]]:
    return [slots[i : i + size] for i in range(0, len(slots), size)]


def succeeded(results: Sequence[object]) -> None:
    """Raise the first error among the results of a tier."""
    for error in results:
        if isinstance(error, Exception):
            raise error


def check(codes: Sequence[int]) -> None:
    assert min(codes) >= 0, codes


# -- measuring, on the host of the engine ---------------------------------------------------


def mooncake_ways(
    address: str, host: str, shape: BlockShape, memory: Memory, batch: int, stack: ExitStack
) -> dict[str, Way]:
    options = MooncakeOptions(master=address, host=host, lend=0, **PATIENT)
    store = MooncakeStore(options)
    own = MooncakeStore(options)
    stack.callback(own.close)
    own.attach(memory.pages.view)
    client = own._joined()
    ways = {KVCORE: stack.enter_context(kvcore_way(store, options, shape, memory, batch))}
    for threads in (1, 4):
        name = f"mooncake client, {threads} thread{'s' * (threads > 1)}"
        ways[name] = stack.enter_context(mooncake_way(client, memory, batch, threads))
    return ways


def redis_ways(
    address: str, host: str, shape: BlockShape, memory: Memory, batch: int, stack: ExitStack
) -> dict[str, Way]:
    import redis

    url = f"redis://{address}/0"
    options = RedisOptions(url=url, **PATIENT)
    store = open_store(options)
    client = redis.Redis.from_url(url, socket_timeout=PATIENT["timeout_s"])
    stack.callback(client.close)
    ways = {KVCORE: stack.enter_context(kvcore_way(store, options, shape, memory, batch))}
    for threads in (1, 4):
        name = f"redis-py, {threads} connection{'s' * (threads > 1)}"
        ways[name] = stack.enter_context(redis_way(client, memory, batch, threads))
    return ways


STORES = {"mooncake": mooncake_ways, "redis": redis_ways}


def measure(
    ways: dict[str, Way], rounds: int, slots: Sequence[int], nbytes: int
) -> dict[str, tuple[float, ...]]:
    """Return for each way the medians of (get GB/s, ratio to the best own way, put GB/s, ratio).

    The first round is for warming up and does not count.
    """
    turns = count()
    rates: dict[str, list[tuple[float, ...]]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        names = sorted(ways)
        random.Random(number).shuffle(names)
        put, get = {}, {}
        for name in names:
            way, turn = ways[name], next(turns)
            put[name] = timed(way.put, turn, slots, nbytes)
            get[name] = timed(way.get, turn, slots, nbytes)
            way.drop(turn, slots)
        best_put = max(rate for name, rate in put.items() if name != KVCORE)
        best_get = max(rate for name, rate in get.items() if name != KVCORE)
        for name in ways if number else ():
            row = (get[name], get[name] / best_get, put[name], put[name] / best_put)
            rates[name].append(row)
    return {
        name: tuple(statistics.median(column) for column in zip(*rows, strict=True))
        for name, rows in rates.items()
    }


def timed(
    act: Callable[[int, Sequence[int]], None], turn: int, slots: Sequence[int], nbytes: int
) -> float:
    """Return the rate of a call in GB/s."""
    start = time.perf_counter()
    act(turn, slots)
    return nbytes / (time.perf_counter() - start) / 1e9


def inside(told: dict[str, Any]) -> None:
    """Measure one store with one shape and print the rows as JSON. Runs on the engine's host."""
    shape = SHAPES[told["shape"]]
    slots = max((told["mib"] << 20) // shape.nbytes, 1)
    memory = Memory(slots, shape.nbytes)
    order = random.Random(1).sample(range(slots), slots)
    with ExitStack() as stack:
        ways = STORES[told["store"]](
            told["address"], told["host"], shape, memory, told["batch"], stack
        )
        found = measure(ways, told["rounds"], order, slots * shape.nbytes)
    print(json.dumps(found))


# -- the hosts ------------------------------------------------------------------------------


def open_hosts(stack: ExitStack) -> tuple[Host | None, Host | None, str]:
    """Return the engine's and the store's host (None: localhost), and their description."""
    try:
        network = stack.enter_context(Network("engine", "store"))
    except UnsupportedError as error:
        return None, None, f"localhost: {error}"
    return network["engine"], network["store"], str(network.facts)


def start_store(kind: str, start: Start, host: Host | None, nbytes: int) -> str:
    """Start a store with room for ``nbytes`` bytes. Return its address."""
    where = host.address if host else "127.0.0.1"
    if kind == "redis":
        return start(redis_like("redis-server", bind=where), host).address
    master = start(mooncake_master(), host).address
    start(mooncake_lender(master, where, nbytes), host)
    return master


def rows_of(kind: str, shape: str, options: Any, notes: dict[str, Any]) -> Iterator[Row]:
    """Measure in a new process on new hosts, and yield the rows. Blocks for minutes."""
    with ExitStack() as stack:
        engine, host, notes["network"] = open_hosts(stack)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvcore-remote-"))
        start = stack.enter_context(servers(Path(folder)))
        address = start_store(kind, start, host, (4 * options.mib + 64) << 20)
        if engine is not None and options.mib_s:
            engine.slow(options.mib_s * (1 << 20))
        told = {
            "store": kind,
            "shape": shape,
            "address": address,
            "host": engine.address if engine else "127.0.0.1",
            **{name: getattr(options, name) for name in ("mib", "rounds", "batch")},
        }
        command = [sys.executable, "-m", "benchmarks.remote", "--inside", json.dumps(told)]
        done = subprocess.run(
            [*(engine.command if engine else ()), *command],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        found = json.loads(done.stdout.splitlines()[-1])
    size = SHAPES[shape].nbytes // 1024
    for way, numbers in found.items():
        yield dict(zip(COLUMNS, (kind, shape, size, way, *numbers), strict=True))


def draw(figure: Figure, rows: Sequence[Row]) -> None:
    """Plot gets and puts side by side, a picture for each store and block."""
    pictures = list(dict.fromkeys((row["store"], row["block"]) for row in rows))
    axes = figure.subplots(len(pictures), 1, squeeze=False)[:, 0]
    for ax, picture in zip(axes, pictures, strict=True):
        mine = [row for row in rows if (row["store"], row["block"]) == picture]
        where = np.arange(len(mine))
        for shift, kind in ((-0.2, "get GB/s"), (0.2, "put GB/s")):
            ax.barh(where + shift, [row[kind] for row in mine], height=0.4, label=kind)
        ax.set_yticks(where, [row["way"] for row in mine], fontsize="x-small")
        ax.invert_yaxis()
        ax.set_title(f"{picture[0]}: {picture[1]}", fontsize="small")
        ax.legend(fontsize="x-small")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.remote")
    add = parser.add_argument
    add("--stores", nargs="+", choices=sorted(STORES), default=sorted(STORES))
    add("--mib", type=int, default=128, help="MiB of blocks that a pass moves (128)")
    add("--rounds", type=int, default=9, help="rounds that count (9)")
    add("--batch", type=int, default=32, help="blocks in a call (32)")
    add("--mib-s", type=float, default=0, help="MiB/s to slow the cable down to (not slowed)")
    add("--out", type=Path, default=Path("results"))
    add("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        inside(json.loads(options.inside))
        return
    notes = {name: getattr(options, name) for name in ("mib", "rounds", "batch", "mib_s")}
    report = Report("remote", COLUMNS, "the store's own client, its best way of each round", notes)
    for kind in options.stores:
        for shape in SHAPES:
            for row in rows_of(kind, shape, options, report.notes):
                report.add(**row)
    report.finish(options.out, draw)
    mine = [row for row in report.rows if row["way"] == KVCORE]
    low = sum(row[f"of own {what}"] < BAR for row in mine for what in ("get", "put"))
    print(f"{low} of {2 * len(mine)} below {BAR:.0%} of the store's own client")


if __name__ == "__main__":
    main()
