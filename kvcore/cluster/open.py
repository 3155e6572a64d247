"""Opens the directory that `[cluster]` describes, and registers this process in it."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from kvcore.cluster.base import Directory, Member
from kvcore.cluster.static import StaticDirectory
from kvcore.config import Config
from kvcore.config.schema_cluster import ClusterConfig
from kvcore.errors import ConfigError

__all__ = ["directory_of", "open_directory", "register"]


def open_directory(config: Config) -> Directory | None:
    """Return the configured directory; None if neither etcd nor members are set.

    Does not wait for a server. Raises ConfigError if both are set, if a name is not allowed, or if
    the etcd client is not installed.
    """
    return directory_of(config.cluster)


def directory_of(cluster: ClusterConfig) -> Directory | None:
    """Do what `open_directory` does, for the ``[cluster]`` section alone."""
    if cluster.etcd and cluster.members:
        raise ConfigError("cluster.etcd and cluster.members are both set: choose one")
    if cluster.members:
        listed = [
            Member(entry.kind, name, entry.address, entry.model, entry.group, entry.details)
            for name, entry in cluster.members.items()
        ]
        return StaticDirectory(listed)
    if not cluster.etcd:
        return None
    try:
        from kvcore.cluster.etcd import EtcdDirectory
    except ImportError as error:
        raise ConfigError(f"cluster.etcd needs a client: pip install etcd3gw ({error})") from error
    return EtcdDirectory(
        cluster.etcd,
        ttl_s=cluster.ttl_s,
        prefix=cluster.prefix,
        ca_cert=cluster.ca_cert,
        cert=cluster.cert,
        key=cluster.key,
    )


def register(
    config: Config, kind: str, details: Mapping[str, str], data_parallel_rank: int | None = None
) -> Directory | None:
    """Register this process in the configured directory as a ``kind``: "leader" or "server".

    Returns the directory; closing it removes the entry. None if no directory is configured. If
    etcd cannot be reached, the process is registered as soon as it can be.

    ``details`` are what other processes need to know; ``*`` as the host of an address is replaced
    by this host's name. Raises ConfigError if a static list lacks this process.
    """
    directory = open_directory(config)
    if directory is None:
        return None
    host = socket.gethostname()
    name = config.cluster.name or f"{host}-{os.getpid()}"
    if data_parallel_rank is not None:
        name = f"{name}-dp{data_parallel_rank}"
    if kind == "server":  # a server registers one member for each of its models
        name = f"{name}-{details['fingerprint'][:8]}"
    resolved = {key: value.replace("//*", f"//{host}") for key, value in details.items()}
    member = Member(
        kind,
        name,
        resolved.get("events", ""),
        config.cluster.model,
        config.cluster.group,
        resolved,
    )
    try:
        directory.join(member)
    except ConfigError:
        directory.close()
        raise
    return directory
