"""An entry of the catalogue, and phrases that several entries share."""

from __future__ import annotations

from typing import NamedTuple


class Trouble(NamedTuple):
    """A log line, identified by its text, with its meaning and the action to take."""

    text: str
    means: str
    do: str


NOTHING = "Nothing."
REPORT = "Report the traceback."
MEDIUM = "Check the medium."
BUILD_NATIVE = (
    "Install a wheel, or run `python3 kvcore/memory/copy/build_native.py` (needs a C compiler)."
)
RESTART_AND_REPORT = "Restart the engine, and report the traceback."
OWN_ERROR = "An internal error of kvcore. kvcore turns itself off."
