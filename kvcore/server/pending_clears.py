"""Clear requests that no server has acknowledged, stored in the runtime directory.

    <server.folder>/cleared-<model>-<random>    ["<namespace>", ...], or null for all of them

A client writes its file before it sends the request, and removes the file when the server has
acknowledged everything. If client or server dies in between, the file stays, and the next server
carries the clear out. The directory is on tmpfs and is lost on reboot.
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

from kvcore._util.outside import decode_json, read_regular
from kvcore._util.private import open_folder, write_whole
from kvcore.errors import FormatError
from kvcore.model.keys import KEY_BYTES
from kvcore.server.messages import Model

__all__ = ["PendingClear", "PendingClears", "pending_clears"]

_log = logging.getLogger("kvcore.server")

_PREFIX = "cleared-"
_MAX_NBYTES = 16 << 20


def _name_of(model: Model) -> str:
    told = msgspec.to_builtins(model, builtin_types=(bytes,))
    if model.machines == 1:  # the same name as before there were fields for machines
        told = told[: Model.__struct_fields__.index("machines")]
    return hashlib.blake2b(msgspec.msgpack.encode(told), digest_size=8).hexdigest()


class PendingClears:
    """The client's side: one file. For one thread."""

    def __init__(self, folder: Path, model: Model) -> None:
        self._path = folder / f"{_PREFIX}{_name_of(model)}-{secrets.token_hex(8)}"

    def write(self, namespaces: Collection[bytes] | None) -> None:
        """Record which namespaces must be cleared; None stands for all of them.

        If the file cannot be written, that is logged.
        """
        names = None if namespaces is None else [namespace.hex() for namespace in namespaces]
        try:
            folder = open_folder(self._path.parent, make=True)  # maybe no server was here yet
            try:
                name, text = self._path.name, json.dumps(names).encode()
                write_whole(folder, name, text, draft=f"draft-{name}", sync=False)
            finally:
                os.close(folder)
        except OSError as error:
            _log.error(
                "a clear is not written down in %s, and lost if this engine ends before a kvcore "
                "server confirms it: %s",
                self._path.parent,
                error,
            )

    def remove(self) -> None:
        """Remove the file: every clear was acknowledged."""
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            _log.debug("%s stays, and is paid twice: %s", self._path, error)


class PendingClear(NamedTuple):
    """One file of a client.

    ``model`` is a digest of `Model`. ``namespaces`` is None for all of them.
    """

    path: Path
    model: str
    namespaces: tuple[bytes, ...] | None

    def is_of(self, model: Model) -> bool:
        return self.model == _name_of(model)


def pending_clears(folder: Path) -> list[PendingClear]:
    """Return the clears that are still to be carried out.

    A file that cannot be read or parsed stands for all namespaces of its model.
    """
    found = []
    for path in folder.glob(f"{_PREFIX}*"):
        try:
            text = read_regular(path, _MAX_NBYTES)
        except FileNotFoundError:
            continue  # meanwhile its client got the acknowledgement
        except (OSError, FormatError) as error:
            _log.warning("%s cannot be read, all of the model is cleared: %s", path, error)
            text = b"null"
        found.append(PendingClear(path, path.name.split("-")[1], _namespaces(path, text)))
    return found


def _namespaces(path: Path, text: bytes) -> tuple[bytes, ...] | None:
    try:
        told = decode_json(text, list[str] | None)
        if told is None:
            return None
        namespaces = tuple(bytes.fromhex(name) for name in told)
        assert all(len(namespace) == KEY_BYTES for namespace in namespaces)
    except (ValueError, FormatError, AssertionError) as error:
        _log.warning("%s cannot be read, all of the model is cleared: %s", path, error)
        return None
    return namespaces
