"""Injected faults: any kind at any seam, repeatable from a seed.

    faults = Faults(Rule(Fault.BIT_FLIP, Seam.FILE_READ, rate=0.1), seed=7)
    into_worker(worker, faults)            transfers, copies, clock, tiers, the disk's files
    FaultyMessages(transport, faults)      messages from leader to worker and back
    FaultyStore(store, faults)             a remote store
    ...
    faults.clear()                         end all faults; hanging calls continue

`plan` decides when a fault happens, and the other modules inject it. Equal seeds give equal faults:
whether a rule strikes at the n-th point that it sees does not depend on the thread that comes
there. For an engine in another process, `plugin` offers tiers that follow a file of rules, and
`process` injects faults at every seam.

`turns` has threads pass seams one at a time, in an order of a seed, for races.

`FITS` says which faults each seam can have.
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
