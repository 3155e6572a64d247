"""The server's runtime directory: its socket, its arenas, and who may still touch which memory.

    folder (0700)
      server.lock       held by the server: one for each folder
      server.sock       0600, for ``address = "local"``
      counter           the last session number given; outlives a restart
      arena-N           host memory of one model, mapped by the workers. It may be in a folder of
                        its own on a larger tmpfs
      memory            the path of that folder
      cleared-M-X       clears that no server acknowledged (`kvcore.server.pending_clears`)
      session-N         what the session's workers map, and the secret by which the server knows
                        them; *locked by every process that may touch that memory*

A session's leader and its workers hold shared locks on its file. The kernel drops a lock when its
process is gone, whatever the reason. The server therefore asks for the exclusive lock. When it gets
the lock, no process reads or writes the session's slots any more, and none can begin to, because
the server removes the file before it releases the lock. A process that is only slow, or stopped,
keeps its slots.

Another user of the machine may have made the folder first. Server and clients alike therefore use
it, and the files in it, only as `kvcore._util.private` opens them.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from kvcore._util.outside import decode_json, read_bounded
from kvcore._util.private import NotPrivateError, open_file, open_folder, write_whole
from kvcore.config.paths import folder_of
from kvcore.config.schema_server import ServerConfig
from kvcore.errors import ConfigError, FormatError, TierUnavailable
from kvcore.memory.hugepages import SharedPages, gives_huge_pages

_log = logging.getLogger("kvcore.server")

SESSION_BITS = 24
GRAPH_BITS = 63 - SESSION_BITS
_SOCKET_PATH_MAX = 107
_MEMORY = "memory"
_MAX_NBYTES = 1 << 16
"""The most bytes of the file of a session."""
_FILE_NAME = re.compile(r"(session|arena)-[0-9]+")


def graph_number(session: int, graph_id: int) -> int:
    """Return the id that a graph of the server's manager has in a session."""
    return session << GRAPH_BITS | graph_id % (1 << GRAPH_BITS)


def session_of(number: int) -> int:
    """Return the session of a graph by its `graph_number`; 0 for graphs of no session."""
    return number >> GRAPH_BITS


def address_of(config: ServerConfig) -> str:
    """Return the ZeroMQ address of the server.

    Raises ConfigError for an address that cannot be used.
    """
    address = config.address or "local"
    if address == "local":
        address = f"ipc://{folder_of(config)}/server.sock"
    if address.startswith("ipc://") and len(address) - len("ipc://") > _SOCKET_PATH_MAX:
        raise ConfigError(
            f"the socket {address!r} has a path of more than {_SOCKET_PATH_MAX} bytes: "
            "give server.folder or server.address a shorter one"
        )
    if address.startswith("tcp://") and config.keys is None:
        raise ConfigError(
            f"server.address = {address!r} without server.keys; supported is TCP with CURVE keys: "
            "make them with `kvcore server --keygen FOLDER` and set server.keys"
        )
    return address


def open_runtime_dir(path: Path, *, make: bool = False) -> int:
    """Open the runtime directory, and return its descriptor. ``make`` creates it if it is missing.

    Raises ConfigError if other users may have written in it, and FileNotFoundError if it is
    missing.
    """
    try:
        return open_folder(path, make=make)
    except NotPrivateError as error:
        raise ConfigError(
            f"server.folder {path} is not used: {error.strerror}. Correct that, or name "
            "another folder"
        ) from error
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(f"server.folder {path} cannot be used: {error.strerror}") from error


class RuntimeDir:
    """The server's side of the directory. For one thread.

    ``memory`` is the folder of the arenas.
    """

    def __init__(self, path: Path, shared: Path | None = None) -> None:
        """Create the directory, lock it for this process, and remove what an earlier server left.

        With ``shared``, a tmpfs in which every user may create names, the arenas are in a new
        folder of random name there. Raises ConfigError if the directory belongs to another user, or
        if another server uses it.
        """
        self.path = path
        try:
            self._folder = self._arenas = open_runtime_dir(path, make=True)
        except FileNotFoundError as error:
            raise ConfigError(f"server.folder {path} cannot be made: {error.strerror}") from error
        try:
            self._lock = self.open("server.lock", os.O_RDWR | os.O_CREAT)
        except OSError as error:
            os.close(self._folder)
            raise ConfigError(f"{path}/server.lock cannot be used: {error.strerror}") from error
        if not _try_lock(self._lock, fcntl.LOCK_EX):
            self.close()
            raise ConfigError(f"a server serves in {path} already: stop it, or name another folder")
        self._remove_memory()
        for left in (*path.glob("arena-*"), *path.glob("session-*"), *path.glob("*.sock")):
            left.unlink(missing_ok=True)
        self.memory = path
        if shared is not None:
            self._make_memory(shared)
        self._counter = self._last_number()

    def open(self, name: str, flags: int) -> int:
        """Open a file of the directory, as `kvcore._util.private.open_file` does."""
        return open_file(name, flags, within=self._folder)

    def _make_memory(self, shared: Path) -> None:
        """Make the folder of the arenas. Raises ConfigError if that cannot be done."""
        try:
            self.memory = Path(tempfile.mkdtemp(prefix="kvcore-", dir=shared))
            self._arenas = open_folder(self.memory)
            write_whole(self._folder, _MEMORY, os.fsencode(self.memory), sync=False)
        except OSError as error:
            self.close()
            raise ConfigError(
                f"no folder for the host tier can be made in {shared}: {error.strerror}; set "
                "server.folder"
            ) from error

    def _remove_memory(self) -> None:
        """Remove the folder of the arenas that this or an earlier server made."""
        try:
            with open(self.open(_MEMORY, os.O_RDONLY), "rb") as file:
                left = Path(os.fsdecode(file.read()))
            within = open_folder(left)
        except OSError:
            return  # there is none, or it is not the one that was made
        try:
            for name in filter(_FILE_NAME.fullmatch, os.listdir(within)):
                os.unlink(name, dir_fd=within)
            left.rmdir()
            self.remove(_MEMORY)
        except OSError as error:
            _log.warning("%s of a server that ended stays: %s", left, error)
        finally:
            os.close(within)

    def next_number(self) -> int:
        """Return a session number that was given to no client for a long time."""
        self._counter = (self._counter + 1) % (1 << SESSION_BITS) or 1
        (self.path / "counter").write_text(str(self._counter))
        return self._counter

    def _last_number(self) -> int:
        try:
            return int((self.path / "counter").read_text())
        except (OSError, ValueError):
            return secrets.randbits(SESSION_BITS)

    def make_arena(self, name: str, nbytes: int, *, huge_pages: bool = True) -> int:
        """Create a file of zeroes with its memory allocated, and return its descriptor.

        Uses huge pages if the mount allows them. Takes about a second for each few GiB. Raises
        TierUnavailable if there is not enough memory.
        """
        file = open_file(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, within=self._arenas)
        try:
            if huge_pages and not gives_huge_pages(file):
                _log.warning(
                    "the server's memory is in pages of 4 KiB: reads from disk are half as fast; "
                    "as root: mount -o remount,huge=advise %s",
                    mount_of(self.memory),
                )
            elif huge_pages:
                os.ftruncate(file, nbytes)  # what is taken through a mapping is on huge pages
                with closing(SharedPages(file, nbytes)) as pages:
                    pages.take()
            # Allocate now: touching a page for which there is no memory kills the process.
            os.posix_fallocate(file, 0, nbytes)
        except (OSError, TierUnavailable) as error:
            os.close(file)
            self.remove_arena(name)
            if isinstance(error, TierUnavailable):
                raise
            raise TierUnavailable(
                f"{self.memory} has no {nbytes} bytes for the host tier ({error.strerror}): lower "
                "host.capacity, or give server.folder on a larger tmpfs"
            ) from error
        return file

    def remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def remove_arena(self, name: str) -> None:
        (self.memory / name).unlink(missing_ok=True)

    def close(self) -> None:
        """Release the lock, so that another server may use the directory."""
        if self._arenas != self._folder:
            os.close(self._arenas)
            self._remove_memory()
        os.close(self._lock)
        os.close(self._folder)


class SessionFile:
    """A session's lock file, as the server sees it."""

    def __init__(
        self, folder: RuntimeDir, number: int, told: dict[str, Any], secret: bytes | None = None
    ) -> None:
        self.name = f"session-{number}"
        self.secret = secret or secrets.token_bytes(16)
        """Proof that a worker has read this file."""
        self._folder = folder
        self._file = folder.open(self.name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        about = {**told, "memory": str(folder.memory), "secret": self.secret.hex()}
        os.write(self._file, json.dumps(about).encode())

    def ended(self) -> bool:
        """Return True, and remove the file, if no process holds the session any more.

        After that no process can lock it again.
        """
        if not _try_lock(self._file, fcntl.LOCK_EX):
            return False
        self._folder.remove(self.name)
        os.close(self._file)
        return True

    def close(self) -> None:
        """Remove the file, so that clients see that the server ended."""
        self._folder.remove(self.name)
        os.close(self._file)


class SessionLock:
    """A client's lock on a session.

    Until `close`, the server gives the session's slots to nobody else.
    """

    def __init__(self, folder: Path, name: str) -> None:
        """Lock the session.

        Raises TierUnavailable if the session is over, and ConfigError if the folder or the file may
        be another user's.
        """
        self._file = _open(folder, name)
        if not _try_lock(self._file, fcntl.LOCK_SH) or self.over:
            os.close(self._file)
            raise TierUnavailable(f"{name} of the server is over")
        self.name = name

    @property
    def over(self) -> bool:
        """Return True if the server ended the session, or if another server has started."""
        return not os.fstat(self._file).st_nlink

    def metadata(self) -> dict[str, Any]:
        """Return what the server wrote into the file.

        That is how to map the arena, and the session's secret.
        """
        told = read_bounded(self._file, _MAX_NBYTES, self.name)
        return decode_json(told, dict[str, Any])

    def close(self) -> None:
        os.close(self._file)


def mount_of(path: Path) -> Path:
    """Return the mount point of a folder, whether the folder exists yet or not."""
    return next(place for place in (path, *path.parents) if place.is_mount())


def sessions_in(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield what the server wrote into the file of each session in its folder, without locking it.

    Leaves out what cannot be read: a session may begin or end meanwhile. Yields nothing from a
    folder that may be another user's.
    """
    try:
        within = open_runtime_dir(folder)
    except (ConfigError, OSError):
        return
    try:
        for name in os.listdir(within):
            if name.startswith("session-") and _FILE_NAME.fullmatch(name):
                with suppress(OSError, FormatError):
                    with open(open_file(name, os.O_RDONLY, within=within), "rb") as file:
                        told = read_bounded(file.fileno(), _MAX_NBYTES, name)
                    yield decode_json(told, dict[str, Any])
    finally:
        os.close(within)


def open_arena(folder: Path, name: str) -> int:
    """Open an arena's file and return its descriptor.

    Raises TierUnavailable if it is gone, and ConfigError as `SessionLock` does.
    """
    return _open(folder, name)


def _open(folder: Path, name: str) -> int:
    """Open a file that the server named."""
    if not _FILE_NAME.fullmatch(name):
        raise ConfigError(
            f"the server names the file {name[:200]!r}; supported are names as arena-1"
        )
    try:
        within = open_runtime_dir(folder)
        try:
            return open_file(name, os.O_RDWR, within=within)
        finally:
            os.close(within)
    except NotPrivateError as error:
        raise ConfigError(f"{folder / name} is not used: {error.strerror}") from error
    except OSError as error:
        raise TierUnavailable(f"{name} of the server is over: {error.strerror}") from error


def _try_lock(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
