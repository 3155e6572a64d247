"""The base of the leaders of all engines: keys, counts, saves, reports and clears.

    a request comes      `namespaces`; `recorder` counts the result of its lookup
    a graph uses pages   `_use`: it reads or writes them until its device ops have ended
    blocks are computed  `_save`: launches their save, and lets fusion learn their tokens
    an op has ended      `_complete`: the manager publishes, pages are free again

An adapter's leader subclasses `LeaderCore`. It decides when the engine calls, what may be
promised, and which pages and hooks the engine has.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from kvcore.config import Config
from kvcore.connector.fusion_scheduler import FusionScheduler
from kvcore.connector.page_table import (
    PageTables,
    PageUsers,
    Paging,
    Place,
    PointPages,
    of_one_pool,
)
from kvcore.connector.patience import Patience
from kvcore.explain.recorder import RequestRecorder
from kvcore.index.policy import PointPolicy, PointRequest, SpacedPoints
from kvcore.manager import HOST, Hit, Manager, Readiness, Transport
from kvcore.manager.base import Lane, Planned, Promise
from kvcore.manager.load_advisor import LoadAdvisor
from kvcore.model.identity import Namespaces
from kvcore.model.keys import KeyChain
from kvcore.model.spec import ModelDescription
from kvcore.telemetry.metrics import Metrics, MissReason
from kvcore.transfer.graph import OpReport, RowError, TransferGraph
from kvcore.transfer.plan import layer_steps
from kvcore.worker import refuse

__all__ = ["LeaderCore", "LeaderParts", "LeaderTraits", "Tokens"]

_log = logging.getLogger("kvcore.connector")

_LATE_KEPT = 256
"""Graphs of which it is remembered that they passed their deadline: more than fail in a step."""

Tokens = Sequence[int] | npt.NDArray[np.int64]

F = TypeVar("F", bound=FusionScheduler)


@dataclass(frozen=True, kw_only=True)
class LeaderTraits:
    """The properties of one engine that matter to its scheduler.

    Attributes:
        no_page: the engine's mark for a page that it dropped or never had.
        min_load_tokens: the fewest tokens worth a load.
        layerwise: a load in a step arrives layer by layer, while the forward runs.
        place: numbers the page of a layer group; pages with equal numbers are the same memory.
        host_only: the engine loads KV from host memory only. Blocks on lower tiers are fetched
            there first, and count as a miss if they arrive too late.
    """

    no_page: int
    min_load_tokens: int
    layerwise: bool
    place: Place = of_one_pool
    host_only: bool = False


@dataclass(frozen=True, kw_only=True)
class LeaderParts(Generic[F]):
    """The parts that a leader works with.

    Attributes:
        recorder: counts lookups in ``metrics`` and keeps the records that `kvcore explain` shows.
        fusion: plans blends; None if there is no fusion.
        planning: weighs a load against recomputing; None if every hit is loaded.
        points: chooses the resume points to save; of no use to a model without them.
        releases: called once when the leader closes.
    """

    manager: Manager
    transport: Transport
    metrics: Metrics
    recorder: RequestRecorder
    fusion: F | None = None
    planning: LoadAdvisor | None = None
    points: PointPolicy = field(default_factory=SpacedPoints)
    releases: Sequence[Callable[[], None]] = ()


class _Saved(NamedTuple):
    """Blocks [start, stop) of a chain that a save copies, and all tokens of their request."""

    chain: KeyChain
    start: int
    stop: int
    tokens: Tokens


class LeaderCore(ABC, Generic[F]):
    """The base of an engine's leader. Engine's scheduling thread only; no call does I/O."""

    def __init__(
        self,
        config: Config,
        model: ModelDescription,
        parts: LeaderParts[F],
        traits: LeaderTraits,
    ) -> None:
        self.manager = parts.manager
        self.metrics = parts.metrics
        self.recorder = parts.recorder
        fingerprint = model.behind(config.server.address).fingerprint
        self.namespaces = Namespaces(config.namespace, fingerprint)
        if model.alone or config.namespace.weights_change == "any_time":
            self.namespaces.renew()
        if model.alone:
            _log.warning(
                "KV of this engine is not shared, and not found after a restart: %s",
                "; ".join(model.alone),
            )
        self.disabled = ""
        """The reason why kvcore stopped serving this engine; empty while it serves."""
        self._config = config
        self._model = model
        self._transport = parts.transport
        self._traits = traits
        self._fusion = parts.fusion
        self._planning = parts.planning
        self._points = parts.points
        self._releases = parts.releases
        self._block = config.block.tokens
        self._deadline_s = config.transfer.load_deadline_s
        self._paging = Paging(
            model.groups,
            self._block,
            no_page=traits.no_page,
            place=traits.place,
            point=model.point,
        )
        self._layer_steps = tuple(layer_steps(model.shape.layers)) if traits.layerwise else ()
        self._users = PageUsers()
        self._saved: dict[int, _Saved] = {}  # by the graph of the save
        self._late: deque[int] = deque(maxlen=_LATE_KEPT)  # graphs that passed their deadline
        self._shown: dict[str, tuple[int, int]] = {}  # slots in use and in all, by tier

    # -- results of lookups -----------------------------------------------------------------

    def _blocks(self, start_token: int, stop_token: int) -> tuple[int, int]:
        """Return the blocks, as (first, one past the last), that hold tokens [start, stop)."""
        return start_token // self._block, -(-stop_token // self._block)

    def _asks_stores(
        self, patience: Patience, hit: Hit, computed: int, promise: Promise | None, now: float
    ) -> bool:
        """Return True if a request waits for stores to say what they have beyond ``hit``.

        ``computed`` are the tokens that the engine holds itself, and ``now`` is the monotonic time.
        Waiting for what another engine has promised has a limit of its own and does not count.
        """
        if promise is not None:
            patience.free_until = now + promise.wait_s
        if not patience.may_begin and now >= patience.free_until:
            return False
        asking = self.manager.ask_stores(hit, computed // self._block, promise)
        if not asking:
            patience.free_until = -math.inf
        return asking

    def _admitted(
        self, patience: Patience, hit: Hit, computed: int, stop: int
    ) -> tuple[int, Readiness]:
        """Return the token up to which ``hit`` is loaded from ``computed`` on, and when.

        It is ``stop``, or the token up to which host memory has the hit, if the request has waited
        for too long, or if there are no slots for the rest.
        """
        in_host = min(stop, self._in_host(hit))
        for end in (stop, in_host) if patience.may_begin else (in_host,):
            if end - computed < self._traits.min_load_tokens:
                continue
            ready = self.manager.can_load(hit, *self._rows(hit, computed, end))
            if ready is Readiness.READY or (ready is Readiness.LATER and not patience.is_over):
                return end, ready
        return stop, Readiness.NEVER

    def _rows(self, hit: Hit, start: int, stop: int) -> tuple[int, int]:
        """Return the first and last row of ``hit`` to load for tokens [start, stop).

        They are blocks, and the rows of a resume point behind them.
        """
        first, last = self._blocks(start, stop)
        return first, hit.depth if hit.point else last

    def _in_host(self, hit: Hit) -> int:
        """Return the token up to which host memory has a hit. A resume point is there or not."""
        if hit.point:
            return hit.blocks * self._block if hit.in_host >= hit.depth else 0
        return hit.in_host * self._block

    def _by_tier(self, hit: Hit, start_token: int, stop_token: int) -> dict[str, int]:
        """Count the tokens of [start, stop) by the tier that they come from."""
        found = {}
        for source in hit.sources:
            first = max(source.start * self._block, start_token)
            stop = min(source.stop * self._block, stop_token)
            if stop > first:
                found[source.tier] = stop - first
        return found

    def _by_first_tier(self, blocks: dict[str, int], tokens: int) -> dict[str, int]:
        """Split ``tokens`` that are loaded from host memory by the tiers that held them before.

        ``blocks`` counts the blocks of each tier at the request's first lookup, the fastest tier
        first.
        """
        found: dict[str, int] = {}
        left = tokens
        for tier, count in reversed(blocks.items()):
            if tier != HOST and (came := min(left, count * self._block)):
                found[tier] = came
                left -= came
        if left:
            found[HOST] = left
        return found

    def _missed_little(self, name: str, hit: Hit, gain: int, computed: int, tokens: int) -> None:
        """Count a lookup whose ``gain`` is not worth a load.

        The engine asked about ``tokens`` and holds the first ``computed`` of them itself. Those are
        no miss: all tokens behind them are.
        """
        missed = tokens - computed
        if gain > 0 or missed < self._block:
            reason = MissReason.TOO_SHORT
        elif self._traits.host_only and hit.depth * self._block > computed:
            reason = MissReason.PENDING
        else:
            reason = MissReason.NOT_CACHED
        self.recorder.missed(name, reason, missed)

    def _failed(self, name: str, reused: Mapping[str, int]) -> None:
        """Count a failed load as one miss of the tokens that it was to bring.

        ``reused`` are all tokens that the request was to reuse. Those of a blend are not a load's.
        """
        tokens = sum(tokens for source, tokens in reused.items() if source != "blend")
        self.recorder.failed(name, tokens)

    # -- saves ------------------------------------------------------------------------------

    def _save(
        self,
        chain: KeyChain,
        blocks: int,
        pages: PageTables,
        tokens: Tokens | None,
        lane: Lane | None = None,
        *,
        known: int = 0,
        states: Mapping[int, int] | None = None,
    ) -> TransferGraph | None:
        """Launch a save of those of the first ``blocks`` of a chain that no tier holds.

        ``states`` are the pages of the states at their end, by group: with them a resume point is
        saved behind the blocks, without which no hit ends there. They are empty if the model keeps
        windows and no states. Returns the graph, or None if
        there is nothing to save or no room. ``pages`` are the request's page tables. ``tokens`` are
        all tokens of the request, or None if they do not determine its KV. Fusion learns the tokens
        of blocks [known, blocks) when the graph has stopped using the pages, or at once if there is
        no graph.
        """
        published = tokens if chain.plain and self.manager.wants_tokens else None
        told = None if published is None else _listed(published)
        planned = self.manager.plan_save(
            chain.keys, chain.namespace.digest, blocks, told, point=states is not None
        )
        graph = None if planned is None else self._launch_save(planned, pages, lane, states)
        if tokens is not None and self._fusion is not None and blocks > known:
            saved = _Saved(chain, known, blocks, tokens)
            if graph is None:
                self._learn(saved)
            else:
                self._saved[graph.graph_id] = saved
        return graph

    def _wanted_points(
        self,
        offered: Sequence[int],
        ends: Collection[int],
        junctions: Collection[int],
        kept: int,
    ) -> list[int]:
        """Return which of the boundaries ``offered`` get a resume point, ascending.

        The arguments are those of `PointRequest`, in tokens. One that is not chosen is as if the
        engine had not offered it: its blocks are saved with the next point behind it.
        """
        assert self._model.point is not None, "a resume point of a model that has none"
        size = self._model.point.most_rows * self._block
        chosen = self._points.take(PointRequest(offered, ends, junctions, kept, size))
        return [boundary for boundary in offered if boundary in chosen]

    def _launch_save(
        self,
        planned: Planned,
        pages: PageTables,
        lane: Lane | None,
        states: Mapping[int, int] | None,
    ) -> TransferGraph | None:
        """Launch a planned save. Returns None if the engine no longer has all of its pages."""
        (start, stop), point, edge = planned.blocks, None, planned.graph.point
        if edge is not None and states is not None:
            blocks, edge = start + edge, max(edge, 0)
            point, stop = PointPages(stop - start - edge, blocks, states), start + edge
        units = self._paging.whole_units(pages, start, stop, point)
        if units is None:
            self.manager.drop(planned)
            return None
        graph = self.manager.launch(planned, units, lane=lane)
        self._use(graph)
        return graph

    def _learn(self, saved: _Saved) -> None:
        if self._fusion is not None:
            tokens = _listed(saved.tokens)
            self._fusion.chunks.learn(saved.chain, saved.start, saved.stop, tokens)

    # -- pages and reports ------------------------------------------------------------------

    def _use(self, graph: TransferGraph) -> None:
        """Record the pages that a graph reads or writes until its device ops have ended."""
        self._users.add(graph, self._paging.pages_of(graph.units))

    def _complete(self, report: OpReport) -> bool:
        """Handle the end of an op on every rank.

        Returns True if its graph has just stopped using the engine's pages. Disables kvcore if a
        worker refused the op.
        """
        self.manager.complete(report)
        released = self._users.ended(report)
        if report.failed and not released:  # a part of a save: it is not learned
            self._saved.pop(report.graph_id, None)
        saved = self._saved.pop(report.graph_id, None) if released else None
        if saved is not None and not report.failed:
            self._learn(saved)
        if RowError.DEADLINE in report.failed.values() and report.graph_id not in self._late:
            self._late.append(report.graph_id)
        if RowError.REFUSED in report.failed.values():
            self.disable("a worker refused its work")
        return released

    def _end_unsent(self, graphs: Iterable[TransferGraph]) -> None:
        """End graphs that no worker will get, as failed."""
        for graph in graphs:
            for report in refuse(graph, RowError.UPSTREAM):
                self._complete(report)

    # -- upkeep -----------------------------------------------------------------------------

    def disable(self, why: str, error: BaseException | None = None) -> None:
        """Stop loads and saves until the engine restarts. Idempotent.

        Logs ``why`` once, with the trace of ``error`` if it is given.
        """
        if not self.disabled:
            self.disabled = why
            self.metrics.aside()
            _log.error("%s: kvcore stands aside until the engine restarts", why, exc_info=error)

    def clear(self) -> None:
        """Forget every block of every tier, for all engines that share it, and `renew`."""
        self.manager.clear()
        if self._fusion is not None:
            self._fusion.chunks.forget()
        self.renew()

    def renew(self) -> None:
        """Stop finding the KV kept so far, because weights may have been changed in place.

        A fingerprint covers only the files that they were read from. KV computed from now on
        therefore gets a random mark in its keys: this engine finds it again, a restarted engine
        does not. Tiers keep what they have, for engines with the weights of the files. Running
        requests neither load nor save any more.
        """
        self.namespaces.renew()
        self._saved.clear()  # what is being copied is not learned after this
        self._stop_running()

    @abstractmethod
    def _stop_running(self) -> None:
        """Stop loads and saves of the requests that are known now."""

    def _show_tiers(self) -> None:
        """Update the gauges of the tiers whose occupancy has changed."""
        index, nbytes = self.manager.index, self._model.shape.nbytes
        for tier in index.tiers:
            used, slots = index.num_used(tier), index.num_slots(tier)
            if self._shown.get(tier) != (used, slots):
                self._shown[tier] = used, slots
                self.metrics.tier(tier, used * nbytes, slots * nbytes)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the index, graphs in flight and pages in use agree."""
        self.manager.check_integrity()
        self._users.check_integrity()
        assert self._saved.keys() <= self._users.graphs, "a save to learn from is not in flight"

    def close(self) -> None:
        """Release the leader's resources. Blocks. Call after the workers have closed."""
        if self._fusion is not None:
            self._fusion.chunks.close()
        self.recorder.close()
        for release in self._releases:
            release()


def _listed(tokens: Tokens) -> Sequence[int]:
    return tokens.tolist() if isinstance(tokens, np.ndarray) else tokens
