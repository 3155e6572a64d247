"""Records that explain how requests were served, and where they are written.

request_log   `RequestLog`: a record of each of the last requests
recorder      counts and records what a leader does
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
