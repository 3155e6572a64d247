"""Helpers to run an engine's decoder layers for blends: find the model, check it, join the ranks.

The checks raise UnsupportedError if a layer is not as fusion expects. The engine then serves exact
prefixes only.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from kvcore.connector.fusion_worker import EngineLayers
from kvcore.errors import UnsupportedError

__all__ = [
    "PREFIXES_ONLY",
    "Agreement",
    "TensorParallelLayers",
    "check_architecture",
    "check_arguments",
    "check_count",
    "live_objects",
    "refuse_unlike",
]

PREFIXES_ONLY = "set fusion.enabled = false to silence this (exact prefixes are reused either way)"
"""What a user can change where fusion does not support the model: the end of the message."""


def live_objects(kind: type[Any]) -> list[Any]:
    """Return the objects of this process that are instances of ``kind``, a class made in Python.

    Engines give a connector neither their worker nor their model, so they are searched for. Blocks
    for the search; no other thread runs meanwhile.
    """
    # Not `gc.get_objects`: its list refers to tuples too that other threads are building, and
    # CPython raises SystemError there if it sees another reference. Instances refer to their class.
    classes = {kind: None}
    waiting = [kind]
    while waiting:
        made = [each for each in type.__subclasses__(waiting.pop()) if each not in classes]
        classes |= dict.fromkeys(made)
        waiting += made
    # not isinstance: it would load lazy objects of other libraries
    return [found for found in gc.get_referrers(*classes) if issubclass(type(found), kind)]


def check_architecture(architectures: Iterable[str], served: Sequence[str]) -> None:
    """Raise UnsupportedError unless one of a model's ``architectures`` is in ``served``."""
    known = list(architectures)
    if not set(known) & set(served):
        raise UnsupportedError(
            f"{', '.join(known)} is not supported by fusion, only {', '.join(served)}; "
            f"{PREFIXES_ONLY}"
        )


def check_count(modules: Sequence[Any], layers: int) -> None:
    """Raise UnsupportedError unless there is one decoder layer for each layer of KV."""
    if len(modules) != layers:
        raise UnsupportedError(
            f"the model has {len(modules)} decoder layers and {layers} layers of KV; fusion needs "
            f"as many of each; {PREFIXES_ONLY}"
        )


def check_arguments(call: Callable[..., Any], wanted: Sequence[str], known: str) -> None:
    """Raise UnsupportedError unless the first arguments of ``call`` are ``wanted``.

    ``known`` names the versions of the engine in which that holds.
    """
    taken = [name for name in inspect.signature(call).parameters if name != "self"][: len(wanted)]
    if taken != list(wanted):
        raise UnsupportedError(
            f"{call.__qualname__} takes {', '.join(taken)}; fusion knows {known}, where it takes "
            f"{', '.join(wanted)}"
        )


def refuse_unlike(unlike: Mapping[str, object], what: str = "attention with") -> None:
    """Raise UnsupportedError if a feature in ``unlike`` is set: fusion cannot compute it.

    ``unlike`` maps the names of features to values that are true if the model has the feature.
    """
    for name, found in unlike.items():
        if found:
            raise UnsupportedError(f"{what} {name} is not supported by fusion; {PREFIXES_ONLY}")


class Agreement:
    """The agreement of an engine's tensor-parallel ranks. For the model's thread only.

    ``distributed`` is that of `TensorParallelLayers`.
    """

    def __init__(self, distributed: Any) -> None:
        self._distributed = distributed
        self.collective = distributed is not None
        # One tensor for all agreements: a new one each time was slower (benchmarks.blend_ranks).
        # It may change in and outside of inference mode. On the CPU, so that no device waits.
        with torch.inference_mode(False):
            self._ailing = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._number = self._ailing.numpy()

    def __call__(self, well: bool) -> bool:
        """Return True if ``well`` is true on every rank. A collective."""
        if self._distributed is None:
            return well
        self._number[0] = not well
        torch.distributed.all_reduce(self._ailing, group=self._distributed.get_tp_group().cpu_group)
        return not self._number[0]


class TensorParallelLayers(EngineLayers):
    """The layers of an engine whose tensor-parallel ranks are a torch process group.

    ``distributed`` is the engine's module of collectives, or None if there is only one rank. It has
    ``tensor_model_parallel_all_reduce``, and ``get_tp_group``, which returns a group with a
    ``cpu_group``.
    """

    def __init__(self, distributed: Any) -> None:
        self._distributed = distributed
        self._agreement = Agreement(distributed)
        self.collective = distributed is not None

    def reduce(self, scores: Tensor) -> Tensor:
        if self._distributed is None:
            return scores
        summed: Tensor = self._distributed.tensor_model_parallel_all_reduce(scores)
        return summed

    def agree(self, well: bool) -> bool:
        return self._agreement(well)
