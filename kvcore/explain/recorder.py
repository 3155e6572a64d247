"""The recorder of a leader's requests: metrics, records as ``[explain]`` says, time saved.

A leader makes one call for each thing that happens to a request. The call counts it, notes it in
the request's record if there are records, and updates the time that loads have saved. No call does
I/O except `close`.

    looked_up ─▶ planned, missed, loaded, arrived, failed ─▶ ended
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from kvcore.config import Config
from kvcore.errors import UnsupportedError
from kvcore.explain.file import RecordFile
from kvcore.explain.otel import Spans
from kvcore.explain.request_log import NOTHING, Cause, RequestLog
from kvcore.manager import Event, Hit, Manager
from kvcore.manager.load_advisor import LoadAdvisor, guessed_rates, learn_loads
from kvcore.manager.load_policy import Action, Plan, PlanRequest
from kvcore.model.keys import Namespace
from kvcore.model.spec import ModelDescription
from kvcore.telemetry.metrics import Data, Metrics, MissReason
from kvcore.telemetry.rates import ForwardPart

__all__ = ["RequestRecorder"]

_log = logging.getLogger("kvcore.connector")

_PENDING = 4096

_CAUSES = {
    MissReason.TOO_SHORT: Cause.TOO_SHORT,
    MissReason.BUSY: Cause.BUSY,
    MissReason.PENDING: Cause.LATE,
    MissReason.ASKED: Cause.ASKED,
    MissReason.UNREADABLE: Cause.UNREADABLE,
}
"""The causes of misses that a lookup does not find by itself."""


class _Savings:
    """Counts the time that loads save when requests without a record end.

    A request is kept from its lookup, if that finds anything, to its end. At most ``_PENDING`` are
    kept, because an engine may not report the end of every request.
    """

    def __init__(self, weigher: LoadAdvisor, metrics: Metrics) -> None:
        self._weigher = weigher
        self._metrics = metrics
        self._asks: OrderedDict[str, PlanRequest] = OrderedDict()
        self._loaded: dict[str, int] = {}

    def looked_up(self, request_id: str, tokens: int, computed: int, hit: Hit) -> None:
        if hit.depth or request_id in self._asks:
            self._drop(request_id)
            self._asks[request_id] = self._weigher.ask(hit, tokens, computed)
            if len(self._asks) > _PENDING:
                self._drop(next(iter(self._asks)))

    def loaded(self, request_id: str, tokens: Mapping[str, int]) -> None:
        if request_id in self._asks and "blend" not in tokens:
            self._loaded[request_id] = sum(tokens.values())

    def has_loaded(self, request_id: str) -> bool:
        return request_id in self._loaded

    def failed(self, request_id: str) -> None:
        self._loaded.pop(request_id, None)

    def ended(self, request_id: str) -> None:
        ask, loaded = self._asks.get(request_id), self._loaded.get(request_id)
        self._drop(request_id)
        if ask is not None and loaded is not None:
            self.count(ask, loaded)

    def count(self, ask: PlanRequest, loaded: int) -> None:
        """Count a load of ``loaded`` tokens, unless one of its rates is only a guess."""
        expected = self._weigher.expected(ask, ask.computed + loaded)
        if expected is not None:
            self._metrics.expected_ttft(*expected)

    def _drop(self, request_id: str) -> None:
        self._asks.pop(request_id, None)
        self._loaded.pop(request_id, None)


class RequestRecorder:
    """Counts and records the requests of one leader. Not thread-safe.

    It does nothing until it has metrics (`count_in`) or a journal. Once it has an estimator
    (`weigh_with`) it also counts the time that loads save.
    """

    def __init__(
        self,
        journal: RequestLog | None = None,
        file: RecordFile | None = None,
        spans: Spans | None = None,
    ) -> None:
        self.journal = journal
        self._file = file
        self._spans = spans
        self._metrics: Metrics | None = None
        self._weigher: LoadAdvisor | None = None
        self._savings: _Savings | None = None
        self._paths: Mapping[str, str] = {}

    @classmethod
    def of(cls, config: Config, *, always: bool = False) -> RequestRecorder:
        """Build the recorder that the settings ask for.

        A file or spans that cannot be set up are left out with a warning. A journal is also kept if
        there is a planner, or if ``always`` is set.
        """
        wanted = config.explain
        if wanted.path is None and not wanted.spans:
            return cls(RequestLog() if always or config.planner.enabled else None)
        file, spans = None, None
        try:
            if wanted.path is not None:
                file = RecordFile(wanted.path, wanted.capacity)
        except OSError as error:
            _log.warning("no records of requests are written: %s", error)
        try:
            spans = Spans() if wanted.spans else None
        except UnsupportedError as error:
            _log.warning("no spans are made: %s", error)
        return cls(RequestLog(), file, spans)

    def count_in(self, metrics: Metrics) -> None:
        """Count lookups, and the time that loads save, in ``metrics``."""
        self._metrics = metrics

    @property
    def records(self) -> bool:
        """True if requests have records."""
        return self.journal is not None

    @property
    def wants_lookups(self) -> bool:
        """True if `looked_up` does anything: there are records, or saved time is counted."""
        return self.journal is not None or self._savings is not None

    def weigh_with(self, weigher: LoadAdvisor, paths: Mapping[str, str] | None = None) -> None:
        """Estimate with ``weigher`` how long each request would have taken otherwise.

        The time that loads saved is counted from then on. ``paths`` are the transfer paths of each
        tier's reads, with which `learn` updates the rates. None if another part updates them.
        """
        self._weigher, self._paths = weigher, dict(paths or {})
        self._savings = None if self._metrics is None else _Savings(weigher, self._metrics)

    def weigh_alone(
        self,
        config: Config,
        model: ModelDescription,
        manager: Manager,
        read_paths: Mapping[str, str],
        *,
        min_load_tokens: int,
        layerwise: bool,
        times_forwards: bool,
    ) -> LoadAdvisor | None:
        """Estimate with rates from `learn`, in an engine in which no other part learns rates.

        ``times_forwards`` is True if `learn` will receive forwards. Returns the planner, which
        decides by the same rates, or None if planning is off. Does nothing if it is, there are no
        records and no saved time could be counted.
        """
        plans = config.planner.enabled
        if not (plans or self.records or (times_forwards and config.metrics.enabled)):
            return None
        weigher = LoadAdvisor(
            config,
            model,
            manager,
            guessed_rates(model, read_paths),
            min_load_tokens=min_load_tokens,
            layerwise=layerwise,
            times_forwards=times_forwards,
        )
        self.weigh_with(weigher, read_paths)
        return weigher if plans else None

    def learn(
        self,
        counted: Data,
        profile: Sequence[tuple[int, float]] = (),
        forwards: Sequence[tuple[Sequence[ForwardPart], float]] = (),
    ) -> None:
        """Learn rates from the counters and times of workers.

        ``profile`` are (rows, seconds) of layers. ``forwards`` are (parts, seconds) of forwards.
        """
        if self._weigher is not None and self._paths:
            rates = self._weigher.planner.rates
            learn_loads(rates, self._paths, counted)
            for rows, seconds in profile:
                rates.prefilled([ForwardPart(rows, 0)], seconds)
            for parts, seconds in forwards:
                rates.prefilled(parts, seconds)

    def listener(self, other: Callable[[Event], None] | None) -> Callable[[Event], None] | None:
        """Return an ``on_event`` for the manager that calls the journal and ``other``.

        Returns None if there is neither.
        """
        journal = self.journal
        if journal is None:
            return other
        if other is None:
            return journal.note
        return partial(_both, journal.note, other)

    def looked_up(
        self,
        request_id: str,
        tokens: Sequence[int],
        computed: int,
        hit: Hit,
        namespace: Namespace,
        block_tokens: int,
        asked: Mapping[str, Any] = NOTHING,
    ) -> None:
        """Note a lookup, and what its request ``asked`` of kvcore.

        It is counted when its result is known.
        """
        if self.journal is None:
            if self._savings is not None:
                self._savings.looked_up(request_id, len(tokens), computed, hit)
            return
        record = self.journal.looked_up(
            request_id, tokens, computed, hit, namespace, block_tokens, asked
        )
        if self._weigher is not None:
            record.ask = self._weigher.ask(hit, record.tokens, computed)

    def planned(self, request_id: str, plan: Plan, missed: int) -> None:
        """Note the planner's decision. If it is to recompute, that is a miss of ``missed`` tokens.

        These are all tokens that the engine does not hold itself, as for every miss.
        """
        recompute = plan.action is Action.RECOMPUTE
        if recompute and self._metrics is not None:
            self._metrics.looked_up({}, missed, MissReason.PLANNED)
        if self.journal is not None and (record := self.journal.get(request_id)) is not None:
            record.plan = plan
            if recompute:
                self.journal.missed(request_id, Cause.PLANNED)

    def missed(self, request_id: str, reason: MissReason, tokens: int) -> None:
        """Count a lookup that loads nothing.

        All ``tokens`` that the engine asked about and does not hold itself are missed.
        """
        if self._metrics is not None:
            self._metrics.looked_up({}, tokens, reason)
        if self.journal is not None and (cause := _CAUSES.get(reason)) is not None:
            self.journal.missed(request_id, cause)

    def loaded(self, request_id: str, tokens: Mapping[str, int], missed: int) -> None:
        """Count a lookup whose load has begun: its tokens by tier, and its ``missed`` tokens."""
        if self._metrics is not None:
            self._metrics.looked_up(tokens, missed)
        if self.journal is not None:
            self.journal.loaded(request_id, tokens)
        elif self._savings is not None:
            self._savings.loaded(request_id, tokens)

    def has_loaded(self, request_id: str) -> bool:
        """Return True if a load of a running request has begun and has not failed."""
        if self.journal is None:
            return self._savings is not None and self._savings.has_loaded(request_id)
        record = self.journal.get(request_id)
        return record is not None and not record.is_over and bool(record.loaded)

    def arrived(self, request_id: str) -> None:
        """Note that the request's load has ended."""
        self.step(request_id, "load")

    def step(self, request_id: str, name: str) -> None:
        """Note that a step of the request has ended. See `RequestLog.step`."""
        if self.journal is not None:
            self.journal.step(request_id, name)

    def failed(self, request_id: str, tokens: int, *, late: bool = False) -> None:
        """Count a load that failed, or was too ``late``, as a miss of its ``tokens``.

        Call once a load. The miss is counted in addition to the lookup that began the load. If the
        load never began, pass all tokens that the engine lacked: the lookup is not counted yet.
        """
        if self._metrics is not None:
            reason = MissReason.DEADLINE if late else MissReason.LOAD_FAILED
            self._metrics.looked_up({}, tokens, reason)
        if self.journal is not None:
            self.journal.failed(request_id)
        elif self._savings is not None:
            self._savings.failed(request_id)

    def ended(
        self, request_id: str, outcome: str, headers: Mapping[str, str] | None = None
    ) -> dict[str, Any] | None:
        """Note that the request is over, and write and send its record once.

        ``headers`` are its W3C trace context. Returns the part of the record that its client may
        see, or None if there is no record or the request had ended before.
        """
        if self.journal is None:
            if self._savings is not None:
                self._savings.ended(request_id)
            return None
        record = self.journal.get(request_id)
        if record is None or record.is_over:
            return None
        self.journal.ended(request_id, outcome)
        if self._weigher is not None and record.ask is not None:
            record.otherwise = self._weigher.otherwise(record.ask)
            if self._savings is not None and record.loaded and "blend" not in record.loaded:
                self._savings.count(record.ask, sum(record.loaded.values()))
        if self._file is not None:
            self._file.put({**record.as_dict(), "at": time.time()})
        if self._spans is not None:
            self._spans.emit(record, headers)
        return record.as_dict(for_client=True)

    def close(self) -> None:
        """Write the queued records. Blocks."""
        if self._file is not None:
            self._file.close()


def _both(one: Callable[[Event], None], other: Callable[[Event], None], event: Event) -> None:
    one(event)
    other(event)
