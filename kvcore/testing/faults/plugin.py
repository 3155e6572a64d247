"""Faults in an engine in another process: tiers that follow a file of rules.

`write_plugin` makes a folder. On the module search path of a process, it offers these tiers:

    kvcore-faults        an in-memory tier that acts as a remote medium
    kvcore-faulty-disk   the disk tier, with faults under and above its checksums

The option ``rules`` names the file that `write_rules` writes, and ``seed`` the seed, to which each
rank adds its number. The other options of ``kvcore-faulty-disk`` are those of ``disk``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kvcore.plugins import PreparedTier, TierContext, TierPlugin, builtin, hookimpl
from kvcore.testing.faults.media import FaultyTier, into_disk
from kvcore.testing.faults.plan import Faults
from kvcore.tiers.base import Tier
from kvcore.tiers.memory import MemoryTier

__all__ = ["FAULTY_DISK", "FAULTY_MEMORY", "kvcore_tiers", "write_plugin"]

FAULTY_MEMORY = "kvcore-faults"
FAULTY_DISK = "kvcore-faulty-disk"
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


def write_plugin(folder: Path) -> Path:
    """Make ``folder`` a plugin that offers the tiers, and return it."""
    info = folder / "kvcore_faults-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvcore-faults\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[kvcore.plugins]\nfaults = {__name__}\n")
    return folder
