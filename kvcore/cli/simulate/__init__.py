"""A trace replayed through the real index, manager, policies and planner; only time is modelled.

trace     requests as Mooncake publishes them, a line each
media     the transport: what moves takes as long as the rates say
run       one scenario over one trace, and what came of it
"""

from __future__ import annotations

from kvcore.cli.simulate.run import Outcome, Scenario, Way, simulate
from kvcore.cli.simulate.trace import TraceRequest, read_trace

__all__ = ["Outcome", "Scenario", "TraceRequest", "Way", "read_trace", "simulate"]
