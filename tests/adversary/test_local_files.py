"""Attacker: a local user who plants files and links where kvcore keeps its own."""

import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcore._util.private import NotPrivateError
from kvcore.admin.audit import AuditLog
from kvcore.errors import ConfigError, FormatError, TierUnavailable
from kvcore.explain.file import RecordFile
from kvcore.fusion._segment_file import SegmentFile
from kvcore.memory.arena import slot_bytes
from kvcore.model.shape import BlockShape
from kvcore.telemetry.timeline import FileTracer
from kvcore.tiers.disk.mount import MountedStore
from kvcore.tiers.disk.scrub import scrub
from kvcore.tiers.disk.store import PreparedStore, prepare_store
from kvcore.tiers.disk.tier import DiskTier
from kvcore.tiers.geometry import Geometry
from kvcore.tiers.remote.pending_deletes import PendingDeletes
from support.other_user import OTHER, needs_root

SHAPE = BlockShape(layers=2, kv_heads=2, head_dim=8, block_tokens=16, dtype="float32")
GEOMETRY = Geometry(SHAPE, b"model", ((0, 2),))
ROOM = 1 << 20
SECRET = b"a file of the engine's user\n" * 100


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """Return a file of this user outside kvcore's folders."""
    path = tmp_path / "victim"
    path.write_bytes(SECRET)
    path.chmod(0o600)
    return path


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return tmp_path / "disk"


def prepared(disk: Path) -> PreparedStore:
    return prepare_store(disk, GEOMETRY, ROOM, wait_s=0)


def open_tier(folder: Path) -> DiskTier:
    return DiskTier(MountedStore(folder, 4), GEOMETRY, shard=0, slot_nbytes=slot_bytes(SHAPE))


def stored(disk: Path) -> Path:
    """Make a store, and return its folder."""
    store = prepared(disk)
    open_tier(store.folder).close()
    store.close()
    return store.folder


# -- the disk tier ------------------------------------------------------------------------------


def test_a_linked_lock_of_the_folder_empties_no_file(disk: Path, victim: Path) -> None:
    disk.mkdir(mode=0o700)
    (disk / "lock").symlink_to(victim)
    with pytest.raises(TierUnavailable, match="lock: it is a symbolic link"):
        prepared(disk)
    assert victim.read_bytes() == SECRET


FILES = ["lock", "shard-0.index", "shard-0.data", "store.json", "cleared", "cleared.new"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", ["symlink_to", "hardlink_to"])
def test_no_file_of_a_store_is_opened_through_a_link(
    disk: Path, victim: Path, name: str, how: str
) -> None:
    """Whatever happens to the store, the file that the link names is neither read nor written."""
    folder = stored(disk)
    (folder / name).unlink(missing_ok=True)
    getattr(folder / name, how)(victim)
    try:
        store = prepared(disk)
        store.tombstones.cleared(None)
        open_tier(folder).close()
        store.close()
    except (TierUnavailable, FormatError):
        pass
    assert victim.read_bytes() == SECRET
    assert stat.S_IMODE(victim.stat().st_mode) == 0o600
    assert victim.stat().st_nlink == 1 + (how == "hardlink_to")


@pytest.mark.parametrize("name", ["shard-0.index", "shard-0.data"])
def test_a_worker_opens_no_link(disk: Path, victim: Path, name: str) -> None:
    """It was put in the place of the file after the leader had prepared the store."""
    store = prepared(disk)
    (store.folder / name).symlink_to(victim)
    with pytest.raises(TierUnavailable, match="symbolic link"):
        open_tier(store.folder)
    assert victim.read_bytes() == SECRET
    store.close()


def test_a_linked_store_is_not_removed_to_make_room(disk: Path, tmp_path: Path) -> None:
    """The victim's folder looks like a store, and is not one of this disk folder."""
    elsewhere = stored(tmp_path / "elsewhere")
    other = Geometry(SHAPE, b"another model", ((0, 2),))
    (disk / other.base).mkdir(parents=True, mode=0o700)
    disk.chmod(0o700)
    (disk / other.base / "store-0").symlink_to(elsewhere)
    before = sorted(elsewhere.iterdir())
    prepare_store(disk, GEOMETRY, 1 << 16, wait_s=0).close()
    assert [report.folder for report in scrub(disk)] == [disk / GEOMETRY.base / "store-0"]
    assert sorted(elsewhere.iterdir()) == before


@needs_root
@pytest.mark.parametrize("what", ["base", "store"])
def test_a_folder_that_another_user_made_is_no_store(
    disk: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its blocks are forged: nothing of them is read."""
    folder = stored(disk)
    os.chown(folder.parent if what == "base" else folder, OTHER, OTHER)
    if what == "base":
        with pytest.raises(TierUnavailable, match=f"belongs to user {OTHER}"):
            prepared(disk)
    else:
        store = prepared(disk)
        assert store.folder == folder.with_name("store-1")
        store.close()
    assert f"belongs to user {OTHER}" in caplog.text


@needs_root
@pytest.mark.parametrize("name", ["lock", "shard-0.index", "shard-0.data"])
def test_a_file_that_another_user_made_is_not_read(disk: Path, name: str) -> None:
    folder = stored(disk)
    os.chown(folder / name, OTHER, OTHER)

    def use() -> None:
        prepared(disk)
        open_tier(folder)

    with pytest.raises(TierUnavailable, match=f"belongs to user {OTHER}"):
        use()


@needs_root
def test_a_store_that_another_user_described_is_not_used(disk: Path) -> None:
    folder = stored(disk)
    os.chown(folder / "store.json", OTHER, OTHER)
    store = prepared(disk)
    assert store.folder == folder.with_name("store-1")
    store.close()


@needs_root
def test_another_users_folder_is_not_used(disk: Path) -> None:
    disk.mkdir(mode=0o755)
    os.chown(disk, OTHER, OTHER)
    with pytest.raises(TierUnavailable, match=f"belongs to user {OTHER}"):
        prepared(disk)
    assert not list(disk.iterdir())


@pytest.mark.parametrize(("mode", "used"), [(0o755, True), (0o775, True), (0o777, False)])
def test_a_folder_where_others_can_replace_stores_is_not_used(
    disk: Path, mode: int, used: bool
) -> None:
    """A group may share it. The stores in it are this user's alone all the same."""
    disk.mkdir()
    disk.chmod(mode)
    if not used:
        with pytest.raises(TierUnavailable, match="others may write in it"):
            prepared(disk)
        return
    folder = stored(disk)
    assert {stat.S_IMODE(made.stat().st_mode) for made in (folder, folder.parent)} == {0o700}


def test_a_lock_that_says_no_number_keeps_no_engine_from_its_start(disk: Path) -> None:
    """Superscript two is a digit to Python's ``str``, and no number."""
    first = prepare_store(disk, GEOMETRY, ROOM, share=2, wait_s=0)
    (first.folder / "lock").write_text("²")
    second = prepare_store(disk, GEOMETRY, ROOM, share=2, wait_s=0)
    assert second.folder != first.folder
    first.close()
    second.close()


# -- the other files ----------------------------------------------------------------------------


def trace(path: Path) -> None:
    FileTracer(path.parent, path.name.split("-")[0]).close()


def record(path: Path) -> None:
    RecordFile(path.parent, ROOM).close()


def segments(path: Path) -> None:
    SegmentFile(path, 16).close()


def audit(path: Path) -> None:
    AuditLog(str(path)).close()


WRITERS = [
    pytest.param(trace, f"rank0-{os.getpid()}.json", id="trace"),
    pytest.param(record, f"requests-{os.getpid()}.jsonl", id="explain"),
    pytest.param(segments, "segments-16", id="segments"),
    pytest.param(audit, "audit.jsonl", id="audit"),
]


@pytest.mark.parametrize(("write", "name"), WRITERS)
def test_what_is_written_is_its_users_alone(
    tmp_path: Path, write: Callable[[Path], None], name: str
) -> None:
    before = os.umask(0)
    try:
        write(tmp_path / name)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600


@pytest.mark.parametrize(("write", "name"), WRITERS)
@pytest.mark.parametrize("how", ["symlink_to", "hardlink_to", "pipe"])
def test_nothing_is_written_through_a_link(
    tmp_path: Path, victim: Path, write: Callable[[Path], None], name: str, how: str
) -> None:
    path = tmp_path / "folder" / name
    path.parent.mkdir(mode=0o700)
    if how == "pipe":
        os.mkfifo(path, 0o600)
    else:
        getattr(path, how)(victim)
    with pytest.raises((NotPrivateError, ConfigError), match=r"link|regular file"):
        write(path)
    assert victim.read_bytes() == SECRET


@pytest.mark.parametrize(("write", "name"), WRITERS[:2])
def test_nothing_is_written_where_others_can_replace_it(
    tmp_path: Path, write: Callable[[Path], None], name: str
) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(NotPrivateError, match="others may write"):
        write(tmp_path / name)


@needs_root
def test_deletes_that_another_user_planted_are_not_carried_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise a local user could name blocks to be deleted from the store."""
    mine = PendingDeletes([tmp_path], "store")
    mine.add([bytes(16)])
    mine.close()
    [owed] = tmp_path.glob("owed-*")
    os.chown(owed, OTHER, OTHER)
    with caplog.at_level(logging.ERROR):
        theirs: Any = PendingDeletes([tmp_path], "store")
    assert theirs.read() == []
    assert f"belongs to user {OTHER}" in caplog.text
