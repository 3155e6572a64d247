"""Nodes that find each other in the directory of `[cluster]`, instead of in a list.

    this node ── worker, details: peer, tier ──▶ etcd, under a lease
    the others ◀── asked every third of a lease's time ──┘

Who registers is asked from the next look on; whose lease is lost is not. A directory that does not
answer changes nothing: the nodes known last stay.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from kvcore.cluster.base import Directory, Member
from kvcore.cluster.open import directory_of
from kvcore.errors import ClusterError, ConfigError

if TYPE_CHECKING:
    from kvcore.config.schema_cluster import ClusterConfig

_log = logging.getLogger("kvcore.tiers.peer")

_LOOKS = 3
"""In the time of a lease."""
_KIND = "worker"


class PeerDiscovery:
    """Keeps ``update`` told of all nodes' addresses, and ``own`` (None: this one lends nothing)
    entered. Does its I/O on a thread of its own."""

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
        self._member = None if own is None else self._enters(own)
        self._update = update
        self._is_address = is_address
        self._every_s = cluster.ttl_s / _LOOKS
        self._fails = False
        self._strange: set[str] = set()  # addresses of which it was said
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvcore-discovery", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take this node out. Blocks for as long as the directory takes. Idempotent."""
        if not self._closed.is_set():
            self._closed.set()
            self._thread.join()
            self._directory.close()

    def _run(self) -> None:
        if self._member is not None:
            self._directory.join(self._member)
        while not self._closed.is_set():
            try:
                self._look()
                self._fails = False
            except ClusterError as error:
                if not self._fails:
                    _log.warning("nodes cannot be looked up, those known stay: %s", error)
                self._fails = True
            except Exception:  # noqa: BLE001 - thread boundary: who is gone must be seen to be
                _log.exception("looking up nodes failed, those known stay")
            self._closed.wait(self._every_s)

    def _look(self) -> None:
        """Raises ClusterError."""
        found = self._directory.members(_KIND, model=self._model, group=self._group)
        told = [member.details["peer"] for member in found if "peer" in member.details]
        strange = {address for address in told if not self._is_address(address)}
        for address in strange - self._strange:
            _log.warning("a node of the cluster is passed over: its address is %r", address)
        self._strange = strange
        self._update([address for address in told if self._is_address(address)])

    def _enters(self, own: str) -> Member:
        """Its name is its own on its host, and in a network where hosts' names are."""
        name = f"{socket.gethostname()}-{os.getpid()}-{own.rpartition(':')[2]}"
        return Member(_KIND, name, own, self._model, self._group, {"peer": own})


def open_discovery(
    cluster: ClusterConfig | None,
    own: str | None,
    update: Callable[[Iterable[str]], None],
    is_address: Callable[[str], bool],
) -> PeerDiscovery:
    """Raises ConfigError where no etcd is set, or its client is not installed."""
    directory = None if cluster is None or not cluster.etcd else directory_of(cluster)
    if cluster is None or directory is None:
        raise ConfigError('peers = "etcd" needs cluster.etcd: set it, or list the nodes in `peers`')
    return PeerDiscovery(directory, cluster, own, update, is_address)
