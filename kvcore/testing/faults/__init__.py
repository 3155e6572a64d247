"""Faults on purpose: every kind, at every seam, seeded and repeatable.

    faults = Faults(Rule(Fault.BIT_FLIP, Seam.FILE_READ, rate=0.1), seed=7)
    into_worker(worker, faults)            transfers, copies, clock, tiers, the disk's files
    FaultyMessages(transport, faults)      leader to worker and back
    FaultyStore(store, faults)             a remote store
    ...
    faults.clear()                         what hangs goes on; nothing is wrong any more

`plan` says when something goes wrong, the other modules do it. The same seed gives the same faults:
the n-th point that a rule sees is struck or not, whatever thread comes there. An engine in another
process gets them through `plugin`, whose tiers follow a file of rules, or at every seam through
`process`.

`FITS` says which seam can have which fault.
"""

from kvcore.testing.faults.media import FaultyStore, FaultyTier, into_disk
from kvcore.testing.faults.plan import FITS, Fault, Faults, Rule, Seam, Strike, write_rules
from kvcore.testing.faults.worker import (
    FaultyClock,
    FaultyExecutor,
    FaultyMessages,
    FaultyOps,
    into_outbox,
    into_reports,
    into_worker,
)

__all__ = [
    "FITS",
    "Fault",
    "Faults",
    "FaultyClock",
    "FaultyExecutor",
    "FaultyMessages",
    "FaultyOps",
    "FaultyStore",
    "FaultyTier",
    "Rule",
    "Seam",
    "Strike",
    "into_disk",
    "into_outbox",
    "into_reports",
    "into_worker",
    "write_rules",
]
