"""Why a request was served as it was: the log of requests, and where it is written.

request_log   `RequestLog`, the last requests and what is known of each
recorder      writes into that log what a leader does
file          records as lines of JSON, for `kvcore explain`
otel          records as OpenTelemetry spans
"""

from __future__ import annotations

__all__ = [
    "Cause",
    "RequestLog",
    "RequestRecord",
]

from kvcore.explain.request_log import Cause, RequestLog, RequestRecord
