"""Folders and files that no other user of the machine may have made, changed or read.

Other users can create names in shared folders such as /tmp and /dev/shm: a folder before kvcore
does, or a symbolic link to one of this user's files. Everything here is therefore opened first and
checked by its descriptor. An opened folder gives its files by descriptor as well.

Each refusal is a `NotPrivateError`, an OSError whose ``strerror`` says what was found and what to
change.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

__all__ = [
    "NotPrivateError",
    "guarded_folder",
    "make_guarded",
    "open_file",
    "open_folder",
    "write_whole",
]

FOLDER_MODE = 0o700
FILE_MODE = 0o600
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_WRITABLE = stat.S_IWGRP | stat.S_IWOTH
_Path = str | os.PathLike[str]


class NotPrivateError(PermissionError):
    """A folder or file belongs to another user, or other users may change or read it."""

    def __init__(self, path: _Path, found: str) -> None:
        super().__init__(errno.EPERM, found, os.fspath(path))


# -- folders ------------------------------------------------------------------------------------


def open_folder(path: _Path, *, make: bool = False, adopt: bool = False) -> int:
    """Open a folder of this user that nobody else may enter, and return its descriptor.

    The last part of ``path`` must not be a symbolic link. With ``make`` a missing folder is created
    with mode 0700. With ``adopt`` the mode of a folder that others may enter, but not write in, is
    changed to 0700.
    """
    if make:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, FOLDER_MODE)
    folder = _opened(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, None)
    try:
        found = os.fstat(folder)
        _check_owner(path, found)
        if found.st_mode & (_WRITABLE if adopt else _OTHERS):
            mode = stat.S_IMODE(found.st_mode)
            raise NotPrivateError(path, f"its mode is {mode:04o}; supported is mode 0700")
        if found.st_mode & _OTHERS:
            os.fchmod(folder, FOLDER_MODE)
    except BaseException:
        os.close(folder)
        raise
    return folder


def guarded_folder(path: _Path, *, shared: bool = False) -> int:
    """Open a folder in which no other user can replace what is this user's; return its descriptor.

    The folder belongs to this user or to root, and others may not write in it. With ``shared``
    others may add names to it, as in /tmp (the sticky bit) or by its group. The path may contain
    symbolic links: they lead to a folder that is checked in the same way. The descriptor serves to
    open names in the folder, not to list it.
    """
    folder = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        found = os.fstat(folder)
        _check_owner(path, found, root=True)
        writable = found.st_mode & (stat.S_IWOTH if shared else _WRITABLE)
        if writable and not (shared and found.st_mode & stat.S_ISVTX):
            mode = stat.S_IMODE(found.st_mode)
            raise NotPrivateError(
                path, f"others may write in it (mode {mode:04o}): chmod it, or name a folder in it"
            )
    except BaseException:
        os.close(folder)
        raise
    return folder


def make_guarded(path: Path) -> int:
    """Create a folder and its parents with mode 0700 if missing, and open it as `guarded_folder`.

    For a folder that an operator names, so it may be shared.
    """
    path.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    return guarded_folder(path, shared=True)


# -- files --------------------------------------------------------------------------------------


def open_file(path: _Path, flags: int, *, within: int | None = None, adopt: bool = False) -> int:
    """Open a regular file of this user that nobody else may read or write; return its descriptor.

    A new file gets mode 0600. A symbolic link is never followed, and a file with a second name (a
    hard link) is refused. With O_TRUNC the file is emptied only after it was checked. With
    ``adopt`` the mode of a file that others may read, but not write, is changed to 0600.
    """
    wanted = flags & ~os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe must not block the open
    file = _opened(path, wanted, within)
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise NotPrivateError(path, "it is not a regular file: remove it")
        _check_owner(path, found)
        if found.st_nlink > 1:
            raise NotPrivateError(path, "it has a second name (a hard link): remove one of them")
        if found.st_mode & (_WRITABLE if adopt else _OTHERS):
            mode = stat.S_IMODE(found.st_mode)
            raise NotPrivateError(path, f"its mode is {mode:04o}; supported is mode 0600")
        if found.st_mode & _OTHERS:
            os.fchmod(file, FILE_MODE)
        os.set_blocking(file, True)
        if flags & os.O_TRUNC:
            os.ftruncate(file, 0)
    except BaseException:
        os.close(file)
        raise
    return file


def write_whole(folder: int, name: str, data: bytes, *, draft: str = "", sync: bool = True) -> None:
    """Write a file of a folder whole or not at all, in place of the one of that name.

    ``folder`` is a descriptor, ``draft`` the name until the file is whole. With ``sync`` it is
    flushed to the medium. Raises OSError.
    """
    draft = draft or f"{name}.new"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with open(open_file(draft, flags, within=folder, adopt=True), "wb") as file:
        file.write(data)
        file.flush()
        if sync:
            os.fsync(file.fileno())
    os.rename(draft, name, src_dir_fd=folder, dst_dir_fd=folder)


def _opened(path: _Path, flags: int, within: int | None) -> int:
    """Open without following a symbolic link at the end of the path."""
    try:
        return os.open(path, flags | os.O_CLOEXEC, FILE_MODE, dir_fd=within)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise NotPrivateError(path, "it is not a regular file: remove it") from error
        link = error.errno == errno.ELOOP
        if error.errno == errno.ENOTDIR and flags & os.O_DIRECTORY:
            link = stat.S_ISLNK(os.stat(path, dir_fd=within, follow_symlinks=False).st_mode)
        if link:
            raise NotPrivateError(path, "it is a symbolic link: remove it") from error
        raise


def _check_owner(path: _Path, found: os.stat_result, *, root: bool = False) -> None:
    me = os.geteuid()
    if found.st_uid != me and not (root and found.st_uid == 0):
        raise NotPrivateError(
            path, f"it belongs to user {found.st_uid}, and this process is user {me}"
        )
