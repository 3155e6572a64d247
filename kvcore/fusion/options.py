"""What a request may say of fusion, in whatever field the engine passes on.

    {"kvcore": {"fusion": {"ratio": 0.3, "chunks": [[12, 512], [512, 1040]]}}}

``true`` in the place of the inner table asks for the report only.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvcore.errors import ConfigError

__all__ = ["FusionOptions", "fusion_options"]


class FusionOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request's wishes.

    ``enabled`` False keeps the answer exact. ``ratio`` None takes the configured one. ``chunks``
    are [start, stop) token offsets of texts that were warmed on their own; None looks for stored
    text, an empty list reuses nothing.
    """

    enabled: bool = True
    ratio: float | None = None
    chunks: tuple[tuple[int, int], ...] | None = None

    def check(self, tokens: int) -> None:
        """Raises ConfigError unless this fits a prompt of ``tokens`` tokens."""
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
    """The options in what a request said under ``kvcore``; the defaults where it said nothing.

    Raises ConfigError, naming what was given, when it does not fit.
    """
    if not isinstance(given, dict) or "fusion" not in given:
        return FusionOptions()
    try:
        options = msgspec.convert(given["fusion"], FusionOptions)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"fusion options {given['fusion']!r}: {error}; supported are enabled, ratio and chunks"
        ) from error
    options.check(tokens)
    return options
