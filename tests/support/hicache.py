"""SGLang's HiCache with kvcore as its storage: arguments of the engine, and what it found."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvcore.harness.engine_process import Generation

_RECORD = 128


def hicache(kvcore: Mapping[str, Any], **args: Any) -> dict[str, Any]:
    """Return the engine's arguments. Lookups wait for the storage, so that hits are certain.

    ``kvcore`` has kvcore's settings.
    """
    extra = {
        "backend_name": "kvcore",
        "module_path": "kvcore_sglang.storage",
        "class_name": "KVCoreStorage",
        "interface_v1": 1,
        "prefetch_threshold": 64,
        "kvcore": kvcore,
    }
    return {
        "enable_hierarchical_cache": True,
        "hicache_ratio": 2.0,
        "hicache_storage_backend": "dynamic",
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend_extra_config": json.dumps(extra),
        **args,
    }


def stored(folder: Path, page: int, prompts: Sequence[Sequence[int]]) -> None:
    """Block until the index of a disk tier has all whole pages of the prompts."""
    wanted = sum((len(prompt) - 1) // page for prompt in prompts)
    limit = time.monotonic() + 120
    while time.monotonic() < limit:
        records = [row for f in folder.rglob("shard-0.index") for row in _rows(f.read_bytes())]
        if len(records) >= wanted:
            return
        time.sleep(0.2)
    raise AssertionError(f"{len(records)} of {wanted} pages were stored")


def _rows(data: bytes) -> list[bytes]:
    rows = [data[i : i + _RECORD] for i in range(0, len(data), _RECORD)]
    return [row for row in rows if row.startswith(b"KVC1")]


def assert_from_storage(
    got: Sequence[Generation], prompts: Sequence[Sequence[int]], page: int
) -> None:
    """Assert that all whole pages but the last token's were found, nearly all in the storage."""
    for answer, prompt in zip(got, prompts, strict=True):
        assert answer.cached_tokens == (len(prompt) - 1) // page * page
        assert answer.sources.get("storage", 0) >= answer.cached_tokens - page
