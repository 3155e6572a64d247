"""What ranks tell the leader before it starts, through vLLM's handshake.

    rank    get_handshake_metadata ─── Told ──▶ leader  set_xfer_handshake_metadata_pp_aware
            its pages are registered             starts before the first request

The leader of a pipeline, or of ranks on several machines, cannot start on what vLLM tells it alone.
Every other one starts at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

from kvcore.tiers.held import Held
from kvcore_vllm.machines import Terms, machines
from kvcore_vllm.stages import Stages

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["Told", "awaits_ranks"]


@dataclass(frozen=True)
class Told(KVConnectorHandshakeMetadata):
    """What a rank tells. Pickled by vLLM.

    ``stages`` are the caches of all stages of a pipeline; None if there is one stage. ``terms`` are
    what a rank goes by whose leader may be on another machine; None on one machine. ``held`` is
    what the disks of a machine without the leader hold; its first rank tells it, once.
    """

    stages: Stages | None = None
    terms: Terms | None = None
    held: Mapping[str, Held] | None = None


def awaits_ranks(vllm_config: VllmConfig) -> bool:
    """Return True if the leader starts only when ranks have told it what they know."""
    parallel = vllm_config.parallel_config
    return parallel.pipeline_parallel_size > 1 or machines(vllm_config) > 1
