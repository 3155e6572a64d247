"""Why a request was served as it was: the journal of requests, and where it is written."""

from __future__ import annotations

__all__ = [
    "Cause",
    "Journal",
    "Record",
]

from kvcore.explain.journal import Cause, Journal, Record
