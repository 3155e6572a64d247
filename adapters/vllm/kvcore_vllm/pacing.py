"""vLLM's measurements for the fusion policy (`kvcore.connector.fusion_policy`).

StepReport.profile    seconds of the layers, which workers time once at the start
StepReport.forwards   seconds of the steps that StepPlan.timed asked for
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvcore.telemetry.rates import ForwardPart


def parts_of(scheduled: Iterable[tuple[int, Any]]) -> list[ForwardPart]:
    """Convert pairs of (tokens in this step, vLLM's request) to the parts of a forward."""
    return [ForwardPart(tokens, request.num_computed_tokens) for tokens, request in scheduled]


def outcome(request: Any) -> str:
    """Return how vLLM's request ended, in one word."""
    reason = request.get_finished_reason()
    return "done" if reason is None else str(reason)
