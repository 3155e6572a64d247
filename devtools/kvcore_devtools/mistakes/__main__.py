"""Put mistakes back one by one, and see the tests that are said to find them fail.

    python -m kvcore_devtools.mistakes [NAME...] [--list]

Works in a copy of the tree. The named tests pass there first, without a mistake. Ends with 1 if a
mistake is not found by each of its tests.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from kvcore_devtools.copies import TESTS_FAILED, Outcome, TreeCopy, copied
from kvcore_devtools.mistakes.book import MISTAKES, Mistake

LIMIT_S = 900.0
"""Longest run of the tests of one mistake, in seconds."""

IN_MAKE_TEST = ("-m", "not exhaustive")


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if every chosen mistake is found by each of its tests."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all of them")
    parser.add_argument("--list", action="store_true", help="only show what there is")
    options = parser.parse_args(arguments)
    known = {mistake.name: mistake for mistake in MISTAKES}
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"no mistake is named {', '.join(unknown)}; there are {', '.join(known)}")
    chosen = [known[name] for name in options.names] or list(MISTAKES)
    if options.list:
        for mistake in chosen:
            print(f"{mistake.name:<26} {mistake.breaks}")
        return 0
    with copied() as copy:
        sound = _sound(copy, chosen)
        return int(
            not sound or [mistake for mistake in chosen if not _put_back(copy, mistake)] != []
        )


def _sound(copy: TreeCopy, chosen: Sequence[Mistake]) -> bool:
    """Return True if the tests of all mistakes pass without one: else red would prove nothing."""
    tests = list(dict.fromkeys(test for mistake in chosen for test in mistake.found_by))
    outcome = copy.run(tests, *IN_MAKE_TEST, limit_s=LIMIT_S)
    print(f"without a mistake: {len(tests)} tests in {outcome.seconds:.0f} s", flush=True)
    wrong = [test for test in tests if outcome.of(test) != {"PASSED"}]
    if wrong or outcome.status:
        print(outcome.output)
        print("fail without a mistake, or did not run:", *wrong, sep="\n  ")
    return not (wrong or outcome.status)


def _put_back(copy: TreeCopy, mistake: Mistake) -> bool:
    """Return True if each test of a mistake fails with it."""
    with copy.change(mistake.file, mistake.applied(copy.folder)):
        outcome = copy.run(mistake.found_by, *IN_MAKE_TEST, limit_s=LIMIT_S)
    for number, test in enumerate(mistake.found_by):
        head = f"{mistake.name:<26} {outcome.seconds:4.0f} s" if not number else " " * 33
        print(f"{head}  {_verdict(outcome, test):<9}  {test}", flush=True)
    found = all(_verdict(outcome, test) == "found" for test in mistake.found_by)
    if not found:
        print(outcome.output)
    return found


def _verdict(outcome: Outcome, test: str) -> str:
    if outcome.status is None:
        return "hangs"
    if outcome.status != TESTS_FAILED or not (results := outcome.of(test)):
        return "did not run"
    return "found" if "FAILED" in results else "not found"


if __name__ == "__main__":
    sys.exit(main())
