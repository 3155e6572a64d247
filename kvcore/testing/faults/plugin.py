"""Faults in an engine in another process: tiers that follow a file of rules, and blends that fail.

`write_plugin` makes a folder. On the module search path of a process, it offers these tiers:

    kvcore-faults        an in-memory tier that acts as a remote medium
    kvcore-faulty-disk   the disk tier, with faults under and above its checksums

It also offers the selector ``kvcore-faults``, with which every blend fails. It adds a byte to the
file `FAILED_BLENDS` in the folder for each.

The option ``rules`` names the file that `write_rules` writes, and ``seed`` the seed, to which each
rank adds its number. The other options of ``kvcore-faulty-disk`` are those of ``disk``.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from kvcore.plugins import (
    PreparedTier,
    SelectorPlugin,
    TierContext,
    TierPlugin,
    builtin,
    hookimpl,
)
from kvcore.testing.faults.media import FaultyTier, into_disk
from kvcore.testing.faults.plan import Faults
from kvcore.tiers.base import Tier
from kvcore.tiers.memory import MemoryTier

__all__ = [
    "FAILED_BLENDS",
    "FAULTY_DISK",
    "FAULTY_MEMORY",
    "FAULTY_SELECTOR",
    "kvcore_selectors",
    "kvcore_tiers",
    "write_plugin",
]

FAULTY_MEMORY = "kvcore-faults"
FAULTY_DISK = "kvcore-faulty-disk"
FAULTY_SELECTOR = "kvcore-faults"
FAILED_BLENDS = "blends-failed"
_NAME = "kvcore-faults"
_OURS = {"rules", "seed"}


def _faults(context: TierContext) -> Faults:
    seed = int(context.options.get("seed", 0)) + context.rank
    return Faults(seed=seed, follow=Path(context.options["rules"]))


def _plain(context: TierContext) -> TierContext:
    """Return the context without the options of the faults, for the wrapped tier."""
    options = {name: value for name, value in context.options.items() if name not in _OURS}
    return replace(context, options=options)


def _memory(context: TierContext) -> Tier:
    inner = MemoryTier(max(context.num_slots, 1), context.slot_nbytes)
    return FaultyTier(inner, _faults(context))


def _disk(context: TierContext) -> Tier:
    faults = _faults(context)
    return FaultyTier(into_disk(builtin._disk(_plain(context)), faults), faults)


def _prepare_disk(context: TierContext) -> PreparedTier:
    return builtin._prepare_disk(_plain(context))


@hookimpl
def kvcore_tiers() -> list[TierPlugin]:
    return [
        TierPlugin(FAULTY_MEMORY, "remote", _memory),
        TierPlugin(FAULTY_DISK, "disk", _disk, _prepare_disk),
    ]


def _selector() -> Any:
    from kvcore.fusion.select import Candidates, Selector

    failed = Path(str(distribution(_NAME).locate_file(FAILED_BLENDS)))

    class Failing(Selector):
        name = FAULTY_SELECTOR

        def score(self, candidates: Candidates) -> Any:
            with failed.open("a") as file:
                file.write("x")
            raise RuntimeError("a selector that fails, as asked")

    return Failing()


@hookimpl
def kvcore_selectors() -> list[SelectorPlugin]:
    return [SelectorPlugin(FAULTY_SELECTOR, _selector)]


def write_plugin(folder: Path) -> Path:
    """Make ``folder`` a plugin that offers the tiers and the selector, and return it."""
    info = folder / "kvcore_faults-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {_NAME}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[kvcore.plugins]\nfaults = {__name__}\n")
    return folder
