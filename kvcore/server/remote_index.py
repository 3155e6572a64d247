"""The part of the server's index that an adapter reads."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kvcore.errors import TierUnavailable, UnsupportedError
from kvcore.server.messages import PathReply, split

__all__ = ["RemoteIndex"]


PATHS_KEPT = 64
"""Chains kept: the chunks of a few prompts, which are looked up again and again."""


class IndexSource(Protocol):
    """The calls of `kvcore.server.client.RemoteManager` that a `RemoteIndex` needs."""

    @property
    def counts(self) -> Mapping[str, tuple[int, int]]:
        """Return blocks used and slots by tier.

        As of the last heartbeat; empty without a session.
        """

    def held(self, tier: str, keys: Sequence[bytes]) -> int: ...

    def path_of(self, key: bytes) -> PathReply: ...


class RemoteIndex:
    """The part of the server's index that an adapter reads.

    Counts are those of the last heartbeat.
    """

    def __init__(self, manager: IndexSource) -> None:
        self._manager = manager
        self._paths: OrderedDict[bytes, PathReply] = OrderedDict()

    @property
    def tiers(self) -> tuple[str, ...]:
        return tuple(self._manager.counts)

    def num_used(self, tier: str) -> int:
        return self._manager.counts.get(tier, (0, 0))[0]

    def num_slots(self, tier: str) -> int:
        return self._manager.counts.get(tier, (0, 0))[1]

    def held(self, tier: str, keys: Sequence[bytes]) -> int:
        return self._manager.held(tier, keys)

    def path(self, key: bytes) -> list[bytes]:
        """Return the chain of keys that ends with ``key``.

        Raises TierUnavailable if no tier holds the block or the server does not answer. A block
        that was held a moment ago may still be found.
        """
        return split(self._lookup(key).keys)

    def namespace_of(self, key: bytes) -> bytes:
        """Return the namespace of ``key``. Raises TierUnavailable as `path` does."""
        return self._lookup(key).namespace

    def _lookup(self, key: bytes) -> PathReply:
        """Return a block's chain. Chains never change, so those used last are kept."""
        known = self._paths.pop(key, None)
        self._paths[key] = found = self._manager.path_of(key) if known is None else known
        if len(self._paths) > PATHS_KEPT:
            self._paths.popitem(last=False)
        return found

    def pin(self, tier: str, key: bytes) -> Any:
        raise _not_served("pins of an engine's own")

    def unpin(self, pin: Any) -> None:
        raise _not_served("pins of an engine's own")

    def __contains__(self, key: bytes) -> bool:
        self._paths.pop(key, None)
        try:
            self._lookup(key)
        except TierUnavailable:
            return False
        return True


def _not_served(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"{what} with a kvcore server; supported is `plan_load`: unset server.address"
    )
