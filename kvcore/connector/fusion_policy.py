"""The fusion controller beside an engine's leader: measurements go in, decisions come out.

    at start        workers time their own layers          profile
    forwards        seconds of steps that prefill          forwards, if the engine reports them
    blends          rows and seconds                       BlendTime
    loads           bytes and seconds by path              the counters that workers send anyway

A chunk is first fetched into host memory while its request waits, and loaded from there layer by
layer. A chunk that is on a slower tier at decision time is costed at that tier's rates.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from kvcore.connector.fusion_messages import FULL_LAYERS, BlendTime
from kvcore.fusion.controller import BlendCandidate, Controller, ControllerSettings, Decision
from kvcore.fusion.rows import LOOK_ROWS
from kvcore.manager.load_advisor import OTHER_TIER, guess_compute, learn_loads, tier_priors
from kvcore.telemetry.rates import ForwardPart, Rates

if TYPE_CHECKING:
    from kvcore.config.schema_fusion import FusionConfig
    from kvcore.telemetry.metrics import Data

__all__ = ["TIMED_TOKENS", "FusionPolicy", "is_prefill", "make_fusion_policy"]

TIMED_TOKENS = 32
"""Steps with fewer tokens are not timed: they say little about prefill."""

_STEPS_KEPT = 64
"""The number of steps whose times may be outstanding. Async scheduling has one or two."""


def is_prefill(scheduled: Collection[int]) -> bool:
    """Return True if a step with these token counts, one a request, is worth timing.

    A step in which every request decodes is not.
    """
    return sum(scheduled) - len(scheduled) >= TIMED_TOKENS


class FusionPolicy:
    """Decides whether a blend is worth it. One per engine; tens of microseconds a call.

    Not thread-safe.

    Args:
        controller: learns rates and decides.
        paths: the transfer path of reads, by tier.
        ranks: the number of tensor-parallel ranks. Each loads its own heads of a chunk.
    """

    def __init__(self, controller: Controller, paths: Mapping[str, str], ranks: int) -> None:
        self._controller = controller
        self._paths = dict(paths)
        self._ranks = ranks
        self._parts: dict[int, list[ForwardPart]] = {}
        self._steps = 0

    @property
    def rates(self) -> Rates:
        """The measured rates of prefill and loads."""
        return self._controller.rates

    def time(self, parts: Sequence[ForwardPart]) -> int:
        """Return a number for a step of these parts; pass it to `learn` with the step's seconds.

        Returns 0 if the step is not worth timing.
        """
        if sum(part.tokens for part in parts) < TIMED_TOKENS:
            return 0
        self._steps += 1
        self._parts[self._steps] = list(parts)
        while len(self._parts) > _STEPS_KEPT:
            self._parts.pop(next(iter(self._parts)))
        return self._steps

    def learn(
        self,
        profile: Sequence[tuple[int, float]] = (),
        forwards: Sequence[tuple[int, float]] = (),
        counted: Data | None = None,
        blends: Sequence[BlendTime] = (),
    ) -> None:
        """Learn from what the workers measured.

        Args:
            profile: (rows, seconds) of the layers over an empty context.
            forwards: (number from `time`, seconds) of steps.
            counted: the transfer counters.
            blends: the times of blends.
        """
        for rows, seconds in profile:
            self._controller.prefilled([ForwardPart(rows, 0)], seconds)
        for step, seconds in forwards:
            self._controller.prefilled(self._parts.pop(step, []), seconds)
        learn_loads(self._controller, self._paths, counted or {})
        for blend in blends:
            self._controller.blended(
                blend.rows, blend.kept, blend.exact, blend.seconds, blend.looked
            )

    def decide(
        self,
        tokens: int,
        exact: int,
        reused: int,
        exact_bytes: Mapping[str, int],
        chunk_bytes: Mapping[str, int],
    ) -> Decision:
        """Decide about a prompt of ``tokens`` with ``reused`` chunk tokens behind ``exact`` ones.

        ``exact_bytes`` and ``chunk_bytes`` are the bytes to load, by tier and over all ranks.
        """
        share = {tier: n // self._ranks for tier, n in exact_bytes.items()}
        chunks = {tier: n // self._ranks for tier, n in chunk_bytes.items()}
        return self._controller.decide(BlendCandidate(tokens, exact, reused, share, chunks))


def make_fusion_policy(
    config: FusionConfig,
    *,
    hidden: int,
    device: str,
    layers: int,
    ranks: int,
    paths: Mapping[str, str],
    looks: bool,
) -> FusionPolicy:
    """Build the policy of an engine, with estimates for rates that are not measured yet.

    ``hidden`` is the model's hidden size and ``device`` a torch device type. ``looks`` is True if
    the selector needs the question's attention.
    """
    settings = ControllerSettings(
        layers,
        min(FULL_LAYERS, layers),
        floor=config.ratio,
        ceiling=max(config.ratio, config.ratio_max),
        look_rows=LOOK_ROWS if looks else 0,
    )
    compute = guess_compute(hidden, layers, ranks, device)
    controller = Controller(settings, compute, tier_priors(paths), OTHER_TIER)
    return FusionPolicy(controller, paths, ranks)
