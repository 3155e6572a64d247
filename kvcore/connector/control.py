"""What a request may ask of kvcore's caching: not to load, not to save, to save a part.

    {"kvcore": {"load": false}}          compute all that the engine does not hold itself
    {"kvcore": {"save": false}}          store nothing of this request
    {"kvcore": {"save_tokens": 512}}     store the whole blocks of its first 512 tokens only

Every engine passes the table on in a field of its own, and every adapter reads it here. A request
whose table cannot be read is computed without kvcore: it may have asked for just that. The other
keys of the table (``report``, ``fusion``, ``promise``) have readers of their own.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from kvcore._util.log_limit import LogLimit
from kvcore._util.outside import converted, decode_json
from kvcore.errors import FormatError
from kvcore.fusion.options import shortened
from kvcore.telemetry.metrics import Metrics, MissReason

__all__ = ["CONTROLS", "FREE", "MAX_TEXT", "ControlReader", "RequestControl", "without_kvcore"]

_log = logging.getLogger("kvcore.connector")

MAX_TEXT = 1 << 20
"""Characters of a table that comes as text. A larger one is not decoded."""

_Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
_KINDS: dict[str, Any] = {"load": bool, "save": bool, "save_tokens": _Tokens | None}
CONTROLS = tuple(_KINDS)
"""The keys that are read here."""


class RequestControl(msgspec.Struct, frozen=True):
    """What one request asks for.

    ``save_tokens`` None means all of them. ``error`` says why the table could not be read. Neither
    ``load`` nor ``save`` is true then.
    """

    load: bool = True
    save: bool = True
    save_tokens: int | None = None
    error: str = ""

    def savable(self, tokens: int) -> int:
        """Return how many of the first ``tokens`` of the request may be saved."""
        if not self.save:
            return 0
        return tokens if self.save_tokens is None else min(tokens, self.save_tokens)

    @property
    def saves_all(self) -> bool:
        """True if the request leaves kvcore free to save all of it."""
        return self.save and self.save_tokens is None

    @property
    def why_no_load(self) -> MissReason:
        """The reason for which a request that may not load counts as a miss."""
        return MissReason.UNREADABLE if self.error else MissReason.ASKED

    def shown(self) -> dict[str, Any]:
        """Return what was understood, as plain data; empty if the request asked for nothing."""
        if self.error:
            return {"error": self.error}
        found: dict[str, Any] = {}
        if not self.load:
            found["load"] = False
        if not self.save:
            found["save"] = False
        if self.save_tokens is not None:
            found["save_tokens"] = self.save_tokens
        return found


FREE = RequestControl()
"""The control of a request that asks for nothing."""


def without_kvcore(why: str) -> RequestControl:
    """Return the control of a request that is neither loaded nor saved, and ``why``."""
    return RequestControl(load=False, save=False, error=why)


class ControlReader:
    """Reads what requests ask for, counts it, and logs what cannot be read.

    One per leader, on its thread. No call raises: one request must not cost the others theirs.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._limit = LogLimit(60.0)

    def read(self, request_id: object, given: object) -> RequestControl:
        """Return what a request asks for. Call once a request: it is counted.

        ``given`` is the table as the engine passes it on: decoded, or the text of a JSON object.
        """
        asked = "kvcore"
        try:
            table = opened(given)
            found: dict[str, Any] = {}
            for asked, kind in _KINDS.items():
                if asked in table:
                    found[asked] = _value(asked, table[asked], kind)
        except FormatError as error:
            return self.refuse(request_id, asked, str(error))
        control = RequestControl(**found)
        for name in control.shown():
            self._metrics.controlled(name, "followed")
        return control

    def refuse(self, request_id: object, asked: str, why: str) -> RequestControl:
        """Count and log an option that cannot be read. Return what then holds for its request."""
        self._metrics.controlled(asked, "unreadable")
        more = self._limit.admit(asked)
        if more is not None:
            _log.warning("request=%s is computed without kvcore: %s", request_id, why)
        return without_kvcore(why)


def opened(given: object) -> Mapping[str, Any]:
    """Return the table that a request gave under ``kvcore``; empty if it gave none.

    ``true`` asks for a report only. Raises FormatError if it is no table, nor the text of one.
    """
    if isinstance(given, str):
        if len(given) > MAX_TEXT:
            raise FormatError(f"kvcore has {len(given)} characters; supported are {MAX_TEXT}")
        try:
            given = decode_json(given) if given else None
        except FormatError as error:
            raise FormatError(f"kvcore is {shortened(given)}: {error}") from error
    if given is None or isinstance(given, bool):
        return {}
    if not isinstance(given, Mapping):
        raise FormatError(f"kvcore is {shortened(given)}; supported is a table of options")
    return given


def _value(name: str, given: object, kind: Any) -> Any:
    try:
        return converted(given, kind)
    except FormatError as error:
        wanted = "a whole number of tokens" if name == "save_tokens" else "true or false"
        raise FormatError(
            f"kvcore.{name} is {shortened(given)}: {error}; supported is {wanted}"
        ) from error
