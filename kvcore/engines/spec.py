"""What an adapter says of its engine, and which version is installed. Imports no engine."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kvcore.config.schema import Config
    from kvcore.engines.probes import Probe

__all__ = ["EngineSpec", "Installed", "ServeCommand", "Switch", "installed"]


class ServeCommand(NamedTuple):
    """A command that starts an engine, and the variables to add to its environment."""

    argv: list[str]
    env: dict[str, str]


class Switch(NamedTuple):
    """Whether an engine uses kvcore without an argument that says so, and why.

    ``advice`` is what to change, if it was asked to and does not.
    """

    on: bool
    why: str
    advice: str = ""


@dataclass(frozen=True)
class EngineSpec:
    """A serving engine and its adapter.

    ``distributions`` are the packages that may provide the engine; the first installed one counts.
    ``serve(model, config, engine_args)`` builds the command line. ``status()`` says in a few words
    how the adapter is connected. ``package`` is the engine's Python package, ``tried`` are the
    releases that the adapter has run with, and ``probes()`` returns the interfaces that it uses.
    ``switch(config)`` says whether the engine uses kvcore without an argument; None if it never
    does. Nothing of this imports the engine.
    """

    name: str
    distributions: tuple[str, ...]
    serve: Callable[[str, Config, Sequence[str]], ServeCommand]
    status: Callable[[], str]
    package: str = ""
    tried: tuple[str, ...] = ()
    probes: Callable[[], Sequence[Probe]] = tuple
    switch: Callable[[Config], Switch] | None = None


class Installed(NamedTuple):
    """The engine on this machine; ``version`` is None if there is none."""

    distribution: str
    version: str | None


def installed(spec: EngineSpec) -> Installed:
    """Return the engine's installed version, from package metadata alone."""
    for distribution in spec.distributions:
        if version := _version(distribution):
            return Installed(distribution, version)
    return Installed(spec.distributions[0], None)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
