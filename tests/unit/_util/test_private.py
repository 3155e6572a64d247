"""Folders and files that nobody else can have made: what is refused, and what is left alone."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from kvcore._util.private import (
    NotPrivateError,
    guarded_folder,
    make_guarded,
    open_file,
    open_folder,
    write_whole,
)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_folder_and_a_new_file_are_its_users_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = open_folder(tmp_path / "new", make=True)
        os.close(open_file("file", os.O_RDWR | os.O_CREAT, within=folder))
        os.close(folder)
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "new") == 0o700
    assert mode_of(tmp_path / "new" / "file") == 0o600


def test_a_folder_behind_a_link_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(NotPrivateError, match="symbolic link"):
        open_folder(tmp_path / "link", make=True)
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        open_folder(tmp_path / "file")


def test_a_refused_file_is_left_as_it_was(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("kept")
    (tmp_path / "link").symlink_to(victim)
    victim.chmod(0o666)
    for path in (tmp_path / "link", victim):
        with pytest.raises(NotPrivateError):
            open_file(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, adopt=True)
    assert victim.read_text() == "kept"
    assert mode_of(victim) == 0o666


def test_a_file_that_others_may_read_is_adopted_only_if_asked(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("kept")
    path.chmod(0o644)
    with pytest.raises(NotPrivateError, match="0644"):
        open_file(path, os.O_RDONLY)
    os.close(open_file(path, os.O_RDONLY, adopt=True))
    assert (mode_of(path), path.read_text()) == (0o600, "kept")
    tmp_path.chmod(0o755)
    os.close(open_folder(tmp_path, adopt=True))
    assert mode_of(tmp_path) == 0o700


def test_an_opened_file_blocks_as_others_do(tmp_path: Path) -> None:
    """It was opened without blocking, for the sake of pipes."""
    file = open_file(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    assert os.get_blocking(file)
    os.close(file)


@pytest.mark.parametrize(
    ("mode", "guarded", "shared"),
    [
        (0o700, True, True),
        (0o755, True, True),
        (0o775, False, True),
        (0o1777, False, True),
        (0o777, False, False),
    ],
)
def test_what_others_may_replace_is_not_guarded(
    tmp_path: Path, mode: int, guarded: bool, shared: bool
) -> None:
    tmp_path.chmod(mode)
    for good, as_shared in ((guarded, False), (shared, True)):
        if good:
            os.close(guarded_folder(tmp_path, shared=as_shared))
        else:
            with pytest.raises(NotPrivateError, match=f"{mode:04o}"):
                guarded_folder(tmp_path, shared=as_shared)


def test_a_guarded_folder_may_be_named_by_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "real").mkdir()
    os.close(make_guarded(tmp_path / "link"))


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    write_whole(folder, "file", b"one")
    (tmp_path / "file.new").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NotPrivateError):
        write_whole(folder, "file", b"two")
    assert (tmp_path / "file").read_bytes() == b"one"
    assert not (tmp_path / "elsewhere").exists()
    os.close(folder)
