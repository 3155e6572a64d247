"""Addresses to listen at: who can reach them, and which need keys."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path

from kvcore.errors import ConfigError

__all__ = ["check_open", "is_bound", "is_local"]

_TCP = re.compile(r"(?:tcp://)?(?P<host>\[[^\]]*\]|[^:]*)(?::[^:]*)?")


def is_bound(endpoint: str) -> bool:
    """Return True if `events.endpoint` is bound; other addresses are connected to, as by vLLM."""
    return "*" in endpoint or endpoint.startswith(("@", "ipc://", "inproc://"))


def is_local(address: str) -> bool:
    """Return True if only processes of this machine can reach ``address``, which may be HOST:PORT.

    A name other than "localhost" counts as one that others reach.
    """
    if address.startswith(("ipc://", "inproc://")):
        return True
    found = _TCP.fullmatch(address)
    host = found["host"].strip("[]") if found else ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_open(name: str, address: str, keys: Path | None, trusted_network: bool) -> None:
    """Raise ConfigError if strangers could connect to ``address``, the setting ``name``."""
    if keys is not None or trusted_network or is_local(address):
        return
    raise ConfigError(
        f"{name} = {address!r} can be reached from other hosts, by anyone; supported without keys "
        "are 127.0.0.1 and ipc://: set `keys` to a folder made by `kvcore server --keygen "
        "FOLDER`, or `trusted_network = true` if only kvcore's own hosts reach it"
    )
