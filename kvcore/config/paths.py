"""Folders whose location depends on settings and defaults."""

from __future__ import annotations

import os
from collections.abc import Iterator
from os import geteuid as current_user
from pathlib import Path

from kvcore._util.private import open_folder
from kvcore.config.schema_server import ServerConfig

__all__ = ["folder_of", "memory_of"]

RUN = Path("/run")
MEMORY = Path("/dev/shm")
"""A tmpfs that is large by default, and in which every user may create names."""


def folder_of(config: ServerConfig) -> Path:
    """Return the server's folder: the configured one, or the user's default.

    The default is the first of these in which a server has been, or else the first that this user
    can have:

    ========================  ===================================================================
    ``/run/kvcore``           root, or a service that has it as its RuntimeDirectory
    ``/run/user/UID/kvcore``  a user who is logged in
    ``/dev/shm/kvcore-UID``   everybody else. Others can make it first; it is not used then
    ========================  ===================================================================
    """
    if config.folder is not None:
        return config.folder
    found = list(_defaults(current_user()))
    return next(filter(_was_used, found), found[0])


def memory_of(config: ServerConfig) -> Path:
    """Return the folder in which the server keeps the host tier.

    ``/run`` is small, so with a default folder there the memory is in ``/dev/shm``, in a folder of
    random name.
    """
    folder = folder_of(config)
    return MEMORY if config.folder is None and folder.is_relative_to(RUN) else folder


def _defaults(uid: int) -> Iterator[Path]:
    if _is_mine(RUN / "kvcore") or (uid == 0 and os.access(RUN, os.W_OK)):
        yield RUN / "kvcore"
    if _is_mine(RUN / "user" / str(uid)):
        yield RUN / "user" / str(uid) / "kvcore"
    yield MEMORY / f"kvcore-{uid}"


def _was_used(folder: Path) -> bool:
    return _is_mine(folder) and os.path.exists(folder / "server.lock")


def _is_mine(folder: Path) -> bool:
    """Return True if a folder is there in which only this user can make names."""
    try:
        os.close(open_folder(folder))
    except OSError:
        return False
    return True
