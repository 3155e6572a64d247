"""Probes find out whether an engine has the interfaces that kvcore uses.

An adapter declares what it uses, and asks the probes, never a version number. A newer or older
engine is served if every probe holds. An optional probe that fails turns off what it is for. No
engine is imported.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from kvcore.engines.sources import (
    Definition,
    Missing,
    Sources,
    is_abstract,
    of_fields,
    parameters,
    signature,
)

__all__ = [
    "Binds",
    "Either",
    "Fields",
    "Has",
    "Overrides",
    "Probe",
    "Takes",
    "Want",
]


class Want(Protocol):
    """One thing that a probe checks."""

    def check(self, sources: Sources) -> None:
        """Raise `Missing` if the sources do not have it."""


@dataclass(frozen=True)
class Has:
    """Names that exist: ``module:Name`` or ``module:Name.member``."""

    targets: tuple[str, ...]

    def __init__(self, *targets: str) -> None:
        object.__setattr__(self, "targets", targets)

    def check(self, sources: Sources) -> None:
        for target in self.targets:
            sources.find(target)


@dataclass(frozen=True)
class Fields:
    """Fields, properties, methods or attributes of a class's instances."""

    target: str
    names: tuple[str, ...]

    def __init__(self, target: str, *names: str) -> None:
        object.__setattr__(self, "target", target)
        object.__setattr__(self, "names", names)

    def check(self, sources: Sources) -> None:
        there = sources.members(sources.find(self.target))
        if lacking := [name for name in self.names if name not in there]:
            raise Missing(f"{self.target} has no {', '.join(lacking)}")


@dataclass(frozen=True)
class Takes:
    """A function with these parameters, because kvcore replaces or wraps it.

    ``more`` may follow them.
    """

    target: str
    names: tuple[str, ...]
    more: bool = False

    def check(self, sources: Sources) -> None:
        found = parameters(sources.find(self.target).node)
        if (found[: len(self.names)] if self.more else found) != self.names:
            raise Missing(f"{self.target} takes {found}; kvcore knows {self.names}")


@dataclass(frozen=True)
class Binds:
    """A function or class that kvcore calls with ``count`` positional arguments and ``keywords``.

    ``self`` is not counted.
    """

    target: str
    count: int = 0
    keywords: tuple[str, ...] = ()

    def check(self, sources: Sources) -> None:
        found = sources.find(self.target)
        if isinstance(found.node, ast.ClassDef):
            init = sources.members(found).get("__init__")
            made = (
                of_fields(sources.fields(found))
                if init is None
                else signature(init.node, bound=True)
            )
        else:
            made = signature(found.node, bound="." in self.target.partition(":")[2])
        try:
            made.bind(*[None] * self.count, **dict.fromkeys(self.keywords))
        except TypeError as error:
            raise Missing(f"{self.target}{made}: {error}") from error


@dataclass(frozen=True)
class Overrides:
    """A base class of the engine, and kvcore's class that the engine calls through it.

    Each public method of ``by`` must be in one of ``bases``, with the parameters that ``by`` has.
    Each abstract one of the bases must be in ``by``. ``beside`` are methods of ``by`` that only
    some versions have, or that the engine does not call.
    """

    bases: tuple[str, ...]
    by: str
    beside: tuple[str, ...] = ()

    def check(self, sources: Sources) -> None:
        wanted: dict[str, Definition] = {}
        for base in self.bases:
            wanted = {**sources.members(sources.find(base)), **wanted}
        own = self.methods()
        abstract = {name for name, at in wanted.items() if is_abstract(at.node)}
        if new := sorted(abstract - set(own)):
            raise Missing(f"{self.bases[0]} wants {', '.join(new)}, which kvcore does not define")
        for name, node in own.items():
            if not name.startswith("_"):
                self._compare(name, node, wanted)

    def methods(self) -> Mapping[str, ast.FunctionDef]:
        """Return the methods that kvcore's own package defines for ``by``."""
        return _own_methods(self.by)

    def _compare(self, name: str, node: ast.AST, wanted: dict[str, Definition]) -> None:
        there = wanted.get(name)
        if there is None:
            if name in self.beside:
                return
            raise Missing(f"{self.bases[0]} has no {name}")
        if isinstance(there.node, ast.FunctionDef) and parameters(there.node) != parameters(node):
            raise Missing(
                f"{self.bases[0]}.{name} takes {parameters(there.node)}; kvcore knows "
                f"{parameters(node)}"
            )


@dataclass(frozen=True)
class Either:
    """Groups of wants, one of which must hold."""

    groups: tuple[tuple[Want, ...], ...]

    def __init__(self, *groups: tuple[Want, ...]) -> None:
        object.__setattr__(self, "groups", groups)

    def check(self, sources: Sources) -> None:
        lacking = [_lacks(group, sources) for group in self.groups]
        if all(lacking):
            raise Missing(", and ".join(lacking))


@dataclass(frozen=True)
class Probe:
    """One interface of an engine.

    ``needed_for`` says what kvcore does with it. ``without`` says what happens if it is absent, and
    makes the probe optional: an engine whose required probes hold is served.
    """

    name: str
    needed_for: str
    wants: tuple[Want, ...]
    without: str = ""

    def failure(self, sources: Sources) -> str:
        """Return what the engine lacks, or an empty string."""
        return _lacks(self.wants, sources)


@cache
def _own_methods(by: str) -> Mapping[str, ast.FunctionDef]:
    home = by.partition(".")[0]
    ours = Sources(home)
    return {
        name: at.node
        for name, at in ours.members(ours.find(by)).items()
        if at.module.startswith(home) and isinstance(at.node, ast.FunctionDef)
    }


def _lacks(wants: Sequence[Want], sources: Sources) -> str:
    """Return the first thing that is missing, or an empty string."""
    try:
        for want in wants:
            want.check(sources)
    except Missing as error:
        return str(error)
    except (OSError, SyntaxError, ValueError) as error:
        return f"the sources cannot be read: {error}"
    return ""
