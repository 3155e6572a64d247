"""Discovery of peer nodes through the directory of `[cluster]`, instead of a list.

    this node ── worker, details: peer ──▶ etcd, under a lease
    the others ◀── looked up three times per TTL ──┘

A node that registers is used after the next lookup, and a node whose lease expires no longer. If
the directory does not answer, the nodes known last stay in use.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from kvcore._util.threads import GuardedThread, nobody_waits
from kvcore.cluster.base import Directory, Member
from kvcore.cluster.open import directory_of
from kvcore.errors import ClusterError, ConfigError

if TYPE_CHECKING:
    from kvcore.config.schema_cluster import ClusterConfig

_log = logging.getLogger("kvcore.tiers.peer")

_LOOKUPS = 3
"""Lookups per TTL."""
_KIND = "worker"
END_S = 10.0


class PeerDiscovery:
    """Registers this node, and passes the addresses of all nodes to ``update``.

    ``own`` is the address of this node, or None if it lends no memory. All I/O happens on a thread
    of its own.
    """

    def __init__(
        self,
        directory: Directory,
        cluster: ClusterConfig,
        own: str | None,
        update: Callable[[Iterable[str]], None],
        is_address: Callable[[str], bool],
    ) -> None:
        self._directory = directory
        self._model, self._group = cluster.model, cluster.group
        self._member = None if own is None else self._own_member(own)
        self._update = update
        self._is_address = is_address
        self._every_s = cluster.ttl_s / _LOOKUPS
        self._fails = False
        self._invalid: set[str] = set()  # invalid addresses that were logged
        self._closed = threading.Event()
        self._thread = GuardedThread("kvcore-discovery", self._run, nobody_waits)
        self._thread.start()

    def close(self) -> None:
        """Remove this node's entry. Blocks until the directory has done so. Idempotent.

        A lookup under way is waited for up to `END_S` seconds.
        """
        if not self._closed.is_set():
            self._closed.set()
            self._thread.join(END_S)
            self._directory.close()

    def _run(self) -> None:
        joined = self._member is None
        while not self._closed.is_set():
            try:
                if not joined:
                    assert self._member is not None
                    self._directory.join(self._member)
                    joined = True
                self._look()
                self._fails = False
            except ClusterError as error:
                if not self._fails:
                    _log.warning("peer nodes cannot be looked up, those known stay: %s", error)
                self._fails = True
            except Exception:  # noqa: BLE001 - thread boundary: lookups must go on
                _log.exception("looking up peer nodes failed unexpectedly, those known stay")
            self._closed.wait(self._every_s)

    def _look(self) -> None:
        """Look up all nodes once. Raises ClusterError."""
        found = self._directory.members(_KIND, model=self._model, group=self._group)
        listed = [member.details["peer"] for member in found if "peer" in member.details]
        invalid = {address for address in listed if not self._is_address(address)}
        for address in invalid - self._invalid:
            _log.warning("a node of the cluster is ignored: its address is %r", address)
        self._invalid = invalid
        self._update([address for address in listed if self._is_address(address)])

    def _own_member(self, own: str) -> Member:
        """Return this node as a member. Its name is unique in a network of unique host names."""
        name = f"{socket.gethostname()}-{os.getpid()}-{own.rpartition(':')[2]}"
        return Member(_KIND, name, own, self._model, self._group, {"peer": own})


def open_discovery(
    cluster: ClusterConfig | None,
    own: str | None,
    update: Callable[[Iterable[str]], None],
    is_address: Callable[[str], bool],
) -> PeerDiscovery:
    """Start discovery. Raises ConfigError if etcd is not set or its client is not installed."""
    directory = None if cluster is None or not cluster.etcd else directory_of(cluster)
    if cluster is None or directory is None:
        raise ConfigError('peers = "etcd" needs cluster.etcd: set it, or list the nodes in `peers`')
    return PeerDiscovery(directory, cluster, own, update, is_address)
