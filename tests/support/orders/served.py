"""A rank whose host memory is a server's arena: the worker that kvcore ships, and a played server.

The server is its runtime directory: the arena's file, and the session's. It reads no tiers.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path as Folder
from typing import Any
from unittest import mock

from kvcore.config import Config
from kvcore.memory.arena import HostArena, arena_bytes
from kvcore.memory.copy.link import LinkOps, Way
from kvcore.memory.hugepages import SharedPages
from kvcore.memory.layout import Arrangement, KVView
from kvcore.model.shape import BlockShape
from kvcore.model.spec import LayerGroup, ModelDescription
from kvcore.server.mapped import MappedArenas
from kvcore.server.runtime_dir import GRAPH_BITS, RuntimeDir, SessionFile
from kvcore.server.worker import ServedWorker
from kvcore.testing.waiting import until
from kvcore.worker import KVWorker
from kvcore_devtools.gpu import GpuRank, Machine, RecordingOps
from kvcore_devtools.gpu.clocks import Clock
from support.orders.books import Books

__all__ = ["SERVED", "PlayedServer", "ServedBooks", "ServedRank"]

SERVED = BlockShape(layers=4, kv_heads=2, head_dim=6, block_tokens=8, dtype="float16")
"""A layer of a block has 384 bytes: a page of memory does not end where a block does."""


class PlayedServer:
    """A server in ``folder`` with one session, and the arena as the server maps it."""

    def __init__(
        self, folder: Folder, model: ModelDescription, slots: int, arrangement: Arrangement
    ) -> None:
        shape = model.shape
        nbytes = arena_bytes(shape, slots, arrangement)
        self._folder = RuntimeDir(folder)
        file = self._folder.make_arena("arena-1", nbytes, huge_pages=False)
        pages = SharedPages(file, nbytes)
        os.close(file)
        self.arena = HostArena(shape, slots, arrangement=arrangement, pages=pages)
        self.number = self._folder.next_number()
        told = {
            "arena": "arena-1",
            "fingerprint": model.fingerprint.hex(),
            "slots": slots,
            "arrangement": arrangement.value,
            "shape": shape.to_dict(),
        }
        self._session = SessionFile(self._folder, self.number, told)

    def close(self) -> None:
        """End the server: its files are gone, and whoever has mapped them still has the memory."""
        self._session.close()
        self._folder.remove_arena("arena-1")
        self._folder.close()


class _WatchedArenas(MappedArenas):
    """Arenas of which the thread that releases one knows when another came into use."""

    machine: Machine
    _told: Clock

    def use(self, arena: HostArena) -> None:
        super().use(arena)
        self._told = self.machine.now()

    def tend(self, wanted: Callable[[], bool]) -> None:
        self.machine.learn(getattr(self, "_told", {}))
        super().tend(wanted)


class ServedRank(GpuRank):
    """A rank over a server's arena, which is mapped and pinned when this returns.

    Copies go over the link by ``way``, or by the way that `LinkOps` chooses.
    """

    worker: ServedWorker

    def __init__(
        self,
        machine: Machine,
        folder: Folder,
        *,
        slots: int = 24,
        arrangement: Arrangement = Arrangement.LAYERWISE,
        way: Way | None = None,
        waits: bool = True,
        **options: Any,
    ) -> None:
        shape = SERVED
        groups = (LayerGroup(0, shape.block_tokens, tuple(range(shape.layers))),)
        self.model = ModelDescription(shape, groups, b"f" * 16, 1)
        self._config = Config.model_validate({"server": {"folder": str(folder)}})
        self._place = folder, slots, arrangement
        self.server = PlayedServer(folder, self.model, slots, arrangement)
        ops = LinkOps(RecordingOps(machine), RecordingOps(machine), way=way)
        super().__init__(machine, shape=shape, ops=ops, arrangement=arrangement, **options)
        self.join(waits=waits)

    def _make_arena(self, slots: int, arrangement: Arrangement) -> HostArena:
        """Return the stand-in."""
        return HostArena(self.shape, 1, huge_pages=False)

    def _make_worker(self, **parts: Any) -> KVWorker:
        watched = type("WatchedArenas", (_WatchedArenas,), {"machine": self.machine})
        with mock.patch("kvcore.server.worker.MappedArenas", watched):
            return ServedWorker(served=self._config, model=self.model, rank=0, **parts)

    def join(self, *, waits: bool = True) -> None:
        """Use the server's memory; with ``waits``, when it is pinned."""
        self.arena = self.server.arena
        self._flat = KVView(self.arena.layout(), [self.arena.tensor()])
        arenas = self.worker._arenas
        until(lambda: any(not one.gone and (one.ready or not waits) for one in arenas._mapped))
        for one in arenas._mapped:
            if not one.gone:
                self.know_arena(one.arena)

    def restart(self) -> None:
        """End the server, and start another one."""
        self.server.close()
        folder, slots, arrangement = self._place
        self.server = PlayedServer(folder, self.model, slots, arrangement)
        self.join()

    def close(self) -> None:
        super().close()
        self.server.close()


class ServedBooks(Books):
    """A leader that has joined the rank's session. The server keeps the tiers."""

    def __init__(self, rank: ServedRank, seed: int, **options: Any) -> None:
        super().__init__(rank, seed, **options)
        self._tier_room = []
        self._session = rank.server.number

    def _number(self) -> int:
        return (self._session << GRAPH_BITS) + super()._number()
