"""Structured log lines over the standard library's logging.

    log = get_logger(__name__)
    log.debug("match", request=rid, host=48, disk=0)

    text   match request=r7 host=48 disk=0
    json   {"time": "...", "level": "debug", "logger": "kvcore.manager", "event": "match", ...}

Each decision is one line at level debug. Fields are numbers, names and keys, never the text of a
prompt.

A message may repeat what a client sent. In text, too, control characters in it are escaped, so that
no client can write a line of its own. The lines of a traceback are indented.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime, timezone
from enum import Enum
from typing import Literal

from kvcore.masking import mask_passwords

__all__ = ["Logger", "configure", "get_logger"]

ROOT = "kvcore"
_FIELDS = "kvcore_fields"


class Logger:
    """Writes events with fields to one logger of the standard library. Thread-safe."""

    __slots__ = ("_log",)

    def __init__(self, log: logging.Logger) -> None:
        self._log = log

    @property
    def name(self) -> str:
        """Name of the underlying logger."""
        return self._log.name

    def enabled(self, level: int) -> bool:
        """Return True if lines of ``level`` are written.

        Ask before gathering fields that are costly to compute.
        """
        return self._log.isEnabledFor(level)

    def debug(self, event: str, /, **fields: object) -> None:
        """Log an event at level debug."""
        self._emit(logging.DEBUG, event, fields)

    def info(self, event: str, /, **fields: object) -> None:
        """Log an event at level info."""
        self._emit(logging.INFO, event, fields)

    def warning(self, event: str, /, **fields: object) -> None:
        """Log an event at level warning."""
        self._emit(logging.WARNING, event, fields)

    def error(self, event: str, /, **fields: object) -> None:
        """Log an event at level error."""
        self._emit(logging.ERROR, event, fields)

    def exception(self, event: str, /, **fields: object) -> None:
        """Log an error with the traceback of the exception being handled."""
        self._emit(logging.ERROR, event, fields, traceback=True)

    def _emit(
        self, level: int, event: str, fields: dict[str, object], *, traceback: bool = False
    ) -> None:
        if self._log.isEnabledFor(level):
            extra = {_FIELDS: fields}
            line = _Line(event, fields)
            self._log.log(level, line, exc_info=traceback, extra=extra, stacklevel=3)


class _Line:
    """An event that is formatted only when a handler writes it."""

    __slots__ = ("event", "fields")

    def __init__(self, event: str, fields: dict[str, object]) -> None:
        self.event = event
        self.fields = fields

    def __str__(self) -> str:
        return " ".join([self.event, *(f"{k}={_text(v)}" for k, v in self.fields.items())])


def get_logger(name: str) -> Logger:
    """Return the structured logger called ``name``, usually ``__name__``."""
    return Logger(logging.getLogger(name))


def configure(
    level: Literal["debug", "info", "warning", "error"] = "info",
    format: Literal["text", "json"] = "text",
) -> None:
    """Set the level of kvcore's loggers and make sure that their lines are written. Idempotent.

    Text lines go to the handlers of the process if it has any, otherwise to standard error. JSON
    lines always go to standard error only.
    """
    root = logging.getLogger(ROOT)
    root.setLevel(level.upper())
    for handler in [h for h in root.handlers if isinstance(h, (_Escape, _Handler))]:
        root.removeHandler(handler)
    if format == "text":
        root.addHandler(_Escape())
    if own := format == "json" or not logging.getLogger().handlers:
        root.addHandler(_Handler(_JsonFormatter() if format == "json" else _TextFormatter()))
    root.propagate = not own


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]  # generic in stubs only
    """The handler that kvcore installs, recognizable among others."""

    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(formatter)


class _Escape(logging.Handler):
    """Escapes the text of records and masks passwords, before the handlers of other loggers."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
        except Exception:  # noqa: BLE001 - a message that does not fit its arguments
            self.handleError(record)
            return
        if (shown := _printable(mask_passwords(text))) != text:
            record.msg, record.args = shown, None
        if record.exc_info and record.exc_info[0] is not None:
            text = logging.Formatter().formatException(record.exc_info)
            lines = mask_passwords(text).splitlines()
            record.exc_text = "\n".join(f"  {_printable(line)}" for line in lines)


class _TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")


class _JsonFormatter(logging.Formatter):
    """Formats structured and plain records as one JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        line = record.msg if isinstance(record.msg, _Line) else _Line(record.getMessage(), {})
        data: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": line.event,
        }
        for key, value in line.fields.items():
            data[f"field_{key}" if key in data else key] = value
        if record.exc_info:
            data["traceback"] = self.formatException(record.exc_info)
        return mask_passwords(json.dumps(data, default=_plain))


def _plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    return value.hex() if isinstance(value, bytes) else mask_passwords(str(value))


def _printable(text: str) -> str:
    """Return ``text`` on one line, with characters that cannot be printed as escapes."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _text(value: object) -> str:
    """Return a field's value on one line, quoted if it would not read back as one word."""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(_plain(value))
    plain = text.isprintable() and not any(c in ' "=' for c in text)
    return text if plain and text else json.dumps(text)
