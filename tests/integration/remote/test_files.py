"""The `files` store: NIXL to storage, files that are damaged, file systems that hang."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from kvcore.cli.probe import Finding, Level, contacts
from kvcore.config import load_config
from kvcore.errors import BlockMissing, ConfigError, CorruptBlock, TierUnavailable, UnsupportedError
from kvcore.memory.nixl import CHANNEL_NBYTES, FileAgent, FileSpan
from kvcore.model.shape import BlockShape
from kvcore.plugins import PluginManager
from kvcore.testing.store_contract import StoreContract, fetch, put, value
from kvcore.tiers.base import BlockRead, BlockWrite
from kvcore.tiers.disk import Geometry
from kvcore.tiers.remote import BlockStore, Item, Shard, StoreTier
from kvcore.tiers.remote.files import store as module
from kvcore.tiers.remote.files.channel import Channel
from kvcore.tiers.remote.files.store import FileOptions, FileStore, open_store
from kvcore_devtools.servers import need_client

need_client("nixl_cu13")

PATIENCE_S = 120.0
GEOMETRY = Geometry(BlockShape(4, 2, 8, 16, "bfloat16"), b"files of a model", ((0, 2),))
NBYTES = GEOMETRY.shape.nbytes

Open = Callable[..., FileStore]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "shared"


@pytest.fixture
def opened(folder: Path) -> Iterator[Open]:
    made: list[FileStore] = []

    def make(**options: Any) -> FileStore:
        made.append(open_store(FileOptions(path=folder, **{"timeout_s": PATIENCE_S, **options})))
        return made[-1]

    yield make
    for store in made:
        store.close()


class TestFiles(StoreContract):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.path = tmp_path / "shared"

    def make_store(self) -> BlockStore:
        return open_store(FileOptions(path=self.path, timeout_s=PATIENCE_S))


def test_nixl_moves_the_bytes(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[tuple[str, int]] = []
    move = FileAgent.move

    def watch(self: FileAgent, operation: str, spans: Sequence[FileSpan]) -> str:
        moved.append((operation, len(spans)))
        return move(self, operation, spans)

    monkeypatch.setattr(FileAgent, "move", watch)
    store = opened()
    put(store, {f"k/{i}": value(i, 5000) for i in range(3)})
    assert fetch(store, "k/1", 5000) == value(1, 5000)
    assert moved == [("WRITE", 3), ("READ", 1)]


def test_what_does_not_fit_a_lane_goes_in_several(opened: Open) -> None:
    store = opened()
    third = CHANNEL_NBYTES // 3 + 1
    put(store, {f"k/{i}": value(i, third) for i in range(4)})
    put(store, {"k/huge": value(9, CHANNEL_NBYTES + 1)})
    assert all(fetch(store, f"k/{i}", third) == value(i, third) for i in range(4))
    assert fetch(store, "k/huge", CHANNEL_NBYTES + 1) == value(9, CHANNEL_NBYTES + 1)


# -- the folder ---------------------------------------------------------------------------------


def test_files_belong_to_their_owner_alone(opened: Open, folder: Path) -> None:
    put(opened(), {"a/b/c": b"1234"})
    assert stat.S_IMODE((folder / "a" / "b" / "c").stat().st_mode) == 0o600
    folders = [folder, folder / "a", folder / "a" / "b", folder / ".writing"]
    assert [stat.S_IMODE(one.stat().st_mode) for one in folders] == [0o700] * 4


def test_another_process_reads_them_and_its_own_are_found(opened: Open, folder: Path) -> None:
    store = opened()
    put(store, {"k/0": value(0, 5000)})
    script = """
        import sys
        from kvcore.testing.store_contract import fetch, put, value
        from kvcore.tiers.remote.files.store import FileOptions, open_store
        store = open_store(FileOptions(path=sys.argv[1], timeout_s=120))
        assert fetch(store, "k/0", 5000) == value(0, 5000)
        put(store, {f"k/{i}": value(10 + i, 5000) for i in range(2)})
        store.close()
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(folder)]
    subprocess.run(command, check=True, timeout=PATIENCE_S)
    assert [fetch(store, f"k/{i}", 5000) for i in range(2)] == [value(10 + i, 5000) for i in (0, 1)]


def test_what_a_dead_writer_left_is_removed_when_it_is_old(opened: Open, folder: Path) -> None:
    store = opened()
    put(store, {"a": b"1"})
    new, old = folder / ".writing" / "new", folder / ".writing" / "old"
    for one in (new, old):
        one.write_bytes(b"half")
    os.utime(old, (time.time() - 2 * 24 * 3600,) * 2)
    other = opened()
    assert [path.name for path in (folder / ".writing").iterdir()] == ["new"]
    assert fetch(other, "a", 1) == b"1"


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"path .*file"):
        open_store(FileOptions(path=tmp_path / "file" / "below"))
    with pytest.raises(ValidationError, match="must not start with a dot"):
        FileOptions(path=tmp_path, prefix=".writing")


def test_a_backend_that_does_not_start_is_refused_by_name(tmp_path: Path) -> None:
    for backend in ("GDS", "GDS_MT"):
        if module._refusal(backend) is None:
            continue
        with pytest.raises(UnsupportedError, match=f"{backend}.*POSIX is in every NIXL.*libcufile"):
            open_store(FileOptions(path=tmp_path, backend=backend))
    store = open_store(FileOptions(path=tmp_path, backend="auto"))
    put(store, {"a": b"1"})
    store.close()


def test_doctor_opens_it_and_names_a_backend_that_is_not_there(folder: Path) -> None:
    def ask(**options: Any) -> Finding:
        options = {"path": str(folder), "timeout_s": PATIENCE_S, **options}
        settings = {"tiers": {"shelf": {"plugin": "files", "options": options}}}
        config = load_config(overrides=settings, env={})
        [found] = contacts(config, PluginManager(), PATIENCE_S)
        return found

    found = ask()
    assert (found.level, found.found.partition(" (")[0]) == (Level.GOOD, "answers")
    if module._refusal("GDS") is not None:
        found = ask(backend="GDS")
        assert found.level is Level.PROBLEM
        assert "libcufile" in found.found


# -- what befalls files -------------------------------------------------------------------------


def write_blocks(store: FileStore, count: int) -> tuple[StoreTier, list[bytes], list[Path]]:
    """A tier with blocks 0, 1, ...: their keys and their files."""
    shard = Shard.of(GEOMETRY, 0, "kvcore")
    tier = StoreTier(store, shard, FileOptions(path=store._root, timeout_s=PATIENCE_S, parallel=1))
    keys = [bytes([i]) * 16 for i in range(count)]
    writes = [
        BlockWrite(i, key, key, key, [memoryview(value(i, NBYTES))]) for i, key in enumerate(keys)
    ]
    assert tier.write(writes) == [None] * count
    return tier, keys, [store._root / shard.name(key) for key in keys]


def read_blocks(tier: StoreTier, keys: Sequence[bytes]) -> list[bytes | type]:
    buffers = [bytearray(NBYTES) for _ in keys]
    reads = [BlockRead(0, key, [memoryview(into)]) for key, into in zip(keys, buffers, strict=True)]
    errors = tier.read(reads)
    return [
        type(error) if error else bytes(into) for error, into in zip(errors, buffers, strict=True)
    ]


def test_damaged_files_are_removed_and_the_others_read(opened: Open) -> None:
    tier, keys, files = write_blocks(opened(), 6)
    data = bytearray(files[1].read_bytes())
    data[500] ^= 1
    files[1].write_bytes(data)
    os.truncate(files[2], 300)
    files[3].unlink()
    shutil.copyfile(files[0], files[4])  # another block's, whole
    good = [value(0, NBYTES), value(5, NBYTES)]
    bad = [CorruptBlock, CorruptBlock, BlockMissing, CorruptBlock]
    assert read_blocks(tier, keys) == [good[0], *bad, good[1]]
    assert [file.exists() for file in files] == [True, False, False, False, False, True]
    assert read_blocks(tier, keys) == [good[0], *[BlockMissing] * 4, good[1]]


def test_a_file_that_shrinks_while_it_is_read_fails_alone(
    opened: Open, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened()
    put(store, {f"k/{i}": value(i, 9000) for i in range(3)})
    move = Channel.move

    def shrink(self: Channel, operation: str, spans: Sequence[FileSpan]) -> Any:
        os.truncate(folder / "k" / "1", 5000)
        return move(self, operation, spans)

    monkeypatch.setattr(Channel, "move", shrink)
    buffers = [bytearray(9000) for _ in range(3)]
    errors = store.get([Item(f"k/{i}", [memoryview(b)]) for i, b in enumerate(buffers)])
    assert [type(error) for error in errors] == [type(None), TierUnavailable, type(None)]
    assert [bytes(buffers[i]) for i in (0, 2)] == [value(i, 9000) for i in (0, 2)]
    monkeypatch.undo()
    with pytest.raises(CorruptBlock):
        fetch(store, "k/1", 9000)
    assert fetch(store, "k/2", 9000) == value(2, 9000)


def test_a_write_that_fails_leaves_nothing(
    opened: Open, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened()
    monkeypatch.setattr(FileAgent, "move", lambda *_: "ERR")
    errors = store.put([Item(name, [memoryview(b"1234")]) for name in ("a", "b")])
    assert [type(error) for error in errors] == [TierUnavailable] * 2
    monkeypatch.undo()
    assert store.exists(["a", "b"]) == [False, False]
    assert list((folder / ".writing").iterdir()) == []
    put(store, {"a": b"1234"})


def test_a_full_file_system_refuses_and_keeps_what_it_has(folder: Path) -> None:
    """On a file system of 2 MiB, mounted for a process of its own."""
    script = """
        import sys
        from pathlib import Path
        from kvcore.errors import TierUnavailable
        from kvcore.testing.store_contract import fetch, value
        from kvcore.tiers.remote import Item
        from kvcore.tiers.remote.files.store import FileOptions, open_store
        folder = Path(sys.argv[1])
        store = open_store(FileOptions(path=folder, timeout_s=120))
        size = 300_000
        items = [Item(f"k/{i}", [memoryview(value(i, size))]) for i in range(10)]
        errors = store.put(items)
        kept = [i for i, error in enumerate(errors) if error is None]
        assert 3 <= len(kept) <= 6, errors
        assert all(isinstance(error, TierUnavailable) for error in errors if error is not None)
        assert "No space left" in str(errors[9])
        assert store.exists([item.name for item in items]) == [i in kept for i in range(10)]
        assert all(fetch(store, f"k/{i}", size) == value(i, size) for i in kept)
        assert not any((folder / ".writing").iterdir())
        store.delete(["k/0"])
        assert store.put(items[9:]) == [None]
    """
    folder.mkdir()
    mounted = 'mount -t tmpfs -o size=2m none "$1" && shift && exec "$@"'
    within = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mounted, "sh"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*within, folder, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("no file system can be mounted here")
    command = [*within, folder, sys.executable, "-c", textwrap.dedent(script), folder]
    subprocess.run(command, check=True, timeout=PATIENCE_S)


# -- what hangs ---------------------------------------------------------------------------------


class Stuck:
    """NIXL's transfers, held until they are let go; then reads fill the memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        move = FileAgent.move

        def hold(agent: FileAgent, operation: str, spans: Sequence[FileSpan]) -> str:
            assert self.go.wait(PATIENCE_S)
            return move(agent, operation, spans)

        monkeypatch.setattr(FileAgent, "move", hold)


def jobs() -> int:
    """Calls under way, those that were given up too."""
    return sum(thread.name == "kvcore-files" for thread in threading.enumerate())


def wait_for(true: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_late_read_is_given_up_and_writes_to_nobody(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(opened(), {f"k/{i}": value(i, 5000) for i in range(2)})
    stuck = Stuck(monkeypatch)
    store = opened(timeout_s=0.3, parallel=1)
    channels = store._free.qsize()
    into = bytearray(5000)
    with pytest.raises(TierUnavailable, match="did not answer in time"):
        store.get([Item("k/0", [memoryview(into)])])
    assert store._free.qsize() == channels - 1, "its channel is not used before it has ended"
    store._timeout = PATIENCE_S
    assert store.exists(["k/0"]) == [True], "others go on"
    stuck.go.set()
    wait_for(lambda: store._free.qsize() == channels)
    assert bytes(into) == bytes(5000)
    assert fetch(store, "k/1", 5000) == value(1, 5000)


def test_calls_that_all_hang_are_not_waited_for_by_more(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = Stuck(monkeypatch)
    store = opened(timeout_s=0.2, parallel=1)
    channels = store._free.qsize()
    for _ in range(channels):
        with pytest.raises(TierUnavailable, match="in time"):
            store.put([Item("k/0", [memoryview(b"1234")])])
    assert jobs() == channels
    with pytest.raises(TierUnavailable, match=f"all {channels} channels are in use"):
        store.put([Item("k/0", [memoryview(b"1234")])])
    assert jobs() == channels
    store.close()
    stuck.go.set()
    wait_for(lambda: jobs() == 0)
    assert store._free.qsize() == 0, "a channel whose call ended late was given back"
    store = opened()
    assert fetch(store, "k/0", 4) == b"1234", "late, and whole"
