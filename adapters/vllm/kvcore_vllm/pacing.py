"""What vLLM tells the fusion controller (`kvcore.connector.fusion_policy`).

StepReport.profile    workers time their own layers, at start
StepReport.forwards   seconds of the steps that StepPlan.timed asked for
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvcore.telemetry.rates import ForwardPart


def parts_of(scheduled: Iterable[tuple[int, Any]]) -> list[ForwardPart]:
    """(tokens of this step, vLLM's request) as what the controller counts."""
    return [ForwardPart(tokens, request.num_computed_tokens) for tokens, request in scheduled]


def outcome(request: Any) -> str:
    """How vLLM's request ended, in a word."""
    reason = request.get_finished_reason()
    return "done" if reason is None else str(reason)
