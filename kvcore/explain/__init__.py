"""Why a request was served as it was: the journal of requests, and where it is written."""

from __future__ import annotations

__all__ = [
    "Cause",
    "RequestLog",
    "RequestRecord",
]

from kvcore.explain.request_log import Cause, RequestLog, RequestRecord
