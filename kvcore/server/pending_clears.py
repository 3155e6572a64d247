"""Clears that no server has confirmed, in the server's folder: whichever server is next pays them.

    <server.folder>/cleared-<model>-<random>    ["<namespace>", ...], or null for every one

A client writes its note before it asks, and removes it when it is told that all is cleared: where
client or server dies between, the note stays. The folder is in memory, and goes with the machine.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvcore.model.keys import KEY_BYTES
from kvcore.server.messages import Model

__all__ = ["PendingClear", "PendingClears", "pending_clears"]

_log = logging.getLogger("kvcore.server")

_PREFIX = "cleared-"


def _name_of(model: Model) -> str:
    return hashlib.blake2b(msgspec.msgpack.encode(model), digest_size=8).hexdigest()


class PendingClears:
    """The client's side: one note. One thread."""

    def __init__(self, folder: Path, model: Model) -> None:
        self._path = folder / f"{_PREFIX}{_name_of(model)}-{secrets.token_hex(8)}"

    def write(self, namespaces: Collection[bytes] | None) -> None:
        """What is owed now; None is every namespace. What cannot be written is named in the log."""
        draft = self._path.with_name(f"draft-{self._path.name}")
        names = None if namespaces is None else [namespace.hex() for namespace in namespaces]
        try:
            self._path.parent.mkdir(mode=0o700, exist_ok=True)  # no server was here yet
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                json.dump(names, file)
            draft.replace(self._path)
        except OSError as error:
            _log.error(
                "a clear is not written down in %s, and lost if this engine ends before a kvcore "
                "server confirms it: %s",
                self._path.parent,
                error,
            )

    def remove(self) -> None:
        """All is cleared."""
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            _log.debug("%s stays, and is paid twice: %s", self._path, error)


class PendingClear(NamedTuple):
    """``model`` is a digest of `Model`; ``namespaces`` are None for every one."""

    path: Path
    model: str
    namespaces: tuple[bytes, ...] | None

    def is_of(self, model: Model) -> bool:
        return self.model == _name_of(model)


def pending_clears(folder: Path) -> list[PendingClear]:
    """What is owed. A note that says nothing sensible means everything."""
    found = []
    for path in folder.glob(f"{_PREFIX}*"):
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            continue  # its client was told meanwhile
        except OSError as error:
            _log.warning("%s cannot be read, all of the model is cleared: %s", path, error)
            text = b"null"
        found.append(PendingClear(path, path.name.split("-")[1], _namespaces(path, text)))
    return found


def _namespaces(path: Path, text: bytes) -> tuple[bytes, ...] | None:
    try:
        told = json.loads(text)
        if told is None:
            return None
        namespaces = tuple(bytes.fromhex(name) for name in told)
        assert all(len(namespace) == KEY_BYTES for namespace in namespaces)
    except (ValueError, TypeError, AssertionError, RecursionError) as error:
        _log.warning("%s cannot be read, all of the model is cleared: %s", path, error)
        return None
    return namespaces
