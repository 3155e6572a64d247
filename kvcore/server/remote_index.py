"""What of a server's index an adapter asks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kvcore.errors import TierUnavailable, UnsupportedError
from kvcore.server.messages import PathReply, split

__all__ = ["RemoteIndex"]


TRAILS_KEPT = 64
"""Chains at hand: those of the chunks of a few prompts, which are asked for again and again."""


class IndexSource(Protocol):
    """What a `RemoteIndex` asks of the client (`kvcore.server.client.RemoteManager`)."""

    @property
    def counts(self) -> Mapping[str, tuple[int, int]]:
        """Blocks used and slots by tier, as the last heartbeat said. Empty without a session."""

    def held(self, tier: str, keys: Sequence[bytes]) -> int: ...

    def path_of(self, key: bytes) -> PathReply: ...


class RemoteIndex:
    """What of the server's index an adapter asks. Counts are those of the last heartbeat."""

    def __init__(self, manager: IndexSource) -> None:
        self._manager = manager
        self._trails: OrderedDict[bytes, PathReply] = OrderedDict()

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
        """Raises TierUnavailable when no tier holds the block, or the server does not answer; of a
        block that was held a moment ago it may answer still."""
        return split(self._trail(key).keys)

    def namespace_of(self, key: bytes) -> bytes:
        """Raises as `path` does."""
        return self._trail(key).namespace

    def _trail(self, key: bytes) -> PathReply:
        """A block's chain, which never changes: those asked for last are at hand."""
        known = self._trails.pop(key, None)
        self._trails[key] = found = self._manager.path_of(key) if known is None else known
        if len(self._trails) > TRAILS_KEPT:
            self._trails.popitem(last=False)
        return found

    def pin(self, tier: str, key: bytes) -> Any:
        raise _not_served("pins of an engine's own")

    def unpin(self, pin: Any) -> None:
        raise _not_served("pins of an engine's own")

    def __contains__(self, key: bytes) -> bool:
        self._trails.pop(key, None)
        try:
            self._trail(key)
        except TierUnavailable:
            return False
        return True


def _not_served(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"{what} with a kvcore server; supported is `prepare_load`: unset server.address"
    )
