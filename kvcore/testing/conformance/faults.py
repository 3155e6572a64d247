"""A tier that hangs, fails and dies when it is told to: a plugin that the kit brings along.

`write_plugin` makes a folder that, on the module search path of any process, offers the tier
``kvcore-faults``. Its option ``control`` names a file whose word says what reads and writes do:

    ok      what they should            hang   wait until the word is another
    fail    every read fails            down   every call fails, as with a store that is gone
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from kvcore.errors import TierError, TierUnavailable
from kvcore.plugins import TierContext, TierPlugin, hookimpl
from kvcore.tiers.base import BlockRead, BlockWrite
from kvcore.tiers.memory import MemoryTier

__all__ = ["FaultyTier", "kvcore_tiers", "write_plugin"]

NAME = "kvcore-faults"
_LOOK_S = 0.01


class FaultyTier(MemoryTier):
    """The naive tier, as its control file wants it."""

    def __init__(self, context: TierContext) -> None:
        super().__init__(max(context.num_slots, 1), context.slot_nbytes)
        self._control = Path(context.options["control"])

    def read(self, requests: Sequence[BlockRead]) -> list[TierError | None]:
        if self._obey() == "fail":
            return [TierUnavailable("told to fail") for _ in requests]
        return super().read(requests)

    def write(self, requests: Sequence[BlockWrite]) -> list[TierError | None]:
        self._obey()
        return super().write(requests)

    def _obey(self) -> str:
        while (word := self._control.read_text().strip()) == "hang":
            time.sleep(_LOOK_S)
        if word == "down":
            raise TierUnavailable("told to be down")
        return word


@hookimpl
def kvcore_tiers() -> list[TierPlugin]:
    return [TierPlugin(NAME, "remote", FaultyTier)]


def write_plugin(folder: Path) -> Path:
    """Make ``folder`` one that brings the tier; returns it."""
    info = folder / "kvcore_faults-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvcore-faults\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[kvcore.plugins]\nfaults = {__name__}\n")
    return folder
