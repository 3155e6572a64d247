"""A directory that is a fixed list: the members in the settings are always registered.

The leader of a model and group is the first, by name, of the members listed as its leaders. The
death of a listed process is not detected: that needs leases, and therefore etcd.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.cluster.base import Leadership, Member, check_name, select_members
from kvcore.errors import ConfigError

__all__ = ["StaticDirectory"]

TERM = 1


class StaticDirectory:
    """A fixed list of members. What a leader records is visible in this process only."""

    def __init__(self, members: Sequence[Member]) -> None:
        """Raise ConfigError if two members of one kind have the same name."""
        self._members = {(member.kind, member.name): member for member in members}
        if len(self._members) != len(members):
            raise ConfigError("two members of a kind have one name: give each a name of its own")
        self._records: dict[tuple[str, str, str], str] = {}

    def join(self, member: Member) -> _Listed:
        """Return the entry of a listed member. Raises ConfigError if the list lacks it."""
        listed = self._members.get((member.kind, member.name))
        if listed is None or (listed.model, listed.group) != (member.model, member.group):
            raise ConfigError(
                f"{member.kind} {member.name!r} of model {member.model!r}, group {member.group!r} "
                f"is not listed: add [cluster.members.{member.name}], or set cluster.etcd"
            )
        return _Listed()

    def members(
        self, kind: str | None = None, *, model: str | None = None, group: str | None = None
    ) -> Sequence[Member]:
        return select_members(list(self._members.values()), kind, model, group)

    def campaign(self, model: str, group: str, name: str) -> _Fixed:
        for text in (model, group, name):
            check_name(text)
        return _Fixed(self, model, group, name)

    def leader(self, model: str, group: str) -> Leadership | None:
        listed = self.members("leader", model=model, group=group)
        return Leadership(listed[0].name, TERM) if listed else None

    def record(self, model: str, group: str, key: str) -> str | None:
        return self._records.get((model, group, key))

    def close(self) -> None:
        self._records.clear()


class _Listed:
    """The entry of a listed member."""

    held = True

    def leave(self) -> None:
        """Do nothing: the list is fixed."""


class _Fixed:
    """A candidacy whose outcome the list decides."""

    def __init__(self, directory: StaticDirectory, model: str, group: str, name: str) -> None:
        self._directory = directory
        self._at = model, group
        self._name: str | None = name

    @property
    def term(self) -> int | None:
        leader = self._directory.leader(*self._at)
        return leader.term if leader is not None and leader.name == self._name else None

    def record(self, key: str, value: str) -> bool:
        if self.term is None:
            return False
        model, group = self._at
        self._directory._records[model, group, key] = value
        return True

    def resign(self) -> None:
        self._name = None
