"""What the clients of an engine may learn and ask for: ``[clients]`` and ``[tenants.NAME]``."""

from __future__ import annotations

from typing import NamedTuple

from kvcore.config import Config
from kvcore.model.keys import Namespace

__all__ = ["ClientRights", "Clients"]


class ClientRights(NamedTuple):
    """The settings ``report`` and ``promises`` for one client.

    ``tokens`` allows a report of the reused tokens, ``explain`` one of the request's record too.
    """

    tokens: bool
    explain: bool
    promises: bool

    @classmethod
    def of(cls, report: str, promises: bool) -> ClientRights:
        return cls(report != "off", report == "explain", promises)


class Clients:
    """The rights of requests, by their salt. LoRAs do not matter, listed or not."""

    def __init__(self, config: Config) -> None:
        default = config.clients
        self._default = ClientRights.of(default.report, default.promises)
        self._by_salt = {
            tenant.salt or config.namespace.salt or "": ClientRights.of(
                tenant.report or default.report,
                default.promises if tenant.promises is None else tenant.promises,
            )
            for tenant in config.tenants.values()
        }

    def rights(self, namespace: Namespace) -> ClientRights:
        """Return the rights of the requests of a namespace."""
        return self._by_salt.get(namespace.cache_salt, self._default)
