"""The fusion options of a request, in whatever field the engine passes on.

    {"kvcore": {"fusion": {"ratio": 0.3, "chunks": [[12, 512], [512, 1040]]}}}

``true`` in place of the inner table asks only for the report.
"""

from __future__ import annotations

import reprlib
from typing import Annotated, Any

import msgspec

from kvcore._util.outside import converted
from kvcore.errors import ConfigError, FormatError

__all__ = ["FusionOptions", "fusion_options", "shortened"]

MAX_SHOWN = 200
"""Characters of a request that an error repeats: a request may be megabytes of text."""


def shortened(given: object) -> str:
    """Return what a request gave, for an error: on one line, and cut at `MAX_SHOWN` characters."""
    shown = reprlib.Repr()
    shown.maxstring = shown.maxother = MAX_SHOWN
    return shown.repr(given)[:MAX_SHOWN]


Offset = Annotated[int, msgspec.Meta(ge=-(1 << 53), le=1 << 53)]  # an error repeats it


class FusionOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fusion options of one request.

    ``enabled`` False keeps the answer exact. ``ratio`` None means the configured ratio. ``chunks``
    has [start, stop) token offsets of texts that were warmed separately. With None, kvcore searches
    for stored text; an empty list reuses nothing.
    """

    enabled: bool = True
    ratio: float | None = None
    chunks: tuple[tuple[Offset, Offset], ...] | None = None

    def check(self, tokens: int) -> None:
        """Raise ConfigError unless the options fit a prompt of ``tokens`` tokens."""
        if self.ratio is not None and not 0 <= self.ratio <= 1:
            raise ConfigError(f"fusion.ratio is {self.ratio}; 0 to 1 is supported")
        last = 0
        for start, stop in self.chunks or ():
            if not last <= start < stop <= tokens:
                raise ConfigError(
                    f"fusion.chunks has [{start}, {stop}) in a prompt of {tokens} tokens; chunks "
                    "are [start, stop) token offsets, ascending and not overlapping"
                )
            last = stop


def fusion_options(given: Any, tokens: int) -> FusionOptions:
    """Return the options that a request gave under ``kvcore``, or the defaults.

    Raises ConfigError, which names the given value, if they are not valid.
    """
    if not isinstance(given, dict) or "fusion" not in given:
        return FusionOptions()
    try:
        options = converted(given["fusion"], FusionOptions)
    except FormatError as error:
        raise ConfigError(
            f"fusion options {shortened(given['fusion'])}: {error}; supported are enabled, ratio "
            "and chunks"
        ) from error
    options.check(tokens)
    return options
