"""A worker's mapping of the server's arena.

A background thread (the *tender*) pins the memory; no request waits for that.

    a session's file ──▶ mapped ──▶ pinned ──▶ ready ──▶ in use ──▶ released when its file is gone
                         └──── the tender's thread ───┘    └ the engine's thread

All sessions of a model have one arena, for as long as their server lives. The tender therefore
begins with whatever session of the model it finds, before a graph of its own engine's arrives, and
a new session of the same server needs no pinning. Without a GPU there is nothing to pin, and the
engine's thread maps the memory itself.

Each rank pins the whole arena. Its own part is the heads of each block of its layers: pieces of a
few KiB to a few hundred, a million of them in 64 GiB, and two pieces share a page. A pipeline stage
could leave out the other stages' layers, but only of the layerwise arrangement.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvcore._util.log_limit import LogLimit
from kvcore.errors import KVCoreError, LayoutError
from kvcore.memory.arena import HostArena, arena_bytes
from kvcore.memory.device import Device
from kvcore.memory.hugepages import SharedPages
from kvcore.model.shape import BlockShape
from kvcore.server.runtime_dir import open_arena, sessions_in

__all__ = ["MappedArenas"]

_log = logging.getLogger("kvcore.server.worker")


class _Mapped:
    """An arena of a server that is mapped here. ``file`` is the descriptor of its file."""

    def __init__(self, file: int, arena: HostArena) -> None:
        self._file = file
        self.arena = arena
        self.ready = self.used = False

    def is_of(self, file: int) -> bool:
        """Return True if ``file`` is a descriptor of the same file."""
        return os.path.samestat(os.fstat(self._file), os.fstat(file))

    @property
    def gone(self) -> bool:
        """True if the server has removed the file: no session will use it any more."""
        return not os.fstat(self._file).st_nlink

    def close(self) -> None:
        """Unpin and unmap the memory. Blocks for seconds if it is large."""
        self.arena.close()
        os.close(self._file)


class MappedArenas:
    """The arenas of one model that are mapped here: that of the server, and perhaps its ancestor's.

    ``shape`` is the part of a block that this machine holds.
    ``pin`` is the device for which they are pinned; None pins nothing. `get` and `use` are for the
    engine's thread and never wait for pinning; `tend` is for one other thread.
    """

    def __init__(
        self, folder: Path, shape: BlockShape, fingerprint: bytes, pin: Device | None
    ) -> None:
        self._folder = folder
        self._shape = shape
        self._fingerprint = fingerprint.hex()
        self._pin = pin
        self._lock = threading.Lock()
        self._mapped: list[_Mapped] = []
        self._wanted: dict[str, Any] | None = None
        self._failures = LogLimit()

    def get(self, told: dict[str, Any]) -> HostArena | None:
        """Return the arena of a session, or None while it is being pinned.

        ``told`` is what the server wrote into the session's file. Raises LayoutError if its blocks
        are not this engine's, and TierUnavailable or ConfigError if it cannot be mapped.
        """
        file = self._open(told)
        try:
            with self._lock:
                found = next((one for one in self._mapped if one.is_of(file)), None)
                if found is None and self._pin is None:
                    found = self._map(told, file)
                    found.ready = True
                if found is None:
                    self._wanted = told
        finally:
            os.close(file)
        return found.arena if found is not None and found.ready else None

    def use(self, arena: HostArena) -> None:
        """Note that copies use this arena, and no other, from now on."""
        with self._lock:
            for one in self._mapped:
                one.used = one.arena is arena

    def tend(self, wanted: Callable[[], bool]) -> None:
        """Release what is gone and not in use, then map and pin the arena of the server.

        Blocks until it is pinned, or until ``wanted`` returns False.
        """
        with self._lock:
            over = [one for one in self._mapped if one.gone and not one.used]
            self._mapped = [one for one in self._mapped if one not in over]
            told, self._wanted = self._wanted, None
            served = any(not one.gone for one in self._mapped)
        for one in over:
            one.close()
        if self._pin is None or (served and told is None):
            return
        told = told or self._find()
        if told is not None:
            try:
                self._bring(told, self._pin, wanted)
            except KVCoreError as error:
                if self._failures.admit(str(error)) is not None:
                    _log.warning("the server's memory cannot be mapped: %s", error)

    def close(self) -> None:
        """Release every arena. No copy may use one."""
        with self._lock:
            left, self._mapped = self._mapped, []
        for one in left:
            one.close()

    def _find(self) -> dict[str, Any] | None:
        """Return what the server wrote for some session of the model, if there is one."""
        for told in sessions_in(self._folder):
            if told.get("fingerprint") == self._fingerprint:
                return told
        return None

    def _bring(self, told: dict[str, Any], device: Device, wanted: Callable[[], bool]) -> None:
        file = self._open(told)
        try:
            with self._lock:
                if any(one.is_of(file) for one in self._mapped):
                    return
                made = self._map(told, file)
        finally:
            os.close(file)
        try:
            made.arena.pin(device, lambda: wanted() and not made.gone)
        finally:
            made.ready = True  # if the driver refuses, copies use it unpinned

    def _open(self, told: dict[str, Any]) -> int:
        shape = BlockShape.from_dict(told["shape"])
        if shape != self._shape:
            raise LayoutError(
                f"the server's blocks are {shape}, this engine's are {self._shape}: start both "
                "with the same settings"
            )
        return open_arena(Path(told["memory"]), told["arena"])

    def _map(self, told: dict[str, Any], file: int) -> _Mapped:
        """Map an arena. The caller holds the lock, and closes ``file``."""
        shape, slots, arrangement = self._shape, told["slots"], told["arrangement"]
        pages = SharedPages(file, arena_bytes(shape, slots, arrangement))
        arena = HostArena(shape, slots, arrangement=arrangement, pages=pages)
        made = _Mapped(os.dup(file), arena)
        self._mapped.append(made)
        return made
