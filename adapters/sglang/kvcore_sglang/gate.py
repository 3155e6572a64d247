"""The waits of a forward: for the layers that are being loaded, and for the blends before it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager

from kvcore.connector.fusion_messages import BlendOrder
from kvcore.connector.fusion_policy import is_prefill
from kvcore.telemetry.rates import ForwardPart
from kvcore.transfer.graph import TransferGraph
from kvcore_sglang.worker import WorkerConnector


class LayerGate:
    """The gate that the KV pool calls before it reads a layer: the forward waits for the layer.

    It stands in for SGLang's ``LayerDoneCounter``. The pool has ``layers`` layers.
    ``consumer_index`` is the batch whose forward runs. -1 and unknown batches wait for nothing. If
    not ``layerwise``, a batch waits for all of its loads before its forward. Blends are made when
    their batch starts to run, on the forward's thread and stream. Without a ``worker`` every method
    returns at once.
    """

    def __init__(self, worker: WorkerConnector | None, *, layers: int, layerwise: bool) -> None:
        self._worker = worker
        self._layerwise = layerwise
        self._batches: dict[int, list[int]] = {}
        self._orders: dict[int, Sequence[BlendOrder]] = {}
        self._unblended: set[int] = set()
        self._count = 0
        self.num_layers = layers
        self.consumer_index = -1

    def start(self, graphs: Sequence[TransferGraph], orders: Sequence[BlendOrder] = ()) -> int:
        """Start the loads of a batch; return its index, or -1 if it has no loads and no blends."""
        if self._worker is None or not (graphs or orders):
            return -1
        self._count += 1
        if orders:
            self._orders[self._count] = orders
        self._batches[self._count] = [graph.graph_id for graph in graphs]
        self._worker.start_loads(graphs)
        return self._count

    def set_consumer(self, index: int) -> None:
        """Let batch ``index`` run: make its blends, and wait for its loads unless layerwise."""
        self.consumer_index = index
        if not self._layerwise:
            self.wait_until(0)  # the load is then one copy of all layers
        orders = self._orders.pop(index, None)
        if (
            orders is not None
            and self._worker is not None
            and not self._worker.blend(orders, self.wait_until)
        ):
            self._unblended.add(index)

    def wait_until(self, layer: int) -> None:
        """Let the current stream wait for the running batch's loads of layers up to ``layer``."""
        graph_ids = self._batches.get(self.consumer_index)
        if graph_ids and self._worker is not None:
            self._worker.wait_layer(graph_ids, layer)

    def around_forward(self, parts: Sequence[ForwardPart]) -> AbstractContextManager[None]:
        """Return a context for the forward of the batch that runs, which may time it.

        ``parts`` are empty if they are not known. A forward is timed if it is a prefill and waits
        for no load.
        """
        waits = bool(self._batches.get(self.consumer_index))
        if self._worker is None or waits or not is_prefill([part.tokens for part in parts]):
            return contextlib.nullcontext()
        return self._worker.forward(parts)

    def finish(self, index: int) -> bool:
        """Block until a batch's loads have ended; return True if all of its KV is right."""
        graph_ids = self._batches.pop(index, None)
        landed = not graph_ids or self._worker is None or self._worker.finish(graph_ids)
        made = index not in self._unblended and self._orders.pop(index, None) is None
        self._unblended.discard(index)
        return landed and made

    def reset(self) -> None:
        """Finish every batch. Blocks."""
        for index in list(self._batches):
            self.finish(index)
        self.consumer_index = -1
