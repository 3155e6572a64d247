"""The age of vLLM's own prefix cache: which step may have computed the oldest KV in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

__all__ = ["PrefixCacheAge"]


class PrefixCacheAge:
    """Tells since which plan vLLM's prefix cache has been filled.

    vLLM gives its pool a new map of cached pages whenever it has emptied the cache. If there is no
    ``pool``, or it has no such map, it is not known whether that ever happened.
    """

    def __init__(self, pool: BlockPool | None = None) -> None:
        self._pool = pool
        self._cached: object = None
        self._since = 0

    def since(self, number: int) -> int:
        """Return the number of the first plan whose KV the cache may hold.

        ``number`` is the number of the plan that is being made. Call this for every plan.
        """
        cached = getattr(self._pool, "cached_block_hash_to_block", None)
        if cached is not self._cached:
            self._cached, self._since = cached, number
        return self._since
