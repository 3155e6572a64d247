"""Renames in an engine's sources, to see that a probe notices."""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from kvcore.engines.probes import Binds, Fields, Has, Overrides, Probe, Takes, Want
from kvcore.engines.sources import Sources, _top


def interfaces(probe: Probe, sources: Sources) -> Iterator[tuple[str, str]]:
    """Yield each name that a probe looks for, with its class (or module) as ``module:Name``.

    What one of two entrances needs is in the probe of that entrance as well.
    """
    for want in probe.wants:
        yield from sorted(set(_of(want, sources)))


def _of(want: Want, sources: Sources) -> Iterator[tuple[str, str]]:
    if isinstance(want, Has):
        for target in want.targets:
            yield target, re.split("[:.]", target)[-1]
    elif isinstance(want, (Fields, Takes)):
        yield from ((want.target, name) for name in want.names if name != "self")
    elif isinstance(want, Binds):
        yield want.target, re.split("[:.]", want.target)[-1]
    elif isinstance(want, Overrides):
        for base in want.bases:
            there = sources.members(sources.find(base))
            shared = {n for n in want.methods() if n in there and not n.startswith("_")}
            yield from ((base, name) for name in shared - set(want.beside))


class Tree:
    """A copy of the modules of an engine that its probes read. Names in it can be changed."""

    def __init__(self, sources: Sources, probes: Sequence[Probe], folder: Path) -> None:
        self._package, self._root = sources.package, folder / sources.package
        for probe in probes:
            assert not probe.failure(sources) or probe.without
        self.sources = Sources(self._package, self._root)
        self._bodies: dict[str, list[ast.stmt]] = {}
        self._spots: dict[str, list[_Spot]] = {}
        """Where the syntax of a module has a text, for the modules that were changed so far."""
        for module in sources.read:
            origin = sources.file(module)
            if origin is not None:
                place = self._place(module, package=origin.name == "__init__.py")
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(origin, place)
                self._bodies[module] = ast.parse(place.read_text(encoding="utf-8")).body
                self.sources._modules[module] = dict(_top(self._bodies[module]))

    @contextmanager
    def renamed(self, target: str, name: str) -> Iterator[Sources]:
        """Yield the sources in which the home of ``target`` calls ``name`` otherwise.

        Names are changed in the syntax trees. To parse a module anew for each takes far longer.
        """
        changed, homes = Sources(self._package, self._root), self._homes(target)
        changed._modules |= {m: n for m, n in self.sources._modules.items() if m not in homes}
        changed._classes |= {
            owner: members
            for owner, members in self.sources._classes.items()
            if homes.isdisjoint({owner.module, *(at.module for at in members.values())})
        }
        word = re.compile(rf"\b{name}\b")
        found = [spot for home in homes for spot in self._spots_of(home) if word.search(spot.text)]
        try:
            for spot in found:
                spot.put(word.sub(f"{name}_renamed", spot.text))
            for home in homes:
                changed._modules[home] = dict(_top(self._bodies[home]))
            yield changed
        finally:
            for spot in found:
                spot.put(spot.text)

    def _homes(self, target: str) -> set[str]:
        """Return the modules that define a name, or the class that it is in, or its bases."""
        owner = target.rpartition(".")[0] if "." in target.partition(":")[2] else target
        return {at.module for at in self.sources.lineage(self.sources.find(owner))}

    def _place(self, module: str, *, package: bool) -> Path:
        folder = self._root.joinpath(*module.split(".")[1:])
        return folder / "__init__.py" if package else folder.with_suffix(".py")

    def _spots_of(self, module: str) -> list[_Spot]:
        if module not in self._spots:
            nodes = [node for top in self._bodies[module] for node in ast.walk(top)]
            self._spots[module] = [spot for node in nodes for spot in _spots(node)]
        return self._spots[module]


class _Spot(NamedTuple):
    """A text in a node: its field, and in a list of texts the place."""

    node: ast.AST
    field: str
    place: int | None
    text: str

    def put(self, text: str) -> None:
        if self.place is None:
            setattr(self.node, self.field, text)
        else:
            getattr(self.node, self.field)[self.place] = text


def _spots(node: ast.AST) -> Iterator[_Spot]:
    for field, value in ast.iter_fields(node):
        if isinstance(value, str):
            yield _Spot(node, field, None, value)
        elif isinstance(value, list):
            yield from (_Spot(node, field, i, v) for i, v in enumerate(value) if isinstance(v, str))


def unnoticed(sources: Sources, probes: Sequence[Probe], folder: Path) -> list[str]:
    """Return the interfaces whose loss a probe does not notice."""
    tree, found = Tree(sources, probes, folder), []
    for probe in probes:
        if probe.failure(tree.sources):
            continue  # this version does not have what is optional
        for target, name in [*interfaces(probe, tree.sources)]:
            with tree.renamed(target, name) as changed:
                if not probe.failure(changed):
                    found.append(f"{probe.name}: {target} {name}")
    return found
