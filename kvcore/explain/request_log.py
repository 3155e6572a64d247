"""A small record of each of the last requests that explains how it was served.

    lookup     matches by tier, causes of misses                RequestLog.looked_up
    plan       the options and their rates                      RequestRecord.plan
    load       tokens by tier, or a failure                     RequestLog.loaded, RequestLog.failed
    end        seconds by step, and estimates of the time       RequestLog.ended
               that the other options would have taken

For the engine's operator. A record shows that a text was seen in another namespace, so clients must
not read it: tenants must not learn about each other.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple

from kvcore.manager import Event, Hit
from kvcore.manager.load_policy import Otherwise, Plan, PlanRequest
from kvcore.model.keys import Namespace

__all__ = ["Cause", "Miss", "RequestLog", "RequestRecord"]


NOTHING: Mapping[str, Any] = MappingProxyType({})
"""What a request asks for that asks for nothing."""

WAITING = "waiting"
"""The outcome of a request that has not ended."""


class Cause(str, Enum):
    """A reason why the first missing block is not held, or why found blocks were not used.

    Clients are told NOT_HELD in place of the first four.
    """

    NEVER_SEEN = "never seen"
    EVICTED = "evicted"
    OTHER_NAMESPACE = "other namespace"
    NO_POINT = "no resume point"
    TOO_SHORT = "too short"
    PLANNED = "plan said recompute"
    BUSY = "no slots to load through"
    LATE = "not in host memory in time"
    ASKED = "the request asked for no load"
    UNREADABLE = "the request's options could not be read"
    FAILED = "failed"
    NOT_HELD = "not held"


_FOR_CLIENTS = {
    Cause.NEVER_SEEN: Cause.NOT_HELD,
    Cause.EVICTED: Cause.NOT_HELD,
    Cause.OTHER_NAMESPACE: Cause.NOT_HELD,
    Cause.NO_POINT: Cause.NOT_HELD,
    Cause.BUSY: Cause.LATE,
}
"""What a client is told instead of causes that depend on others."""


class Miss(NamedTuple):
    """One reason for a miss.

    For an eviction, the tier and the seconds since. For another namespace, the names of the fields
    that differed. For a missing resume point, the token up to which blocks are held.
    """

    cause: Cause
    tier: str = ""
    seconds_ago: float | None = None
    differed: tuple[str, ...] = ()
    held: int | None = None


@dataclass
class RequestRecord:
    """The record of one request.

    Attributes:
        tokens: the length of the prompt at its last lookup.
        computed: the tokens that were in the engine's own cache at the lookup.
        matched: (tier, first token, one past the last) of the blocks found.
        ask: the lookup in the form that a planner takes.
        otherwise: estimates for the other options; None until the request ends.
        loaded: tokens of the last load, by tier.
        steps: seconds by the name of the step, in order.
        began: the log's clock at the first lookup, in seconds.
        asked: what the request asked of kvcore, as `RequestControl.shown` has it.
    """

    request_id: str
    tokens: int
    computed: int = 0
    matched: list[tuple[str, int, int]] = field(default_factory=list)
    misses: list[Miss] = field(default_factory=list)
    plan: Plan | None = None
    ask: PlanRequest | None = None
    otherwise: Otherwise | None = None
    loaded: dict[str, int] = field(default_factory=dict)
    failures: int = 0
    steps: dict[str, float] = field(default_factory=dict)
    outcome: str = WAITING
    began: float = 0.0
    asked: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self, *, for_client: bool = False) -> dict[str, Any]:
        """Return plain values for JSON.

        ``for_client`` leaves out all that depends on others: why and when a block left, what was
        seen in another namespace, how busy the engine is, and measured rates.
        """
        shown: dict[str, Any] = {
            "request": self.request_id,
            "tokens": self.tokens,
            "engine_held": self.computed,
            "matched": [{"tier": tier, "tokens": [a, b]} for tier, a, b in self.matched],
            "misses": [
                _miss(miss) for miss in (_discreet(self.misses) if for_client else self.misses)
            ],
            "loaded": dict(self.loaded),
            "failures": self.failures,
            "ms": {name: round(1e3 * seconds, 3) for name, seconds in self.steps.items()},
            "outcome": self.outcome,
        }
        if self.asked:
            shown["asked"] = dict(self.asked)
        if for_client:
            return shown
        if self.plan is not None:
            shown["plan"] = _plan(self.plan)
        if self.otherwise is not None:
            shown["otherwise"] = _otherwise(self.otherwise)
        return shown

    @property
    def is_over(self) -> bool:
        """Return True if the request has ended."""
        return self.outcome != WAITING


def _discreet(misses: Iterable[Miss]) -> Iterable[Miss]:
    return dict.fromkeys(Miss(_FOR_CLIENTS.get(miss.cause, miss.cause)) for miss in misses)


def _miss(miss: Miss) -> dict[str, Any]:
    shown: dict[str, Any] = {"cause": miss.cause.value}
    if miss.tier:
        shown["tier"] = miss.tier
    if miss.seconds_ago is not None:
        shown["seconds_ago"] = round(miss.seconds_ago, 3)
    if miss.differed:
        shown["differed"] = list(miss.differed)
    if miss.held is not None:
        shown["held"] = miss.held
    return shown


def _plan(plan: Plan) -> dict[str, Any]:
    return {
        "action": plan.action.value,
        "why": plan.why.value,
        "stop": plan.stop,
        "expected_ms": _ms(plan.chosen.seconds),
        "load_all_ms": _ms(plan.load_all.seconds),
        "recompute_ms": _ms(plan.recompute.seconds),
        "deadline_ms": _ms(plan.deadline_s),
        "rates": {
            tier: {"operation_s": latency, "byte_s": byte}
            for tier, (latency, byte) in plan.rates.items()
        },
    }


def _otherwise(known: Otherwise) -> dict[str, Any]:
    return {
        "estimate": True,
        "load_all_ms": _ms(known.load_all),
        "recompute_ms": _ms(known.recompute),
        "loading_ms": _ms(known.loading),
        "unknown": list(known.unknown),
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 3)


class RequestLog:
    """The last ``capacity`` requests, with evictions and namespaces that explain missing blocks.

    Owned by one thread, not thread-safe. Each call takes microseconds. ``blocks`` bounds the number
    of evicted blocks (about 150 bytes each) and of namespaces that are remembered.
    """

    def __init__(
        self,
        capacity: int = 512,
        blocks: int = 1 << 14,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._capacity = capacity
        self._blocks = blocks
        self._clock = clock
        self._records: OrderedDict[str, RequestRecord] = OrderedDict()
        self._gone: OrderedDict[bytes, tuple[str, float]] = OrderedDict()
        self._first: OrderedDict[bytes, Namespace] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def get(self, request_id: str) -> RequestRecord | None:
        """Return the record of a request; None if it is too old or unknown."""
        return self._records.get(request_id)

    # -- events ---------------------------------------------------------------------------------

    def note(self, event: Event) -> None:
        """Note that a tier began or ceased to hold blocks (the ``on_event`` of `KVManager`)."""
        if event.stored:
            for key in event.keys:
                self._gone.pop(key, None)
            return
        now = self._clock()
        for key in event.keys:
            _put(self._gone, key, (event.tier, now), self._blocks)

    def looked_up(
        self,
        request_id: str,
        tokens: Sequence[int],
        computed: int,
        hit: Hit,
        namespace: Namespace,
        block_tokens: int,
        asked: Mapping[str, Any] = NOTHING,
    ) -> RequestRecord:
        """Note a lookup of a request, and return its new record.

        A later lookup of the same request starts its record again, but keeps its failures and the
        time it began. If the request has ended, this is another one with the same name.
        """
        old = self._records.get(request_id)
        record = RequestRecord(request_id, len(tokens), computed, began=self._clock(), asked=asked)
        if old is not None and not old.is_over:
            record.failures, record.began = old.failures, old.began
            record.misses = [miss for miss in old.misses if miss.cause is Cause.FAILED]
        record.matched = [
            (source.tier, source.start * block_tokens, min(source.stop, hit.blocks) * block_tokens)
            for source in hit.sources
            if source.start < hit.blocks
        ]
        first = repr(list(tokens[:block_tokens])).encode()
        seen = hashlib.blake2b(first, digest_size=16).digest()
        if hit.blocks < hit.reached:
            record.misses.append(Miss(Cause.NO_POINT, held=hit.reached * block_tokens))
        elif (miss := self._missing(hit.held, seen, namespace)) is not None:
            record.misses.append(miss)
        if hit.keys:
            _put(self._first, seen, namespace, self._blocks)
        _put(self._records, request_id, record, self._capacity)
        return record

    def _missing(self, hit: Hit, seen: bytes, namespace: Namespace) -> Miss | None:
        """Return why the block after the hit is missing; None if all blocks were found."""
        if not hit.keys:
            return Miss(Cause.TOO_SHORT)
        if hit.depth >= len(hit.keys):
            return None
        gone = self._gone.get(hit.keys[hit.depth])
        if gone is not None:
            return Miss(Cause.EVICTED, gone[0], self._clock() - gone[1])
        other = self._first.get(seen)
        if not hit.depth and other is not None and other.digest != namespace.digest:
            return Miss(Cause.OTHER_NAMESPACE, differed=_differed(other, namespace))
        return Miss(Cause.NEVER_SEEN)

    def missed(self, request_id: str, cause: Cause) -> None:
        """Note that what was found is not used. Each cause is noted once for each record.

        Once a load has begun, a lookup of the tokens behind it is not a miss.
        """
        record = self._records.get(request_id)
        if record is None or record.loaded:
            return
        if all(miss.cause is not cause for miss in record.misses):
            record.misses.append(Miss(cause))

    def loaded(self, request_id: str, tokens: Mapping[str, int]) -> None:
        """Note that a load began, with its tokens by tier."""
        if (record := self._records.get(request_id)) is not None:
            record.loaded = dict(tokens)
            self.step(request_id, "lookup")

    def failed(self, request_id: str) -> None:
        """Note that the request's load failed or came too late."""
        if (record := self._records.get(request_id)) is not None:
            record.failures += 1
            record.loaded = {}
            record.misses.append(Miss(Cause.FAILED))

    def step(self, request_id: str, name: str) -> None:
        """Note that a step has ended: add the seconds since the step before to its time."""
        record = self._records.get(request_id)
        if record is not None and not record.is_over:
            spent = self._clock() - record.began - sum(record.steps.values())
            record.steps[name] = record.steps.get(name, 0.0) + spent

    def ended(self, request_id: str, outcome: str = "done") -> None:
        """Note that the request is over. Does nothing the second time."""
        record = self._records.get(request_id)
        if record is not None and not record.is_over:
            self.step(request_id, "rest")
            record.outcome = outcome


def _differed(one: Namespace, other: Namespace) -> tuple[str, ...]:
    """Return the names of the fields that differ, never their values."""
    names = (each.name for each in fields(Namespace))
    return tuple(name for name in names if getattr(one, name) != getattr(other, name))


def _put(into: OrderedDict[Any, Any], key: Any, value: Any, capacity: int) -> None:
    into[key] = value
    into.move_to_end(key)
    if len(into) > capacity:
        into.popitem(last=False)
