"""Where the forward waits for the layers that are being loaded."""

from __future__ import annotations

from collections.abc import Sequence

from kvcore_sglang.worker import RankWorker

from kvcore.transfer.graph import TransferGraph


class LayerGate:
    """What the KV pool asks before it reads a layer: blocks until its loads have landed.

    ``consumer_index`` is the batch whose forward runs; -1 or an unknown one waits for nothing.
    Not ``layerwise``, a batch waits for all of its loads before its forward.
    """

    def __init__(self, worker: RankWorker | None, *, layerwise: bool) -> None:
        self._worker = worker
        self._layerwise = layerwise
        self._batches: dict[int, list[int]] = {}
        self._count = 0
        self.consumer_index = -1

    def start(self, graphs: Sequence[TransferGraph]) -> int:
        """Begin the loads of a batch; its index, -1 where there are none."""
        if not graphs or self._worker is None:
            return -1
        self._count += 1
        self._batches[self._count] = [graph.graph_id for graph in graphs]
        self._worker.start_loads(graphs)
        return self._count

    def set_consumer(self, index: int) -> None:
        self.consumer_index = index
        if not self._layerwise:
            self.wait_until(0)  # such a load is one copy of all layers

    def wait_until(self, layer: int) -> None:
        graph_ids = self._batches.get(self.consumer_index)
        if graph_ids and self._worker is not None:
            self._worker.wait_layer(graph_ids, layer)

    def finish(self, index: int) -> bool:
        """Block until a batch's loads write no more; whether all of them landed."""
        graph_ids = self._batches.pop(index, None)
        return True if not graph_ids or self._worker is None else self._worker.finish(graph_ids)

    def reset(self) -> None:
        for index in list(self._batches):
            self.finish(index)
        self.consumer_index = -1
