"""The options of the `peer` store, and the addresses in them."""

from __future__ import annotations

import ipaddress
import re
import socket
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from kvcore._util.addresses import check_open
from kvcore.config.fields import FolderPath, Seconds, Size, parse_size
from kvcore.errors import ConfigError
from kvcore.tiers.remote.options import StoreOptions

__all__ = ["PeerOptions", "addresses"]

_ADDRESS = re.compile(r"(?P<host>[^\s:/]+|\[[0-9a-fA-F:]+\]):(?P<first>[0-9]+)(-(?P<last>[0-9]+))?")
_MAX_RANKS = 64
_EVERY_ADDRESS = ("0.0.0.0", "*", "[::]")


def addresses(text: str) -> list[str]:
    """Return tcp://HOST:PORT for each rank of a node. Raises ConfigError."""
    found = _ADDRESS.fullmatch(text)
    first = int(found["first"]) if found else 0
    last = int(found["last"] or first) if found else 0
    if found is None or not (0 < first <= last <= 65535 and last - first < _MAX_RANKS):
        raise ConfigError(
            f"given {text!r}; supported are HOST:PORT, and HOST:FIRST-LAST with one port for each "
            f"of up to {_MAX_RANKS} ranks"
        )
    return [f"tcp://{found['host']}:{port}" for port in range(first, last + 1)]


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    """Parse a network. Raises ConfigError."""
    try:
        return ipaddress.ip_network(text)
    except ValueError as error:
        raise ConfigError(f"{error}; supported is a network such as 10.0.0.0/16") from error


class PeerOptions(StoreOptions):
    """The address of this node, the other nodes, and the memory that this one lends."""

    known_by = ()  # one store, whichever nodes there are

    listen: str = Field(
        default="127.0.0.1:7801",
        description="HOST:PORT at which rank 0 answers other nodes. Rank N listens at PORT + N. An "
        "address that other hosts reach needs `keys` or `trusted_network`.",
    )
    keys: FolderPath | None = Field(
        default=None,
        description="Folder of CURVE keys, made by `kvcore server --keygen FOLDER`. Every node has "
        "the folder's server keys and a client pair of its own, and hears only nodes whose public "
        "keys are in it.",
    )
    trusted_network: bool = Field(
        default=False,
        description="Listen without keys at an address that other hosts reach, because a firewall "
        "or a network policy admits only kvcore's nodes. Whoever else connects can read KV, and "
        "make nodes delete it.",
    )
    advertise: Annotated[str, Field(pattern=r"^([^\s:/]+|\[[0-9a-fA-F:]+\])$")] | None = Field(
        default=None,
        description="HOST at which other nodes reach this one. Unset: the host of `listen`, or "
        "this host's name if `listen` is on every address.",
    )
    peers: list[str] | Literal["etcd"] = Field(
        default=[],
        description="Every node, including this one: HOST:PORT, or HOST:FIRST-LAST for several "
        'ranks. Or "etcd": nodes with the same `cluster.model` and `cluster.group` find each other '
        "through `[cluster]`.",
    )
    guests: list[Annotated[str, Field(min_length=1)]] = Field(
        default=[],
        description="Hosts besides `peers` that a promise may name, so that their memory is read: "
        'names, addresses, or networks such as "10.0.0.0/16". A promise comes with a request, so '
        "every client may name any node of these. Empty: promises may name peers only.",
    )
    guest_ports: Annotated[str, Field(pattern=r"^[0-9]+(-[0-9]+)?$")] | None = Field(
        default=None,
        description="Ports that a promise may name at `guests`: PORT, or FIRST-LAST. Unset: those "
        f"of `listen` for up to {_MAX_RANKS} ranks. A client can make this node connect to each.",
    )
    lend: Size = Field(
        default=parse_size("1GiB"),
        description="Bytes of host memory that each rank lends, in addition to `host.capacity`. "
        "Their content is lost when the rank ends.",
    )
    lease_s: Seconds = Field(
        default=10.0,
        description="Longest time, in seconds, for which a reader may lease a value.",
    )
    backend: Annotated[str, Field(min_length=1)] = Field(
        default="UCX",
        description="NIXL's backend. UCX is configured by its own environment variables.",
    )

    @field_validator("listen")
    @classmethod
    def _one_address(cls, text: str) -> str:
        if len(addresses(text)) != 1:
            raise ConfigError(f"given {text!r}; supported is the HOST:PORT of rank 0")
        return text

    @model_validator(mode="after")
    def _strangers_are_kept_out(self) -> PeerOptions:
        check_open("listen", self.listen, self.keys, self.trusted_network)
        return self

    @field_validator("peers")
    @classmethod
    def _many_addresses(cls, texts: list[str] | str) -> list[str] | str:
        for text in () if isinstance(texts, str) else texts:
            addresses(text)
        return texts

    @field_validator("guests")
    @classmethod
    def _hosts(cls, texts: list[str]) -> list[str]:
        for text in texts:
            if "/" in text:
                _network(text)
        return texts

    def admits(self, address: str) -> bool:
        """Return True if tcp://HOST:PORT may be a guest."""
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        host, first = host.strip("[]"), int(self.listen.rpartition(":")[2])
        low, _, high = (self.guest_ports or f"{first}-{first + _MAX_RANKS - 1}").partition("-")
        if not int(low) <= int(port) <= int(high or low):
            return False
        try:
            number = ipaddress.ip_address(host)
        except ValueError:
            return host in self.guests
        return host in self.guests or any(
            number in _network(text) for text in self.guests if "/" in text
        )

    def address(self, rank: int) -> str:
        """Return where ``rank`` listens. Raises ConfigError if its port is out of range."""
        host, _, port = self.listen.rpartition(":")
        [address] = addresses(f"{host}:{int(port) + rank}")
        return address

    def advertised(self, rank: int) -> str:
        """Return where others reach ``rank``. Raises ConfigError if its port is out of range."""
        host, _, port = self.address(rank).removeprefix("tcp://").rpartition(":")
        if self.advertise is not None:
            host = self.advertise
        elif host in _EVERY_ADDRESS:
            host = socket.gethostname()
        return f"tcp://{host}:{port}"
