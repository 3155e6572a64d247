"""The fusion controller beside an engine's leader: what was measured goes in, decisions come out.

    at start        workers time their own layers          profile
    forwards        seconds of steps that prefill          forwards, where the engine tells them
    blends          rows and seconds                       BlendReport
    loads           bytes and seconds by path              the counters that workers send anyway

Blends bring a chunk to host memory first, while the request waits; from there it goes layer by
layer. What is still on a slower tier when a decision is made is weighed at that tier's rates.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from kvcore.connector.fusion_messages import FULL_LAYERS, BlendReport
from kvcore.fusion.controller import Controller, Decision, Request, Settings
from kvcore.fusion.gate import Step
from kvcore.manager.load_advisor import OTHER_TIER, guess_compute, learn_loads, tier_priors
from kvcore.telemetry.rates import Part, Rates

if TYPE_CHECKING:
    from kvcore.config.schema import FusionConfig
    from kvcore.telemetry.metrics import Data

__all__ = ["TIMED_TOKENS", "Pace", "make_pace", "prefills"]

TIMED_TOKENS = 32
"""A step with fewer says little about prefill; it is not timed."""

_STEPS_KEPT = 64
"""Steps whose times are waited for; under async scheduling one or two are."""


def prefills(scheduled: Collection[int]) -> bool:
    """Whether a step of so many tokens of each request is worth timing: not where all decode."""
    return sum(scheduled) - len(scheduled) >= TIMED_TOKENS


class Pace:
    """One per engine, beside its leader. Tens of microseconds a call. Not thread-safe.

    Args:
        controller: learns and decides.
        paths: the transfer path of each tier's reads, by tier.
        ranks: tensor-parallel ones; each loads its heads of a chunk.
    """

    def __init__(self, controller: Controller, paths: Mapping[str, str], ranks: int) -> None:
        self._controller = controller
        self._paths = dict(paths)
        self._ranks = ranks
        self._parts: dict[int, list[Part]] = {}
        self._steps = 0

    @property
    def rates(self) -> Rates:
        """What was learnt of prefill and loads."""
        return self._controller.rates

    def time(self, parts: Sequence[Part]) -> int:
        """A number for the step of these parts, to be given with its seconds; 0: not wanted."""
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
    ) -> None:
        """Take in what the workers measured: (rows, seconds) of layers behind nothing, (number of
        `time`, seconds) of steps, and counters."""
        for rows, seconds in profile:
            self._controller.prefilled([Part(rows, 0)], seconds)
        for step, seconds in forwards:
            self._controller.prefilled(self._parts.pop(step, []), seconds)
        learn_loads(self._controller, self._paths, counted or {})

    def blended(self, report: BlendReport, exact: int) -> None:
        """Take in a blend behind ``exact`` tokens. One that started over is of two walks."""
        if report.ok and set(report.verdicts) <= {Step.GO_ON.value}:
            seconds = report.compute_s + report.look_s
            self._controller.blended(report.rows, report.kept, exact, seconds)

    def decide(
        self,
        tokens: int,
        exact: int,
        reused: int,
        exact_bytes: Mapping[str, int],
        chunk_bytes: Mapping[str, int],
    ) -> Decision:
        """What to do with ``reused`` tokens of chunks behind ``exact`` ones of a prompt.

        Bytes are those to load, by tier and over all ranks.
        """
        share = {tier: n // self._ranks for tier, n in exact_bytes.items()}
        chunks = {tier: n // self._ranks for tier, n in chunk_bytes.items()}
        return self._controller.decide(Request(tokens, exact, reused, share, chunks))


def make_pace(
    config: FusionConfig,
    *,
    hidden: int,
    device: str,
    layers: int,
    ranks: int,
    paths: Mapping[str, str],
    looks: bool,
) -> Pace:
    """The controller of an engine, with guesses for what has not been measured yet.

    ``hidden`` is the model's width and ``device`` a torch device's type. ``looks`` says that the
    selector asks where the question looks.
    """
    settings = Settings(
        layers,
        min(FULL_LAYERS, layers),
        floor=config.ratio,
        ceiling=max(config.ratio, config.ratio_max),
        looks=looks,
    )
    compute = guess_compute(hidden, layers, ranks, device)
    controller = Controller(settings, compute, tier_priors(paths), OTHER_TIER)
    return Pace(controller, paths, ranks)
