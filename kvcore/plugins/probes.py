"""Probes find out whether an engine has the interfaces that kvcore uses.

    Probe ──▶ wants, each checked in `Sources` ──▶ judge ──▶ Verdict: tried, probed or not served

An adapter declares what it uses, and asks the probes, never a version number. A newer or older
engine is served if every probe holds. An optional probe that fails turns off what it is for. No
engine is imported.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from packaging.version import InvalidVersion, Version

from kvcore.errors import UnsupportedError
from kvcore.plugins.hookspecs import EngineSpec
from kvcore.plugins.manager import installed
from kvcore.plugins.sources import (
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
    "Failed",
    "Fields",
    "Has",
    "Overrides",
    "Probe",
    "Standing",
    "Takes",
    "Verdict",
    "Want",
    "judge",
    "judge_sources",
    "require",
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

    def methods(self) -> dict[str, ast.FunctionDef]:
        """Return the methods that kvcore's own package defines for ``by``."""
        home = self.by.partition(".")[0]
        ours = Sources(home)
        return {
            name: at.node
            for name, at in ours.members(ours.find(self.by)).items()
            if at.module.startswith(home) and isinstance(at.node, ast.FunctionDef)
        }

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


# -- the verdict ------------------------------------------------------------------------------

UNKNOWN = "of unknown version"


class Standing(str, Enum):
    """What kvcore knows of the installed version of an engine."""

    ABSENT = "not installed"
    TRIED = "tried"
    PROBED = "probed"
    NOT_SERVED = "not served"


class Failed(NamedTuple):
    """A probe that failed, and what the engine lacks."""

    probe: Probe
    lacks: str


class Verdict(NamedTuple):
    """The standing of a version of an engine.

    ``failed`` are the required probes that failed, ``lost`` the optional ones. ``held`` counts the
    others.
    """

    distribution: str
    version: str | None
    standing: Standing
    tried: tuple[str, ...] = ()
    held: int = 0
    failed: tuple[Failed, ...] = ()
    lost: tuple[Failed, ...] = ()

    @property
    def served(self) -> bool:
        """True if kvcore runs with this version."""
        return self.standing in (Standing.TRIED, Standing.PROBED)

    @property
    def about(self) -> str:
        """Return the standing in one line: what failed, and what is switched off."""
        if self.version is None:
            return f"not installed; tried are {self._tried}"
        why = ""
        if self.failed:
            more = f" and {len(self.failed) - 1} more" if len(self.failed) > 1 else ""
            probe, lacks = self.failed[0]
            why = f": probe {probe.name!r}{more} failed: {lacks}. It is needed {probe.needed_for}"
        elif self.standing is Standing.PROBED:
            why = f": tried are {self._tried}; {self.held} probes hold"
        lost = "".join(f"; {each.probe.without} ({each.lacks})" for each in self.lost)
        return f"{self.distribution} {self.version}, {self.standing.value}{why}{lost}"

    @property
    def advice(self) -> str:
        """Return what to do about an engine that is missing or not served."""
        wanted = " ".join((self.distribution, ", ".join(self.tried))).rstrip()
        return f"install {wanted}, or a newer kvcore"

    @property
    def _tried(self) -> str:
        return ", ".join(self.tried) or "no versions"

    def holds(self, name: str) -> None:
        """Raise UnsupportedError if the probe of this name failed."""
        for probe, lacks in (*self.failed, *self.lost):
            if probe.name == name:
                raise UnsupportedError(f"{self.distribution} {self.version}: {lacks}")


def judge(engine: EngineSpec) -> Verdict:
    """Return the verdict on the installed version. Reads sources, and imports no engine."""
    found = installed(engine)
    sources = Sources(engine.package)
    if found.version is None and not sources.exists:
        return Verdict(found.distribution, None, Standing.ABSENT, engine.tried)
    return _judge(engine, found.distribution, found.version or UNKNOWN, sources)


def judge_sources(engine: EngineSpec, version: str, sources: Sources) -> Verdict:
    """Return the verdict on sources that lie anywhere, as those of ``version``."""
    return _judge(engine, engine.distributions[0], version, sources)


def require(engine: EngineSpec) -> Verdict:
    """Return the verdict on the installed version.

    Raises UnsupportedError if the engine is missing or not served; its text says what to change.
    """
    verdict = judge(engine)
    if not verdict.served:
        raise UnsupportedError(f"engine {engine.name!r}: {verdict.about}: {verdict.advice}")
    return verdict


def _judge(engine: EngineSpec, distribution: str, version: str, sources: Sources) -> Verdict:
    probes: Sequence[Probe] = engine.probes()
    ended = [Failed(probe, probe.failure(sources)) for probe in probes]
    failed = tuple(each for each in ended if each.lacks and not each.probe.without)
    lost = tuple(each for each in ended if each.lacks and each.probe.without)
    held = sum(not each.lacks for each in ended)
    standing = Standing.TRIED if _is_tried(version, engine.tried) else Standing.PROBED
    if failed:
        standing = Standing.NOT_SERVED
    return Verdict(distribution, version, standing, engine.tried, held, failed, lost)


def _is_tried(version: str, tried: Sequence[str]) -> bool:
    """Return True for a release in ``tried``; builds such as 0.32.0+cpu count, nightlies do not."""
    try:
        release = Version(Version(version).public)
    except InvalidVersion:
        return False
    return any(release == Version(each) for each in tried)
