"""The directory that `[cluster]` asks for."""

from __future__ import annotations

from kvcore.cluster.base import Directory, Member
from kvcore.cluster.static import StaticDirectory
from kvcore.config import Config
from kvcore.errors import ConfigError

__all__ = ["open_directory"]


def open_directory(config: Config) -> Directory | None:
    """None where neither etcd nor members are set. Waits for no server.

    Raises ConfigError where both are set, where names do not fit, or where etcd's client is not
    installed.
    """
    cluster = config.cluster
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
