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
    """The rights of requests, by their salt. LoRAs do not matter, listed or not.

    A report says whether somebody with the same salt has sent the same text. With a salt of its own
    a client learns about itself. Without one it would learn about everybody who has none either. If
    ``clients.report`` is unset, such requests get no report where several tenants are named.
    """

    def __init__(self, config: Config) -> None:
        shared, clients = config.namespace.salt or "", config.clients

        def usual(salt: str) -> str:
            many = bool(config.tenants) and salt == shared
            return clients.report or ("off" if many else "explain")

        self._default = ClientRights.of(clients.report or "explain", clients.promises)
        self._by_salt = {shared: ClientRights.of(usual(shared), clients.promises)}
        for tenant in config.tenants.values():
            salt = tenant.salt or shared
            self._by_salt[salt] = ClientRights.of(
                tenant.report or usual(salt),
                clients.promises if tenant.promises is None else tenant.promises,
            )

    def rights(self, namespace: Namespace) -> ClientRights:
        """Return the rights of the requests of a namespace."""
        return self._by_salt.get(namespace.cache_salt, self._default)
