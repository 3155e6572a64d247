"""Two engines, one server: what one computed the other loads, and the answers stay the same."""

import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcore.config import Config
from kvcore.testing.waiting import until
from kvcore_devtools.server_fixture import RunningServer, serve, settings, words

Start = Callable[[Config], RunningServer]


@pytest.mark.parametrize(
    "sizes",
    [
        [(1, 1), (1, 1)],
        [(2, 1), (2, 1)],
        [(1, 1), (2, 1)],
        [(2, 1), (1, 1)],
        [(1, 2), (2, 1)],
        [(1, 1), (2, 2)],
    ],
)
def test_what_one_engine_computes_the_other_loads(
    start: Start, engine: Any, plain: Any, folder: Path, sizes: list[tuple[int, int]]
) -> None:
    """Ranks of data parallelism, say, each with its tensor-parallel ranks and pipeline stages."""
    config = settings(folder)
    server = start(config)
    first, second = (engine(config, ranks=ranks, stages=stages) for ranks, stages in sizes)
    prompt = words(1, 100)
    assert serve(first, prompt) == (plain(prompt), {})
    until(lambda: server.idle)
    assert serve(second, prompt) == (plain(prompt), {"host": 96})
    longer = [*prompt, *words(2, 60)]
    assert serve(second, longer)[0] == plain(longer)
    until(lambda: server.idle)
    assert serve(first, longer)[1] == {"host": 63}, "96 are its own, the rest the other's"


@pytest.mark.parametrize("ranks", [1, 2])
def test_loads_from_disk_pass_through_few_slots_at_the_pace_of_the_slowest_rank(
    start: Start, engine: Any, plain: Any, folder: Path, tmp_path: Path, ranks: int
) -> None:
    """Host memory of 12 blocks and 4 for staging, prompts of 10 blocks, two at a time."""
    disk = {"path": str(tmp_path), "capacity": "64MiB"}
    config = settings(folder, host={"capacity": "256KiB"}, disk=disk)
    server = start(config)
    serving = engine(config, ranks=ranks, prefix_cache=False)
    slow = serving.workers[-1].worker.ops
    copy = slow.copy_blocks

    def slowly(*given: Any, **options: Any) -> None:
        time.sleep(0.02)
        copy(*given, **options)

    slow.copy_blocks = slowly
    prompts = [words(seed, 165) for seed in range(3)]
    for prompt in prompts:
        assert serve(serving, prompt)[0] == plain(prompt)
        until(lambda: server.idle)
    staged = 0
    for _ in range(2):
        for left, right in itertools.permutations(prompts, 2):
            requests = [serving.submit(prompt, 6) for prompt in (left, right)]
            serving.run()
            serving.settle()
            until(lambda: server.idle)
            assert [r.answer for r in requests] == [plain(left), plain(right)]
            staged += sum(r.reused.get("disk", 0) for r in requests)
    assert staged > 6 * 160, "most of it came from disk"


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_damaged_on_the_servers_disk_is_computed_and_saved_anew(
    start: Start, engine: Any, plain: Any, folder: Path, tmp_path: Path, ranks: int
) -> None:
    config = settings(folder, disk={"path": str(tmp_path), "capacity": "1MiB"})
    server = start(config)
    prompt = words(1, 100)
    serve(engine(config), prompt)
    until(lambda: server.idle)
    server.close()
    [file] = tmp_path.rglob("shard-0.data")
    file.write_bytes(bytes(byte ^ 0xFF for byte in file.read_bytes()))
    again = start(config)
    second = engine(config, ranks=ranks, prefix_cache=False)
    assert serve(second, prompt) == (plain(prompt), {})
    until(lambda: again.idle)
    assert serve(second, prompt) == (plain(prompt), {"host": 96})


@pytest.mark.parametrize("first", ["engine", "read"])
def test_a_read_that_hangs_is_waited_for_once(
    start: Start,
    engine: Any,
    plain: Any,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    first: str,
) -> None:
    """Whether the engine or its read is the first to see that the deadline has passed."""
    config = settings(
        folder, disk={"path": str(tmp_path), "capacity": "64MiB"}, transfer={"load_deadline_s": 0.4}
    )
    server = start(config)
    serving, prompt = engine(config, prefix_cache=False), words(1, 100)
    assert serve(serving, prompt) == (plain(prompt), {})
    until(lambda: server.idle)
    [cache] = server.server.models
    cache.manager.index.evictions.evict("host", 100)
    disk, begun, go_on = cache._transport.worker.tiers["disk"], [], threading.Event()
    read = disk.read

    def hang(requests: Any) -> Any:
        begun.append(len(requests))
        go_on.wait(60)
        return read(requests)

    monkeypatch.setattr(disk, "read", hang)
    if first == "read":
        transfers = serving.workers[0].worker.engine
        monkeypatch.setattr(transfers, "_expire", lambda now: None)
    assert serve(serving, prompt) == (plain(prompt), {})
    assert len(begun) == 1, "no second load from what was too slow for the first"
    go_on.set()
    until(lambda: server.idle)
