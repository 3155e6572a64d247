"""What vLLM tells the fusion controller (`kvcore.connector.fusion_policy`).

StepNews.profile     workers time their own layers, at start
StepNews.forwards    seconds of the steps that StepPlan.timed asked for
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from kvcore.connector import fusion_policy as pacing
from kvcore.connector.fusion_policy import FusionPolicy
from kvcore.fusion.controller import Part

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from kvcore.config.schema import FusionConfig


def make_pace(
    config: FusionConfig,
    vllm_config: VllmConfig,
    layers: int,
    ranks: int,
    paths: Mapping[str, str],
    looks: bool,
) -> FusionPolicy:
    """The controller of an engine, with guesses for what has not been measured yet."""
    return pacing.make_fusion_policy(
        config,
        hidden=vllm_config.model_config.get_hidden_size(),
        device=str(vllm_config.device_config.device_type),
        layers=layers,
        ranks=ranks,
        paths=paths,
        looks=looks,
    )


def parts_of(scheduled: Iterable[tuple[int, Any]]) -> list[Part]:
    """(tokens of this step, vLLM's request) as what the controller counts."""
    return [Part(tokens, request.num_computed_tokens) for tokens, request in scheduled]


def outcome(request: Any) -> str:
    """How vLLM's request ended, in a word."""
    reason = request.get_finished_reason()
    return "done" if reason is None else str(reason)
