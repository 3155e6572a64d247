"""The names of TensorRT-LLM that the connector needs, from where this version keeps them.

The only module that imports the engine, and only these names: everything else of it is read from
the objects it hands over.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

from kvcore.errors import UnsupportedError

MODULES = (
    "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector",  # from 1.3
    "tensorrt_llm._torch.pyexecutor.kv_cache_connector",  # 1.2
)


class EngineNames(NamedTuple):
    """Base classes of the two halves, and the collectives of the engine's ranks."""

    scheduler: type[Any]
    worker: type[Any]
    rank: Callable[[], int]
    allgather: Callable[[Any], list[Any]]


def find() -> EngineNames:
    """Raises UnsupportedError where there is no TensorRT-LLM with a connector interface."""
    for name in MODULES:
        try:
            module: Any = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("tensorrt_llm"):
                raise  # something that TensorRT-LLM itself needs
            continue
        utils: Any = importlib.import_module("tensorrt_llm._utils")
        return EngineNames(
            module.KvCacheConnectorScheduler,
            module.KvCacheConnectorWorker,
            utils.mpi_rank,
            utils.mpi_allgather,
        )
    raise UnsupportedError(
        f"TensorRT-LLM's KV cache connector is not here; looked for {' and '.join(MODULES)}. "
        "Install tensorrt_llm 1.2 or 1.3 in this environment"
    )
