"""The tiers below host memory, as a manager sees them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvcore._util.circuit_breaker import Breaker, TierBreakers
from kvcore.index import BlockIndex
from kvcore.manager.base import Backing
from kvcore.manager.remote_lookup import StoreLookup
from kvcore.model.points import PointRows

__all__ = ["LowerTiers"]


@dataclass(frozen=True)
class LowerTiers:
    """The tiers below host memory by name, nearest first, with the state of their media.

    Args:
        bindings: how each tier is read and written.
        breakers: the circuit breakers of each tier's reads and writes.
        lookups: the leader's view of each shared store; other tiers have none.
    """

    bindings: Mapping[str, Backing]
    breakers: TierBreakers
    lookups: Mapping[str, StoreLookup]

    @classmethod
    def of(
        cls,
        backings: Sequence[Backing],
        index: BlockIndex,
        clock: Callable[[], float],
        points: PointRows | None = None,
    ) -> LowerTiers:
        """Give ``backings`` circuit breakers, and lookups if other hosts write to them."""
        breakers = TierBreakers((tier.name for tier in backings), clock=clock)
        lookups = {
            tier.name: StoreLookup(
                tier.name,
                index,
                Breaker(f"{tier.name} lookups", clock=clock),
                tier.finder,
                points=points,
                readable=breakers.reads[tier.name].allows,
                clock=clock,
            )
            for tier in backings
            if tier.finder is not None
        }
        return cls({tier.name: tier for tier in backings}, breakers, lookups)

    def share_lookups(self, owner_of: Callable[[bytes], str]) -> None:
        """Share the open lookups of each store fairly between owners of namespaces."""
        for lookup in self.lookups.values():
            lookup.owner_of = owner_of
