"""The directory that `[cluster]` asks for."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from kvcore.cluster.base import Directory, Member
from kvcore.cluster.static import StaticDirectory
from kvcore.config import Config
from kvcore.errors import ConfigError
from kvcore.schema_cluster import ClusterConfig

__all__ = ["directory_of", "enter_leader", "open_directory"]


def open_directory(config: Config) -> Directory | None:
    """None where neither etcd nor members are set. Waits for no server.

    Raises ConfigError where both are set, where names do not fit, or where etcd's client is not
    installed.
    """
    return directory_of(config.cluster)


def directory_of(cluster: ClusterConfig) -> Directory | None:
    """As `open_directory`."""
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


def enter_leader(
    config: Config, details: Mapping[str, str], data_parallel_rank: int | None = None
) -> Directory | None:
    """A directory in which this process's leader is, or will be once etcd is there; close it to
    take the leader out. None where none is set.

    ``details`` are what others need to know of it; ``*`` in an address becomes this host's name.
    Raises ConfigError where the leader is not listed.
    """
    directory = open_directory(config)
    if directory is None:
        return None
    host = socket.gethostname()
    name = config.cluster.name or f"{host}-{os.getpid()}"
    if data_parallel_rank is not None:
        name = f"{name}-dp{data_parallel_rank}"
    told = {key: value.replace("//*", f"//{host}") for key, value in details.items()}
    member = Member(
        "leader",
        name,
        told.get("events", ""),
        config.cluster.model,
        config.cluster.group,
        told,
    )
    try:
        directory.join(member)
    except ConfigError:
        directory.close()
        raise
    return directory
