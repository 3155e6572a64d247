"""Fusion in TensorRT-LLM's leader: the engine's part of `kvcore.connector.fusion_scheduler`.

The promise of [0, stop) cannot be retracted. The engine stores the KV that it computes behind it
under the request's own salt (`kvcore_trtllm.salt`). kvcore stores nothing from the first chunk on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvcore.connector.fusion_chunks import worth_fetching
from kvcore.connector.fusion_messages import BlendPlan
from kvcore.connector.fusion_scheduler import FusionScheduler
from kvcore.errors import KVCoreError
from kvcore.manager import Hit

_log = logging.getLogger("kvcore.trtllm.fusion")


class TrtllmFusionScheduler(FusionScheduler):
    """The fusion scheduler of one engine, on rank 0.

    Called from the executor's thread only. Only `fetched` waits.
    """

    def fetched(
        self, plan: BlendPlan, fetch: Callable[[list[tuple[Hit, int]]], object]
    ) -> BlendPlan | None:
        """Fetch a plan's chunks into host memory and return the plan reduced to those that arrived.

        ``fetch`` receives the chains to fetch, each with the block to stop at, and may wait for
        them. Returns None if too few tokens are in host memory.
        """
        sources = [source for _, source in self.chunks.sources(plan)]
        wanted = [(hit, stop) for hit, start, stop in sources if worth_fetching(hit, start, stop)]
        try:
            fetch(wanted)
        except KVCoreError as error:  # fetching one chunk evicted another
            _log.debug("no blend, a chunk was evicted: %s", error)
            return None
        return self.in_host(plan)
