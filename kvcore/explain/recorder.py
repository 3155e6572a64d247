"""An adapter's requests as records: kept, written and sent as ``[explain]`` wants it.

Everything is one call beside the scheduler's own; where nothing is wanted each returns at once. No
call does I/O. The same for every engine:

    looked_up ─▶ planned, missed, loaded, arrived, failed ─▶ ended      each as far as it happens
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
from kvcore.explain.request_log import Cause, RequestLog
from kvcore.manager import Event, Hit, Manager
from kvcore.manager.load_advisor import Planning, guessed_rates, learn_loads
from kvcore.manager.load_policy import Action, Ask, Plan
from kvcore.model.keys import Namespace
from kvcore.model.spec import ModelDescription
from kvcore.telemetry.metrics import Data, Metrics
from kvcore.telemetry.rates import ForwardPart

__all__ = ["Watch"]

_log = logging.getLogger("kvcore.connector")

_PENDING = 4096


class _Savings:
    """What loads save, of requests that nobody keeps a record of: counted as they end.

    Something is kept of a request from its lookup, if that finds anything, to its end: of
    ``_PENDING`` at most, for an engine may forget to speak of one's end.
    """

    def __init__(self, weigher: Planning, metrics: Metrics) -> None:
        self._weigher = weigher
        self._metrics = metrics
        self._asks: OrderedDict[str, Ask] = OrderedDict()
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

    def count(self, ask: Ask, loaded: int) -> None:
        """That so many tokens were loaded; nothing where a rate in question is a guess."""
        expected = self._weigher.expected(ask, ask.computed + loaded)
        if expected is not None:
            self._metrics.expected_ttft(*expected)

    def _drop(self, request_id: str) -> None:
        self._asks.pop(request_id, None)
        self._loaded.pop(request_id, None)


class Watch:
    """One owner, not thread-safe. Made with nothing it watches nothing; told how to weigh
    (`weigh_with`) it counts what loads save, whether or not there are records."""

    def __init__(
        self,
        journal: RequestLog | None = None,
        file: RecordFile | None = None,
        spans: Spans | None = None,
    ) -> None:
        self.journal = journal
        self._file = file
        self._spans = spans
        self._weigher: Planning | None = None
        self._savings: _Savings | None = None
        self._paths: Mapping[str, str] = {}

    @classmethod
    def of(cls, config: Config, *, always: bool = False) -> Watch:
        """As the settings want it; what cannot be had is named in the log. A journal is also kept
        where there is a planner, and ``always`` where that is wanted."""
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

    @property
    def is_on(self) -> bool:
        """Whether anything is watched."""
        return self.journal is not None

    @property
    def listens(self) -> bool:
        """Whether it wants to hear of lookups: it watches, or counts what loads save."""
        return self.journal is not None or self._savings is not None

    def weigh_with(
        self,
        weigher: Planning,
        metrics: Metrics | None = None,
        paths: Mapping[str, str] | None = None,
    ) -> None:
        """Estimate by ``weigher`` what each request would have taken otherwise, and count in
        ``metrics`` what those that loaded saved.

        ``paths``, the transfer path of each tier's reads: `learn` teaches it. None where its rates
        are another's, who teaches them.
        """
        self._weigher, self._paths = weigher, dict(paths or {})
        self._savings = None if metrics is None else _Savings(weigher, metrics)

    def weigh_alone(
        self,
        config: Config,
        model: ModelDescription,
        manager: Manager,
        metrics: Metrics,
        read_paths: Mapping[str, str],
        *,
        min_load_tokens: int,
        layerwise: bool,
        times_forwards: bool,
    ) -> None:
        """Estimate by what `learn` is told, in an engine in which nobody else learns rates.

        ``times_forwards`` says whether forwards will be among it. Nothing where nothing is watched,
        and nothing can be counted.
        """
        if self.is_on or (times_forwards and config.metrics.enabled):
            weigher = Planning(
                config,
                model,
                manager,
                guessed_rates(model, read_paths),
                min_load_tokens=min_load_tokens,
                layerwise=layerwise,
                times_forwards=times_forwards,
            )
            self.weigh_with(weigher, metrics, read_paths)

    def learn(
        self,
        counted: Data,
        profile: Sequence[tuple[int, float]] = (),
        forwards: Sequence[tuple[Sequence[ForwardPart], float]] = (),
    ) -> None:
        """Take in what workers counted, and what they timed: (rows, seconds) of layers, (parts,
        seconds) of forwards."""
        if self._weigher is not None and self._paths:
            rates = self._weigher.planner.rates
            learn_loads(rates, self._paths, counted)
            for rows, seconds in profile:
                rates.prefilled([ForwardPart(rows, 0)], seconds)
            for parts, seconds in forwards:
                rates.prefilled(parts, seconds)

    def listener(self, other: Callable[[Event], None] | None) -> Callable[[Event], None] | None:
        """What the manager is to tell of events: ``other``, this, or both."""
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
    ) -> None:
        """See `RequestLog.looked_up`."""
        if self.journal is None:
            if self._savings is not None:
                self._savings.looked_up(request_id, len(tokens), computed, hit)
            return
        record = self.journal.looked_up(request_id, tokens, computed, hit, namespace, block_tokens)
        if self._weigher is not None:
            record.ask = self._weigher.ask(hit, record.tokens, computed)

    def planned(self, request_id: str, plan: Plan) -> None:
        """The planner's word on it."""
        if self.journal is not None and (record := self.journal.get(request_id)) is not None:
            record.plan = plan
            if plan.action is Action.RECOMPUTE:
                self.journal.missed(request_id, Cause.PLANNED)

    def missed(self, request_id: str, cause: Cause) -> None:
        """What was found is not used."""
        if self.journal is not None:
            self.journal.missed(request_id, cause)

    def loaded(self, request_id: str, tokens: Mapping[str, int]) -> None:
        """A load of so many tokens from each tier began."""
        if self.journal is not None:
            self.journal.loaded(request_id, tokens)
        elif self._savings is not None:
            self._savings.loaded(request_id, tokens)

    def has_loaded(self, request_id: str) -> bool:
        """Whether a load of a request that has not ended began, and did not fail."""
        if self.journal is None:
            return self._savings is not None and self._savings.has_loaded(request_id)
        record = self.journal.get(request_id)
        return record is not None and not record.is_over and bool(record.loaded)

    def arrived(self, request_id: str) -> None:
        """Its load ended."""
        self.step(request_id, "load")

    def step(self, request_id: str, name: str) -> None:
        """See `RequestLog.step`."""
        if self.journal is not None:
            self.journal.step(request_id, name)

    def failed(self, request_id: str) -> None:
        """A load failed, or came too late."""
        if self.journal is not None:
            self.journal.failed(request_id)
        elif self._savings is not None:
            self._savings.failed(request_id)

    def ended(
        self, request_id: str, outcome: str, headers: Mapping[str, str] | None = None
    ) -> dict[str, Any] | None:
        """The request is over: it is written and sent, once. What its client may see of it; None
        where it is unknown, or was over before."""
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
        """Write what waits. Blocks."""
        if self._file is not None:
            self._file.close()


def _both(one: Callable[[Event], None], other: Callable[[Event], None], event: Event) -> None:
    one(event)
    other(event)
