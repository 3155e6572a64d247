"""Renames in an engine's sources, to see that a probe notices."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvcore.engines.probes import Binds, Fields, Has, Overrides, Probe, Takes, Want
from kvcore.engines.sources import Sources


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


def _homes(sources: Sources, target: str) -> set[str]:
    """Return the modules that define a name, or the class that it is in, or its bases."""
    owner = target.rpartition(".")[0] if "." in target.partition(":")[2] else target
    return {at.module for at in sources.lineage(sources.find(owner))}


class Tree:
    """A copy of the modules of an engine that its probes read."""

    def __init__(self, sources: Sources, probes: Sequence[Probe], folder: Path) -> None:
        self._package, self._root = sources.package, folder / sources.package
        for probe in probes:
            assert not probe.failure(sources) or probe.without
        for module in sources.read:
            origin = sources.file(module)
            if origin is not None:
                place = self._place(module, package=origin.name == "__init__.py")
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(origin, place)
        self.sources = Sources(self._package, self._root)

    def renamed(self, target: str, name: str) -> Sources:
        """Return the sources in which the home of ``target`` calls ``name`` otherwise."""
        changed = Sources(self._package, self._root)
        homes = _homes(self.sources, target)
        changed._modules |= {m: n for m, n in self.sources._modules.items() if m not in homes}
        changed._classes |= {
            owner: members
            for owner, members in self.sources._classes.items()
            if homes.isdisjoint({owner.module, *(at.module for at in members.values())})
        }
        for module in homes:
            file = changed.file(module)
            assert file is not None
            text = file.read_text()
            file.write_text(re.sub(rf"\b{name}\b", f"{name}_renamed", text))
            try:
                changed.names(module)  # read while it is changed
            finally:
                file.write_text(text)
        return changed

    def _place(self, module: str, *, package: bool) -> Path:
        folder = self._root.joinpath(*module.split(".")[1:])
        return folder / "__init__.py" if package else folder.with_suffix(".py")


def unnoticed(sources: Sources, probes: Sequence[Probe], folder: Path) -> list[str]:
    """Return the interfaces whose loss a probe does not notice."""
    tree = Tree(sources, probes, folder)
    return [
        f"{probe.name}: {target} {name}"
        for probe in probes
        if not probe.failure(tree.sources)  # this version has what is optional
        for target, name in interfaces(probe, tree.sources)
        if not probe.failure(tree.renamed(target, name))
    ]
