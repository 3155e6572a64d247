"""The contract of a directory: which processes are registered, and which one leads.

    leaders, workers, servers ── join ──▶ Directory ◀── members, leader ── routers, tools, others
    candidates ── campaign ─────────────▶    │
                                             └─ a lease: an entry that is not renewed expires

An entry and a term are valid as long as the lease of their process. The holder measures that time
itself, starting before it sends the renewal, and stops relying on the lease a while before the
directory expires it. It may conclude too early that a lease is lost, but never too late.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple, Protocol

import msgspec

from kvcore.errors import ConfigError, FormatError

__all__ = ["KINDS", "Candidacy", "Directory", "Leadership", "Member", "Membership"]

KINDS = ("leader", "worker", "server")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]*")


@dataclass(frozen=True)
class Member:
    """A process of the cluster. Its ``name`` is unique among the members of its ``kind``.

    ``address`` is where other processes reach it. ``details`` hold what else they need, such as
    the endpoint of its events. ``model`` is the model it serves, ``group`` the group of nodes it
    belongs to. Raises ConfigError if a field cannot be part of a key.
    """

    kind: str
    name: str
    address: str = ""
    model: str = "any"
    group: str = "default"
    details: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"given the kind {self.kind!r}; supported are {', '.join(KINDS)}")
        for text in (self.name, self.model, self.group):
            check_name(text)

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "details": dict(self.details)})

    @classmethod
    def from_json(cls, text: str | bytes) -> Member:
        """Return the member that `to_json` wrote. Raises FormatError for any other text."""
        try:
            return msgspec.json.decode(text, type=cls)
        except (TypeError, ValueError, RecursionError) as error:  # of JSON, names and fields
            raise FormatError(f"not a member of a cluster: {text[:200]!r}: {error}") from error


def check_name(text: str) -> None:
    """Raise ConfigError if ``text`` cannot be part of a key."""
    if not _NAME.fullmatch(text):
        raise ConfigError(
            f"given the name {text!r}; supported are letters, digits and . _ : @ -, starting with "
            "a letter or digit"
        )


class Leadership(NamedTuple):
    """The current leader.

    ``term`` grows with every change of leader. Anything that carries a lower term is outdated.
    """

    name: str
    term: int


class Membership(Protocol):
    """The entry of one member."""

    @property
    def held(self) -> bool:
        """True while other processes can rely on the entry. O(1), no I/O."""

    def leave(self) -> None:
        """Remove the entry. Does I/O."""


class Candidacy(Protocol):
    """A candidate in the election for one model and group."""

    @property
    def term(self) -> int | None:
        """The term in which this candidate leads; None while it does not. O(1), no I/O."""

    def record(self, key: str, value: str) -> bool:
        """Store a value for the model and group if this candidate leads at the moment of writing.

        Returns True if the value was written. Does I/O.
        """

    def resign(self) -> None:
        """Withdraw from the election, and give up leadership if it was won. Does I/O."""


class Directory(Protocol):
    """Members, leaders and their records. Thread-safe.

    Calls that do I/O raise ClusterError if the directory cannot be reached.
    """

    def join(self, member: Member) -> Membership:
        """Register a member, and keep it registered until it leaves or the directory closes."""

    def members(
        self, kind: str | None = None, *, model: str | None = None, group: str | None = None
    ) -> Sequence[Member]:
        """Return the registered members that match, sorted by kind and name. Does I/O."""

    def campaign(self, model: str, group: str, name: str) -> Candidacy:
        """Be a candidate for the leadership of a model and group until `Candidacy.resign`."""

    def leader(self, model: str, group: str) -> Leadership | None:
        """Return the current leader; None if there is none. Does I/O."""

    def record(self, model: str, group: str, key: str) -> str | None:
        """Return the value that a leader stored last under ``key``, or None. Does I/O."""

    def close(self) -> None:
        """Remove every entry and candidacy made through this object."""


def select_members(
    members: Sequence[Member], kind: str | None, model: str | None, group: str | None
) -> list[Member]:
    """Return the members that match every given criterion, sorted by kind and name.

    None matches any value.
    """
    wanted = (kind, model, group)
    return sorted(
        (
            member
            for member in members
            if all(
                want in (None, have)
                for want, have in zip(
                    wanted, (member.kind, member.model, member.group), strict=True
                )
            )
        ),
        key=lambda member: (member.kind, member.name),
    )
