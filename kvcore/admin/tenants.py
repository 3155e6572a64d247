"""Tenants: names for namespaces, and how much each may keep in each tier.

    [tenants.NAME] salt, loras ──▶ namespaces of this model ──▶ quotas of the index, counts

The index counts a named tenant's blocks in every tier, with or without a quota. Reading a count
costs nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from kvcore.config import Config
from kvcore.config.schema_control import parse_quota, tenant_name
from kvcore.errors import CapacityError, ConfigError, UnsupportedError
from kvcore.index import BlockIndex
from kvcore.model.identity import Namespaces, lora_identity
from kvcore.model.keys import Namespace
from kvcore.telemetry.metrics import Metrics

__all__ = ["UNNAMED", "Tenants", "Usage"]

UNNAMED = "*"
"""Stands for all requests of no named tenant, in quotas and metrics. No tenant can have the name.
"""

MAX_TENANTS = 1024
"""Named tenants of a model; each is one Prometheus series for each tier."""

COUNT_S = 1.0
"""Seconds between two updates of the metrics."""

NO_LIMIT = sys.maxsize


class Usage(NamedTuple):
    """What a tenant uses of a tier, in blocks; ``limit`` is None without a quota."""

    tenant: str
    tier: str
    used: int
    limit: int | None


def check_quotas(config: Config, tiers: Iterable[str] = ()) -> None:
    """Raise ConfigError for a quota of a tier that neither the settings nor ``tiers`` have."""
    known = {"host", "disk", *config.tiers, *tiers}
    quotas = {f"tenants.{name}.quota": tenant.quota for name, tenant in config.tenants.items()}
    for place, quota in {**quotas, "clients.unnamed_quota": config.clients.unnamed_quota}.items():
        if unknown := quota.keys() - known:
            raise ConfigError(
                f"{place} names the tiers {', '.join(sorted(unknown))}; there "
                f"are {', '.join(sorted(known))}"
            )


class Tenants:
    """The tenants of one model. The leader's thread only; no I/O after the start."""

    def __init__(
        self,
        config: Config,
        fingerprint: bytes,
        index: BlockIndex,
        block_nbytes: int,
        metrics: Metrics,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Apply the quotas of ``config``, which evicts the blocks beyond them.

        Reads the folders of LoRA weights. Raises ConfigError for quotas that cannot be met.
        """
        self.index = index
        self._block_nbytes = block_nbytes
        self._metrics = metrics
        self._clock = clock
        self._counted = -COUNT_S
        self._spaces = Namespaces(config.namespace, fingerprint)
        self._names: dict[str, list[Namespace]] = {}
        self._owners: dict[bytes, str] = {}
        check_quotas(config, index.tiers)
        for name, tenant in config.tenants.items():
            loras = [_lora(name, lora, path) for lora, path in tenant.loras.items()]
            self._name(name, [self._spaces.of(lora, tenant.salt) for lora in ("", *loras)])
            for tier in index.tiers:
                self._set(name, tier, self.blocks(tier, tenant.quota.get(tier)))
        if config.clients.unnamed_quota:
            for tier in index.tiers:
                self._set(UNNAMED, tier, self.blocks(tier, config.clients.unnamed_quota.get(tier)))

    # -- names ----------------------------------------------------------------------------------

    def add(self, name: str, salt: str) -> None:
        """Name a tenant, unless it has this name already.

        Raises ConfigError if the name or the salt belongs to another tenant, and CapacityError if
        there are too many tenants.
        """
        space = self._spaces.of("", salt)
        if self._owners.get(space.digest) == name:
            return
        if name in self._names:
            raise ConfigError(f"tenant {name!r} has another salt: give another name, or no salt")
        self._name(tenant_name(name), [space])
        for tier in self.index.tiers:
            self._set(name, tier, None)

    def digests(self, name: str) -> list[bytes]:
        """Return the digests of a tenant's namespaces, none for `UNNAMED`.

        Raises ConfigError for an unknown name.
        """
        return [] if name == UNNAMED else [space.digest for space in self.spaces(name)]

    def spaces(self, name: str) -> Sequence[Namespace]:
        """Return a tenant's namespaces. Raises ConfigError for an unknown name."""
        if name not in self._names:
            there = ", ".join(sorted(self._names)) or "none"
            raise ConfigError(f"no tenant {name!r}; there are: {there}. Add [tenants.{name}]")
        return self._names[name]

    def space_of(self, salt: str | None) -> Namespace:
        """Return the namespace of requests with ``salt``, or without one (None)."""
        return self._spaces.of("", salt)

    def name_of(self, namespace: bytes) -> str:
        """Return the tenant that a namespace belongs to; empty if there is none."""
        return self._owners.get(namespace, "")

    def _name(self, name: str, spaces: list[Namespace]) -> None:
        for other in {self._owners.get(space.digest, name) for space in spaces} - {name}:
            raise ConfigError(f"tenants {name!r} and {other!r} have one salt: give each its own")
        if len(self._names) >= MAX_TENANTS:
            raise CapacityError(
                f"{MAX_TENANTS} tenants have names already, the most there can be; remove some of "
                "[tenants.NAME] and restart"
            )
        self._names[name] = spaces
        self._owners.update(dict.fromkeys((space.digest for space in spaces), name))

    # -- quotas ---------------------------------------------------------------------------------

    def blocks(self, tier: str, quota: str | None) -> int | None:
        """Return a quota in blocks of a tier; None for no quota.

        Raises ConfigError if the quota cannot be parsed or is smaller than a block.
        """
        if quota is None:
            return None
        capacity = self.index.num_slots(tier) * self._block_nbytes
        nbytes = parse_quota(quota, capacity)
        if 0 < nbytes < self._block_nbytes:
            raise ConfigError(
                f"a quota of {quota!r} in tier {tier!r} is less than a block of "
                f"{self._block_nbytes} bytes: give more, or 0 to keep nothing"
            )
        return nbytes // self._block_nbytes

    def limit(self, blocks: int | None) -> int:
        """Return the number of blocks by which the index expresses a quota."""
        return NO_LIMIT if blocks is None else blocks

    def _set(self, name: str, tier: str, blocks: int | None) -> None:
        evicted = self.index.admin.set_quota(tier, name, self.digests(name), self.limit(blocks))
        if evicted:
            self._metrics.evicted(tier, len(evicted))

    def usage(self) -> Iterator[Usage]:
        """Yield what every tenant uses of every tier. O(tenants * tiers)."""
        for tier in self.index.tiers:
            for name, quota in self.index.admin.quotas(tier).items():
                limit = None if quota.limit == NO_LIMIT else quota.limit
                yield Usage(name, tier, quota.used, limit)

    def tick(self) -> None:
        """Update the metrics, at most once a second. Cheap to call often."""
        if (now := self._clock()) - self._counted < COUNT_S:
            return
        self._counted = now
        for name, tier, used, limit in self.usage():
            most = self.index.num_slots(tier)
            most = most if limit is None else min(limit, most)
            self._metrics.tenant(name, tier, used * self._block_nbytes, most * self._block_nbytes)


def _lora(tenant: str, name: str, path: str) -> str:
    try:
        return lora_identity(name, path)
    except UnsupportedError as error:
        raise ConfigError(f"tenants.{tenant}.loras.{name}: {error}") from error
