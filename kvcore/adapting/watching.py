"""An adapter's requests as records: kept, written and sent as ``[explain]`` wants it.

Everything is one call beside the scheduler's own; where nothing is wanted each returns at once. No
call does I/O.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from kvcore.block import Namespace
from kvcore.config import Config
from kvcore.errors import UnsupportedError
from kvcore.explain import Cause, Journal
from kvcore.explain_file import RecordFile
from kvcore.manager import Event, Hit
from kvcore.planner import Action, Plan
from kvcore.spans import Spans

__all__ = ["Watch"]

_log = logging.getLogger("kvcore.adapting")


class Watch:
    """One owner, not thread-safe. Made with nothing it watches nothing."""

    def __init__(
        self,
        journal: Journal | None = None,
        file: RecordFile | None = None,
        spans: Spans | None = None,
    ) -> None:
        self.journal = journal
        self._file = file
        self._spans = spans

    @classmethod
    def of(cls, config: Config) -> Watch:
        """As the settings want it; what cannot be had is named in the log."""
        wanted = config.explain
        if wanted.path is None and not wanted.spans:
            return cls()
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
        return cls(Journal(), file, spans)

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
        """See `Journal.looked_up`."""
        if self.journal is not None:
            self.journal.looked_up(request_id, tokens, computed, hit, namespace, block_tokens)

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

    def arrived(self, request_id: str) -> None:
        """A load between steps ended."""
        if self.journal is not None:
            self.journal.step(request_id, "load")

    def failed(self, request_id: str) -> None:
        """A load failed, or came too late."""
        if self.journal is not None:
            self.journal.failed(request_id)

    def ended(
        self, request_id: str, outcome: str, headers: Mapping[str, str] | None = None
    ) -> dict[str, Any] | None:
        """The request is over: it is written and sent. What its client may see of it."""
        if self.journal is None:
            return None
        self.journal.ended(request_id, outcome)
        record = self.journal.get(request_id)
        if record is None:
            return None
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
