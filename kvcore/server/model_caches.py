"""Every model that a server serves: preparing their caches, and finding the right one.

A thread prepares a model, because that takes memory and scans the disk for seconds. Until the model
is ready, its first client is asked to try again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from kvcore.admin.audit import AuditLog
from kvcore.config import Config
from kvcore.errors import KVCoreError
from kvcore.server.errors import AmbiguousModel, Misfit, ModelBusy
from kvcore.server.messages import Model
from kvcore.server.model_cache import ModelCache
from kvcore.server.pending_clears import PendingClear
from kvcore.server.runtime_dir import RuntimeDir

__all__ = ["ModelCaches"]

_log = logging.getLogger("kvcore.server")


class ModelCaches:
    """The caches of a server's models, at most ``server.models`` of them.

    Only the server's thread calls it.
    """

    def __init__(self, config: Config, folder: RuntimeDir, audit: AuditLog) -> None:
        self._config = config
        self._folder = folder
        self._audit = audit
        self._ready: dict[Model, ModelCache] = {}
        self._preparing: dict[Model, Future[ModelCache]] = {}
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

        Raises ModelBusy while it is being prepared, Misfit if it cannot be served, and LayoutError
        if ``model`` describes no valid block.
        """
        if model in self._ready:
            return self._ready[model]
        prepared = self._preparing.get(model)
        if prepared is None:
            self._check_room(model)
            self._arenas += 1
            prepared = self._preparing[model] = self._thread.submit(
                ModelCache, self._config, model, self._folder, f"arena-{self._arenas}", self._audit
            )
        if not prepared.done():
            raise ModelBusy("the model is being prepared: ask again")
        del self._preparing[model]
        try:
            cache = self._ready[model] = prepared.result()
        except KVCoreError as error:
            raise Misfit(str(error)) from error
        return cache

    def _check_room(self, model: Model) -> None:
        _ = model.shape  # raises LayoutError
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
        self._thread.shutdown(wait=True, cancel_futures=True)
        for prepared in self._preparing.values():
            if not prepared.cancelled() and prepared.exception() is None:
                prepared.result().close()

    def close(self) -> None:
        """Finish the writes, flush the tiers and give the memory back. Blocks."""
        for cache in self:
            cache.close()
