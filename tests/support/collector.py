"""What Python's collector of garbage, and a search through all objects, need not look at."""

from __future__ import annotations

import gc
import logging

from _pytest.logging import LogCaptureHandler


def forget_imports() -> None:
    """Leave all objects that there are now out of each collection and search.

    Modules of torch, transformers and vLLM have millions. The collection afterwards tells the
    collector how few are left: it waits for a quarter more than it has seen before it frees cycles.
    """
    gc.freeze()
    gc.collect()


def forget_records() -> None:
    """Drop what pytest keeps of the log: a record of an error has all frames of its traceback."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LogCaptureHandler):
            handler.records.clear()
