"""The meaning of kvcore's errors and log lines, and what to do: for `tools.troubleshooting`."""

from __future__ import annotations

from tools.troubles.cluster import EVENTS_AND_CLUSTER
from tools.troubles.disk import DISK
from tools.troubles.entry import Trouble
from tools.troubles.errors import ERRORS
from tools.troubles.fusion import FUSION
from tools.troubles.operate import OPERATOR_COMMANDS, TRACES_AND_RECORDS
from tools.troubles.remote import REMOTE_STORES
from tools.troubles.server import SERVER
from tools.troubles.start import START, TURNS_OFF
from tools.troubles.tiers import LOADS_AND_SAVES, TIERS

__all__ = ["ERRORS", "TROUBLES"]

TROUBLES: dict[str, list[Trouble]] = {
    "Start": START,
    "kvcore turns itself off": TURNS_OFF,
    "Loads and saves": LOADS_AND_SAVES,
    "Tiers": TIERS,
    "Disk": DISK,
    "Remote stores": REMOTE_STORES,
    "Fusion": FUSION,
    "Server": SERVER,
    "Events and cluster": EVENTS_AND_CLUSTER,
    "Operator commands": OPERATOR_COMMANDS,
    "Traces and records": TRACES_AND_RECORDS,
}
"""All log lines, by section of docs/troubleshooting.md."""
