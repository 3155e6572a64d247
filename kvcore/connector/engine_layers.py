"""What every engine needs to lend its decoder layers to blends: find the model, check that it is
the one that fusion knows, and act with the other ranks.

A layer that is not as expected raises UnsupportedError: the engine then serves exact prefixes.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from kvcore.connector.fusion_worker import EngineLayers
from kvcore.errors import UnsupportedError

__all__ = [
    "TensorParallelLayers",
    "check_architecture",
    "check_arguments",
    "check_count",
    "live_objects",
    "refuse_unlike",
]


def live_objects(kind: type[Any]) -> Iterator[Any]:
    """Yield the objects of this process that are of ``kind``. Engines give a connector neither
    their worker nor their model."""
    for found in gc.get_objects():
        # not isinstance: lazy objects of other libraries wake up when asked for their class
        if issubclass(type(found), kind):
            yield found


def check_architecture(architectures: Iterable[str], served: Sequence[str]) -> None:
    """Raise UnsupportedError unless one of a model's ``architectures`` is ``served``."""
    known = list(architectures)
    if not set(known) & set(served):
        raise UnsupportedError(
            f"fusion is served for {', '.join(served)}, not for {', '.join(known)}"
        )


def check_count(modules: Sequence[Any], layers: int) -> None:
    """Raise UnsupportedError unless there is one decoder layer for each layer of KV."""
    if len(modules) != layers:
        raise UnsupportedError(
            f"{len(modules)} decoder layers, KV of {layers}: fusion needs one each"
        )


def check_arguments(call: Callable[..., Any], wanted: Sequence[str], known: str) -> None:
    """Raise UnsupportedError unless the first arguments of ``call`` are those that it takes in the
    ``known`` versions of the engine."""
    taken = [name for name in inspect.signature(call).parameters if name != "self"][: len(wanted)]
    if taken != list(wanted):
        raise UnsupportedError(
            f"{call.__qualname__} takes {', '.join(taken)}; fusion knows {known}, where it takes "
            f"{', '.join(wanted)}"
        )


def refuse_unlike(unlike: Mapping[str, object], what: str = "attention with") -> None:
    """Raise UnsupportedError for the first feature in ``unlike`` that is there: fusion would
    compute something else."""
    for name, found in unlike.items():
        if found:
            raise UnsupportedError(f"fusion is not served for {what} {name}")


class TensorParallelLayers(EngineLayers):
    """Layers of an engine whose tensor-parallel ranks are a torch group.

    ``distributed`` is the engine's module of collectives, None for a rank that is alone. It has
    ``tensor_model_parallel_all_reduce``, and ``get_tp_group`` with a ``cpu_group``.
    """

    def __init__(self, distributed: Any) -> None:
        self._distributed = distributed

    def reduce(self, scores: Tensor) -> Tensor:
        if self._distributed is None:
            return scores
        summed: Tensor = self._distributed.tensor_model_parallel_all_reduce(scores)
        return summed

    def agree(self, well: bool) -> bool:
        if self._distributed is None:
            return well
        ailing = torch.tensor([int(not well)])  # between processes: no device waits
        torch.distributed.all_reduce(ailing, group=self._distributed.get_tp_group().cpu_group)
        return not ailing.item()
