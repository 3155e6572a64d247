"""Change the code that decides in one place at a time, and list the changes that no test notices.

    python -m kvcore_devtools.mutants index [--each 20] [--seed 1] [--only TEXT] [--for MINUTES]

Runs the tests of that package only. A survivor is a change that is equivalent, or harmless, or
shows that a test is missing: read each.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import random
import sys
import time
from collections.abc import Iterator, Sequence

from kvcore_devtools.copies import ROOT
from kvcore_devtools.mutants.forks import EachInAFork, Task, codes_of, main_in_fork, put_into
from kvcore_devtools.mutants.operators import Mutant, mutants_of
from kvcore_devtools.mutants.packages import PACKAGES, Package

LEAST_S = 30.0
"""Shortest time limit of the tests of a mutant, in seconds."""

_OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "--hypothesis-seed=0")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the survivors. Returns 1 if the tests do not pass without a change."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("package", choices=PACKAGES)
    parser.add_argument("--each", type=int, default=20, help="mutants of a file at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", metavar="TEXT", help="files whose path has this text")
    parser.add_argument("--line", type=int, help="only mutants of this line, such as a survivor's")
    parser.add_argument("--tests", nargs="*", default=(), help="modules instead of the package's")
    parser.add_argument("--for", dest="minutes", type=float, default=1e9, help="stop after MINUTES")
    options = parser.parse_args(arguments)
    package = PACKAGES[options.package]
    chosen = _sample(package, options.each, options.seed, options.only, options.line)
    runs = _Runs(chosen, time.monotonic() + 60 * options.minutes)
    return runs.run(package, options.tests)


def _sample(
    package: Package, each: int, seed: int, only: str, line: int | None
) -> list[tuple[str, Mutant]]:
    """Return (file, mutant) pairs in random order, at most ``each`` of a file."""
    rng = random.Random(seed)
    chosen: list[tuple[str, Mutant]] = []
    for file in package.files(ROOT):
        if only in file:
            made = mutants_of((ROOT / file).read_text())
            made = [one for one in made if line in (None, one.line)]
            chosen += [(file, one) for one in rng.sample(made, min(each, len(made)))]
    rng.shuffle(chosen)
    return chosen


class _Runs:
    """The runs on each mutant, after one without a change."""

    def __init__(self, chosen: Sequence[tuple[str, Mutant]], until: float) -> None:
        self._chosen = chosen
        self._until = until
        self._plugin = EachInAFork(self._tasks(), self._end)
        self._status: int | None = None
        self._sound = False
        self._survived = self._ran = 0

    def run(self, package: Package, tests: Sequence[str] = ()) -> int:
        names = [str(ROOT / name) for name in tests or package.modules(ROOT)]
        status = main_in_fork([*_OPTIONS, "-m", package.marks, *names], self._plugin)
        if status or not self._sound:
            print("the tests fail without a change, or there are none")
            return 1
        print(f"{self._survived} of {self._ran} survived", flush=True)
        return 0

    def _end(self, status: int | None) -> None:
        self._status = status

    def _tasks(self) -> Iterator[Task]:
        started = time.monotonic()
        yield lambda: None
        self._sound = self._status == 0
        if not self._sound:
            return
        seconds = time.monotonic() - started
        self._plugin.limit_s = max(LEAST_S, 4 * seconds)
        print(f"\n{len(self._chosen)} mutants; the tests take {seconds:.1f} s", flush=True)
        for file, mutant in self._chosen:
            if time.monotonic() > self._until:
                return
            yield functools.partial(_become, file, mutant)
            self._ran += 1
            if self._status == 0:
                self._survived += 1
                print(f"{file}:{mutant.line} {mutant.kind:<9} {mutant.before}", flush=True)


def _become(file: str, mutant: Mutant) -> None:
    """Change this process to run a mutant of a file."""
    place = (ROOT / file).with_suffix("")
    roots = [root for root in sys.path if root and place.is_relative_to(root)]
    name = min((".".join(place.relative_to(root).parts) for root in roots), key=len)
    put_into(importlib.import_module(name), codes_of(mutant.source, file))


if __name__ == "__main__":
    sys.exit(main())
