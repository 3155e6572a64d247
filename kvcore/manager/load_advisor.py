"""The load planner of one engine: bound to its config, its manager and its measured rates.

    config, model ── LoadAdvisor ──▶ Planner over the engine's Rates
    lookup ─────────▶ plan(hit, ...)           once a request and hit
                      ask, otherwise           a lookup for the planner; estimates of each way
    workers' counters ──▶ learn_loads          bytes and seconds by path

If nothing is planned, the same arithmetic estimates what would have happened otherwise.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvcore.config import Config
from kvcore.fusion.controller import Controller
from kvcore.manager.base import HOST, Hit, Manager
from kvcore.manager.load_policy import (
    PREFILL,
    Ahead,
    Otherwise,
    Plan,
    Planner,
    PlannerSettings,
    PlanRequest,
    TokenSource,
)
from kvcore.model.spec import ModelDescription
from kvcore.telemetry.rates import ComputeRates, Rates, TierRates
from kvcore.transfer.plan import layer_steps

__all__ = [
    "OTHER_TIER",
    "LoadAdvisor",
    "PlanMemo",
    "guess_compute",
    "guessed_rates",
    "learn_loads",
    "tier_priors",
]

_log = logging.getLogger("kvcore.manager.load_advisor")

_RATES = {HOST: TierRates(2e-5, 1 / 8e9), "disk": TierRates(5e-4, 1 / 1e9)}
OTHER_TIER = TierRates(2e-3, 1 / 5e8)
"""Expected rates of an unknown tier, such as a tier that a server adds later."""

DEADLINE_LEAST_S = 0.25
"""No load is given up earlier than this, because a scheduler may pause that long."""

NO_PREFILL = "prefill was not measured often enough yet"
NOT_TIMED = "prefill: this engine's forwards are not timed"
NO_LOADS = "loads from {tier} were not measured often enough yet"
NOT_COUNTED = "loads from {tier} are not measured: metrics.enabled is off"
NOTHING_FOUND = "nothing was found to load"
"""Reasons why there is no estimate."""

_FLOPS = {"cpu": 5e10}
_GPU_FLOPS = 1e14


def tier_priors(tiers: Iterable[str]) -> dict[str, TierRates]:
    """Return the expected rates of tiers that were not measured."""
    return {tier: _RATES.get(tier, OTHER_TIER) for tier in tiers}


def guess_compute(hidden: int, layers: int, ranks: int, device: str) -> ComputeRates:
    """Return the expected prefill rates of a model that was not measured.

    ``hidden`` is the model's width.
    """
    flops = ranks * _FLOPS.get(device, _GPU_FLOPS)
    return ComputeRates.guess(12 * hidden * hidden * layers, hidden, layers, flops)


def learn_loads(
    rates: Rates | Controller, paths: Mapping[str, str], counted: Mapping[str, Mapping[str, Any]]
) -> None:
    """Update ``rates`` with what workers counted since the last call.

    ``counted`` comes from `kvcore.telemetry.metrics.Metrics.delta`, ``paths`` is the transfer path
    of each tier's reads.
    """
    moved = counted.get("kvcore_transfer_bytes_total", {})
    took = counted.get("kvcore_transfer_seconds", {})
    for tier, path in paths.items():
        if path in moved and path in took:
            counts, sums = took[path]
            rates.loaded(tier, moved[path], sum(sums), sum(counts))


def guessed_rates(model: ModelDescription, tiers: Iterable[str]) -> Rates:
    """Return the rates of an engine whose compute was not measured.

    Its prefill is a guess until forwards or layers are timed. No estimate is made from a guess.
    """
    shape = model.shape
    compute = guess_compute(shape.kv_heads * shape.head_dim, shape.layers, model.world_size, "cuda")
    return Rates(shape.layers, compute, tier_priors(tiers), otherwise=OTHER_TIER)


@dataclass
class PlanMemo:
    """The last plan of a request, because engines ask again while they have no room for it."""

    plan: Plan | None = None
    made_for: tuple[int, int] | None = None
    """The number of tokens that the engine held itself, and of blocks found."""

    def deadline_s(self, otherwise: float) -> float:
        """Return the seconds after which the load is given up; ``otherwise`` if not planned."""
        known = None if self.plan is None else self.plan.deadline_s
        return otherwise if known is None else known


class LoadAdvisor:
    """A planner whose input is a hit. One owner, not thread-safe; it does no I/O.

    ``layerwise`` tells whether the engine loads layer by layer inside a step. ``min_load_tokens``
    is the fewest tokens that are worth a load. ``times_forwards`` is False if the engine gives no
    way to measure prefill.
    """

    def __init__(
        self,
        config: Config,
        model: ModelDescription,
        manager: Manager,
        rates: Rates,
        *,
        min_load_tokens: int,
        layerwise: bool,
        times_forwards: bool = True,
    ) -> None:
        self._manager = manager
        self._no_prefill = NO_PREFILL if times_forwards else NOT_TIMED
        self._no_load = NO_LOADS if config.metrics.enabled else NOT_COUNTED
        self._block = config.block.tokens
        self._block_bytes = max(1, model.shape.nbytes // model.world_size)
        in_step = layerwise and model.single_group
        self.planner = Planner(
            PlannerSettings(
                self._block,
                self._block_bytes,
                batch_blocks=config.transfer.batch_blocks,
                step_bytes=config.transfer.sync_load_max // model.world_size if in_step else 0,
                step_operations=len(layer_steps(model.shape.layers)),
                least=min_load_tokens,
                deadline_least=min(DEADLINE_LEAST_S, config.transfer.load_deadline_s),
                deadline_most=config.transfer.load_deadline_s,
            ),
            rates,
        )

    def plan(self, memo: PlanMemo, hit: Hit, tokens: int, computed: int) -> Plan:
        """Return what to do with ``hit`` for a prompt of ``tokens`` tokens.

        The engine holds the KV of the first ``computed`` tokens itself. ``memo`` is the request's:
        the plan for the same hit is made once.
        """
        if memo.plan is None or memo.made_for != (computed, hit.depth):
            request = self.ask(hit, tokens, computed)
            memo.plan, memo.made_for = self.planner.plan(request), (computed, hit.depth)
            _log.debug("plan tokens=%d computed=%d %s", tokens, computed, memo.plan.reason)
        return memo.plan

    def ask(self, hit: Hit, tokens: int, computed: int) -> PlanRequest:
        """Return the planner's input for a lookup, with the reads in flight. Decides nothing."""
        start = computed // self._block
        sources = tuple(
            TokenSource(source.tier, min(source.stop, hit.blocks) * self._block)
            for source in hit.sources
            if source.stop > start and source.start < hit.blocks
        )
        ahead = {
            tier: Ahead(operations, blocks * self._block_bytes)
            for tier, (operations, blocks) in self._manager.reads_before(hit.blocks - start).items()
        }
        return PlanRequest(tokens, computed, sources, ahead)

    def expected(self, request: PlanRequest, stop: int) -> tuple[float, float] | None:
        """Estimate the seconds to the first token with KV up to token ``stop``, and with none.

        Returns None if that would be a guess.
        """
        if self.planner.ways(request).unmeasured:
            return None
        load = self.planner.weigh(request, stop).seconds
        return load, self.planner.weigh(request, request.computed).seconds

    def otherwise(self, request: PlanRequest) -> Otherwise:
        """Estimate what each way takes, from rates measured until now, never from a guess."""
        ways = self.planner.ways(request)
        tiers = sorted(ways.unmeasured - {PREFILL})
        unknown = [self._no_load.format(tier=tier) for tier in tiers]
        prefill = PREFILL not in ways.unmeasured
        if not prefill:
            unknown.append(self._no_prefill)
        load = None if tiers else ways.load
        if ways.load is None:
            unknown.append(NOTHING_FOUND)
        return Otherwise(
            load.seconds if load is not None and prefill else None,
            ways.recompute.seconds if prefill else None,
            None if load is None else load.load,
            tuple(unknown),
        )
