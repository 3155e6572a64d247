"""The waits of a forward: for the layers that are being loaded, and for the blends before it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from kvcore.connector.fusion_messages import BlendOrder
from kvcore.connector.fusion_policy import is_prefill
from kvcore.connector.guard import Neutral, attempt, covered
from kvcore.connector.rank_guard import RankGuard
from kvcore.telemetry.rates import ForwardPart
from kvcore.transfer.graph import TransferGraph
from kvcore_sglang.worker import WorkerConnector

_START, _RUN = "start_layer_wise_loading", "set_consumer"

FAILED_BATCH = 0
"""Index of a batch of which nothing is known but that it has failed."""


@covered(
    {
        "stopped": Neutral(lambda: "an error in the gate"),
        "start": Neutral(lambda: FAILED_BATCH),
        "spoil": Neutral(lambda: None),
        "set_consumer": Neutral(lambda: None),
        "wait_until": Neutral(lambda: None),
        "around_forward": Neutral(contextlib.nullcontext),
        "finish": Neutral(lambda: False),
        "halt": Neutral(lambda: None),
        "reset": Neutral(lambda: None),
    }
)
class LayerGate:
    """The gate that the KV pool calls before it reads a layer: the forward waits for the layer.

    It stands in for SGLang's ``LayerDoneCounter``. The pool has ``layers`` layers.
    ``consumer_index`` is the batch whose forward runs. -1 and unknown batches wait for nothing. If
    not ``layerwise``, a batch waits for all of its loads before its forward. Blends are made when
    their batch starts to run, on the forward's thread and stream. Without a ``worker`` every method
    returns at once.

    No error of kvcore passes the gate, but for an `EngineMustEnd`. After one, this rank loads and
    blends no more: every batch that has something to load fails, and its requests are computed.
    """

    def __init__(self, worker: WorkerConnector | None, *, layers: int, layerwise: bool) -> None:
        self._worker = worker
        self._rank = None if worker is None else worker.guard
        self._layerwise = layerwise
        self._batches: dict[int, list[int]] = {}
        self._orders: dict[int, Sequence[BlendOrder]] = {}
        self._unblended: set[int] = set()
        self._count = 0
        self.num_layers = layers
        self.consumer_index = -1

    @property
    def stopped(self) -> str:
        """Why this rank loads and blends no more; empty if it does."""
        return "" if self._rank is None else self._rank.stopped

    def _failed(self, name: str, error: Exception, args: tuple[Any, ...]) -> None:
        """Stop this rank after an error. The batch that runs, and all that are known, fail."""
        self._unblended.update(self._batches)
        self.halt(f"an error in {name}", error)
        if name == "set_consumer" and self._rank is not None:
            self._rank.meet()  # others may be about to blend

    def halt(self, why: str, error: BaseException) -> None:
        """Load and blend no more. Blocks, and raises PagesInUse, as `RankGuard.halt` does."""
        if self._rank is not None:
            self._rank.halt(why, error)

    def start(self, graphs: Sequence[TransferGraph], orders: Sequence[BlendOrder] = ()) -> int:
        """Start the loads of a batch; return its index, or -1 if it has no loads and no blends."""
        worker, rank = self._worker, self._rank
        if worker is None or rank is None or not (graphs or orders):
            return -1
        self._count += 1
        if orders:
            self._orders[self._count] = orders
        self._batches[self._count] = [graph.graph_id for graph in graphs]

        def begin() -> bool:
            worker.start_loads(graphs)
            return True

        rank.run(_START, lambda: worker.take_on(graphs), None, always=True)
        if not rank.run(_START, begin, False):
            self.spoil(self._count)
        self._refuse_rest(worker, rank)
        return self._count

    def spoil(self, index: int) -> None:
        """Let a batch fail, whatever becomes of its loads."""
        if index in self._batches:
            self._unblended.add(index)

    def set_consumer(self, index: int) -> None:
        """Let batch ``index`` run: make its blends, and wait for its loads unless layerwise.

        A collective if the batch has blends.
        """
        self.consumer_index = index
        worker, rank = self._worker, self._rank
        if worker is None or rank is None:
            return
        orders = self._orders.pop(index, ())

        def begin() -> bool:
            if not self._layerwise:
                self._wait_until(0)  # the load is then one copy of all layers
            return not orders or worker.blend(orders, self._wait_until)

        rank.expect(orders)
        rank.run(_RUN, lambda: worker.take_on((), orders), None, always=True)
        if not rank.run(_RUN, begin, False):
            self.spoil(index)
        rank.meet()
        self._refuse_rest(worker, rank)

    @staticmethod
    def _refuse_rest(worker: WorkerConnector, rank: RankGuard) -> None:
        if rank.stopped:
            attempt("the refusal of work", worker.refuse_rest, None)

    def wait_until(self, layer: int) -> None:
        """Let the current stream wait for the running batch's loads of layers up to ``layer``."""
        if self._rank is not None:
            self._rank.run("wait_until", lambda: self._wait_until(layer), None)

    def _wait_until(self, layer: int) -> None:
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
        if index == FAILED_BATCH:
            return False
        known = index in self._batches
        graph_ids = self._batches.pop(index, None)
        made = index not in self._unblended and self._orders.pop(index, None) is None
        self._unblended.discard(index)
        worker, rank = self._worker, self._rank
        if not known or worker is None or rank is None:
            return made
        landed = rank.run(
            "finish_layer_wise_loading", lambda: not graph_ids or worker.finish(graph_ids), False
        )
        return landed and made

    def reset(self) -> None:
        """Finish every batch. Blocks."""
        for index in list(self._batches):
            self.finish(index)
        self.consumer_index = -1
