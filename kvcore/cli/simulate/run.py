"""The simulation of one scenario over one trace.

    arrives ──▶ lookup, plan ──▶ load ──▶ queue of the engine ──▶ prefill ──▶ first token, save
                     └── nothing to load, or a load in the step ──▲

The engine prefills prompts one after another, in the order in which they are ready. Answers take no
time. The engine has no prefix cache: KV that it would still hold counts as read from host memory.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np

from kvcore.cli.simulate.media import Clock, Media
from kvcore.cli.simulate.points import Bytes, PointRule, held, point_shape
from kvcore.cli.simulate.trace import TraceRequest
from kvcore.errors import CapacityError, ConfigError
from kvcore.index import BlockIndex, TierSpec
from kvcore.index.policy import SpacedPoints
from kvcore.index.policy.admission import Always, OnNthUse
from kvcore.manager import HOST, Backing, Hit, KVManager, Readiness, TransferOptions, WritePolicy
from kvcore.manager.base import Planned
from kvcore.manager.load_policy import (
    Action,
    Ahead,
    Planner,
    PlannerSettings,
    PlanRequest,
    TokenSource,
)
from kvcore.model.points import PointShape, point_keys
from kvcore.telemetry.metrics import MissReason
from kvcore.telemetry.rates import ComputeRates, Rates, TierRates, pipelined
from kvcore.transfer.graph import Path, Span, UnitTable
from kvcore.transfer.plan import layer_steps

__all__ = ["Outcome", "Scenario", "Way", "simulate"]

DISK = "disk"
NAMESPACE = b"simulated" + bytes(7)


class Way(str, Enum):
    """What decides whether to load the blocks that were found."""

    PLANNER = "planner"
    ALWAYS = "always"
    NEVER = "never"


_POINTS = PointRule("ends,junctions", SpacedPoints(every=0))
_MANY = 1 << 20
"""Graphs in flight: more than there are points of a prompt, which an engine saves over time."""

_HOST = TierRates(2e-5, 1 / 2e10)
_DISK = TierRates(2e-4, 1 / 3e9)


@dataclass(frozen=True)
class Scenario:
    """A machine, and kvcore's settings on it.

    Args:
        host_blocks: indexed blocks of host memory. ``staging_blocks`` come in addition.
        disk_blocks: blocks on disk; 0 means no disk.
        block_bytes: bytes of a block, which has ``block_tokens`` tokens.
        layers, compute: the model's layers, and the rate of its prefill.
        host, disk: rates of reads. Writes take as long.
        way: what decides whether to load.
        write, admit_after: when a block is written to disk.
        batch_blocks: blocks per operation.
        step_bytes: largest load from host memory that is part of a step.
        point_bytes: bytes of a resume point; 0 for a model that goes on behind any block.
        point_step: blocks between two boundaries at which the engine has one.
        points: which of them are kept.
    """

    host_blocks: int
    disk_blocks: int = 0
    block_tokens: int = 512
    block_bytes: int = 512 * 131_072
    layers: int = 32
    compute: ComputeRates = field(
        default_factory=lambda: ComputeRates.guess(8 * 10**9, 4096, 32, 4e14)
    )
    host: TierRates = _HOST
    disk: TierRates = _DISK
    way: Way = Way.PLANNER
    policy: str = "lfu"
    write: WritePolicy = WritePolicy.WRITE_THROUGH
    admit_after: int = 2
    batch_blocks: int = 16
    staging_blocks: int = 32
    step_bytes: int = 512 * 2**20
    point_bytes: int = 0
    point_step: int = 1
    points: PointRule = _POINTS

    def __post_init__(self) -> None:
        if min(self.host_blocks, self.block_tokens, self.block_bytes, self.layers) < 1:
            raise ConfigError(
                f"given {self.host_blocks} host blocks of {self.block_tokens} tokens and "
                f"{self.block_bytes} bytes, and {self.layers} layers; each must be at least 1"
            )
        if min(self.disk_blocks, self.staging_blocks) < 0:
            raise ConfigError(
                f"given {self.disk_blocks} blocks on disk and {self.staging_blocks} for staging; "
                "neither may be negative"
            )
        if self.point_bytes < 0 or self.point_step < 1:
            raise ConfigError(
                f"given points of {self.point_bytes} bytes every {self.point_step} blocks; the "
                "first must not be negative, the second at least 1"
            )

    @property
    def point_shape(self) -> PointShape | None:
        """The resume points of the model; None without them."""
        if not self.point_bytes:
            return None
        return point_shape(self.point_bytes, self.block_bytes, self.point_step)


@dataclass
class Outcome:
    """The result of a simulation, in tokens and seconds.

    ``found`` counts loaded tokens by tier, and ``misses`` the lookups that loaded nothing, by
    reason. ``first_token`` has the seconds from arrival to the first token of each request.
    ``prefill`` is the time that the engine computed, and ``prefill_alone`` the time that it would
    have without kvcore. ``held`` are the bytes that each tier has at the end, and ``written``
    those that were saved from the device.
    """

    scenario: Scenario
    requests: int = 0
    tokens: int = 0
    found: dict[str, int] = field(default_factory=dict)
    misses: dict[str, int] = field(default_factory=dict)
    first_token: array[float] = field(default_factory=lambda: array("d"))
    prefill: float = 0.0
    prefill_alone: float = 0.0
    held: dict[str, Bytes] = field(default_factory=dict)
    written: Bytes = field(default_factory=Bytes)

    @property
    def hit_rate(self) -> dict[str, float]:
        """Return the share of the prompts' tokens that were loaded, by tier."""
        return {tier: found / max(1, self.tokens) for tier, found in self.found.items()}

    @property
    def saved(self) -> float:
        """Return the seconds of prefill that the engine saved."""
        return self.prefill_alone - self.prefill

    def quantile(self, share: float) -> float:
        """Return the seconds to the first token that this share of the requests does not exceed."""
        return float(np.quantile(np.frombuffer(self.first_token), share)) if self.requests else 0.0


def simulate(scenario: Scenario, requests: Iterable[TraceRequest], speed: float = 1.0) -> Outcome:
    """Replay ``requests``, with their times divided by ``speed``."""
    if not speed > 0:
        raise ConfigError(f"given a speed of {speed}; it must be above 0")
    machine = _Machine(scenario)
    for request in requests:
        machine.clock.run_until(request.at / speed)
        machine.arrive(request)
    machine.clock.run_out()
    machine.manager.check_integrity()
    index = machine.manager.index
    machine.outcome.held = {t: held(index, t, scenario.block_bytes) for t in index.tiers}
    return machine.outcome


@dataclass
class _Job:
    """A request at the engine, and its lookup.

    KV of ``loaded`` tokens is present, or is loaded in the step.
    """

    request: TraceRequest
    arrived: float
    hit: Hit
    loaded: int = 0
    in_step: bool = False


class _Machine:
    """The manager, media, planner and engine of one run, with a common clock."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._block = scenario.block_tokens
        self._points = scenario.point_shape
        self.clock = Clock()
        self.outcome = Outcome(scenario)
        self.manager = _manager(scenario, self.clock)
        tiers = {HOST: scenario.host, DISK: scenario.disk}
        self._rates = Rates(scenario.layers, scenario.compute, tiers)
        self._planner = Planner(
            PlannerSettings(
                self._block,
                scenario.block_bytes,
                batch_blocks=scenario.batch_blocks,
                step_bytes=scenario.step_bytes,
                step_operations=len(layer_steps(scenario.layers)),
                trusts_priors=True,
            ),
            self._rates,
        )
        self._queue: deque[_Job] = deque()
        self._free_at = 0.0
        self._running = False
        self._waiting = 0.0  # seconds of prefill in the queue
        self._units: dict[int, list[UnitTable]] = {}

    # -- arrival of a request -------------------------------------------------------------------

    def arrive(self, request: TraceRequest) -> None:
        self.manager.maintain()
        most = (request.tokens - 1) // self._block  # the last token is always computed
        hit = self.manager.get_match(request.keys, NAMESPACE, most)
        stop = self._stop(request, hit)
        job = _Job(request, self.clock.now, hit)
        if stop:
            self._load(job, hit, stop)
        else:
            self._enqueue(job)

    def _stop(self, request: TraceRequest, hit: Hit) -> int:
        """Return the number of tokens to load. If it is 0, count the reason."""
        found = min(hit.blocks * self._block, request.tokens - 1)
        if not found:
            short = not request.keys
            self._missed(MissReason.TOO_SHORT if short else MissReason.NOT_CACHED)
            return 0
        stop = found
        if self._scenario.way is Way.NEVER:
            stop = 0
        elif self._scenario.way is Way.PLANNER:
            plan = self._planner.plan(self._ask(request, hit))
            whole = found if hit.point else plan.stop  # a point is loaded whole or not at all
            stop = 0 if plan.action is Action.RECOMPUTE else whole
        if not stop:
            self._missed(MissReason.PLANNED)
        elif self.manager.can_load(hit, 0, self._rows(hit, stop)) is not Readiness.READY:
            self._missed(MissReason.BUSY)
            return 0
        return stop

    def _ask(self, request: TraceRequest, hit: Hit) -> PlanRequest:
        size = self._scenario.block_bytes
        ahead = {
            tier: Ahead(operations, blocks * size)
            for tier, (operations, blocks) in self.manager.reads_before().items()
        }
        sources = tuple(
            TokenSource(s.tier, min(s.stop, hit.blocks) * self._block)
            for s in hit.sources
            if s.start < hit.blocks
        )
        busy = max(0.0, self._free_at - self.clock.now) + self._waiting
        return PlanRequest(request.tokens, 0, sources, ahead, busy)

    def _missed(self, reason: MissReason) -> None:
        misses = self.outcome.misses
        misses[reason.value] = misses.get(reason.value, 0) + 1

    def _rows(self, hit: Hit, stop: int) -> int:
        """Return how many rows of ``hit`` a load of ``stop`` tokens moves."""
        return hit.depth if hit.point else -(-stop // self._block)

    def _load(self, job: _Job, hit: Hit, stop: int) -> None:
        rows = self._rows(hit, stop)
        job.loaded = stop
        in_host = set(hit.blocks_by_tier(0, rows)) <= {HOST}
        small = rows * self._scenario.block_bytes <= self._scenario.step_bytes
        if in_host and small and not hit.point:  # points are loaded between steps
            job.in_step = True
            self._enqueue(job)
            return
        try:
            planned = self.manager.plan_load(hit, Span(0, rows))
        except CapacityError:
            job.loaded = 0
            self._missed(MissReason.BUSY)
            self._enqueue(job)
            return
        self.manager.launch(planned, self._places(rows), on_end=lambda: self._enqueue(job))
        self._found(hit, stop)

    def _found(self, hit: Hit, stop: int) -> None:
        found = self.outcome.found
        for source in hit.sources:
            tokens = min(source.stop * self._block, stop) - source.start * self._block
            if tokens > 0:
                found[source.tier] = found.get(source.tier, 0) + tokens

    def _places(self, blocks: int) -> list[UnitTable]:
        """Return tables of pages that are never read."""
        if blocks not in self._units:
            self._units[blocks] = [UnitTable.of(np.zeros((blocks, 1), np.int64), self._block)]
        return self._units[blocks]

    # -- the engine -----------------------------------------------------------------------------

    def _seconds(self, job: _Job) -> float:
        left = job.request.tokens - job.loaded
        return self._rates.prefill_seconds(left, job.loaded)

    def _enqueue(self, job: _Job) -> None:
        self._queue.append(job)
        self._waiting += self._seconds(job)
        if not self._running:
            self._next()

    def _next(self) -> None:
        if not self._queue:
            self._running, self._waiting = False, 0.0
            return
        self._running = True
        job = self._queue.popleft()
        self._waiting -= self._seconds(job)
        loading = self._load_in_step(job)
        seconds = self._seconds(job)
        self.outcome.prefill += seconds
        layers = self._scenario.layers
        took = pipelined(loading / layers, (layers, seconds / layers))
        self._free_at = self.clock.now + took
        self.clock.after(took, lambda: self._prefilled(job))

    def _load_in_step(self, job: _Job) -> float:
        """Start the load that belongs to the step, and return its seconds.

        Blocks that have left host memory since the lookup are computed.
        """
        if not job.in_step:
            return 0.0
        keys = job.request.keys
        hit = self.manager.get_match(keys, NAMESPACE)
        host = hit.blocks_by_tier().get(HOST, 0)
        job.loaded = min(job.loaded, host * self._block)
        blocks = -(-job.loaded // self._block)
        if not blocks:
            self._missed(MissReason.NOT_CACHED)
            return 0.0
        self._found(hit, job.loaded)
        planned = self.manager.plan_load(hit, Span(0, blocks))
        self.manager.launch(planned, self._places(blocks))
        return self._rates.load_seconds(HOST, blocks * self._scenario.block_bytes, 1)

    def _prefilled(self, job: _Job) -> None:
        request, outcome = job.request, self.outcome
        outcome.requests += 1
        outcome.tokens += request.tokens
        outcome.first_token.append(self.clock.now - job.arrived)
        outcome.prefill_alone += self._rates.prefill_seconds(request.tokens, 0)
        if self._points is None:
            self._save(self.manager.plan_save(request.keys, NAMESPACE, len(request.keys)))
        else:
            self._save_points(self._points, job)
        self._next()

    def _save_points(self, points: PointShape, job: _Job) -> None:
        """Save the resume points that are kept of a prompt, with the blocks before them."""
        keys, rule, saved = job.request.keys, self._scenario.points, False
        computed = job.loaded // self._block
        for blocks in rule.take(points, job.hit, computed, len(keys), self._block):
            planned = self.manager.plan_save(keys, NAMESPACE, blocks, point=True)
            saved = self._save(planned) or saved
        if rule.moves and saved and job.loaded:
            rows = point_keys(keys[computed - 1], points.rows(computed))
            for tier in self.manager.index.tiers:
                self.manager.invalidation.evict(tier, rows)

    def _save(self, planned: Planned | None) -> bool:
        """Launch a save and count its bytes. Return False if there is nothing to save."""
        if planned is None:
            return False
        rows, point, size = planned.blocks.size, planned.graph.point, self._scenario.block_bytes
        blocks = rows if point is None else max(point, 0)
        before = self.outcome.written
        self.outcome.written = Bytes(
            before.blocks + blocks * size, before.points + (rows - blocks) * size
        )
        self.manager.launch(planned, self._places(rows))
        return True


def _manager(scenario: Scenario, clock: Clock) -> KVManager:
    """Create a real manager, over media that only take time."""
    specs = [TierSpec(HOST, scenario.host_blocks, scenario.policy)]
    backing = []
    if scenario.disk_blocks:
        specs.append(TierSpec(DISK, scenario.disk_blocks, scenario.policy))
        selective = scenario.write is WritePolicy.SELECTIVE
        admission = OnNthUse(scenario.admit_after) if selective else Always()
        backing.append(Backing(DISK, write=scenario.write, admission=admission))
    rates = {
        Path.H2D: scenario.host,
        Path.D2H: scenario.host,
        Path.DISK2H: scenario.disk,
        Path.H2DISK: scenario.disk,
    }
    media = Media(clock, rates, scenario.block_bytes, lambda report: manager.complete(report))
    staging = range(scenario.host_blocks, scenario.host_blocks + scenario.staging_blocks)
    options = TransferOptions(staging, batch_blocks=scenario.batch_blocks)
    if scenario.point_bytes:
        options = replace(options, max_in_flight=_MANY)
    manager = KVManager(
        BlockIndex(specs),
        media,
        backing=backing,
        options=options,
        points=scenario.point_shape,
        clock=lambda: clock.now,
    )
    return manager
