"""Dynamo's router as a child process: `demo.fleet` runs this file with .venvs/routers.

    in    {"workers": [{...}, ...]}       engines, as Dynamo's catalogue has them
    in    {"token_ids": [...], "selection_id": "..."}
                                          out  {"worker_id": 1, "endpoint": "http://...", ...}
    in    {"done": "..."}                 a selection whose request has been answered
    in    {"gone": 1}                     an engine to forget

One JSON object a line; each is answered by one line. `dynamo.select_service` is the same over HTTP.
That one listens on all addresses of the machine, without access control, so it is not used here.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

MODEL = "demo"


async def answer(service: Any, request: dict[str, Any]) -> Any:
    """Carry out one line."""
    if "workers" in request:
        return [await service.upsert_worker(_worker(**worker)) for worker in request["workers"]]
    if "gone" in request:
        return await service.delete_worker(request["gone"])
    if "done" in request:
        return await service.free_reservation(request["done"])
    return await service.select_and_reserve({"model_name": MODEL, **request})


def _worker(worker_id: int, endpoint: str, events: str, replay: str, block: int) -> dict[str, Any]:
    return {
        "worker_id": worker_id,
        "model_name": MODEL,
        "endpoint": endpoint,
        "block_size": block,
        "kv_events_endpoints": {0: events},
        "replay_endpoint": replay,
        "max_num_batched_tokens": 8192,
    }


async def main() -> None:
    """Answer lines until there are no more."""
    from dynamo.llm import SelectionService  # type: ignore[import-not-found]

    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)  # Dynamo logs to the standard output
        service = SelectionService(indexer_threads=1)
        lines = asyncio.StreamReader(limit=1 << 24)
        reads = asyncio.StreamReaderProtocol(lines)
        await asyncio.get_running_loop().connect_read_pipe(lambda: reads, sys.stdin)
        while line := await lines.readline():
            print(json.dumps(await answer(service, json.loads(line))), file=out, flush=True)
        service.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
