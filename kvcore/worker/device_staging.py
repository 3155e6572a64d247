"""Reads from tiers into a worker's staging on the device: directly, or through host memory.

tier.read_device ──▶ region          verified there by its block sum
tier.read ──▶ bounce ──▶ region      verified in host memory; for blocks that cannot go directly
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvcore.errors import TierError
from kvcore.memory.device_region import DeviceRegion
from kvcore.memory.hugepages import Pages
from kvcore.telemetry.metrics import Metrics
from kvcore.tiers.base import BlockRead, DeviceRead, NotDirect, Tier

__all__ = ["StagedReads"]

_log = logging.getLogger("kvcore.worker")

AT_ONCE = 4
"""Blocks that go through host memory together."""


class StagedReads:
    """Reads into a region on the device.

    Thread-safe if the calls use different places of the region.
    """

    def __init__(self, region: DeviceRegion, metrics: Metrics) -> None:
        self.region = region
        self._metrics = metrics
        self._lock = threading.Lock()
        self._idle: list[Pages] = []
        self._said: set[str] = set()

    def read(self, name: str, tier: Tier, requests: Sequence[DeviceRead]) -> list[TierError | None]:
        """Read as `Tier.read_device` does, and through host memory what cannot go directly."""
        results = tier.read_device(requests)
        others = [i for i, error in enumerate(results) if isinstance(error, NotDirect)]
        if others:
            self._say(name, str(results[others[0]]), len(others))
        for first in range(0, len(others), AT_ONCE):
            some = others[first : first + AT_ONCE]
            for i, error in zip(some, self._bounce(tier, [requests[i] for i in some]), strict=True):
                results[i] = error
        return results

    def close(self) -> None:
        """Free the memory. No read may be in flight."""
        for pages in self._idle:
            pages.close()
        self._idle.clear()
        self.region.close()

    def _bounce(self, tier: Tier, requests: Sequence[DeviceRead]) -> list[TierError | None]:
        with self._buffers() as buffers:
            reads = [
                BlockRead(one.slot, one.key, [buffer], (), one.parent, one.namespace)
                for one, buffer in zip(requests, buffers, strict=False)
            ]
            results = tier.read(reads)
            for request, buffer, error in zip(requests, buffers, results, strict=False):
                if error is None:
                    self.region.put(request.place, buffer)
        return results

    @contextmanager
    def _buffers(self) -> Iterator[list[memoryview]]:
        """Yield ``AT_ONCE`` slots of host memory for one thread."""
        size = self.region.slot_nbytes
        with self._lock:
            pages = self._idle.pop() if self._idle else None
        pages = pages or Pages(AT_ONCE * size)
        try:
            yield [pages.view[i * size : (i + 1) * size] for i in range(AT_ONCE)]
        finally:
            with self._lock:
                self._idle.append(pages)

    def _say(self, name: str, why: str, blocks: int) -> None:
        self._metrics.bounced(name, blocks)
        with self._lock:
            first = name not in self._said
            self._said.add(name)
        if first:
            _log.warning(
                "tier %s: blocks on their way to the device go through host memory; the first, "
                "for %s; kvcore_bounced_blocks_total counts them",
                name,
                why,
            )
