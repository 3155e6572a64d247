"""The verdict on an engine: tried, probed or not served. Reads sources, and imports no engine."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from packaging.version import InvalidVersion, Version

from kvcore.engines.probes import Probe
from kvcore.engines.sources import Sources
from kvcore.engines.spec import EngineSpec, installed
from kvcore.errors import UnsupportedError

__all__ = ["Failed", "Standing", "Verdict", "judge", "judge_sources", "require"]

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
