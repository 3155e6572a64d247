"""A consumer's view of what a publisher's tiers hold, however many batches it missed.

live message ── number is the next ──▶ applied
     │ some are missing                    ▲
     ▼                                     │ all of them
ask for them ──────────────────────────────┤
     │ no longer kept, or it restarted     │
     ▼                                     │
ask for everything held ───────────────────┘ as of a number; live messages follow it
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kvcore.errors import FormatError
from kvcore.events.wire import (
    SNAPSHOT,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Message,
    WireEvent,
    decode,
    number_bytes,
)

__all__ = ["MessageSource", "Subscriber"]

_log = logging.getLogger("kvcore.events")

Hash = bytes | int


class MessageSource(Protocol):
    """The way by which one publisher's messages reach this process."""

    def receive(self, timeout: float) -> Message | None:
        """Return the next live message; None after ``timeout`` seconds. Some may be missing."""

    def ask(self, body: bytes, timeout: float) -> Sequence[Message] | None:
        """Return all messages of an answer, in order; None if it is not complete in time."""

    def close(self) -> None: ...


class Subscriber:
    """Follows one publisher. Not thread-safe; only `poll` and `resync` block.

    ``synced`` is True while nothing is known to be missing. Missing batches are requested at once,
    and again every ``retry_s`` seconds without an answer. A publisher sends empty batches when
    idle, so one that is silent for ``silence_s`` seconds is asked for everything as well.
    """

    def __init__(
        self,
        source: MessageSource,
        *,
        answer_s: float = 5.0,
        retry_s: float = 1.0,
        silence_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.synced = False
        self.resyncs = 0
        """How often everything was requested and received."""
        self._source = source
        self._answer_s = answer_s
        self._retry_s = retry_s
        self._silence_s = silence_s
        self._clock = clock
        self._held: dict[str, dict[Hash, Hash | None]] = {}
        self._number: int | None = None  # of the last message that is part of ``held``
        self._live: int | None = None  # of the last message that came by itself
        self._heard = self._asked = clock() - retry_s

    def tiers(self) -> Mapping[str, Mapping[Hash, Hash | None]]:
        """Return the blocks held, by tier, each with its parent block (None: it starts a prompt).

        For kvcore the keys are tier names, for other publishers media. The mappings change with
        every `poll`.
        """
        return {tier: held for tier, held in self._held.items() if held}

    def poll(self, timeout: float) -> bool:
        """Wait for one message and apply it; return False if none came."""
        message = self._source.receive(timeout)
        now = self._clock()
        if message is not None:
            self._heard = now
            self._take(message)
        elif now - self._heard >= self._silence_s:
            self.synced = False
        if not self.synced and now - self._asked >= self._retry_s:
            self.resync()
        return message is not None

    def resync(self) -> bool:
        """Ask for everything held and start again from it; return False if no answer came."""
        self._asked = self._clock()
        answer = self._source.ask(SNAPSHOT, self._answer_s)
        if not answer:
            _log.warning("a publisher of block events does not answer; what is known may be old")
            self.synced = False
            return False
        try:
            batches = [decode(message.payload) for message in answer]
        except FormatError as error:
            _log.warning("an answer of a publisher of block events is not understood: %s", error)
            self.synced = False
            return False
        self._held = {}
        for events in batches:
            self._apply(events)
        self._number = answer[-1].number
        self._heard = self._clock()
        self.synced = True
        self.resyncs += 1
        return True

    def close(self) -> None:
        self._source.close()

    def _take(self, message: Message) -> None:
        restarted = self._live is not None and message.number <= self._live
        self._live = message.number
        if restarted or self._number is None:
            self._miss()
        elif message.number > self._number + 1:
            if self.synced:
                self._catch_up(message)
        elif message.number == self._number + 1:
            self._advance(message)

    def _catch_up(self, message: Message) -> None:
        assert self._number is not None
        wanted = number_bytes(self._number + 1)
        for missed in self._source.ask(wanted, self._answer_s) or ():
            if missed.number == self._number + 1:
                self._advance(missed)
        if message.number == self._number + 1:
            self._advance(message)
        elif message.number > self._number:
            self._miss()

    def _miss(self) -> None:
        """Ask for everything held, now or after a while, because the view is not what is held."""
        if self.synced or self._clock() - self._asked >= self._retry_s:
            self.resync()

    def _advance(self, message: Message) -> None:
        try:
            events = decode(message.payload)
        except FormatError as error:
            _log.warning("a batch of block events is not understood: %s", error)
            self._miss()
            return
        self._apply(events)
        self._number = message.number

    def _apply(self, events: Sequence[WireEvent]) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self._held = {}
                continue
            held = self._held.setdefault(event.ownership or event.medium or "", {})
            if isinstance(event, BlockStored):
                above = [event.parent_block_hash, *event.block_hashes]
                held.update(zip(event.block_hashes, above, strict=False))
            else:
                assert isinstance(event, BlockRemoved)
                for key in event.block_hashes:
                    held.pop(key, None)
