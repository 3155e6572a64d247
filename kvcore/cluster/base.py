"""Who is there, and who leads: the contract of a directory, whatever keeps it.

    leaders, workers, servers ── join ──▶ Directory ◀── members, leader ── routers, tools, others
    candidates ── campaign ─────────────▶    │
                                             └─ a lease: what is not renewed is gone

What a process has promised holds as long as its lease. The holder counts the time itself, from
before it asked for more, and gives up a while before the directory does: it may know too early
that a lease is lost, never too late.
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
    """A process of the cluster. Its ``name`` is its own among those of its kind.

    ``address`` is where it is reached, ``details`` what else others need (the endpoints of its
    events, say). ``model`` is what it serves, ``group`` the nodes it works with.
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
        """Raises FormatError for what `to_json` has not made."""
        try:
            return msgspec.json.decode(text, type=cls)
        except (TypeError, ValueError, RecursionError) as error:  # of JSON, names and fields
            raise FormatError(f"not a member of a cluster: {text[:200]!r}: {error}") from error


def check_name(text: str) -> None:
    """Raises ConfigError for what cannot be part of a key."""
    if not _NAME.fullmatch(text):
        raise ConfigError(
            f"given the name {text!r}; supported are letters, digits and . _ : @ -, the first a "
            "letter or digit"
        )


class Leadership(NamedTuple):
    """Who leads. ``term`` grows with every change: what bears a lower one is of the past."""

    name: str
    term: int


class Membership(Protocol):
    """A member's entry."""

    @property
    def held(self) -> bool:
        """Whether others can rely on it. O(1), no I/O."""

    def leave(self) -> None:
        """Take it out. Does I/O."""


class Candidacy(Protocol):
    """A candidate's part in the election for one model and group."""

    @property
    def term(self) -> int | None:
        """The term it leads in, None while another does, or nobody. O(1), no I/O."""

    def record(self, key: str, value: str) -> bool:
        """Write for the model and group, if it leads at the moment of writing. Does I/O."""

    def resign(self) -> None:
        """Stand no longer. Does I/O."""


class Directory(Protocol):
    """Thread-safe. Calls that do I/O raise ClusterError where the directory cannot be reached."""

    def join(self, member: Member) -> Membership:
        """Enter a member, and keep it entered."""

    def members(
        self, kind: str | None = None, *, model: str | None = None, group: str | None = None
    ) -> Sequence[Member]:
        """Who is there now, by name. Does I/O."""

    def campaign(self, model: str, group: str, name: str) -> Candidacy:
        """Stand for leadership of a model in a group until `Candidacy.resign`."""

    def leader(self, model: str, group: str) -> Leadership | None:
        """Who leads now. Does I/O."""

    def record(self, model: str, group: str, key: str) -> str | None:
        """What a leader has written last. Does I/O."""

    def close(self) -> None:
        """Take out everything that was entered here."""


def select_members(
    members: Sequence[Member], kind: str | None, model: str | None, group: str | None
) -> list[Member]:
    """Those that are asked for, by kind and name."""
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
