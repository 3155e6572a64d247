"""Every model that a server serves: preparing their caches, and finding the right one.

A thread prepares a model, because that takes memory and scans the disk for seconds. Until the model
is ready, its first client is asked to try again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from kvcore.admin.audit import AuditLog
from kvcore.config import Config
from kvcore.errors import KVCoreError
from kvcore.runtime.build import host_slots
from kvcore.server.errors import AmbiguousModel, MachineAway, Misfit, ModelBusy
from kvcore.server.machines import Machines, SharedCache
from kvcore.server.messages import Model
from kvcore.server.model_cache import ModelCache
from kvcore.server.pending_clears import PendingClear
from kvcore.server.runtime_dir import RuntimeDir
from kvcore.server.tier_worker import model_config

__all__ = ["ModelCaches"]

_log = logging.getLogger("kvcore.server")


@dataclass
class _Preparing:
    """A cache on its way: first the other machines prepare theirs, then this one, then all open."""

    shared: SharedCache | None
    made: Future[ModelCache] | None = None
    opens: bool = False

    def open_elsewhere(self, cache: ModelCache, shared: SharedCache) -> None:
        """Have the other machines open their tiers. Raises ModelBusy until they have."""
        if not self.opens:
            self.opens = True
            shared.open(cache.open_tiers)
        if not shared.opened:
            raise ModelBusy("other machines are opening their tiers: ask again")

    @property
    def cache(self) -> ModelCache | None:
        """The cache that was made, which may have to wait for other machines."""
        made = self.made
        ended = made is not None and made.done() and not made.cancelled()
        return made.result() if made is not None and ended and not made.exception() else None


class ModelCaches:
    """The caches of a server's models, at most ``server.models`` of them.

    Only the server's thread calls it.
    """

    def __init__(
        self, config: Config, folder: RuntimeDir, audit: AuditLog, machines: Machines
    ) -> None:
        self._config = config
        self._folder = folder
        self._audit = audit
        self._machines = machines
        self._ready: dict[Model, ModelCache] = {}
        self._preparing: dict[Model, _Preparing] = {}
        self._thread = ThreadPoolExecutor(1, "kvcore-prepare")
        self._arenas = 0

    def __iter__(self) -> Iterator[ModelCache]:
        return iter(self._ready.values())

    @property
    def busy(self) -> bool:
        """Return True if a report may come from a cache's own threads."""
        return any(cache.busy for cache in self)

    def get(self, model: Model) -> ModelCache:
        """Return the cache of ``model``; start to prepare it on the first call.

        Raises ModelBusy while it is being prepared, MachineAway while another machine of it is not
        there, Misfit if it cannot be served, and LayoutError if ``model`` describes no valid block.
        """
        if model in self._ready:
            return self._ready[model]
        found = self._preparing.get(model)
        if found is None:
            self._check_room(model)
            found = self._preparing[model] = _Preparing(self._share(model))
        if found.shared is not None:
            self._check_shared(model, found.shared)
        if found.made is None:
            self._arenas += 1
            arena = f"arena-{self._arenas}"
            found.made = self._thread.submit(
                ModelCache, self._config, model, self._folder, arena, self._audit, found.shared
            )
        if not found.made.done():
            raise ModelBusy("the model is being prepared: ask again")
        try:
            cache = found.made.result()
        except KVCoreError as error:
            self._give_up(model)
            raise Misfit(str(error)) from error
        if found.shared is not None:
            found.open_elsewhere(cache, found.shared)
        del self._preparing[model]
        self._ready[model] = cache
        return cache

    def _check_shared(self, model: Model, shared: SharedCache) -> None:
        """Raise ModelBusy until the other machines have prepared their parts.

        Raises MachineAway if one of them has gone, and Misfit if one cannot provide its part.
        """
        if shared.lost or shared.why:
            self._give_up(model)
            if shared.why:
                raise Misfit(shared.why)
            raise MachineAway("the server of another machine has gone meanwhile: ask again")
        if not shared.prepared:
            raise ModelBusy("other machines are preparing the model: ask again")

    def _share(self, model: Model) -> SharedCache | None:
        """Have other machines prepare their parts of a model, if it has any there."""
        described = model.described
        if described.machines == 1:
            return None
        slots = host_slots(model_config(self._config, described), described).total
        return self._machines.share(model, slots)

    def _give_up(self, model: Model) -> None:
        """Stop to prepare a model."""
        given_up = self._preparing.pop(model)
        if given_up.shared is not None:
            self._machines.drop(given_up.shared)
        if given_up.made is not None:
            self._thread.submit(lambda: _close(given_up.cache))

    def take_lost(self) -> list[ModelCache]:
        """Return the caches of which another machine has lost its part, and close them.

        Their sessions are over. A thread closes them, before it prepares another cache.
        """
        lost = [cache for cache in self if cache.lost]
        self._ready = {model: cache for model, cache in self._ready.items() if not cache.lost}
        for cache in lost:
            assert cache.shared is not None
            self._machines.drop(cache.shared)
            self._thread.submit(_close, cache)
        return lost

    def _check_room(self, model: Model) -> None:
        _ = model.described  # raises LayoutError
        known = [*self._ready, *self._preparing]
        if len(known) < self._config.server.models:
            return
        differs = [
            f"{name} is {getattr(model, name)}, served is {getattr(other, name)}"
            for other in known
            for name in model.__struct_fields__
            if other.fingerprint == model.fingerprint
            and getattr(model, name) != getattr(other, name)
        ]
        why = "; ".join(differs) or f"{len(known)} other models are served"
        raise Misfit(
            f"this server has room for {self._config.server.models} models: {why}. Give the engine "
            "the same settings (block.tokens), or raise server.models"
        )

    def select(self, fingerprint: bytes) -> ModelCache:
        """Return the only cache whose model's fingerprint begins with ``fingerprint``.

        Raises AmbiguousModel if there is none, or more than one.
        """
        found = [cache for cache in self if cache.model.fingerprint.startswith(fingerprint)]
        if len(found) == 1:
            return found[0]
        there = ", ".join(model.fingerprint.hex() for model in self._ready)
        raise AmbiguousModel(
            f"{len(found)} models are meant; served: {there or 'none, before an engine joins'}. "
            "Give --model the first digits of one"
        )

    def replay_clears(self, clears: Iterable[PendingClear]) -> None:
        """Clear what clients could not ask a server to clear, for the models that are served."""
        for clear in clears:
            for model, cache in self._ready.items():
                if clear.is_of(model):
                    spaces = [None] if clear.namespaces is None else clear.namespaces
                    count = sum(cache.clear(namespace) for namespace in spaces)
                    clear.path.unlink(missing_ok=True)
                    _log.info("paid a clear that an engine could not tell blocks=%d", count)

    def stop_preparing(self) -> None:
        """Wait for the model that is being prepared, and close its cache. Blocks."""
        for preparing in self._preparing.values():
            if preparing.made is not None:
                preparing.made.cancel()
        self._thread.shutdown(wait=True)  # after it has closed what is over
        for preparing in self._preparing.values():
            if (cache := preparing.cache) is not None:
                cache.close()

    def close(self) -> None:
        """Finish the writes, flush the tiers and give the memory back. Blocks."""
        for cache in self:
            cache.close()


def _close(cache: ModelCache | None) -> None:
    """Close a cache that nobody uses any more. For the thread that made it."""
    try:
        if cache is not None:
            cache.close()
    except Exception:  # noqa: BLE001 - thread boundary: the next cache is prepared all the same
        _log.exception("a cache was not closed as it should be")
