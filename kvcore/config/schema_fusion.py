"""The settings tables ``[fusion]`` and ``[planner]``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from kvcore.config.fields import Name, Options, SchemaModel

__all__ = ["FusionConfig", "PlannerConfig", "Share"]

Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class FusionConfig(SchemaModel):
    """Selective recomputation: reuse of cached text that is not a prefix. Off by default."""

    enabled: bool = Field(
        default=False,
        description="Reuse stored chunks at other positions and recompute the few tokens that "
        "matter most. Answers are then close to the engine's own, but not equal to them.",
    )
    ratio: Share = Field(
        default=0.15,
        description="Share of the reused tokens to recompute: 0 recomputes none of them, 1 "
        "recomputes everything. A request may ask for another share.",
    )
    adaptive: bool = Field(
        default=True,
        description="Decide for each request, from measured rates: blend only if that is clearly "
        "faster than computing what follows the prefix, and recompute as much as loading hides, "
        "from `ratio` to `ratio_max`. A request that asks for a ratio gets it.",
    )
    ratio_max: Share = Field(
        default=0.5,
        description="Largest share to recompute while it costs no time; see `adaptive`.",
    )
    spread: Share = Field(
        default=0.5,
        description="The share falls over the layers from `ratio * (1 + spread)` to `ratio * (1 - "
        "spread)`.",
    )
    gate: float | None = Field(
        default=None,
        ge=0,
        allow_inf_nan=False,
        description="Quality gate: the largest error of recomputed rows that is accepted after a "
        "quarter of the layers (squared distance of V relative to its square, times the share of "
        "rows not recomputed). Above it, the request recomputes a larger share or is computed in "
        "full. Unset: no gate.",
    )
    selector: Name = Field(
        default="runs",
        description="Algorithm that chooses the tokens to recompute: any registered one "
        "(see `kvcore plugins`).",
    )
    selector_options: Options = Field(
        default_factory=dict, description="Arguments of the selector."
    )
    min_tokens: int = Field(
        default=64,
        ge=16,
        description="Fewest tokens of a stored chunk that are reused at another position, and "
        "fewest tokens of all chunks together for a blend.",
    )
    unmarked: bool = Field(
        default=True,
        description="Look for stored chunks anywhere in a prompt. Otherwise only chunks that the "
        "request marks, or that the separator delimits, are reused.",
    )
    separator: list[int] = Field(
        default_factory=list,
        description="Token ids that separate chunks, for prompts that mark their chunks this way.",
    )
    behind: list[int] = Field(
        default_factory=list,
        description="Token ids that precede chunks when they are warmed, such as a begin-of-text "
        "token or a system prompt. Marked chunks are looked up after them.",
    )


class PlannerConfig(SchemaModel):
    """Choice between loading the cached part of a prompt and recomputing it."""

    enabled: bool = Field(
        default=False,
        description="Load only what is expected to arrive before the engine would have computed "
        "it, from measured rates of loads and of prefill. Abandon a load when waiting for it "
        "costs more than computing. Until both rates are measured, everything cached is loaded. "
        "The rates come from the metrics, so `metrics.enabled` must be on.",
    )
