"""The directory that `[cluster]` asks for."""

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


def register(
    config: Config, kind: str, details: Mapping[str, str], data_parallel_rank: int | None = None
) -> Directory | None:
    """A directory in which this process is as a ``kind``, "leader" or "server", or will be once
    etcd is there; close it to take it out. None where none is set.

    ``details`` are what others need to know of it; ``*`` in an address becomes this host's name.
    Raises ConfigError where it is not listed.
    """
    directory = open_directory(config)
    if directory is None:
        return None
    host = socket.gethostname()
    name = config.cluster.name or f"{host}-{os.getpid()}"
    if data_parallel_rank is not None:
        name = f"{name}-dp{data_parallel_rank}"
    if kind == "server":  # it has a member for each of its models
        name = f"{name}-{details['fingerprint'][:8]}"
    told = {key: value.replace("//*", f"//{host}") for key, value in details.items()}
    member = Member(
        kind,
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
