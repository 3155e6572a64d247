"""The fusion options of a request, in whatever field the engine passes on.

    {"kvcore": {"fusion": {"ratio": 0.3, "chunks": [[12, 512], [512, 1040]]}}}

``true`` in place of the inner table asks only for the report.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvcore.errors import ConfigError

__all__ = ["FusionOptions", "fusion_options"]


class FusionOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fusion options of one request.

    ``enabled`` False keeps the answer exact. ``ratio`` None means the configured ratio. ``chunks``
    has [start, stop) token offsets of texts that were warmed separately. With None, kvcore searches
    for stored text; an empty list reuses nothing.
    """

    enabled: bool = True
    ratio: float | None = None
    chunks: tuple[tuple[int, int], ...] | None = None

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
        options = msgspec.convert(given["fusion"], FusionOptions)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"fusion options {given['fusion']!r:.200}: {error}; supported are enabled, ratio and "
            "chunks"
        ) from error
    options.check(tokens)
    return options
